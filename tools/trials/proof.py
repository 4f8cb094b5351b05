"""What must hold in the end, whatever happened: exactly once, the undisturbed losses, nothing left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardstream.audit.ledger import check_ledger
from shardstream.manifest import Manifest
from tools.training.launch import Torchrun
from tools.training.metrics import Metrics, newest_step, read_metrics
from tools.trials.setting import Setting


@dataclass(frozen=True)
class Proof:
    """What the logs of a disturbed run show.

    Attributes:
        num_attempts: Starts of the job that trained.
        num_steps: Steps that count.
        num_rolled_back: Windows that were trained, lost with a crash and trained again.
        num_epochs: Epochs that were finished.
        num_samples: Samples of those, each trained on exactly once.
        world_sizes: Numbers of ranks, in the order of attempts, without repeats in a row.
        num_losses: Losses, of all attempts, that were compared with the undisturbed run's at the same step.
        largest_difference: Of a loss to the undisturbed one, relative to it.
        violations: What does not hold.
    """

    num_attempts: int
    num_steps: int
    num_rolled_back: int
    num_epochs: int
    num_samples: int
    world_sizes: tuple[int, ...]
    num_losses: int
    largest_difference: float
    violations: tuple[str, ...]


def undisturbed(setting: Setting, world_size: int, num_steps: int) -> list[Metrics]:
    """Trains the same run without mishaps until it has made so many steps, and returns its metrics."""
    run = setting.folder / "undisturbed"
    settings = ["checkpoint.every_num_steps=1000"]
    with Torchrun(setting.config, run, world_size, settings=settings, max_restarts=0) as torchrun:
        torchrun.wait_for(step=num_steps)
        torchrun.stop()
    return read_metrics(run)


def prove(setting: Setting, expected: Sequence[Metrics], tolerance: float) -> Proof:
    """Checks a run that has stopped.

    Args:
        setting: Where it is.
        expected: Metrics of an undisturbed run that made at least as many steps.
        tolerance: How much a loss may differ from the undisturbed one, relative to it; 0 for the same bits.
    """
    report = check_ledger(setting.run / "ledger", Manifest.load(str(setting.manifest)))
    lines, losses = read_metrics(setting.run), {line["step"]: line["loss"] for line in expected}
    differences = [abs(line["loss"] - losses[line["step"]]) / abs(losses[line["step"]]) for line in lines]
    violations = list(report.violations)
    largest = max(differences, default=math.nan)
    if not largest <= tolerance:
        violations.append(f"a loss differs from the undisturbed one by {largest:.3g} of it")
    steps = {line["step"] for line in lines}
    if steps != set(range(1, max(steps) + 1)) or newest_step(setting.run) != max(steps):
        violations.append(f"{len(steps)} steps of {max(steps)} were seen, {newest_step(setting.run)} are saved")
    finished = [epoch for epoch in report.consumed.epochs if epoch.is_finished]
    attempts = report.consumed.attempts
    sizes = [attempt.world_size for attempt in attempts]
    return Proof(
        num_attempts=len(attempts),
        num_steps=max(steps),
        num_rolled_back=sum(attempt.num_discarded for attempt in attempts),
        num_epochs=len(finished),
        num_samples=sum(epoch.num_samples for epoch in finished),
        world_sizes=tuple(size for k, size in enumerate(sizes) if k == 0 or size != sizes[k - 1]),
        num_losses=len(lines),
        largest_difference=largest,
        violations=tuple(violations),
    )


def left_in_run(run: Path) -> list[str]:
    """Returns what is in a run folder that does not belong there once the run has stopped."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))


def summary(values: Sequence[Any]) -> dict[str, int]:
    """Counts equal values, by their text.

    Example:
        >>> summary(["b", "a", "b"])
        {'a': 1, 'b': 2}
    """
    texts = [str(value) for value in values]
    return {text: texts.count(text) for text in sorted(set(texts))}
