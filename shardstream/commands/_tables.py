"""Tables for people. Loaded by the commands that show some; rich is loaded when one is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardstream.manifest import Manifest


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


def summary_of(manifest: Manifest) -> dict[str, Any]:
    """Returns what is told of a manifest that was written, as JSON-able values."""
    from shardstream.errors import shown_url

    return {
        "manifest": shown_url(str(manifest.path)),
        "num_shards": manifest.num_shards,
        "num_blocks": manifest.num_blocks,
        "num_samples": manifest.num_samples,
        "num_bytes": int(manifest.num_bytes.sum()),
        "fingerprint": manifest.fingerprint,
    }


def print_manifest(manifest: Manifest) -> None:
    """Prints what a manifest that was written holds, and where it is."""
    about = summary_of(manifest)
    click.echo(
        f"{manifest.num_samples:,} samples in {manifest.num_blocks:,} blocks of {manifest.num_shards:,} shards, "
        f"{about['num_bytes']:,} bytes\nfingerprint {manifest.fingerprint}\nwritten to {about['manifest']}"
    )
