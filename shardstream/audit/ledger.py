"""Checks a finished run's ledger: exactly once, denominators, collectives matched between ranks; and shows one step."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar, final, overload

import numpy as np

from shardstream.audit.consumption import ConsumedReport, check_consumed, windows_that_count
from shardstream.audit.mixture_logs import (
    MixedWindow,
    MixtureLogsReport,
    check_mixture_logs,
    mixed_windows_that_count,
)
from shardstream.audit.tally import CountedWindow
from shardstream.audit.windows import ExpectedWindow
from shardstream.consumed import LoggedWindow, RankLog, read_logs
from shardstream.errors import ReadError
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.mixture_plan import SOURCE_BITS, AnyPlan, MixturePlan, logged_ids
from shardstream.rounds import RankRounds, first_difference, read_rounds

_NUM_FAULTS = 20


_Consumed = TypeVar("_Consumed", ConsumedReport, MixtureLogsReport)


@dataclass(frozen=True)
class _Checked(Generic[_Consumed]):
    """What a ledger shows.

    Attributes:
        consumed: Exactly once, from the numbers; of a mixture its windows and passes.
        faults: What is wrong with denominators and rounds, in words.
        notes: What is worth knowing but no fault.
        num_denominators: Windows whose targets were compared between ranks.
        num_rounds: Rounds that were compared between ranks.
    """

    consumed: _Consumed
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    num_denominators: int
    num_rounds: int

    @property
    def violations(self) -> tuple[str, ...]:
        """Everything that is wrong."""
        return (*self.consumed.violations, *self.faults)

    @property
    def holds(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations

    def verdict(self) -> str:
        """Returns the result in one sentence."""
        if self.faults:
            return f"{self.consumed.verdict()}; {len(self.faults)} fault(s) in targets and rounds"
        return (
            f"{self.consumed.verdict()}; targets of {self.num_denominators} window(s) add up on all ranks; "
            f"{self.num_rounds} round(s) are equal on all ranks"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values: what that of ``consumed`` has, and more."""
        more = {name: value for name, value in asdict(self).items() if name not in ("consumed", "notes")}
        summary = {"holds": self.holds, "verdict": self.verdict(), "violations": self.violations}
        return {**self.consumed.to_dict(), **summary, "notes": (*self.consumed.notes, *self.notes), **more}


@final
class LedgerReport(_Checked[ConsumedReport]):
    """What the ledger of a run on one data set shows."""


@final
class MixtureLedgerReport(_Checked[MixtureLogsReport]):
    """What the ledger of a run on a mixture shows."""


@overload
def check_ledger(directory: str | os.PathLike[str], data: Manifest) -> LedgerReport: ...


@overload
def check_ledger(directory: str | os.PathLike[str], data: Mixture) -> MixtureLedgerReport: ...


def check_ledger(directory: str | os.PathLike[str], data: Manifest | Mixture) -> LedgerReport | MixtureLedgerReport:
    """Checks a run's ledger against what it read.

    Args:
        directory: Folder that ``Ledger`` logged to; the files of several hosts may be put together.
        data: The manifest of the run, or its mixture: the sources by name, weights and schedule being the logs'.

    Returns:
        The report. What was rolled back with a crash counts for targets and rounds, too.

    Raises:
        ReadError: If there are no logs, they are damaged, or not of this mixture.
    """
    logs = check_mixture_logs(directory, data) if isinstance(data, Mixture) else check_consumed(directory, data)
    num_denominators, faults = _check_denominators(read_logs(directory)[0], data)
    num_rounds, different, notes = _check_rounds(read_rounds(directory))
    found = ((*faults, *different), tuple(notes), num_denominators, num_rounds)
    return LedgerReport(logs, *found) if isinstance(logs, ConsumedReport) else MixtureLedgerReport(logs, *found)


def _check_denominators(logs: Sequence[RankLog], data: Manifest | Mixture) -> tuple[int, list[str]]:
    """Every rank must have divided by the same N_h, and the parts of the ranks must add up to it."""
    windows: dict[tuple[int, int, int], dict[int, LoggedWindow]] = defaultdict(dict)
    plans = {log.attempt: log for log in logs if isinstance(data, Mixture) or log.fingerprint == data.fingerprint}
    for log in logs:
        for window in log.windows:
            if window.targets and log.attempt in plans:
                windows[log.attempt, window.epoch, window.position][log.rank] = window
    faults = []
    for (attempt, epoch, position), by_rank in sorted(windows.items()):
        where = f"attempt {attempt}, epoch {epoch}, position {position}"
        ranks = _ranks_with_rows(plans[attempt], data, epoch, position)
        for head in sorted({head for window in by_rank.values() for head in window.targets}):
            counts = {rank: window.targets.get(head, (0, 0)) for rank, window in sorted(by_rank.items())}
            totals = {total for total, _ in counts.values()}
            mine = sum(part for _, part in counts.values())
            if len(totals) > 1:
                by_total = ", ".join(f"{total} on rank {rank}" for rank, (total, _) in counts.items())
                faults.append(f"{where}: head {head!r} was divided by {by_total}")
            elif set(ranks) <= counts.keys() and totals != {mine}:
                faults.append(f"{where}: head {head!r} was divided by {totals.pop()}, but its ranks had {mine} targets")
    return len(windows), _cut(faults)


def _ranks_with_rows(log: RankLog, data: Manifest | Mixture, epoch: int, position: int) -> list[int]:
    """The ranks that read anything of a window: of a mixture's, all."""
    ranks = range(log.world_size)
    if isinstance(data, Mixture):
        return list(ranks)
    expected = ExpectedWindow(log.plan(data), epoch, position)
    return [rank for rank in ranks if expected.has_rows(rank)]


