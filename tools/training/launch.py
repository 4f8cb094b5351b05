"""Programs that are started, watched, killed and never left behind: commands, and training runs under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar, final

import psutil

from tools.training.metrics import Metrics, read_metrics

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tools" / "train.py"
T = TypeVar("T")

_NUM_TAIL_LINES = 25
_POLL_S = 0.03


class LaunchError(Exception):
    """A program failed or took too long; the message ends with what it printed last."""


def call(arguments: Sequence[str | Path], timeout_s: float = 60.0) -> str:
    """Runs a Python script or module (``["-m", name, ...]``) to its end.

    Returns:
        What it printed.

    Raises:
        LaunchError: If it exits with an error or takes longer than ``timeout_s``.
    """
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        output, _ = process.communicate()
        raise LaunchError(f"{_shown(command)}\nstill ran after {timeout_s:.0f} s\n{_tail(output)}") from None
    if process.returncode:
        raise LaunchError(f"{_shown(command)}\nexited with {process.returncode}\n{_tail(output)}")
    return output


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Kills a program and all that it started; torchrun's ranks are in sessions of their own."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family[:-1], timeout=10)
    process.wait(timeout=10)


@final
class Torchrun:
    """A training run under torchrun; as a context it leaves no process behind.

    Args:
        config: The config file of ``tools/train.py``.
        run: Its run folder.
        num_ranks: Processes.
        settings: ``key=value`` texts for ``--set``.
        max_restarts: How often torchrun starts all ranks again after one failed.
        meeting: torchrun's options on where ranks meet; by default on this host alone.
        prefix: A command that starts torchrun elsewhere, such as in a network of its own.
        environ: More environment variables.
    """

    def __init__(
        self,
        config: Path,
        run: Path,
        num_ranks: int,
        *,
        settings: Sequence[str] = (),
        max_restarts: int = 3,
        meeting: Sequence[str] = ("--standalone",),
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] = {},
    ) -> None:
        self.run = run
        run.mkdir(parents=True, exist_ok=True)
        torchrun = ["-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(num_ranks)]
        options = [option for setting in (f"run={run}", *settings) for option in ("--set", setting)]
        script = ["--max-restarts", str(max_restarts), str(TRAIN), str(config), *options]
        self._command = [*prefix, sys.executable, *torchrun, *script]
        self.log = run / "torchrun.log"
        self._num_before = len(read_metrics(run))
        self._file: IO[str] = self.log.open("a")
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env={**_environment(), **environ},
            stdout=self._file,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self._process)
        self._file.close()

    @property
    def pid(self) -> int:
        """The process of torchrun itself."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether torchrun itself has ended."""
        return self._process.poll() is not None

    def ends_within(self, seconds: float) -> bool:
        """Waits for the end of torchrun, however it is; tells whether it came in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def metrics(self) -> list[Metrics]:
        """Returns the lines of metrics since this was started."""
        return read_metrics(self.run)[self._num_before :]

    def wait_for(self, step: int = 1, attempt: int = 0, idle_s: float = 120.0) -> Metrics:
        """Waits for the first line of metrics that is from this step and attempt or a later one, and returns it.

        Raises:
            LaunchError: If the run ends before, or makes no step for ``idle_s``.
        """

        def reached() -> Metrics | None:
            has_ended = self._process.poll() is not None
            lines = (line for line in self.metrics() if line["step"] >= step and line["attempt"] >= attempt)
            line = next(lines, None)
            if line is None and has_ended:
                raise self._failed("ended before it came so far")
            return line

        return self._watch(reached, idle_s)

    def send(self, number: signal.Signals, rank: int) -> None:
        """Sends a signal to the process of one rank: SIGKILL is a crash."""
        os.kill(int((self.run / "pids" / f"rank-{rank}").read_text()), number)

    def stop(self, idle_s: float = 60.0) -> None:
        """Asks the run to save and stop (SIGTERM to torchrun, which hands it on), and waits until it has.

        Raises:
            LaunchError: If it still runs after ``idle_s``.
        """
        self.ask_to_stop()
        self._watch(self._process.poll, idle_s)

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to torchrun, and does not wait."""
        self._process.send_signal(signal.SIGTERM)

    def finish(self, idle_s: float = 120.0) -> None:
        """Waits for the end of the run.

        Raises:
            LaunchError: If it fails, or makes no step for ``idle_s``.
        """
        if self._watch(self._process.poll, idle_s):
            raise self._failed(f"exited with {self._process.returncode}")

    def _watch(self, reached: Callable[[], T | None], idle_s: float) -> T:
        """Waits until ``reached`` returns something; every step that the run makes gives it new time."""
        num_steps, deadline = 0, time.monotonic() + idle_s
        while (result := reached()) is None:
            if len(self.metrics()) > num_steps:
                num_steps, deadline = len(self.metrics()), time.monotonic() + idle_s
            elif time.monotonic() > deadline:
                raise self._failed(f"made no step for {idle_s:.0f} s")
            time.sleep(_POLL_S)
        return result

    def _failed(self, why: str) -> LaunchError:
        printed = self.log.read_text("utf-8", "replace")
        # What the ranks printed stands before torchrun's report that one failed; that is long and says nothing more.
        of_ranks = printed.rpartition("] failed (exitcode")[0] or printed
        return LaunchError(f"{_shown(self._command)}\n{why}\n{_tail(of_ranks)}")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])


def _tail(output: str) -> str:
    lines = output.rstrip().splitlines()
    return "\n".join(f"    {line}" for line in lines[-_NUM_TAIL_LINES:])
