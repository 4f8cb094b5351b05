"""Proves from a run's logs that each sample of each finished epoch was trained on exactly once.

What counts: windows that the attempt's ranks logged before the place where a later attempt began. What was logged from
there on was rolled back with the crash.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from shardstream.audit.tally import NUM_NAMED, ConsumedEpoch, CountedWindow, Place, count_epochs
from shardstream.audit.windows import ExpectedWindow
from shardstream.consumed import LoggedWindow, RankLog, read_logs
from shardstream.errors import ReadError, listed
from shardstream.manifest import Manifest


@dataclass(frozen=True)
class AttemptCounts:
    """One attempt.

    Attributes:
        attempt: Its number.
        world_size: Its ranks.
        global_batch: Its global batch.
        epoch: Where it began.
        position: Where it began.
        num_windows: Windows that count.
        num_discarded: Windows that were trained and then rolled back, because a later attempt began before them.
        has_ended: Whether every rank ended by itself.
    """

    attempt: int
    world_size: int
    global_batch: int
    epoch: int
    position: int
    num_windows: int
    num_discarded: int
    has_ended: bool


@dataclass(frozen=True)
class ConsumedReport:
    """What the logs show.

    Attributes:
        violations: Each fault, in words; empty if everything holds.
        notes: What is worth knowing but no fault: cut lines, an unfinished window.
        attempts: The attempts.
        epochs: The epochs.
    """

    violations: tuple[str, ...]
    notes: tuple[str, ...]
    attempts: tuple[AttemptCounts, ...]
    epochs: tuple[ConsumedEpoch, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations

    def verdict(self) -> str:
        """Returns the result in one sentence."""
        finished = [epoch for epoch in self.epochs if epoch.is_finished]
        if not self.holds:
            return f"NOT exactly once: {len(self.violations)} violation(s)"
        if not finished:
            return "no epoch is finished; so far no sample was trained on twice"
        which = ", ".join(str(epoch.epoch) for epoch in finished)
        apart = {
            "left out by the tail": sum(epoch.num_dropped for epoch in finished),
            "repeated by the tail": sum(epoch.num_repeated for epoch in finished),
            "masked": sum(epoch.num_masked for epoch in finished),
        }
        but = "".join(f", {number} {what}" for what, number in apart.items() if number)
        return f"each sample was trained on exactly once in epoch(s) {which}{but}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {"holds": self.holds, "verdict": self.verdict(), **asdict(self)}


def check_consumed(directory: str | os.PathLike[str], manifest: Manifest) -> ConsumedReport:
    """Checks a run's logs against the manifest.

    Args:
        directory: Folder of the logs that ``ConsumedLog`` wrote.
        manifest: The manifest of the run.

    Returns:
        The report; ``report.violations`` is empty if each sample of each finished epoch was consumed exactly once.

    Raises:
        ReadError: If there are no logs, or they are damaged.
    """
    logs, empty = read_logs(directory)
    if faults := _foreign_manifests(logs, manifest):
        return ConsumedReport(tuple(faults), tuple(_notes(logs, empty)), (), ())
    attempts = {k: list(of_attempt) for k, of_attempt in groupby(logs, key=lambda log: log.attempt)}
    violations = [fault for of_attempt in attempts.values() for fault in disagreements(of_attempt)]
    windows, counts = _windows_that_count(attempts, manifest)
    first = _first_known(logs)
    windows = [window for window in windows if window.place >= first]
    complete, faults, notes = _complete(windows, newest=max(attempts))
    violations += faults + _gaps(complete, first)
    begun = max(log.start.epoch for log in logs)  # epochs before the one where an attempt began are finished
    epochs = list(count_epochs(complete, begun, violations, first))
    notes += [_masked_note(epoch) for epoch in epochs if epoch.num_masked]
    return ConsumedReport(tuple(violations), (*_notes(logs, empty), *notes), tuple(counts), tuple(epochs))


def windows_that_count(directory: str | os.PathLike[str], manifest: Manifest) -> list[CountedWindow]:
    """Returns the windows that the run consumed, by place, without those that were rolled back.

    Raises:
        ReadError: If there are no logs, they are damaged or of another manifest.
    """
    logs, _ = read_logs(directory)
    if faults := _foreign_manifests(logs, manifest):
        raise ReadError("the logs do not belong to the manifest", url=str(directory), found=faults[0])
    attempts = {k: list(of_attempt) for k, of_attempt in groupby(logs, key=lambda log: log.attempt)}
    return _windows_that_count(attempts, manifest)[0]


def _foreign_manifests(logs: list[RankLog], manifest: Manifest) -> list[str]:
    others = [log for log in logs if log.fingerprint != manifest.fingerprint]
    return [
        f"{log.path.name}: of another manifest: expected fingerprint {manifest.fingerprint}, found {log.fingerprint}"
        for log in others[:NUM_NAMED]
    ]


def _notes(logs: list[RankLog], empty: list[Path]) -> Iterator[str]:
    if cut := [log.path.name for log in logs if log.is_cut] + [path.name for path in empty]:
        yield f"{len(cut)} log(s) end in a cut line, as killed processes leave it: {', '.join(cut[:4])}"
    if any(log.num_dropped_parts for log in logs):
        epoch, position = _first_known(logs)
        yield f"oldest parts were dropped to keep a bound: nothing is proved before epoch {epoch}, position {position}"
    if num_unknown := sum(log.num_unknown for log in logs):
        yield f"{num_unknown} line(s) of kinds unknown here were skipped"


def _masked_note(epoch: ConsumedEpoch) -> str:
    more = epoch.num_masked - len(epoch.masked)
    names = ", ".join(epoch.masked) + (f" and {more} more" if more else "")
    return f"epoch {epoch.epoch}: {epoch.num_masked} masked, that is dealt and not trained on: {names}"


def _first_known(logs: list[RankLog]) -> Place:
    """Where the windows begin that every rank's parts still hold."""
    cut = [log.windows[0] for log in logs if log.num_dropped_parts and log.windows]
    return max(((window.epoch, window.position) for window in cut), default=(0, 0))


