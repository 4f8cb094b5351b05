"""Tables for people. Loaded by the commands that show some; rich is loaded when one is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
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


def stdout() -> Console:
    """Returns standard output as a console of rich."""
    from rich.console import Console

    return Console(highlight=False)


def print_verdict(console: Console, violations: Sequence[str], good: str) -> None:
    """Prints what is violated, and the verdict: ``good`` if nothing is."""
    for text in violations:
        console.print(f"Violation: {text}", markup=False, soft_wrap=True, style="red")
    verdict = good if not violations else f"{len(violations)} violation(s)"
    console.print(f"Verdict: {verdict}", markup=False, soft_wrap=True, style="bold red" if violations else "bold green")
