"""A profile of the reading path in this process: samples/s, and the functions that take the time."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable

from tools.bench.case import Case, Folders
from tools.bench.measuring import Reader
from tools.bench.subjects import load_subject


def profile(case: Case, folders: Folders, num_samples: int, num_functions: int, say: Callable[[str], None]) -> None:
    """Reads ``num_samples`` twice, plainly and under ``cProfile``, and prints what both found.

    The profile is of the consuming thread; what reading threads do shows as time in which it waits for them.
    """
    subject = load_subject(case.subject, folders)
    if not isinstance(subject, Reader):
        raise TypeError(f"{case.subject} delivers no batches")
    for name in ("first pass", "second pass"):
        done, seconds = _read(subject, case, num_samples)
        say(f"{name}: {done:,} samples in {seconds:.2f} s, {done / seconds:,.0f} samples/s")
    profiler = cProfile.Profile()
    profiler.enable()
    done, seconds = _read(subject, case, num_samples)
    profiler.disable()
    say(f"profiled: {done / seconds:,.0f} samples/s")
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(num_functions)
    say(text.getvalue().replace(str(folders.root), "").strip())


def _read(subject: Reader, case: Case, most: int) -> tuple[int, float]:
    began, done = time.perf_counter(), 0
    for batch in subject.open(case):
        done += len(batch["ids"])
        if done >= most:
            break
    return done, time.perf_counter() - began
