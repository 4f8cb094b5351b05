"""All that can be shown of a plan, in one report."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from shardstream.audit.advice import with_advice
from shardstream.audit.amplification import read_cost
from shardstream.audit.arithmetic import check_by_arithmetic
from shardstream.audit.enumeration import check_by_enumeration
from shardstream.audit.labels import Labels
from shardstream.audit.quality import shuffle_quality
from shardstream.audit.report import AuditReport
from shardstream.audit.simulate import passes
from shardstream.audit.tokens import check_tokens, packing_figures
from shardstream.cursor import Cursor
from shardstream.errors import PlanError
from shardstream.memory import memory_need
from shardstream.plan import Plan

ENUMERATE_UP_TO = 1_000_000


def audit(
    plan: Plan,
    *,
    num_workers: int = 0,
    epochs: int = 1,
    start: Cursor | None = None,
    labels: npt.ArrayLike | Labels | None = None,
    enumerate_up_to: int = ENUMERATE_UP_TO,
) -> AuditReport:
    """Simulates every rank and worker of a plan and shows coverage, disjointness and equal steps.

    Args:
        plan: The plan.
        num_workers: DataLoader workers of each rank, 0 for none.
        epochs: How many epochs.
        start: Where the job begins, as ``plan.resume`` returns it; by default at the beginning.
        labels: One label a sample, to count classes per batch; or None.
        enumerate_up_to: Up to so many positions over all epochs (a quarter as many micro-batches) everything is dealt
            out and counted; above that the proof is by arithmetic, and says on how much of the data it was checked.

    Returns:
        The report; ``report.violations`` is empty if everything holds.

    Raises:
        PlanError: If a number is impossible.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=4, blocks_per_shard=2, rows_per_block=25)
        >>> report = audit(Plan.make(manifest, batch_size=3, world_size=8), num_workers=2)
        >>> report.holds, report.epochs[0].num_steps, report.epochs[0].num_padding
        (True, 9, 16)
    """
    if num_workers < 0 or epochs < 1:
        raise PlanError("num_workers must be at least 0 and epochs at least 1", found=(num_workers, epochs))
    first, readers = start or plan.cursor(), max(num_workers, 1)
    num_positions = plan.num_positions * epochs
    # A micro-batch takes about four times as long as a position.
    is_small = max(num_positions, 4 * num_positions // plan.batch_size) <= enumerate_up_to
    check = check_by_enumeration if is_small else check_by_arithmetic
    found = check(plan, first, epochs, readers)
    if labels is not None and not isinstance(labels, Labels):
        labels = Labels.from_array(labels, plan.num_positions)
    if plan.packed is not None:
        for faults, proof in map(check_tokens, passes(plan, first, epochs)):
            found.violations.extend(faults)
            found.proofs.append(proof)
    broken = bool(found.violations)  # figures of a broken plan mean nothing
    return AuditReport(
        settings=_settings(plan, num_workers, epochs, first),
        violations=tuple(found.violations),
        proofs=tuple(found.proofs),
        epochs=tuple(found.epochs),
        ranks=tuple(found.ranks),
        reading=None if broken else with_advice(plan, num_workers, read_cost(plan, readers, first.epoch)),
        quality=None if broken else shuffle_quality(plan, first.epoch, labels),
        packing=packing_figures(plan),
        memory=memory_need(plan, num_workers=readers),
    )


def _settings(plan: Plan, num_workers: int, epochs: int, start: Cursor) -> dict[str, Any]:
    """Returns the plan in plain values."""
    names = ("seed", "world_size", "batch_size", "accumulate", "global_batch", "lanes", "shuffle", "tail")
    return {
        "fingerprint": plan.manifest.fingerprint,
        "num_samples": plan.num_positions,
        "num_blocks": plan.manifest.num_blocks,
        "num_shards": plan.manifest.num_shards,
        **{name: getattr(plan, name) for name in names},
        "num_workers": num_workers,
        "num_epochs": epochs,
        "packing": None if plan.packed is None else plan.packed.packing.identity(),
        "start": {"epoch": start.epoch, "position": start.position},
    }
