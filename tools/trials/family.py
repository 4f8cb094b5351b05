"""The processes of a job, by their part in it, and what processes leave behind them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tools.training.launch import TRAIN

_POLL_S = 0.02
_IS_ALONE = "TRIAL_HAS_SHARED_MEMORY_OF_ITS_OWN"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is only listed


class Family:
    """All processes that a launcher started, also those that it no longer knows.

    Args:
        launcher: Process id of torchrun.
    """

    def __init__(self, launcher: int) -> None:
        self.launcher = psutil.Process(launcher)
        self._seen: set[psutil.Process] = {self.launcher}

    def look(self) -> None:
        """Takes note of the processes there are now."""
        for member in list(self._seen):
            try:
                self._seen.update(member.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def ranks(self) -> dict[int, psutil.Process]:
        """Returns the processes of ranks that live, by rank."""
        self.look()
        found = {}
        for member in self.alive():
            try:
                if str(TRAIN) in member.cmdline() and self._parent_in(member) == self.launcher.pid:
                    found[int(member.environ()["RANK"])] = member
            except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                continue
        return found

    def workers(self) -> list[psutil.Process]:
        """Returns the DataLoader workers that live."""
        ranks = {rank.pid for rank in self.ranks().values()}
        return [member for member in self.alive() if self._parent_in(member) in ranks]

    def alive(self) -> list[psutil.Process]:
        """Returns the members that have not ended."""
        return [member for member in self._seen if is_alive(member)]

    def wait_for_end(self, within_s: float) -> list[psutil.Process]:
        """Waits until all members have ended; returns those that have not in time."""
        deadline = time.monotonic() + within_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            self.look()
            time.sleep(_POLL_S)
        return alive

    def kill(self) -> None:
        """Kills all members that are left."""
        self.look()
        for member in self.alive():
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        self.wait_for_end(10)

    @staticmethod
    def _parent_in(member: psutil.Process) -> int | None:
        try:
            return int(member.ppid())
        except psutil.NoSuchProcess:
            return None


def is_alive(process: psutil.Process) -> bool:
    """Tells whether a process still runs; one that only waits to be asked how it ended does not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alone_with_shared_memory() -> None:
    """Starts this program again with shared memory of its own, where that is allowed.

    Other programs' files would otherwise be taken for what ours left behind. The memory is gone when all have ended.
    """
    if os.environ.get(_IS_ALONE) or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    script = f'mount -t tmpfs tmpfs {_SHARED_MEMORY} && exec "$@"'
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*unshare, "sh", "-c", script, "sh", "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_IS_ALONE] = "1"
        os.execvp("unshare", [*unshare, "sh", "-c", script, "sh", sys.executable, *sys.argv])  # noqa: S606 - ourselves


def shared_memory() -> set[str]:
    """Returns the files of shared memory that no process has mapped or open: left behind by a process that ended.

    Where others share it, only those that bear torch's name.
    """
    if not _SHARED_MEMORY.is_dir():
        return set()
    begin = "" if os.environ.get(_IS_ALONE) else "torch_"
    named = {entry.path for entry in os.scandir(_SHARED_MEMORY) if entry.name.startswith(begin)}
    if not named:
        return set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            named -= _used_by(process, named)
    return named


def _used_by(process: Path, named: Iterable[str]) -> set[str]:
    try:
        maps, files = (process / "maps").read_text(), list((process / "fd").iterdir())
    except OSError:  # ended meanwhile
        return set()
    opened = set()
    for file in files:
        with suppress(OSError):  # closed meanwhile
            opened.add(str(file.readlink()))
    return {path for path in named if path in opened or path in maps}


def temporary_files(folder: Path) -> dict[str, int]:
    """Returns how many entries of each kind a folder for temporary files holds, by their names' beginnings.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("pymp-a", "pymp-b"):
        ...         Path(folder, name).touch()
        ...     temporary_files(Path(folder))
        {'pymp': 2}
    """
    kinds: dict[str, int] = {}
    for path in folder.iterdir():
        kind = path.name.replace("_", "-").split("-")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    return dict(sorted(kinds.items()))
