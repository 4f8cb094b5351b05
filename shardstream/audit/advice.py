"""Advice: which settings would open blocks less often, each with the figure that the same computation gives."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from math import lcm

from shardstream.audit.amplification import ReadCost, read_cost
from shardstream.order import default_lanes
from shardstream.plan import Plan

_WORTH_IT = 0.98  # advice must lower the amplification at least to this part of it
_GOOD = 1.05  # below this no advice is needed


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
