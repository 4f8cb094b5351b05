"""What a run tells of itself while it lives: its metrics, one JSON line a step, and how far it is saved."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

Metrics: TypeAlias = dict[str, Any]


def read_metrics(run: Path) -> list[Metrics]:
    """Returns the lines of ``metrics.jsonl`` in the order they were written; none if there is no such file.

    A line that is cut, because its process was killed or is just writing it, is left out.
    """
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [parsed for line in lines if (parsed := _parsed(line)) is not None]


def newest_step(run: Path) -> int:
    """Returns the step of a run's newest checkpoint, 0 if there is none, without reading it."""
    return max((int(path.stem.rpartition("-")[2]) for path in (run / "checkpoints").glob("step-*.pt")), default=0)


def _parsed(line: str) -> Metrics | None:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def plot_losses(metrics: list[Metrics], path: Path, title: str) -> None:
    """Writes a PNG of the loss by step: a line for each attempt, and where each began.

    Args:
        metrics: What ``read_metrics`` returned.
        path: Where to write it.
        title: Stands above.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for attempt, lines in groupby(metrics, key=lambda line: line["attempt"]):
        own = list(lines)
        label = f"attempt {attempt}: {own[0]['world_size']} ranks, steps {own[0]['step']} to {own[-1]['step']}"
        # Earlier attempts are drawn wider: where a later one makes the same steps again, both are seen.
        steps = [line["step"] for line in own]
        losses = [float("nan") if line["loss"] is None else line["loss"] for line in own]
        (drawn,) = axes.plot(steps, losses, marker=".", markersize=4, linewidth=max(1.5, 5 - 2 * attempt), label=label)
        if attempt:
            axes.axvline(own[0]["step"] - 1, color=drawn.get_color(), linestyle="--", linewidth=1)
    axes.set(title=title, xlabel="step (global batches trained on)", ylabel="loss per target, nats")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


class Tail:
    """Reads on in ``metrics.jsonl`` where it has stopped.

    Args:
        run: The run folder.
        at_end: Whether to leave out what is there already.
    """

    def __init__(self, run: Path, *, at_end: bool = False) -> None:
        self._path = run / "metrics.jsonl"
        self._offset = self._path.stat().st_size if at_end and self._path.exists() else 0

    def read(self) -> list[Metrics]:
        """Returns the whole lines that were written since the last time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        lines = whole.decode("utf-8", "replace").splitlines()
        return [parsed for line in lines if (parsed := _parsed(line)) is not None]
