"""The trace: which sample each rank and worker gets at each step of each epoch. For small sets, to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstream.audit.simulate import deal_out
from shardstream.cursor import Cursor
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.permutation import Int64Array
from shardstream.plan import Plan

MOST_TRACED_SAMPLES = 20_000


def _places(manifest: Manifest, ids: Int64Array) -> tuple[str, ...]:
    shard = manifest.shard_of_sample(ids)
    row = ids - manifest.first_sample[shard]
    return tuple(f"{manifest.urls[s]}:{r}" for s, r in zip(shard.tolist(), row.tolist(), strict=True))


@dataclass(frozen=True)
class TracedBatch:
    """One micro-batch of one rank.

    Attributes:
        epoch: The epoch in which its window begins.
        step: Index of the window in the epoch (with ``tail="continue"`` since the start).
        rank: The rank.
        worker: The worker that makes it.
        micro: Index of the micro-batch in the rank's window.
        ids: Sample ids, in order.
        places: ``shard:row`` of each; empty for packed sequences.
        is_padding: Whether each only fills the micro-batch.
    """

    epoch: int
    step: int
    rank: int
    worker: int
    micro: int
    ids: tuple[int, ...]
    places: tuple[str, ...]
    is_padding: tuple[bool, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}


def trace(plan: Plan, *, num_workers: int = 0, epochs: int = 1, start: Cursor | None = None) -> Iterator[TracedBatch]:
    """Yields what every rank and worker gets, ordered by epoch, step, micro-batch and rank.

    Args:
        plan: The plan.
        num_workers: Workers of each rank, 0 for none.
        epochs: How many epochs.
        start: Where to begin; by default at the beginning.

    Raises:
        PlanError: If there are too many samples to look at.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=2, blocks_per_shard=1, rows_per_block=3)
        >>> plan = Plan.make(manifest, batch_size=2, world_size=2, shuffle=False)
        >>> for row in trace(plan):
        ...     print(row.step, row.rank, row.ids, row.is_padding)
        0 0 (0, 2) (False, False)
        0 1 (1, 3) (False, False)
        1 0 (4, 4) (False, True)
        1 1 (5, 5) (False, True)
    """
    if plan.num_positions * epochs > MOST_TRACED_SAMPLES:
        raise PlanError(
            "too many samples to trace",
            expected=f"at most {MOST_TRACED_SAMPLES}",
            found=f"{plan.num_positions} samples x {epochs} epochs",
            hint="leave --trace out, or trace a smaller set (--synthetic)",
        )
    dealt = deal_out(plan, start or plan.cursor(), epochs, max(num_workers, 1))
    rows = sorted(dealt, key=lambda d: (d.batch.epoch, d.batch.window, d.batch.micro, d.rank))
    for rank, worker, batch in rows:
        ids = plan.sample_ids(batch.epoch, batch.positions)
        places = () if plan.packed is not None else _places(plan.manifest, ids)
        padding = tuple(np.asarray(batch.is_padding).tolist())
        yield TracedBatch(batch.epoch, batch.window, rank, worker, batch.micro, tuple(ids.tolist()), places, padding)
