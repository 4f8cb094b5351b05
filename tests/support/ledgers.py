"""A ledger of a run that never was: two ranks, with times, targets and losses, without torch."""

from __future__ import annotations

from pathlib import Path

from shardstream.audit.windows import ExpectedWindow
from shardstream.consumed import ConsumedLog
from shardstream.plan import Plan
from shardstream.rounds import RoundsLog


def write_ledger(folder: Path, plan: Plan, *, step_s: float = 0.5, head: str = "lm") -> None:
    """Logs one epoch: a step takes ``step_s``, a fifth of it between steps and, on rank 1, a tenth in sums."""
    targets = [
        [10 + rank + 3 * (window % 2) for rank in range(plan.world_size)] for window in range(_num_windows(plan))
    ]
    for rank in range(plan.world_size):
        with ConsumedLog(folder, rank, plan.world_size, 0, plan.cursor(), plan) as log:
            rounds = RoundsLog(folder, rank, plan.world_size, 0)
            for window in range(_num_windows(plan)):
                place = {"epoch": 0, "position": window * plan.global_batch}
                dealt = ExpectedWindow(plan, **place)
                of_all = {head: (sum(targets[window]), targets[window][rank])}
                log.window(**place, ids=dealt.ids(rank), num_padding=dealt.num_padding(rank), targets=of_all)
                log.sums(**place, sums={head: 2.0 * targets[window][rank]})
                begin = 1000 + step_s * window
                sums = [(begin + 0.3 * step_s, "gradients are summed: begins")]
                sums += [(begin + (0.3 + 0.1 * rank) * step_s, "gradients are summed: ends")]
                rounds.round(window, ["backward of micro-batch 0, gradients are summed"], begin)
                events = [(begin, "takes micro-batch 0"), *sums, (begin + 0.8 * step_s, "parameters moved")]
                rounds.times(**place, events=events)
            rounds.end()


def _num_windows(plan: Plan) -> int:
    return plan.epoch(0).deal.num_windows