def disagreements(logs: list[RankLog]) -> list[str]:
    """Ranks of one attempt begin at one place, with one plan."""
    first, faults = logs[0], []
    for log in logs[1:]:
        mine, theirs = (each.start.state_dict() | {"manifest": None} for each in (log, first))
        if (log.world_size, mine, log.settings) != (first.world_size, theirs, first.settings):
            faults.append(f"attempt {log.attempt}: ranks {first.rank} and {log.rank} disagree in start or plan")
    faults += [
        f"attempt {log.attempt}: rank {log.rank} with {log.world_size} ranks"
        for log in logs
        if not 0 <= log.rank < log.world_size
    ]
    return faults


def _windows_that_count(
    attempts: dict[int, list[RankLog]], manifest: Manifest
) -> tuple[list[CountedWindow], list[AttemptCounts]]:
    """Groups windows over ranks, without those that a later attempt went back behind; ordered by place."""
    windows, counts = [], []
    limit: Place | None = None
    for attempt, logs in sorted(attempts.items(), reverse=True):
        first = logs[0]
        plan = first.plan(manifest)
        start = (first.start.epoch, first.start.position)
        by_place: dict[Place, dict[int, list[LoggedWindow]]] = defaultdict(lambda: defaultdict(list))
        for log in logs:
            for window in log.windows:
                by_place[window.epoch, window.position][log.rank].append(window)
        kept = [place for place in sorted(by_place) if limit is None or place < limit]
        windows += [CountedWindow(place, attempt, start, plan, by_place[place]) for place in kept]
        ended = len(logs) == first.world_size and all(log.has_ended for log in logs)
        numbers = (len(kept), len(by_place) - len(kept))
        counts.append(AttemptCounts(attempt, first.world_size, plan.global_batch, *start, *numbers, ended))
        limit = start if limit is None else min(limit, start)
    return sorted(windows, key=lambda window: (window.place, window.attempt)), counts[::-1]


def _complete(windows: list[CountedWindow], newest: int) -> tuple[list[CountedWindow], list[str], list[str]]:
    """Finds windows that a rank did not log: in the newest attempt its last one may be unfinished, no other."""
    complete, faults, notes = [], [], []
    for window in windows:
        expected = ExpectedWindow(window.plan, *window.place)
        absent = [r for r in range(window.plan.world_size) if expected.has_rows(r) and r not in window.by_rank]
        where = f"attempt {window.attempt}, epoch {window.place[0]}, position {window.place[1]}"
        if not absent:
            complete.append(window)
        elif window is windows[-1] and window.attempt == newest:
            notes.append(f"unfinished last window ({where}): rank(s) {listed(absent)} had not logged it; not counted")
        else:
            faults.append(f"{where}: rank(s) {listed(absent)} did not log this window")
            complete.append(window)
        twice = [rank for rank, logged in window.by_rank.items() if len(logged) > 1]
        if twice:
            faults.append(f"{where}: rank(s) {listed(twice)} logged this window more than once")
    return complete, faults, notes


def _gaps(windows: list[CountedWindow], expected: Place) -> list[str]:
    """Each window begins where the one before it ended."""
    faults = []
    for window in windows:
        # A larger global batch may have left no window in an epoch that drops its tail.
        skipped = window.start if window.start > expected and window.leaves_rest(expected) else expected
        if window.place not in (expected, skipped):
            faults.append(
                f"attempt {window.attempt}: a window begins at epoch {window.place[0]}, position {window.place[1]}; "
                f"expected at epoch {expected[0]}, position {expected[1]}: what lies between is not logged, or twice"
            )
        expected = window.next_place
    return faults
