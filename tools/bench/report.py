"""One table of everything that was measured: as text, Markdown and JSON, with plots."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from tools.bench.case import Folders
from tools.bench.machine import describe_machine, describe_peers
from tools.bench.plots import plot_growth, plot_throughput
from tools.bench.runs import Measured, load_results
from tools.bench.statistics import Spread
from tools.bench.targets import Line, Values, all_targets, evaluate

_HEADER = ("what", "value", "target", "", "measured", "against")
_MARKS = {True: "met", False: "MISSED", None: ""}


def values_of(results: Sequence[Measured]) -> Values:
    """Returns the values of all repetitions by case and metric."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for measured in results:
        for metric, value in measured.metrics.items():
            values[measured.case, metric].append(value)
    return values


def write_report(folders: Folders, say: Callable[[str], None]) -> None:
    """Writes ``report.md``, ``report.json`` and plots below the root, and prints the table.

    Raises:
        FileNotFoundError: If nothing was measured yet.
    """
    results = load_results(folders)
    if not results:
        raise FileNotFoundError("no results yet: run a suite first, such as `python -m tools.bench throughput`")
    values = values_of(results)
    lines = evaluate(all_targets(), values)
    machine = {**describe_machine(), **describe_peers(folders.root)}
    problems = {measured.case: measured.problem for measured in results if measured.problem}
    plots = [path.name for path in (plot_throughput(values, folders.root), plot_growth(values, folders.root)) if path]
    table = render_table(lines)
    (folders.root / "report.md").write_text(_markdown(table, machine, values, problems, plots))
    (folders.root / "report.json").write_text(json.dumps(_as_json(lines, machine, values, problems), indent=1) + "\n")
    say(table)
    for case, problem in problems.items():
        say(f"not measured: {case}: {problem}")


def render_table(lines: Sequence[Line]) -> str:
    """Returns a Markdown table, aligned so that it reads well as text, too."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for topic, group in groupby(lines, key=lambda line: line.target.topic):
        rows.append((f"**{topic}**", "", "", "", "", ""))
        rows += [_row(line) for line in group]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def _row(line: Line) -> tuple[str, ...]:
    target = line.target
    bound = "" if target.at_least is None else f">= {target.at_least:g}"
    bound += "" if target.at_most is None else f"<= {_figure(target.at_most, target)}"
    against = "" if line.against is None else f"{line.against[0]}: {_spread(line.against[1])}"
    return (target.what, _figure(line.value, target), bound, _MARKS[line.is_met], _spread(line.ours), against)


def _figure(value: float, target: Any) -> str:
    if target.against:
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"  # noqa: PLR2004 - digits that mean something
    if target.metric in ("seconds", "first_batch_s"):
        return f"{value * 1e3:,.0f} ms"
    return f"{value:,.0f} MB" if target.metric.endswith("_mb") else f"{value:,.3g}"


def _spread(spread: Spread) -> str:
    return f"{_number(spread.median)} ({_number(spread.least)} to {_number(spread.most)}, n={spread.num})"


def _number(value: float) -> str:
    """Returns three digits, with "k" for thousands.

    Example:
        >>> _number(244_321), _number(0.01234)
        ('244k', '0.0123')
    """
    return f"{value / 1000:,.3g}k" if value >= 1000 else f"{value:,.3g}"  # noqa: PLR2004 - where k begins


def _markdown(
    table: str, machine: dict[str, str], values: Values, problems: dict[str, str], plots: Sequence[str]
) -> str:
    parts = [
        "# Benchmark\n",
        "Ratios are of medians over interleaved repetitions; ranges are smallest to largest.\n",
        ", ".join(f"{name} {text}" for name, text in machine.items()) + ".\n",
        table + "\n",
        *[f"![{name}]({name})\n" for name in plots],
        "## All figures\n",
        _all_figures(values) + "\n",
    ]
    if problems:
        parts += ["## Not measured\n", *[f"- {case}: {problem.splitlines()[0]}" for case, problem in problems.items()]]
    return "\n".join(parts).rstrip() + "\n"


def _all_figures(values: Values) -> str:
    rows = [f"| {case} | {metric} | {_spread(Spread.of(list(found)))} |" for (case, metric), found in values.items()]
    return "\n".join(["| case | metric | median (range) |", "|---|---|---|", *rows])


def _as_json(
    lines: Sequence[Line], machine: dict[str, str], values: Values, problems: dict[str, str]
) -> dict[str, Any]:
    return {
        "machine": machine,
        "targets": [
            {
                "topic": line.target.topic,
                "what": line.target.what,
                "value": line.value,
                "at_least": line.target.at_least,
                "at_most": line.target.at_most,
                "is_met": line.is_met,
                "ours": line.ours._asdict(),
                "against": None if line.against is None else {"case": line.against[0], **line.against[1]._asdict()},
            }
            for line in lines
        ],
        "values": [{"case": case, "metric": metric, "values": found} for (case, metric), found in values.items()],
        "not_measured": problems,
    }
