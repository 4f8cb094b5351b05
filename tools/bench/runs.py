"""Runs cases in fresh processes, repetition by repetition, and keeps what they measured."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.case import REPOSITORY, Case, Folders
from tools.bench.data import touch_pages
from tools.bench.memory import TreeMemory
from tools.bench.statistics import interleaved
from tools.bench.subjects import interpreter, load_subject

TIMEOUT_S = 600


class Measured(NamedTuple):
    """What one process said.

    Attributes:
        suite: Suite of the case.
        case: Its name.
        repetition: Which repetition, from 0.
        metrics: Numbers by name; empty if it was skipped or failed.
        problem: Why there are no numbers, or "".
    """

    suite: str
    case: str
    repetition: int
    metrics: dict[str, float]
    problem: str = ""


def run_fresh(
    case: Case, folders: Folders, *, watches_memory: bool = False, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Runs a case in a process of its own.

    Args:
        case: The case.
        folders: Where things lie.
        watches_memory: Whether to watch the memory of its tree of processes, which takes some processor time.
        timeout_s: When it is ended.

    Returns:
        What the child wrote; with ``watches_memory`` its metrics also have ``peak_pss_mb``, ``peak_private_mb``
        (without mapped files) and ``above_imports_mb``.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        output, log = Path(folder, "outcome.json"), Path(folder, "log.txt")
        python = interpreter(load_subject(case.subject, folders), folders.root)
        command = [python, "-m", "tools.bench.child", case.to_json(), str(folders.root), str(folders.data), str(output)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
            )
        memory = TreeMemory(process.pid)
        with memory if watches_memory else contextlib.nullcontext():
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
            finally:
                _end_group(process)
        if not output.exists():
            last = log.read_text(errors="replace")[-2000:]
            return {"error": f"the process ended with {process.returncode} and no result", "trace": last}
        outcome: dict[str, Any] = json.loads(output.read_text())
    if watches_memory and "metrics" in outcome:
        outcome["metrics"] |= {
            "peak_pss_mb": memory.peak_mb,
            "peak_private_mb": memory.peak_private_mb,
            "above_imports_mb": max(0.0, memory.peak_mb - outcome["metrics"]["imports_pss_mb"]),
            "num_processes": memory.num_processes,
        }
    return outcome


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and the workers it left; they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_suite(
    suite: str, cases: Sequence[Case], num_repetitions: int, folders: Folders, say: Callable[[str], None] = print
) -> list[Measured]:
    """Runs each case ``num_repetitions`` times, in turn, and replaces the suite's earlier results.

    A case that is skipped or fails is not tried again.
    """
    save_results(folders, suite, [])
    compileall.compile_dir(REPOSITORY / "shardstream", quiet=1)  # as installed; PYTHONDONTWRITEBYTECODE may be set
    for load in sorted({case.workload for case in cases}):
        touch_pages(folders.data / load)
    done: list[Measured] = []
    hopeless: set[str] = set()
    for repetition, case in interleaved(cases, num_repetitions):
        if case.name in hopeless:
            continue
        began = time.perf_counter()
        outcome = run_fresh(case, folders, watches_memory=suite.startswith("memory"))
        problem = outcome.get("skipped") or outcome.get("error") or ""
        measured = Measured(suite, case.name, repetition, outcome.get("metrics", {}), problem)
        done.append(measured)
        if problem:
            hopeless.add(case.name)
        say(f"{repetition + 1}/{num_repetitions} {case.name}: {_shown(measured)} [{time.perf_counter() - began:.1f} s]")
        if "trace" in outcome:
            say(outcome["trace"])
        save_results(folders, suite, done)  # after each, so that an interrupted run is not lost
    return done


def _shown(measured: Measured) -> str:
    if measured.problem:
        return measured.problem
    return ", ".join(f"{name} {value:,.4g}" for name, value in measured.metrics.items() if name in _SHOWN)


_SHOWN = frozenset(
    {
        "samples_per_s",
        "values_per_s",
        "values_per_cpu_s",
        "first_batch_s",
        "above_imports_mb",
        "prepare_s",
        "windows_per_s",
        "seconds",
    }
)


def save_results(folders: Folders, suite: str, done: Sequence[Measured]) -> None:
    """Writes a suite's results, one JSON line a process."""
    folders.results.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(measured._asdict()) + "\n" for measured in done)
    (folders.results / f"{suite}.jsonl").write_text(text)


def load_results(folders: Folders) -> list[Measured]:
    """Reads the results of every suite that was run."""
    files = sorted(folders.results.glob("*.jsonl"))
    return [Measured(**json.loads(line)) for path in files for line in path.read_text().splitlines()]
