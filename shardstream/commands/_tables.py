"""Tables for people. Loaded by the commands that show some; rich is loaded when one is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, names: Sequence[str], rows: Iterable[Iterable[object]]) -> Table:
    """Returns a table; whole numbers are grouped by thousands, names of columns may all be empty."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", show_header=any(names))
    for name in names:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else escaped(str(value))


def escaped(text: str) -> str:
    """Text in which rich finds no markup: names of shards may hold square brackets."""
    from rich.markup import escape

    return escape(text)
