"""Byte ranges of shards: from the disk cache or from storage, asked for ahead by threads of their own.

Reading from a store is waiting, decoding is work: so the threads that fetch are others, and many more, than those that
decode. What is fetched ahead are the bytes as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from shardstream import storage
from shardstream.cache import RangeCache
from shardstream.read_stats import ReadStats
from shardstream.storage import Data

RANGE_THREAD_NAME = "shardstream-read-range"


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file of one version.

    Attributes:
        url: The file.
        version: All that is known of the version that is wanted.
        start: First byte.
        end: End.
        check: Called with the version tag that came along with the bytes (None if none did), raises if it is another
            version; not called for bytes that the cache had, which were checked before.
        storage_options: For fsspec.
    """

    url: str
    version: str
    start: int
    end: int
    check: Callable[[str | None], None] = field(compare=False)
    storage_options: Mapping[str, Any] = field(compare=False, repr=False)


@dataclass
class _Asked:
    future: Future[Data]
    num_askers: int = 1


class Ranges:
    """Reads ranges; those asked for ahead are there, or under way, when they are read.

    Args:
        num_threads: Ranges that are fetched side by side; 0 to fetch nothing ahead.
        cache: The disk cache, or None.
        stats: Is counted up.
        takes_local: Whether ranges of local files are read here, too: where "local" is a network's file system.
    """

    def __init__(
        self,
        num_threads: int = 0,
        cache: RangeCache | None = None,
        stats: ReadStats | None = None,
        *,
        takes_local: bool = False,
    ) -> None:
        self.takes_local = takes_local
        self._cache, self._stats = cache, stats or ReadStats()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=RANGE_THREAD_NAME) if num_threads else None
        self._asked: dict[ByteRange, _Asked] = {}
        self._lock = Lock()
        self._given_up = Event()

    def submit(self, act: Callable[[], None]) -> Future[None]:
        """Lets a thread do something short that comes before reading; without threads it is done at once."""
        if self._threads is not None:
            return self._threads.submit(act)
        act()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def ahead(self, range_: ByteRange) -> None:
        """Asks for a range ahead. It is held until ``forget`` was called as often as this."""
        if self._threads is None:
            return
        with self._lock:
            asked = self._asked.get(range_)
            if asked is not None:
                asked.num_askers += 1
            else:
                self._asked[range_] = _Asked(self._threads.submit(self._fetch, range_))

    def read(self, range_: ByteRange) -> Data:
        """Returns a range, waiting for it; one that was not asked for is fetched by the calling thread.

        Raises:
            ReadError: If storage failed.
            ShardChangedError: If the file is another version.
        """
        with self._lock:
            asked = self._asked.get(range_)
            if asked is not None:
                asked.num_askers += 1  # nobody else's ``forget`` cancels what is waited for here
        if asked is None:
            return self._fetch(range_)
        try:
            return asked.future.result()
        finally:
            self.forget(range_)

    def read_again(self, range_: ByteRange) -> Data:
        """Fetches a range from storage whatever the cache has; who asked for it ahead gets these bytes, too.

        Raises:
            ReadError: If storage failed.
            ShardChangedError: If the file is another version.
        """
        data = self._from_storage(range_)
        with self._lock:
            asked = self._asked.get(range_)
            if asked is not None:
                asked.future = Future()
                asked.future.set_result(data)
        return data

    def forget(self, range_: ByteRange) -> None:
        """Takes back what was asked for ahead: the last one to do so drops it."""
        with self._lock:
            asked = self._asked.get(range_)
            if asked is None:
                return
            asked.num_askers -= 1
            if asked.num_askers:
                return
            del self._asked[range_]
        asked.future.cancel()

    def give_up(self) -> None:
        """Lets no request begin or be tried again: those under way end soon, whoever waits gets their last error."""
        self._given_up.set()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads. With ``wait`` what is under way is waited for."""
        self.give_up()
        if self._threads is not None:
            self._threads.shutdown(wait=wait)
        with self._lock:
            self._asked.clear()

    def _fetch(self, range_: ByteRange) -> Data:
        cached = self._cache.get(_key(range_)) if self._cache is not None else None
        if cached is not None and len(cached) == range_.end - range_.start:
            with self._lock:
                self._stats.num_cache_hits += 1
            return cached
        return self._from_storage(range_)

    def _from_storage(self, range_: ByteRange) -> Data:
        data, tag = storage.read_versioned(
            range_.url, range_.start, range_.end, range_.storage_options, given_up=self._given_up
        )
        is_whole = len(data) == range_.end - range_.start
        range_.check(tag if is_whole else tag or "")  # what was cut is no version that was seen before
        storage.whole(data, range_.url, range_.start, range_.end)
        with self._lock:
            self._stats.num_requests += 1
            self._stats.num_bytes_fetched += len(data)
        if self._cache is not None:
            self._cache.put(_key(range_), data)
        return data


def _key(range_: ByteRange) -> str:
    """Under which the cache keeps a range."""
    return RangeCache.key(range_.url, range_.version, str(range_.start), str(range_.end))