def _check_rounds(logs: Sequence[RankRounds]) -> tuple[int, list[str], list[str]]:
    """Returns the number of rounds compared, faults and notes."""
    num_rounds, faults, notes = 0, [], []
    newest = max((log.attempt for log in logs), default=0)
    for attempt, group in groupby(logs, key=lambda log: log.attempt):
        of_attempt = list(group)
        found = list(_differences(of_attempt))
        num_rounds += len({number for log in of_attempt for number in log.rounds})
        texts = dict.fromkeys(text for log in of_attempt for text in log.desyncs)
        found += [f"the run was ended there: {text}" for text in texts]
        where = [f"attempt {attempt}: {text}" for text in found]
        # Ranks that found each other out of step took no step there, and a later attempt went on from before it.
        if attempt == newest:
            faults += where
        else:
            notes += where
    return num_rounds, _cut(faults), notes


def _differences(logs: Sequence[RankRounds]) -> Iterator[str]:
    """Finds the first round of an attempt that is not equal on all ranks which came to it."""
    by_round: dict[int, dict[int, tuple[str, ...]]] = defaultdict(dict)
    for log in logs:
        for number, events in log.rounds.items():
            by_round[number][log.rank] = events
    for number, by_rank in sorted(by_round.items()):
        difference = first_difference(by_rank)
        if difference is not None:
            yield f"round {number} is not the same on all ranks: {difference}"
            return
    last = {log.rank: max(log.rounds, default=-1) for log in logs}
    if all(log.has_ended for log in logs) and len(set(last.values())) > 1:
        yield f"ranks ended after different numbers of rounds: {last}"


def _cut(faults: list[str]) -> list[str]:
    more = [f"and {len(faults) - _NUM_FAULTS} more of the kind"] if len(faults) > _NUM_FAULTS else []
    return faults[:_NUM_FAULTS] + more


# ------------------------------------------------------------------------------------------------------------ one step


@dataclass(frozen=True)
class StepEvent:
    """What a rank did in a step.

    Attributes:
        time_s: Seconds since the step's first event, by the rank's own clock.
        rank: The rank.
        event: What it did.
        ids: Samples of the micro-batch that it took, or None; of a mixture as ``"web:17"``.
    """

    time_s: float
    rank: int
    event: str
    ids: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class StepEvents:
    """One optimizer step.

    Attributes:
        step: Index of the step, counted from the run's first, rolled back ones left out.
        epoch: Epoch in which its window begins.
        position: Position where it begins.
        attempt: The attempt that counts.
        targets: Head name → valid targets of all ranks.
        events: What happened, by time.
    """

    step: int
    epoch: int
    position: int
    attempt: int
    targets: dict[str, int]
    events: tuple[StepEvent, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)


def step_events(directory: str | os.PathLike[str], data: Manifest | Mixture, step: int) -> StepEvents:
    """Returns who held which samples in a step, when gradients were summed and when parameters moved.

    Args:
        directory: Folder that ``Ledger`` logged to.
        data: The manifest of the run, or its mixture.
        step: Index of the step.

    Raises:
        ReadError: If there is no such step, or the logs are damaged.
    """
    windows: Sequence[CountedWindow | MixedWindow] = (
        mixed_windows_that_count(directory, data) if isinstance(data, Mixture) else windows_that_count(directory, data)
    )
    if not 0 <= step < len(windows):
        expected = f"0 to {len(windows) - 1}"
        raise ReadError("the run has no such step", url=str(directory), expected=expected, found=step)
    window = windows[step]
    timed = [
        (time_s, log.rank, text)
        for log in read_rounds(directory)
        if log.attempt == window.attempt
        for time_s, text in log.times.get(window.place, ())
    ]
    ids = {rank: _ids_by_micro_batch(window, rank) for rank in range(window.plan.world_size)}
    begin_s = min((time_s for time_s, *_ in timed), default=0.0)
    events = []
    for time_s, rank, text in sorted(timed):
        taken = text.removeprefix("takes micro-batch ")
        held = ids[rank][int(taken)] if taken != text else None
        events.append(StepEvent(round(time_s - begin_s, 6), rank, text, held))
    targets = {head: total for logged in window.by_rank.values() for head, (total, _) in logged[0].targets.items()}
    return StepEvents(step, *window.place, window.attempt, targets, tuple(events))


def _ids_by_micro_batch(window: CountedWindow | MixedWindow, rank: int) -> list[tuple[int | str, ...]]:
    """The ids of a rank's real samples: those logged, else those that the plan deals to it."""
    plan, (epoch, position) = window.plan, window.place
    if isinstance(plan, MixturePlan):
        positions = plan.windows(position, 1)[0].reshape(plan.world_size, -1)[rank]
        dealt, is_padding = logged_ids(plan, positions), np.zeros(len(positions), np.bool_)
    else:
        part = plan.epoch(epoch, position).deal.part(0, rank)
        dealt, is_padding = plan.sample_ids(epoch, part.positions), part.is_padding
    logged = window.by_rank.get(rank, [None])[0]
    trained = None if logged is None or logged.ids is None else set(logged.ids)
    held = []
    for begin in range(0, len(dealt), plan.batch_size):
        cut = slice(begin, begin + plan.batch_size)
        real = dealt[cut][~is_padding[cut]].tolist()
        held.append(tuple(_shown(plan, each) for each in real if trained is None or each in trained))
    return held


def _shown(plan: AnyPlan, number: int) -> int | str:
    """A sample as people name it."""
    if not isinstance(plan, MixturePlan):
        return number
    return f"{plan.names[number >> SOURCE_BITS]}:{number & (1 << SOURCE_BITS) - 1}"
