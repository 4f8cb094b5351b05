"""Counts, epoch by epoch, what the windows of a run's logs hold, and names what is missing, repeated or foreign."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardstream.audit.windows import ExpectedWindow
from shardstream.consumed import LoggedWindow, id_checksum
from shardstream.errors import ManifestError, shown_url
from shardstream.permutation import Int64Array
from shardstream.plan import Plan

NUM_NAMED = 20  # of the samples that are wrong, this many are named, the rest is counted

Place = tuple[int, int]  # (epoch, position)


class CountedWindow(NamedTuple):
    """A window that counts, as the ranks of its attempt logged it."""

    place: Place
    attempt: int
    start: Place
    """Where the attempt began."""
    plan: Plan
    by_rank: dict[int, list[LoggedWindow]]

    @property
    def next_place(self) -> Place:
        """Where the next window of the same plan begins."""
        after = self.plan.cursor(*self.place).advanced(1, num_positions=self.plan.num_positions)
        return after.epoch, after.position

    def leaves_rest(self, place: Place) -> bool:
        """Whether the plan has no window from ``place`` to the end of that epoch, so that it goes on in the next."""
        after = self.plan.cursor(*place).advanced(0, num_positions=self.plan.num_positions)
        return (after.epoch, after.position) == self.start


@dataclass(frozen=True)
class ConsumedEpoch:
    """One epoch.

    Attributes:
        epoch: The epoch.
        is_finished: Whether all its windows were trained on.
        num_windows: Windows that count.
        num_samples: Samples trained on.
        num_padding: Rows that only filled micro-batches.
        num_dropped: Samples that the tail left out.
        num_repeated: Samples that the tail repeats (``tail="repeat"``).
        num_masked: Samples that could not be decoded, were rejected, or were left by the loop.
        missing: Samples that were not trained on, though they should have been: the first of them, named.
        num_missing: How many.
        repeated: Samples trained on more often than they should have been: the first of them, named.
        num_extra: How many.
        foreign: Ids that are no samples of the manifest: the first of them.
        num_foreign: How many.
        masked: The first of those that are masked, named.
    """

    epoch: int
    is_finished: bool
    num_windows: int
    num_samples: int
    num_padding: int
    num_dropped: int
    num_repeated: int
    num_masked: int
    missing: tuple[str, ...] = ()
    num_missing: int = 0
    repeated: tuple[str, ...] = ()
    num_extra: int = 0
    foreign: tuple[str, ...] = ()
    num_foreign: int = 0
    masked: tuple[str, ...] = ()


class _Tally:
    """Counts of one epoch while its windows are read; arrays of int16[num_samples]."""

    def __init__(self, num_samples: int) -> None:
        self.times = np.zeros(num_samples, np.int16)
        self.due = np.zeros(num_samples, np.int16)
        self.foreign: list[int] = []
        self.masked: list[int] = []
        self.repeated: list[int] = []
        self.num_windows = self.num_padding = self.num_dropped = 0

    def add(self, ids: Counter[int]) -> None:
        """Counts ids that were trained on."""
        numbers, times = np.array(list(ids), np.int64), np.array(list(ids.values()), np.int16)
        inside = (numbers >= 0) & (numbers < len(self.times))
        self.times[numbers[inside]] += times[inside]
        self.foreign += np.repeat(numbers[~inside], times[~inside]).tolist()


def count_epochs(
    windows: list[CountedWindow], begun: int, violations: list[str], first: Place = (0, 0)
) -> Iterator[ConsumedEpoch]:
    """Counts each epoch; at most those that one window reaches are held at a time.

    Args:
        windows: The windows that count, by place.
        begun: An epoch that an attempt began in: those before it are finished.
        violations: What is wrong is added here.
        first: Where what is known begins: an epoch whose beginning is not known is never finished.
    """
    if not windows:
        return
    plan = windows[0].plan
    tallies: dict[int, _Tally] = defaultdict(lambda: _Tally(plan.num_positions))
    num_finished = max(begun, windows[-1].next_place[0])
    by_epoch = [list(group) for _, group in groupby(windows, key=lambda window: window.place[0])]
    for of_epoch, after in zip(by_epoch, [*by_epoch[1:], []], strict=True):
        epoch, last = of_epoch[-1].place[0], of_epoch[-1]
        tallies[epoch].num_windows = len(of_epoch)
        for window in of_epoch:
            violations += _count_window(window, tallies)
        if first[0] + (first[1] > 0) <= epoch < num_finished:
            most = max(each.plan.global_batch for each in (last, *after[:1]))
            _finish(tallies[epoch], _left_out(last, most))
        done = [e for e in sorted(tallies) if not after or e < after[0].place[0]]
        for e in done:
            yield _closed(e, tallies.pop(e), plan, violations, is_finished=(e, 0) >= first and e < num_finished)


def _left_out(last: CountedWindow, most: int) -> Int64Array:
    """Returns the ids that the tail left out behind an epoch's last window: fewer than a global batch."""
    left_out = ExpectedWindow(last.plan, *last.place).ids_behind()
    return left_out if last.plan.tail in ("drop", "truncate") and len(left_out) < most else left_out[:0]


