"""``Reading``: how data is read. It changes nothing of what is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardstream.cache import RangeCache
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.ranges import Ranges
from shardstream.read_stats import ReadStats
from shardstream.storage import local_path

_MOST_RANGE_THREADS = 32  # a store gives its bandwidth to many requests only
_RANGE_THREADS_OF_CORE = 8  # more would wait for the processor: to receive and decode costs work, too
_LEAST_RANGE_THREADS = 4  # in each of many workers


@dataclass(frozen=True)
class Reading:
    """How data is read; it changes nothing of what is read.

    Attributes:
        num_threads: Threads that read and decode; None for up to 4 without worker processes, 1 in each of them.
        look_ahead: Gathers whose runs are read before they are asked for.
        gather_rows: Samples that are taken together, at the most; a rank's workers share them.
        storage_options: For ``fsspec``.
        timeout_s: How long a batch may be waited for, in seconds.
        num_range_threads: Requests to a remote store side by side; None for 8 a core and at most 32,
            divided among a rank's workers.
        ahead_num_bytes: Bytes of blocks that are asked of a remote store before they are needed.
        memory_num_bytes: What a process that reads may hold for it; None for half of what the machine has for each of
            its ranks. Look-ahead and gathers shrink to fit; what cannot fit is refused before anything is read.
        keeps_lane_ends: Whether a block that two lanes share stays decoded from the beginning of the epoch, where one
            lane needs it, to the end, where the other does; else it is read twice. Worker processes never keep any, and
            it is the first thing that is given up to fit ``memory_num_bytes``.
        cache_dir: Folder in which ranges of remote shards are kept for all ranks of a host; None for no cache.
        cache_num_bytes: Size at which what was not used for the longest time is deleted from it.
        cache_local: Whether shards with local paths are kept there, too: for those on a network's file system.
        verify_checksums: Compare blocks with the manifest's checksums before they are decoded, where all their bytes
            are read: blocks of one run, read with all columns. ``num_blocks_verified`` counts them.

    Raises:
        PlanError: If a number is not positive.
    """

    num_threads: int | None = None
    look_ahead: int = 6
    gather_rows: int = 2048
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    timeout_s: float = 1800.0
    num_range_threads: int | None = None
    ahead_num_bytes: int = 128 << 20
    memory_num_bytes: int | None = None
    keeps_lane_ends: bool = True
    cache_dir: str | os.PathLike[str] | None = None
    cache_num_bytes: int = 64 << 30
    cache_local: bool = False
    verify_checksums: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("num_threads", "look_ahead", "gather_rows", "timeout_s"),
            *("num_range_threads", "ahead_num_bytes", "memory_num_bytes", "cache_num_bytes"),
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"Reading({name}=) must be positive", found=value)

    @property
    def takes_local(self) -> bool:
        """Whether shards with local paths are read through the cache, too."""
        return self.cache_local and self.cache_dir is not None

    def ranges(self, manifests: Iterable[Manifest], stats: ReadStats, num_workers: int = 1) -> Ranges | None:
        """Returns where the ranges of shards come from in this process; None if all are read by their paths.

        Args:
            manifests: Of the shards.
            stats: Is counted up.
            num_workers: Processes of this rank that read.
        """
        if not (self.takes_local or any(is_remote(manifest) for manifest in manifests)):
            return None
        cache = None if self.cache_dir is None else RangeCache(self.cache_dir, self.cache_num_bytes)
        num_threads = self.num_range_threads or default_range_threads(num_workers)
        return Ranges(num_threads, cache, stats, takes_local=self.takes_local)


def default_range_threads(num_workers: int = 1) -> int:
    """Returns how many requests a process has under way by default.

    Args:
        num_workers: Processes of this rank that read.
    """
    of_rank = min(_MOST_RANGE_THREADS, _RANGE_THREADS_OF_CORE * (os.cpu_count() or 1))
    return max(_LEAST_RANGE_THREADS, of_rank // num_workers)


def is_remote(manifest: Manifest) -> bool:
    """Whether some shards are not files with local paths."""
    if manifest.root:
        return local_path(manifest.root) is None
    return any(local_path(url) is None for url in manifest.urls)
