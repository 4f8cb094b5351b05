"""What a report is made of, and how it becomes one HTML page or JSON values.

A figure says the same thing three times: as marks, as a sentence, and as a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, TypeAlias

from shardstream.errors import shown_url
from shardstream.report.marks import NUM_SHADES, area_path, bar_paths, heat_paths, heat_shade, line_paths

Cell: TypeAlias = "str | int | float | bool | None"


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows.
        columns: Headers; the first column names each row.
        rows: The rows.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Bars:
    """Bars from zero.

    Attributes:
        x_name: What they stand for.
        y_name: What their height is.
        labels: Name of each.
        values: Height of each.
    """

    x_name: str
    y_name: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    kind: str = "bars"

    @property
    def paths(self) -> tuple[str, ...]:
        """One SVG path a bar, in a box of 100 x 100."""
        return bar_paths(self.values)

    @property
    def top(self) -> float:
        """What the box's height stands for."""
        return max(self.values, default=0)


@dataclass(frozen=True)
class Lines:
    """Lines over a common axis, from zero.

    Attributes:
        x_name: What the axis is.
        y_name: What the height is.
        x: Where the points are.
        series: Name of each line, and its points; None where there is none.
        spread: Lowest and highest values around the first line, or None.
    """

    x_name: str
    y_name: str
    x: tuple[float, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    spread: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    kind: str = "lines"

    @property
    def top(self) -> float:
        """What the box's height stands for."""
        highest = [y for _, points in self.series for y in points if y is not None]
        return max([*highest, *(self.spread[1] if self.spread else ())], default=0)

    @property
    def paths(self) -> tuple[str, ...]:
        """One SVG path a line, in a box of 100 x 100."""
        return line_paths(self.x, [points for _, points in self.series], self.top)

    @property
    def spread_path(self) -> str:
        """The SVG path of what lies between lowest and highest values."""
        return "" if self.spread is None else area_path(self.x, *self.spread, self.top)


@dataclass(frozen=True)
class HeatMap:
    """Counts over two axes, in panels that share their shades.

    Attributes:
        x_name: What columns are.
        y_name: What rows are.
        x_ends: Names of the first and last column.
        y_ends: Names of the first and last row.
        panels: Name of each, and its counts by row and column.
        unit: What is counted.
    """

    x_name: str
    y_name: str
    x_ends: tuple[str, str]
    y_ends: tuple[str, str]
    panels: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
    unit: str
    kind: str = "heat"

    @property
    def top(self) -> int:
        """The highest count."""
        return max((count for _, rows in self.panels for row in rows for count in row), default=0)

    @property
    def shades(self) -> tuple[tuple[int, int], ...]:
        """Shades that can occur, each with the highest count that it stands for."""
        most = sorted({self.top * shade // NUM_SHADES for shade in range(1, NUM_SHADES + 1)})
        return tuple((heat_shade(count, self.top), count) for count in most if count)

    @property
    def drawn(self) -> tuple[tuple[str, int, int, tuple[tuple[int, str], ...]], ...]:
        """Of each panel its name, columns, rows, and for each shade an SVG path of its cells."""
        return tuple(
            (name, len(rows[0]) if rows else 0, len(rows), heat_paths(rows, self.top)) for name, rows in self.panels
        )


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        name: Its anchor in the page: lower case letters and hyphens.
        title: What it shows.
        summary: The same in words and numbers, for those who do not see it.
        chart: The marks.
        table: The numbers.
    """

    name: str
    title: str
    summary: str
    chart: Bars | Lines | HeatMap
    table: Table


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        name: Its anchor in the page.
        title: Its heading.
        notes: Sentences.
        facts: Names and values.
        figures: Its figures.
        tables: Tables that stand for themselves.
    """

    name: str
    title: str
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, Cell], ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Report:
    """What ``shardstream report`` shows.

    Attributes:
        title: What it is about.
        verdict: The result in one sentence.
        violations: Each broken promise, in words; empty if everything holds.
        sections: Its parts.
        details: What the parts were made from, as JSON values: the audit, the run.
    """

    title: str
    verdict: str
    violations: tuple[str, ...]
    sections: tuple[Section, ...]
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {"holds": self.holds, **asdict(self)}

    def to_html(self) -> str:
        """Returns the report as one HTML page, which loads nothing else. The same report gives the same text."""
        from jinja2 import Environment, StrictUndefined

        pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        pages.filters.update(shown=shown, text=_clean)
        source = files("shardstream.report").joinpath("page.html.j2").read_text("utf-8")
        return pages.from_string(source).render(report=self)


def shown(value: Cell) -> str:
    """Returns a number as people read it.

    Example:
        >>> shown(1234567), shown(0.123456), shown(1234.5), shown(True), shown(None)
        ('1,234,567', '0.1235', '1,234', 'yes', 'not known')
    """
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"  # noqa: PLR2004
    return _clean(value)


def _clean(text: str) -> str:
    """Text without credentials, which any encoding can hold."""
    return shown_url(text).encode("utf-8", "backslashreplace").decode()


def evenly(num: int, at_most: int) -> Sequence[int]:
    """Returns up to ``at_most`` of the numbers 0..num-1, evenly spread, the first and the last among them.

    Example:
        >>> evenly(3, 8), evenly(100, 4)
        ([0, 1, 2], [0, 33, 66, 99])
    """
    if num <= at_most:
        return list(range(num))
    return [round(k * (num - 1) / (at_most - 1)) for k in range(at_most)]