def _finish(tally: _Tally, left_out: Int64Array) -> None:
    """Whatever the windows say, each sample must have come once in a finished epoch, unless the tail left it out."""
    tally.due[:] = 1
    tally.due[left_out] = 0
    tally.num_dropped = len(left_out)


def _count_window(window: CountedWindow, tallies: dict[int, _Tally]) -> list[str]:
    """Counts one window's ids to the epochs they are of."""
    epoch, faults = window.place[0], []
    expected = ExpectedWindow(window.plan, *window.place)
    trained: Counter[int] = Counter()
    masked: Counter[int] = Counter()
    for rank, logged in sorted(window.by_rank.items()):
        where = f"attempt {window.attempt}, epoch {epoch}, position {window.place[1]}, rank {rank}"
        for entry in logged:
            ids = entry.ids
            if ids is None:  # the checksum must be that of what the plan deals to this rank
                ids = tuple((Counter(expected.ids(rank).tolist()) - Counter(entry.masked_ids)).elements())
            if entry.checksum != f"{id_checksum(ids):016x}":
                what = "what the plan deals to this rank" if entry.ids is None else "the ids beside it"
                faults.append(f"{where}: the checksum {entry.checksum} is not that of {what}")
            num_padding = entry.num_padding - len(entry.masked_ids)
            if num_padding != expected.num_padding(rank):
                faults.append(f"{where}: {num_padding} padding rows, expected {expected.num_padding(rank)}")
            trained.update(ids)
            tallies[epoch].num_padding += num_padding
            masked.update(entry.masked_ids)
    for ahead, ids_due in expected.by_epoch().items():
        masked_of_epoch = masked & Counter(ids_due)
        masked -= masked_of_epoch
        tallies[epoch + ahead].masked += masked_of_epoch.elements()
        of_epoch = trained & Counter(ids_due)  # the smaller number of each
        trained -= of_epoch
        tallies[epoch + ahead].add(of_epoch)
        tallies[epoch + ahead].due[ids_due] = 1
    tallies[epoch].masked += masked.elements()
    tallies[epoch].add(trained)  # what this window should not have held
    tallies[epoch].repeated += expected.repeated_ids()
    return faults


def _closed(epoch: int, tally: _Tally, plan: Plan, violations: list[str], *, is_finished: bool) -> ConsumedEpoch:
    """Compares what was trained on with what should have been, and says what is wrong."""
    masked = [sample_id for sample_id in tally.masked if 0 <= sample_id < plan.num_positions]
    np.subtract.at(tally.due, masked, 1)
    np.add.at(tally.due, tally.repeated, 1)
    missing, extra = np.flatnonzero(tally.times < tally.due), np.flatnonzero(tally.times > tally.due)
    counted = ConsumedEpoch(
        epoch=epoch,
        is_finished=is_finished,
        num_windows=tally.num_windows,
        num_samples=int(tally.times.sum(dtype=np.int64)) + len(tally.foreign),
        num_padding=tally.num_padding,
        num_dropped=tally.num_dropped,
        num_repeated=len(tally.repeated),
        num_masked=len(masked),
        missing=tuple(sample_names(plan, missing[:NUM_NAMED].tolist())),
        num_missing=len(missing),
        repeated=tuple(sample_names(plan, extra[:NUM_NAMED].tolist())),
        num_extra=len(extra),
        foreign=tuple(map(str, tally.foreign[:NUM_NAMED])),
        num_foreign=len(tally.foreign),
        masked=tuple(sample_names(plan, sorted(masked)[:NUM_NAMED])),
    )
    parts = (
        ("missing", counted.missing, counted.num_missing),
        ("repeated", counted.repeated, counted.num_extra),
        ("foreign", counted.foreign, counted.num_foreign),
    )
    for what, names, number in parts:
        if number:
            more = f" and {number - len(names)} more" if number > len(names) else ""
            violations.append(f"epoch {epoch}: {number} {what}: {', '.join(names)}{more}")
    return counted


def sample_names(plan: Plan, ids: list[int]) -> Iterator[str]:
    """Yields id, shard and row of samples, and their keys where the manifest has them (tar)."""
    if plan.packed is not None:
        yield from (f"sequence {sequence}" for sequence in ids)
        return
    manifest = plan.manifest
    for sample_id in ids:
        shard = int(manifest.shard_of_sample(np.array([sample_id]))[0])
        row = sample_id - int(manifest.first_sample[shard])
        key = ""
        if manifest.lists is not None and "sample_keys" in manifest.lists.names:
            try:
                keys = manifest.lists.read(shard, ("sample_keys",))["sample_keys"]
            except ManifestError:  # names are a courtesy: the verdict does not hang on them
                keys = ()
            key = f", key {keys[row].decode('utf-8', 'replace')}" if row < len(keys) else ""
        yield f"{sample_id} ({shown_url(manifest.urls[shard])}:{row}{key})"
