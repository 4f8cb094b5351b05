"""What a run did, from its ledger: how fast, who waited, which targets it divided by, and what it covered."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardstream.audit.consumption import ConsumedReport, windows_that_count
from shardstream.audit.ledger import LedgerReport, MixtureLedgerReport
from shardstream.audit.mixture_logs import MixedWindow, mixed_windows_that_count
from shardstream.audit.tally import CountedWindow
from shardstream.consumed import LoggedWindow
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.report.binning import span, stretches
from shardstream.report.page import Bars, Figure, Lines, Section, Table, evenly, shown
from shardstream.rounds import RankRounds, read_rounds

_MOST_BARS = 64
_MOST_HEADS = 6
_SUM_BEGINS, _SUM_ENDS = "gradients are summed: begins", "gradients are summed: ends"

_BETWEEN = "between the end of a step and the next one's first batch: data, checkpoints, whatever the loop does there"
_SUMS = "in backwards that sum gradients, which includes waiting for the slowest rank"

Window = CountedWindow | MixedWindow


def coverage_section(report: LedgerReport | MixtureLedgerReport) -> Section:
    """Returns the section of what the run covered."""
    tables = []
    facts: tuple[tuple[str, str | int | float | bool | None], ...] = (
        ("windows whose targets add up", report.num_denominators),
        ("rounds compared between ranks", report.num_rounds),
    )
    if isinstance(report.consumed, ConsumedReport):
        columns = ("epoch", "finished", "steps", "samples", "padding", "dropped", "masked", "missing", "repeated")
        fields: tuple[str, ...] = (
            "epoch",
            "is_finished",
            "num_windows",
            "num_samples",
            "num_padding",
            "num_dropped",
            "num_masked",
        )
        fields = (*fields, "num_missing", "num_extra")
        rows = tuple(tuple(getattr(epoch, name) for name in fields) for epoch in report.consumed.epochs)
        tables.append(Table("Coverage of each epoch", columns, rows))
        names = ("attempt", "ranks", "global batch", "from epoch", "position", "steps", "rolled back", "ended")
        starts = tuple(tuple(vars(attempt).values()) for attempt in report.consumed.attempts)
        tables.append(Table("Starts of the job", names, starts))
    else:
        of_run = report.consumed
        facts += (("starts of the job", of_run.num_attempts), ("steps", of_run.num_windows))
        tables.append(Table("Passes of each source", ("source", "times through"), tuple(of_run.passes.items())))
    notes = tuple(f"Note: {note}." for note in (*report.consumed.notes, *report.notes))
    return Section(
        "coverage", "Run: coverage", notes=(f"{report.verdict()}.", *notes), facts=facts, tables=tuple(tables)
    )


def run_section(directory: str | os.PathLike[str], data: Manifest | Mixture) -> Section:
    """Returns the section of throughput, waits, targets and losses.

    Raises:
        ReadError: If there are no logs, or they are damaged.
    """
    windows: Sequence[Window] = (
        mixed_windows_that_count(directory, data) if isinstance(data, Mixture) else windows_that_count(directory, data)
    )
    clock = _Clock.of(windows, read_rounds(directory))
    figures = [*_throughput(windows, clock), *_waits(clock), *_targets(windows), *_losses(windows)]
    notes = []
    if not clock.step_s:
        notes.append("The ledger has no times: throughput and waits are not known.")
    if not any(window.targets for each in windows for window in _logged(each).values()):
        notes.append("The ledger has no targets: denominators are not known.")
    return Section("run", "Run: throughput, waits, targets", notes=tuple(notes), figures=tuple(figures))


# -------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class _Clock:
    """When what happened, by each rank's own clock.

    Attributes:
        step_s: Index of a window → seconds to the next one's beginning, on its slowest rank.
        between_s: Rank → seconds between the end of a window and the next one's beginning.
        sums_s: Rank → seconds in sums of gradients.
        all_s: Rank → seconds in all, without breaks between attempts.
    """

    step_s: dict[int, float] = field(default_factory=dict)
    between_s: dict[int, float] = field(default_factory=dict)
    sums_s: dict[int, float] = field(default_factory=dict)
    all_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, windows: Sequence[Window], logs: Sequence[RankRounds]) -> _Clock:
        """Reads the times of windows that count."""
        clock = cls()
        for log in logs:
            ours = [(k, log.times.get(w.place, ())) for k, w in enumerate(windows) if w.attempt == log.attempt]
            clock._add(log.rank, [(k, events) for k, events in ours if events])
        return clock

    def _add(self, rank: int, ours: Sequence[tuple[int, tuple[tuple[float, str], ...]]]) -> None:
        for (index, events), following in zip(ours, [*ours[1:], None], strict=True):
            begin, end = events[0][0], events[-1][0]
            next_begin = end if following is None or following[0] != index + 1 else following[1][0][0]
            # Another clock than the wall's would be needed to be safe from one that is set back.
            seconds = max(0.0, next_begin - begin)
            if following is not None and following[0] == index + 1:
                self.step_s[index] = max(seconds, self.step_s.get(index, 0.0))
            self._count(self.all_s, rank, seconds)
            self._count(self.between_s, rank, next_begin - end)
            begun = None
            for time_s, text in events:
                if text == _SUM_BEGINS:
                    begun = time_s
                elif text == _SUM_ENDS and begun is not None:
                    self._count(self.sums_s, rank, time_s - begun)
                    begun = None

    @staticmethod
    def _count(seconds: dict[int, float], rank: int, more: float) -> None:
        seconds[rank] = seconds.get(rank, 0.0) + max(0.0, more)


def _throughput(windows: Sequence[Window], clock: _Clock) -> Iterator[Figure]:
    steps = [k for k in sorted(clock.step_s) if clock.step_s[k] > 0]
    if not steps:
        return
    samples = {k: sum(logged.num_samples for logged in _logged(windows[k]).values()) for k in steps}
    rates, rows, x = [], [], []
    for begin, end in stretches(len(steps)):
        here = steps[begin:end]
        seconds, num = sum(clock.step_s[k] for k in here), sum(samples[k] for k in here)
        x.append(here[0])
        rates.append(num / seconds)
        rows.append((_name(here), num, round(seconds, 3), round(num / seconds, 2)))
    seconds, num = sum(clock.step_s[k] for k in steps), sum(samples.values())
    summary = (
        f"{shown(num / seconds)} samples a second over {len(steps):,} timed steps and all ranks "
        f"({shown(round(seconds, 1))} s); lowest {shown(min(rates))}, highest {shown(max(rates))}."
    )
    chart = Lines("step", "samples a second", tuple(x), (("samples a second", tuple(rates)),))
    columns = ("steps", "samples", "seconds", "samples a second")
    table = Table("Throughput: numbers of the figure", columns, tuple(rows))
    yield Figure("run-throughput", "Throughput", summary, chart, table)


def _waits(clock: _Clock) -> Iterator[Figure]:
    kinds = (
        ("between", "Time between steps", clock.between_s, _BETWEEN),
        ("sums", "Time in sums of gradients", clock.sums_s, _SUMS),
    )
    for name, title, seconds, what in kinds:
        ranks = sorted(rank for rank in seconds if clock.all_s[rank] > 0)
        if not ranks:
            continue
        shares = {rank: 100 * seconds[rank] / clock.all_s[rank] for rank in ranks}
        slowest = max(ranks, key=lambda rank: (shares[rank], -rank))
        summary = f"{shown(np.mean(list(shares.values())).item())} % of the time on average is {what}; most on rank "
        chosen = [ranks[k] for k in evenly(len(ranks), _MOST_BARS)]
        rows = tuple((r, round(seconds[r], 3), round(clock.all_s[r], 3), round(shares[r], 2)) for r in chosen)
        chart = Bars("rank", "% of the time", tuple(map(str, chosen)), tuple(shares[rank] for rank in chosen))
        table = Table(f"{title}: numbers of the figure", ("rank", "seconds", "of seconds", "%"), rows)
        yield Figure(f"run-{name}", title, f"{summary}{slowest}: {shown(shares[slowest])} %.", chart, table)


# ------------------------------------------------------------------------------------------------------------ numbers


def _targets(windows: Sequence[Window]) -> Iterator[Figure]:
    for index, head in enumerate(_heads(windows)):
        totals: dict[int, int] = {}
        by_rank: dict[int, int] = {}
        for step, window in enumerate(windows):
            for rank, logged in sorted(_logged(window).items()):
                if head in logged.targets:
                    totals[step] = logged.targets[head][0]
                    by_rank[rank] = by_rank.get(rank, 0) + logged.targets[head][1]
        yield _denominators(f"run-denominators-{index}", head, totals)
        yield _by_rank(f"run-targets-{index}", head, by_rank)


def _denominators(name: str, head: str, totals: dict[int, int]) -> Figure:
    steps, means, lows, highs, rows, x = sorted(totals), [], [], [], [], []
    for begin, end in stretches(len(steps)):
        here = steps[begin:end]
        numbers = [totals[step] for step in here]
        x.append(here[0])
        means.append(sum(numbers) / len(numbers))
        lows.append(min(numbers))
        highs.append(max(numbers))
        rows.append((_name(here), round(means[-1], 2), lows[-1], highs[-1]))
    title = f"Denominators of {head}"
    spread = (tuple(lows), tuple(highs)) if len(steps) > len(x) else None
    summary = (
        f"Each step's losses of {head} were divided by {shown(min(lows))} to {shown(max(highs))} valid targets, "
        f"{shown(sum(totals.values()) / len(steps))} on average, over {len(steps):,} steps."
    )
    chart = Lines("step", "valid targets of all ranks", tuple(x), ((head, tuple(means)),), spread)
    table = Table(f"{title}: numbers of the figure", ("steps", "mean", "lowest", "highest"), tuple(rows))
    return Figure(name, title, summary, chart, table)


def _by_rank(name: str, head: str, by_rank: dict[int, int]) -> Figure:
    ranks = sorted(by_rank)
    chosen = [ranks[k] for k in evenly(len(ranks), _MOST_BARS)]
    numbers, total = [by_rank[rank] for rank in chosen], sum(by_rank.values())
    title = f"Valid targets of {head} by rank"
    summary = (
        f"{total:,} valid targets over {len(ranks):,} rank(s): {min(by_rank.values()):,} to "
        f"{max(by_rank.values()):,} a rank. Ranks may differ: every target weighs the same all the same."
    )
    rows = tuple((r, by_rank[r], round(100 * by_rank[r] / max(total, 1), 2)) for r in chosen)
    chart = Bars("rank", "valid targets", tuple(map(str, chosen)), tuple(numbers))
    return Figure(name, title, summary, chart, Table(f"{title}: numbers of the figure", ("rank", "targets", "%"), rows))


def _losses(windows: Sequence[Window]) -> Iterator[Figure]:
    heads = _heads(windows)
    means: dict[int, dict[str, float]] = {}
    for step, window in enumerate(windows):
        logged = _logged(window).values()
        for head in heads:
            sums = [each.sums[head] for each in logged if head in each.sums]
            total = max((each.targets[head][0] for each in logged if head in each.targets), default=0)
            if sums and total and np.isfinite(sum(sums)):
                means.setdefault(step, {})[head] = sum(sums) / total
    if not means:
        return
    x, rows = [], []
    points: dict[str, list[float | None]] = {head: [] for head in heads}
    steps = sorted(means)
    for begin, end in stretches(len(steps)):
        here = steps[begin:end]
        x.append(here[0])
        for head in heads:
            numbers = [means[step][head] for step in here if head in means[step]]
            points[head].append(sum(numbers) / len(numbers) if numbers else None)
        rows.append((_name(here), *(points[head][-1] for head in heads)))
    ends = "; ".join(f"{head} from {shown(points[head][0])} to {shown(points[head][-1])}" for head in heads)
    # Bars and areas begin at zero, and so does this; a loss below it would leave the box.
    drawn = tuple((head, tuple(None if y is None else max(y, 0.0) for y in points[head])) for head in heads)
    table = Table("Losses per target: numbers of the figure", ("steps", *heads), tuple(rows))
    chart = Lines("step", "loss per target", tuple(x), drawn)
    yield Figure("run-losses", "Losses per target", f"Over {len(steps):,} steps: {ends}.", chart, table)


def _heads(windows: Sequence[Window]) -> list[str]:
    found = {head for each in windows for window in _logged(each).values() for head in window.targets}
    return sorted(found)[:_MOST_HEADS]


def _logged(window: Window) -> dict[int, LoggedWindow]:
    return {rank: each[0] for rank, each in window.by_rank.items() if each}


def _name(steps: Sequence[int]) -> str:
    return span(steps[0], steps[-1])
