"""Memory of a process tree: PSS, in which pages shared between processes count once over all of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_INTERVAL_S = 0.05


def own_pss_mb() -> float:
    """Returns the PSS of this process in MB; 0 where the system does not tell."""
    return _pss_mb("self")[0]


def _pss_mb(pid: int | str) -> tuple[float, float]:
    """Returns PSS, and the part of it that is not mapped files."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0, 0.0
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
    private = kilobytes.get("Pss_Anon", 0) + kilobytes.get("Pss_Shmem", 0)
    return kilobytes.get("Pss", 0) * 1024 / 1e6, private * 1024 / 1e6


@dataclass
class TreeMemory:
    """Samples the memory of a process and all its descendants until it is stopped.

    Attributes:
        pid: The process.
        peak_mb: Largest sum of PSS seen.
        peak_private_mb: The same without mapped files.
        num_processes: Most processes seen.
    """

    pid: int
    peak_mb: float = 0.0
    peak_private_mb: float = 0.0
    num_processes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            tree = _tree(self.pid)
            sizes = [_pss_mb(pid) for pid in tree]
            self.peak_mb = max(self.peak_mb, sum(size for size, _ in sizes))
            self.peak_private_mb = max(self.peak_private_mb, sum(private for _, private in sizes))
            self.num_processes = max(self.num_processes, len(tree))


def _tree(pid: int) -> list[int]:
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


class PeakGrowth:
    """Measures how far this process's resident memory grew at its peak, as a context.

    Attributes:
        growth_mb: Set when the context ends.
    """

    growth_mb = 0.0

    def __enter__(self) -> Self:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self._before = _status_mb("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.growth_mb = max(0.0, _status_mb("VmHWM") - self._before)


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
