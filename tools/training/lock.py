"""One job at a time in a run folder: a job whose launcher died may still be ending when the next one starts."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from shardstream.errors import PlanError

_POLL_S = 0.1
_IS_HELD = (errno.EACCES, errno.EAGAIN)


def hold(run: Path, timeout_s: float) -> IO[str]:
    """Waits until no other process holds the run folder, and holds it as long as this process lives.

    The lock is the kernel's and belongs to this process alone: it is gone with it, however it ends, and forked workers
    do not keep it. Where the file system has no locks, nothing is held.

    Returns:
        The open file; the lock ends when it is closed.

    Raises:
        PlanError: If another process still holds it after ``timeout_s``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, hold(Path(folder), timeout_s=1) as file:
        ...     print(Path(file.name).name)
        lock
    """
    run.mkdir(parents=True, exist_ok=True)
    file, deadline = (run / "lock").open("a+"), time.monotonic() + timeout_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _IS_HELD:
                return file
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                hint = "wait until it has ended, or stop it"
                raise PlanError("another job is at this run", url=str(run), found=holder, hint=hint) from None
            time.sleep(_POLL_S)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            return file
