"""How a trial ends: its report is printed, kept on request, and a violation is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


def publish(report: Mapping[str, Any], folder: Path, json_path: Path | None) -> None:
    """Prints a report, and writes it if asked to.

    Args:
        report: Its ``violations`` are empty if everything held.
        folder: Where the trial worked, for the error.
        json_path: Where to write the report; None for nowhere.

    Raises:
        ClickException: If something was violated.
    """
    text = json.dumps(report, indent=1)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(text + "\n")
    print(text, flush=True)
    if report["violations"]:
        raise click.ClickException(f"{len(report['violations'])} violation(s); everything is in {folder}")
