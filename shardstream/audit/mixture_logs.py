"""Proves from a run's logs that every window of a mixture was trained on once, with the samples that were its own."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardstream.audit.consumption import disagreements
from shardstream.audit.enumeration import named
from shardstream.consumed import LoggedWindow, RankLog, id_checksum, read_logs
from shardstream.errors import ReadError, listed
from shardstream.mixing import Mixture
from shardstream.mixture_past import Past
from shardstream.mixture_plan import SOURCE_BITS, MixturePlan, logged_ids
from shardstream.packing import Packing

_ByRank: TypeAlias = "dict[int, list[LoggedWindow]]"


@dataclass(frozen=True)
class MixtureLogsReport:
    """What the logs of a run on a mixture show.

    Attributes:
        violations: Each fault, in words; empty if everything holds.
        notes: What is worth knowing but no fault.
        num_attempts: Starts of the run.
        num_windows: Windows that count: those that no later attempt went back behind.
        position: Where the last of them ends.
        passes: Source → how many times it has been through by then.
    """

    violations: tuple[str, ...]
    notes: tuple[str, ...]
    num_attempts: int
    num_windows: int
    position: int
    passes: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations

    def verdict(self) -> str:
        """Returns the result in one sentence."""
        if not self.holds:
            return f"NOT exactly once: {len(self.violations)} violation(s)"
        passes = ", ".join(f"{name} {times:.2f} times" for name, times in self.passes.items())
        return f"each of {self.num_windows} windows was trained on once, with its own samples; been through: {passes}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {"holds": self.holds, "verdict": self.verdict(), **asdict(self)}


def _served(plan: MixturePlan, position: int) -> dict[str, tuple[object, ...]]:
    """What decides the samples of the sources that were read before a position, and how many that were."""
    given = {name: num for name, num in plan.counts(position).items() if num}
    return {name: (num, replace(plan.by_name[name].cursor(), global_batch=1)) for name, num in given.items()}


class MixedWindow(NamedTuple):
    """A window, as the ranks of its attempt logged it."""

    position: int
    plan: MixturePlan
    attempt: int
    by_rank: _ByRank

    @property
    def place(self) -> tuple[int, int]:
        """Epoch, which is 0, and position."""
        return 0, self.position


def check_mixture_logs(directory: str | os.PathLike[str], mixture: Mixture) -> MixtureLogsReport:
    """Checks a run's logs against the sources of its mixture. Weights and schedule are those that the logs tell of.

    Args:
        directory: Folder that ``Ledger`` or ``ConsumedLog`` wrote.
        mixture: The sources by name.

    Raises:
        ReadError: If there are no logs, they are damaged, or not of a mixture of these sources.
    """
    logs, empty = read_logs(directory)
    attempts, plans, windows = _counted(logs, mixture)
    violations = [fault for of_attempt in attempts.values() for fault in disagreements(of_attempt)]
    notes = [f"{len(empty)} log(s) have not even one whole line"] * bool(empty)
    if windows and (absent := _absent(windows[-1])):
        where = f"position {windows[-1].position}"
        notes.append(f"unfinished last window ({where}): rank(s) {listed(absent)} had not logged it; not counted")
        windows.pop()
    faults = [fault for window in windows for fault in _window_faults(window)]
    violations += named(faults, len(faults))
    if is_cut := any(log.num_dropped_parts for log in logs):
        notes.append(
            "oldest parts were dropped to keep a bound: nothing is proved before the first window that is left"
        )
    violations += _gaps(windows, windows[0].position if is_cut and windows else 0)
    for (_, before), (attempt, after) in pairwise(sorted(plans.items())):
        begin = attempts[attempt][0].start.position
        if _served(before, begin) != _served(after, begin):
            violations.append(f"attempt {attempt}: its past is not that of the attempt before")
    last = windows[-1] if windows else None
    position = 0 if last is None else last.position + last.plan.global_batch
    passes = {} if last is None else last.plan.passes(position)
    return MixtureLogsReport(tuple(violations), tuple(notes), len(attempts), len(windows), position, passes)


def mixed_windows_that_count(directory: str | os.PathLike[str], mixture: Mixture) -> list[MixedWindow]:
    """Returns the windows that the run consumed, by position, without those that were rolled back.

    Raises:
        ReadError: If there are no logs, they are damaged, or not of a mixture of these sources.
    """
    return _counted(read_logs(directory)[0], mixture)[2]


def _counted(
    logs: list[RankLog], mixture: Mixture
) -> tuple[dict[int, list[RankLog]], dict[int, MixturePlan], list[MixedWindow]]:
    """Logs and plan of each attempt, and the windows that count."""
    attempts = {k: list(of_attempt) for k, of_attempt in groupby(logs, key=lambda log: log.attempt)}
    plans = {attempt: mixture_plan_of(of_attempt[0], mixture) for attempt, of_attempt in attempts.items()}
    return attempts, plans, _windows_that_count(attempts, plans)


def mixture_plan_of(log: RankLog, mixture: Mixture) -> MixturePlan:
    """Returns the plan that an attempt followed, from what its logs say of it.

    Raises:
        ReadError: If the mixture has not the sources that the run had.
    """
    past, manifests = Past.read(log.start), dict(zip(mixture.names, mixture.manifests, strict=True))
    for name, source in past.sources.items():
        if name not in manifests or source["fingerprint"] != manifests[name].fingerprint:
            hint = "give the sources that the run had"
            found = "no source of this name" if name not in manifests else "another manifest"
            raise ReadError(f"the logs are of other data: source {name!r}", url=str(log.path), found=found, hint=hint)
    weights = [dict(zip(past.names, era.weights, strict=True)) for era in past.eras]
    sources = {name: (manifests[name], weights[0][name]) for name in past.names}
    schedule = [(era.start, after) for era, after in zip(past.eras[1:], weights[1:], strict=True)]
    packing = [past.sources[name]["packing"] for name in past.names]
    plan = MixturePlan.make(
        Mixture(sources, schedule),
        world_size=log.world_size,
        batch_size=log.settings["batch_size"],
        accumulate=log.settings["accumulate"],
        seed=log.settings["seed"],
        shuffle=log.settings["shuffle"],
        packing=[None if how is None else Packing(**how) for how in packing],
    )
    lanes = [int(past.sources[name]["lanes"]) for name in past.names]
    pinned = tuple(each.with_pin(pin) for each, pin in zip(plan.plans, lanes, strict=True))
    return replace(plan, plans=pinned, grid=past.grid(plan.global_batch))


def _windows_that_count(attempts: dict[int, list[RankLog]], plans: dict[int, MixturePlan]) -> list[MixedWindow]:
    """Groups windows over ranks, without those that a later attempt went back behind; ordered by position."""
    windows: list[MixedWindow] = []
    limit: int | None = None
    for attempt, logs in sorted(attempts.items(), reverse=True):
        by_position: dict[int, _ByRank] = defaultdict(lambda: defaultdict(list))
        for log in logs:
            for window in log.windows:
                by_position[window.position][log.rank].append(window)
        kept = [position for position in by_position if limit is None or position < limit]
        windows += [MixedWindow(position, plans[attempt], attempt, by_position[position]) for position in kept]
        limit = min(logs[0].start.position, logs[0].start.position if limit is None else limit)
    return sorted(windows, key=lambda window: (window.position, window.attempt))


def _absent(window: MixedWindow) -> list[int]:
    return [rank for rank in range(window.plan.world_size) if rank not in window.by_rank]


def _window_faults(window: MixedWindow) -> Iterator[str]:
    where = f"attempt {window.attempt}, position {window.position}"
    if absent := _absent(window):
        yield f"{where}: rank(s) {listed(absent)} did not log this window"
        return
    logged = [each for windows in window.by_rank.values() for each in windows]
    if len(logged) > window.plan.world_size:
        yield f"{where}: a rank logged this window {max(map(len, window.by_rank.values()))} times"
    plan, size = window.plan, window.plan.global_batch
    expected = logged_ids(plan, window.position + np.arange(size))
    ids = [each.ids for each in logged]
    masked = [number for each in logged for number in each.masked_ids]
    if None in ids:
        found = sum(int(each.checksum, 16) for each in logged) + id_checksum(masked)
        if found % (1 << 64) != id_checksum(expected):
            yield f"{where}: other samples than the mixture has there (by their checksum)"
        return
    mine = np.sort(np.array([number for each in ids for number in each or ()] + masked, np.int64))
    if not np.array_equal(mine, np.sort(expected)):
        missing, foreign = np.setdiff1d(expected, mine), np.setdiff1d(mine, expected)
        shown = [
            f"{_name(plan, number)} {what}"
            for what, of in (("is missing", missing), ("is foreign", foreign))
            for number in of[:2]
        ]
        yield f"{where}: other samples than the mixture has there: {', '.join(shown) or 'some of them several times'}"


def _name(plan: MixturePlan, number: int) -> str:
    source, sample_id = int(number) >> SOURCE_BITS, int(number) & (1 << SOURCE_BITS) - 1
    return f"sample {sample_id} of {plan.names[source] if source < len(plan.names) else f'source {source}'}"


def _gaps(windows: list[MixedWindow], begin: int) -> Iterator[str]:
    """Each window begins where the one before ended."""
    end = begin
    for window in windows:
        if window.position != end:
            what = "was trained on twice" if window.position < end else "was not trained on"
            yield f"what lies between positions {min(end, window.position)} and {max(end, window.position)} {what}"
        end = max(end, window.position + window.plan.global_batch)
