"""A job that went well does not end with SIGABRT: before Python ends, gloo's threads may finish.

A thread of gloo drops the tensors of a collective a moment after the collective returned. Those made in Python take the
interpreter's lock for it, and a thread that asks for the lock while the interpreter ends is ended there, where C++
allows no such thing: "terminate called without an active exception", exit status -6 of a rank that had trained to its
last step, and torchrun starts the job again. ``destroy_process_group`` alone does not help: DistributedDataParallel
keeps the group, and its threads, until the process ends.
"""

from __future__ import annotations

import atexit
import time
from functools import cache
from pathlib import Path

_MOST_S = 2.0
_LOOK_EVERY_S = 0.002
_NUM_QUIET_LOOKS = 3
_TASKS = Path("/proc/self/task")


@cache
def let_gloo_finish() -> None:
    """At exit, waits until no thread of gloo has anything to do, for two seconds at most."""
    atexit.register(_wait)


def _wait() -> None:
    deadline_s = time.monotonic() + _MOST_S
    num_quiet = 0
    while num_quiet < _NUM_QUIET_LOOKS and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S)  # without the interpreter's lock: theirs for the asking
        num_quiet = 0 if any(map(_is_running, _threads())) else num_quiet + 1


def _threads() -> list[Path]:
    return list(_TASKS.iterdir()) if _TASKS.exists() else []  # elsewhere than on Linux: a few looks, blind


def _is_running(thread: Path) -> bool:
    try:
        name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name.startswith("pt_gloo") and rest.split()[0] == "R"
