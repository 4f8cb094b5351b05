"""Advice: which settings would open blocks less often, each with the figure that the same computation gives.

``with_advice`` is the audit's, exact; ``startup_warnings`` is for a job that starts, estimated, and only what matters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from shardstream.audit.amplification import ReadCost, estimated_amplification, read_cost
from shardstream.order import default_lanes
from shardstream.plan import Plan

_WORTH_IT = 0.98  # advice must lower the amplification at least to this part of it
_GOOD = 1.05  # below this no advice is needed
_DEAR = 1.5  # from here on a job that starts is told
_SMALL_NUM_BYTES = 1 << 30  # data that stays in the page cache may be opened as often as one likes
_MANY_SAMPLES = 1_000_000


def with_advice(plan: Plan, num_workers: int, cost: ReadCost) -> ReadCost:
    """Adds what would lower the amplification to what reading costs.

    Args:
        plan: The plan.
        num_workers: Workers of each rank as the user counts them, 0 for none.
        cost: What ``read_cost`` found for it.
    """
    if cost.amplification is None or cost.amplification <= _GOOD:
        return cost
    texts = []
    for what, other, workers in _candidates(plan, num_workers):
        better = read_cost(other, max(workers, 1))
        if better.amplification is not None and better.amplification < _WORTH_IT * cost.amplification:
            texts.append(
                (better.amplification, f"{what}: {better.amplification:.2f}, {better.open_runs} open runs a reader")
            )
    return replace(cost, advice=tuple(text for _, text in sorted(texts)))


def startup_warnings(plan: Plan, num_workers: int) -> list[str]:
    """Returns what a job should be told when it starts: what reading it costs, if that is much more than need be.

    Args:
        plan: The plan.
        num_workers: Workers of each rank as the user counts them, 0 for none.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=90, rows_per_block=100)
        >>> startup_warnings(Plan.make(manifest, batch_size=8, shuffle="full"), 0)
        []
        >>> parquet = replace(manifest, formats=["parquet"])
        >>> startup_warnings(Plan.make(parquet, batch_size=8, shuffle="full"), 0)[0].split(";")[0]
        "shuffle='full' opens each block about 96.2 times an epoch: every micro-batch opens the blocks of its samples"
    """
    texts = []
    if plan.shuffle == "torch" and plan.num_positions >= _MANY_SAMPLES:
        texts.append(
            f"shuffle='torch' is O(N): every reader of every rank permutes all {plan.num_positions:,} samples in "
            "memory each epoch; it is for migration and audits, shuffle=True needs no such table"
        )
    amplification = estimated_amplification(plan, max(num_workers, 1))
    num_bytes = int(plan.manifest.num_bytes.sum())
    is_dear_anyway = plan.shuffle == "full" and "parquet" in plan.manifest.formats
    if amplification < _DEAR or (num_bytes < _SMALL_NUM_BYTES and not is_dear_anyway):
        return texts
    what, why = _reason(plan, num_workers)
    text = f"{what} opens each block about {amplification:,.1f} times an epoch: {why}"
    better = [(estimated_amplification(other, max(w, 1)), what) for what, other, w in _candidates(plan, num_workers)]
    better = [(figure, what) for figure, what in sorted(better) if figure < _WORTH_IT * amplification]
    if better:
        text += "; lower with " + ", or ".join(f"{what} ({figure:.2f})" for figure, what in better[:2])
    return [*texts, text]


def _reason(plan: Plan, num_workers: int) -> tuple[str, str]:
    """What opens blocks often, and why."""
    if isinstance(plan.shuffle, str):
        return f"shuffle={plan.shuffle!r}", "every micro-batch opens the blocks of its samples"
    if plan.lanes == 1 and plan.world_size > 1:
        return f"shuffle={plan.shuffle} in one lane", f"each of {plan.world_size} ranks reads from every block"
    if num_workers > 1 and estimated_amplification(plan, num_workers) > estimated_amplification(plan):
        return f"num_workers={num_workers}", "the workers of a rank share its lanes"
    return f"lanes={plan.lanes}", f"their ends cut {plan.manifest.num_blocks} blocks"


def _candidates(plan: Plan, num_workers: int) -> Iterator[tuple[str, Plan, int]]:
    """Yields settings worth a look: the text, the plan and the number of workers."""
    global_batch, readers = plan.global_batch, max(num_workers, 1)
    if readers > 1:
        yield "num_workers=0", plan, 0
        for workers in range(readers - 1, 1, -1):
            if plan.accumulate % workers == 0:
                yield f"num_workers={workers}", plan, workers
                break
        accumulate = lcm(plan.accumulate, readers)
        if plan.batch_size * plan.accumulate % accumulate == 0:
            batch_size = plan.batch_size * plan.accumulate // accumulate
            other = replace(plan, accumulate=accumulate, batch_size=batch_size)
            yield f"batch_size={batch_size}, accumulate={accumulate}", other, num_workers
    if isinstance(plan.shuffle, str):
        if plan.tail not in ("repeat", "truncate"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is advice, not what runs
                lanes = default_lanes(global_batch, plan.manifest.num_blocks)
            yield f"shuffle=True, lanes={lanes}", replace(plan, shuffle=True, lanes=lanes), num_workers
        return
    if plan.tail in ("repeat", "truncate"):
        return
    divisors = [d for d in range(1, min(global_batch, 1 << 16) + 1) if global_batch % d == 0 and d >= plan.world_size]
    fewer = [d for d in divisors if d < plan.lanes][-2:]
    more = [d for d in divisors if d > plan.lanes][:1]
    for lanes in {*fewer, *more, global_batch, readers * global_batch} - {plan.lanes}:
        yield (
            f"lanes={lanes} (a global batch mixes up to {min(lanes, global_batch)} blocks)",
            replace(plan, lanes=lanes),
            num_workers,
        )
