"""A job that mishaps happen to: started, hit, watched until it has ended or goes on, started again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, final

import psutil

from tools.training.launch import Torchrun
from tools.training.metrics import Metrics, Tail
from tools.trials.family import Family, is_alive
from tools.trials.mishap import Mishap
from tools.trials.setting import NUM_STEPS, Setting

T = TypeVar("T")

_POLL_S = 0.002
_IDLE_S = 300.0
_END_S = 30.0
"""Within so much more than the deadline all processes of a job must have ended; the machine may be busy."""


class TrialError(Exception):
    """A job did what it must not: lived on, hung, or left something behind."""


@dataclass
class Round:
    """A mishap, and what came of it.

    Attributes:
        number: Counts them from 0.
        world_size: Ranks of the job.
        num_workers: DataLoader workers of each.
        mishap: What happened.
        step: Last step that was seen before.
        outcome: ``"goes on"``, ``"restarted"`` by torchrun, ``"ended"``; ``"missed"`` if the job ended before.
        took_s: Seconds from the mishap to the outcome.
        end_s: Of a rank that was stopped: seconds until all others had ended.
    """

    number: int
    world_size: int
    num_workers: int
    mishap: Mishap
    step: int = 0
    outcome: str = "missed"
    took_s: float = 0.0
    end_s: float | None = None

    def __str__(self) -> str:
        where = f"{self.world_size} ranks, {self.num_workers} workers each, step {self.step}"
        waited = "" if self.end_s is None else f"; other ranks had ended after {self.end_s:.1f} s"
        return f"{where}: {self.mishap.kind} at {self.mishap.moment}, {self.outcome} after {self.took_s:.1f} s{waited}"


@dataclass
class _Launch:
    """A start of torchrun and what is known of it."""

    torchrun: Torchrun
    family: Family
    world_size: int
    num_workers: int
    tail: Tail
    seen: list[Metrics] = field(default_factory=list)

    def look(self) -> list[Metrics]:
        """Returns the steps that were made since the last look."""
        new = self.tail.read()
        self.seen += new
        return new

    @property
    def has_ended(self) -> bool:
        return self.torchrun.has_ended


@final
class Disturbed:
    """Runs a job through mishaps; as a context it leaves no process.

    Args:
        setting: Where.
        chance: Decides world sizes, workers and mishaps.
        timeout_s: The job's own deadline.
        world_size: Always so many ranks; None for 2 to 4, drawn at each start.
    """

    def __init__(self, setting: Setting, chance: random.Random, timeout_s: float, world_size: int | None) -> None:
        self._setting, self._chance, self._timeout_s, self._fixed = setting, chance, timeout_s, world_size
        self._launch: _Launch | None = None
        self._next_size: int | None = None
        self._start_s = 8.0  # from a start to the first step, as seen last
        self.num_launches = self.num_lost = 0
        self.violations: list[str] = []

    def __enter__(self) -> Disturbed:
        return self

    def __exit__(self, *_: object) -> None:
        if self._launch is not None:
            self._launch.family.kill()
            self._launch.torchrun.__exit__()

    def round(self, number: int) -> Round:
        """Lets one mishap happen, and waits for what comes of it.

        If a process lives on, or nothing happens any more, it is among the ``violations``, and the job is killed.
        """
        launch = self._running()
        launch.look()
        mishap = Mishap.draw(self._chance, has_workers=launch.num_workers > 0, is_starting=not launch.seen)
        done = Round(number, launch.world_size, launch.num_workers, mishap)
        try:
            self._let_happen(launch, done)
        except TrialError as error:
            self.violations.append(f"round {number}, {mishap.kind} at {mishap.moment}: {error}")
            done.outcome = "violation"
            self.__exit__()
            self._launch = None
        return done

    def _let_happen(self, launch: _Launch, done: Round) -> None:
        mishap = done.mishap
        hit = self._catch(launch, mishap)
        done.step = launch.seen[-1]["step"] if launch.seen else 0
        if hit is None:
            self._expect_end(launch)
            return
        begin_s, attempt = time.monotonic(), launch.seen[-1]["attempt"] if launch.seen else -1
        if mishap.signal == "SIGSTOP":
            done.end_s = self._stall(launch, mishap, hit)
        done.outcome = self._settle(launch, mishap, hit, attempt)
        done.took_s = round(time.monotonic() - begin_s, 2)
        if mishap.for_good and self._fixed is None:
            self._lose_a_rank(launch)

    def stop(self) -> None:
        """Lets the job save and stop."""
        launch = self._running()
        self._wait(launch, lambda: launch.look() or None, "its first step")
        launch.torchrun.stop(_IDLE_S)
        self._expect_end(launch)

    # --------------------------------------------------------------------------------------------------------- starts

    def _running(self) -> _Launch:
        if self._launch is None:
            self._launch = self._start()
        return self._launch

    def _start(self) -> _Launch:
        chance = self._chance
        drawn = chance.choice([2, 2, 2, 3, 3, 4])
        world_size = self._fixed or self._next_size or drawn
        self._next_size = None
        num_workers, max_restarts = chance.choice([0, 0, 1, 2]), chance.choice([0, 2])
        self.num_launches += 1
        setting, tail = self._setting, Tail(self._setting.run, at_end=True)
        options = [f"data.num_workers={num_workers}"]
        torchrun = Torchrun(setting.config, setting.run, world_size, settings=options, max_restarts=max_restarts)
        return _Launch(torchrun, Family(torchrun.pid), world_size, num_workers, tail)

    def _lose_a_rank(self, launch: _Launch) -> None:
        """A host is gone for good: the next start has a rank less, and the same global batch."""
        if self._launch is not None:
            launch.torchrun.stop(_IDLE_S)
            self._expect_end(launch)
        self.num_lost += 1
        self._next_size = max(1, launch.world_size - 1)

    # ----------------------------------------------------------------------------------------------------- the mishap

    def _catch(self, launch: _Launch, mishap: Mishap) -> psutil.Process | None:
        """Waits for the moment and sends the signal; returns whom it hit, None if the job ended before."""
        if mishap.moment == "start" and not launch.seen:
            begin_s = time.monotonic()
            until_s = begin_s + mishap.delay_s * self._start_s
            while time.monotonic() < until_s and not launch.has_ended and not launch.look():
                launch.family.look()
                time.sleep(10 * _POLL_S)
        else:
            begin_s = time.monotonic()
            reached = self._wait_for_steps(launch, mishap)
            if not reached:
                return None
            if mishap.moment == "checkpoint":
                return self._catch_writer(launch, mishap)
            time.sleep(mishap.delay_s if mishap.moment == "step" else 0)
        return self._wait(launch, lambda: self._hit(launch, mishap), f"a {mishap.target} to hit", may_end=True)

    def _wait_for_steps(self, launch: _Launch, mishap: Mishap) -> bool:
        is_first, begin_s, num_seen = not launch.seen, time.monotonic(), len(launch.seen)
        num_steps = mishap.num_steps if mishap.moment == "step" else 1

        def reached() -> bool | None:
            new = launch.look()
            if mishap.moment == "epoch":
                return any(line["step"] % NUM_STEPS == 0 for line in new) or None
            return len(launch.seen) - num_seen >= num_steps or None

        has_come = self._wait(launch, reached, f"the moment {mishap.moment!r}", may_end=True) is not None
        if is_first and has_come and num_steps == 1:
            self._start_s = time.monotonic() - begin_s
        return has_come

    def _catch_writer(self, launch: _Launch, mishap: Mishap) -> psutil.Process | None:
        """Hits rank 0 while it is writing a checkpoint: it is stopped when one is seen, and looked at again."""
        folder = self._setting.run / "checkpoints"
        writer = launch.family.ranks().get(0)
        if writer is None:
            return None

        def caught() -> psutil.Process | None:
            launch.look()
            if not any(folder.glob("*.tmp")):
                return None
            with suppress(psutil.NoSuchProcess):
                writer.suspend()
                if any(folder.glob("*.tmp")):
                    writer.send_signal(signal.Signals[mishap.signal])
                    if mishap.signal != "SIGSTOP":
                        writer.resume()
                    return writer
                writer.resume()
            return None

        return self._wait(launch, caught, "a checkpoint", may_end=True, poll_s=0.0)

    def _hit(self, launch: _Launch, mishap: Mishap) -> psutil.Process | None:
        launch.look()
        family = launch.family
        if mishap.target == "launcher":
            members = [family.launcher]
        else:
            ranks = family.ranks()
            members = list(ranks.values()) if mishap.target == "rank" else family.workers()
        if not members:
            return None
        chosen = members[int(mishap.choice * len(members))]
        try:
            chosen.send_signal(signal.Signals[mishap.signal])
        except psutil.NoSuchProcess:
            return None
        return chosen

    def _stall(self, launch: _Launch, mishap: Mishap, hit: psutil.Process) -> float | None:
        """Leaves a process stopped for longer than others wait for it; returns when all other ranks had ended."""
        family, begin_s = launch.family, time.monotonic()
        ended_s: float | None = None
        others = [rank for rank in family.ranks().values() if rank != hit] if mishap.target == "rank" else []
        for_s = self._timeout_s + 2.0 if mishap.target == "worker" else 3.0
        while time.monotonic() < begin_s + (self._timeout_s + _END_S if others else for_s):
            family.look()
            launch.look()
            if others and not any(map(is_alive, others)):
                ended_s = round(time.monotonic() - begin_s, 2)
                break
            time.sleep(10 * _POLL_S)
        if others and ended_s is None:
            raise TrialError(f"ranks still wait for one that was stopped {time.monotonic() - begin_s:.0f} s ago")
        with suppress(psutil.NoSuchProcess):
            hit.resume()
        return ended_s

    def _settle(self, launch: _Launch, mishap: Mishap, hit: psutil.Process, attempt: int) -> str:
        """Waits until the job has ended, goes on, or was started again by torchrun."""
        may_go_on = mishap.kind in ("worker SIGTERM", "worker SIGSTOP", "launcher SIGSTOP", "worker SIGKILL")
        num_steps = 0

        def outcome() -> str | None:
            nonlocal num_steps
            launch.family.look()
            has_ended, new = launch.has_ended, launch.look()
            num_steps += len(new)
            if has_ended:
                return "ended"
            if new and (new[-1]["attempt"] > attempt >= 0 or (attempt < 0 and not is_alive(hit))):
                return "restarted"
            if new and attempt < 0 and mishap.signal == "SIGSTOP":
                return "goes on"
            # A worker that had no more to do is missed by nobody, which is clear once all workers were started anew.
            return "goes on" if may_go_on and num_steps > 2 * NUM_STEPS else None

        settled = self._wait(launch, outcome, f"what comes of {mishap.kind}")
        assert settled is not None  # noqa: S101 - narrows the type
        if settled == "ended":
            self._expect_end(launch)
        return settled

    # -------------------------------------------------------------------------------------------------------- waiting

    def _expect_end(self, launch: _Launch) -> None:
        """All processes must end by themselves, within the deadline."""
        alive = launch.family.wait_for_end(self._timeout_s + _END_S)
        launch.torchrun.__exit__()
        self._launch = None
        if alive:
            shown = [(member.pid, member.status(), " ".join(member.cmdline())[:120]) for member in alive]
            launch.family.kill()
            raise TrialError(f"processes live on {self._timeout_s + _END_S:.0f} s after the job's end: {shown}")

    def _wait(
        self,
        launch: _Launch,
        reached: Callable[[], T | None],
        what: str,
        *,
        may_end: bool = False,
        poll_s: float = _POLL_S,
    ) -> T | None:
        """Waits until ``reached`` returns something; steps that are made give it new time."""
        num_seen, deadline = -1, 0.0
        while True:
            has_ended = launch.has_ended
            result = reached()
            if result is not None:
                return result
            if has_ended and may_end:
                return None
            if len(launch.seen) > num_seen:
                num_seen, deadline = len(launch.seen), time.monotonic() + _IDLE_S
            elif time.monotonic() > deadline:
                raise TrialError(f"nothing happened for {_IDLE_S:.0f} s; waited for {what}")
            time.sleep(poll_s)
