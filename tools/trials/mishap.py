"""What happens to a job: whom a signal hits, which one, and when. Drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tools.trials.setting import NUM_STEPS

Target: TypeAlias = Literal["rank", "worker", "launcher"]
Signal: TypeAlias = Literal["SIGKILL", "SIGTERM", "SIGSTOP"]
Moment: TypeAlias = Literal["start", "step", "checkpoint", "epoch"]

_KINDS: tuple[tuple[Target, Signal, int], ...] = (
    ("rank", "SIGKILL", 6),
    ("rank", "SIGTERM", 2),
    ("rank", "SIGSTOP", 2),
    ("worker", "SIGKILL", 4),
    ("worker", "SIGTERM", 1),
    ("worker", "SIGSTOP", 1),
    ("launcher", "SIGKILL", 3),
    ("launcher", "SIGTERM", 2),
    ("launcher", "SIGSTOP", 1),
)
_MOMENTS: tuple[tuple[Moment, int], ...] = (("start", 2), ("step", 4), ("checkpoint", 3), ("epoch", 3))
_MOST_STEPS = NUM_STEPS + 2


@dataclass(frozen=True)
class Mishap:
    """One of a job's mishaps.

    Attributes:
        target: Whom the signal is sent to: a rank, a DataLoader worker, or torchrun.
        signal: Which one. What is stopped goes on after the deadline of those that wait for it.
        moment: While processes start, after some steps, while a checkpoint is being written, or at an epoch's end.
        num_steps: For ``"step"``: after so many.
        delay_s: Seconds after that moment; for ``"start"`` as a fraction of a start.
        choice: Which of several ranks or workers, in [0, 1).
        for_good: Whether what is killed is lost, so that the job goes on with a rank less.
    """

    target: Target
    signal: Signal
    moment: Moment
    num_steps: int
    delay_s: float
    choice: float
    for_good: bool

    @property
    def kind(self) -> str:
        """Target and signal, as one text."""
        return f"{self.target} {self.signal}"

    @classmethod
    def draw(cls, chance: random.Random, *, has_workers: bool, is_starting: bool) -> Mishap:
        """Draws one.

        Args:
            chance: Decides it.
            has_workers: Whether there are workers to hit.
            is_starting: Whether the job makes no steps yet.

        Example:
            >>> Mishap.draw(random.Random(1), has_workers=False, is_starting=True).kind
            'rank SIGKILL'
        """
        kinds = [kind for kind in _KINDS if has_workers or kind[0] != "worker"]
        [(target, signal, _)] = chance.choices(kinds, [weight for *_, weight in kinds])
        fits = [each for each in _MOMENTS if _fits(each[0], target, is_starting=is_starting)]
        [(moment, _)] = chance.choices(fits, [weight for _, weight in fits])
        is_lost = signal == "SIGKILL" and target == "rank" and chance.random() < 0.3  # noqa: PLR2004 - now and then
        delay_s = chance.uniform(0.1, 1.2) if moment == "start" else chance.uniform(0, 0.05)
        return cls(target, signal, moment, chance.randint(1, _MOST_STEPS), delay_s, chance.random(), is_lost)


def _fits(moment: Moment, target: Target, *, is_starting: bool) -> bool:
    if moment == "start":
        return is_starting and target != "worker"
    # A checkpoint is caught by stopping rank 0, its writer, and it is rank 0 that is hit.
    return moment != "checkpoint" or target == "rank"
