"""Looking at many shards: in this process, in processes of our own, or on any executor; results come in order."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shardstream import storage
from shardstream.errors import ManifestError, ShardStreamError
from shardstream.executors import most_under_way
from shardstream.formats import IndexOptions, ShardIndex, format_of
from shardstream.index._checksums import indexed_with_checksums
from shardstream.processes import interrupts_held, num_cores, pool_of

_FEW_SHARDS = 16
_FEW_BYTES = 256 << 20
_UNDER_WAY = 4  # results per worker that may wait for an earlier one


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """What to find out about one shard; travels to other processes."""

    @property
    def url(self) -> str:
        """The shard's absolute location."""
        ...

    def find(self) -> T_co:
        """Finds it out; what it raises becomes a ``Fault``."""
        ...


@dataclass(frozen=True)
class Look:
    """What to find out about one shard.

    Attributes:
        url: Its absolute location.
        options: What indexing looks at.
        storage_options: Given to fsspec.
        known_tag: Version tag of the shard as it was indexed before; if it still has it, it is not read.
    """

    url: str
    options: IndexOptions
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    known_tag: str | None = None

    def find(self) -> ShardIndex | Unchanged:
        """Indexes the shard."""
        if self.known_tag is not None:
            info = storage.stat(self.url, self.storage_options)
            if info.version_tag == self.known_tag and storage.tells_versions(info.version_tag, info.num_bytes):
                return Unchanged()
        format_ = format_of(self.url)
        if self.options.checksum:
            return indexed_with_checksums(format_, self.url, self.options, self.storage_options)
        return format_.index_shard(self.url, self.options, self.storage_options)


@dataclass(frozen=True)
class Fault:
    """Why a shard cannot be used."""

    reason: str


@dataclass(frozen=True)
class Unchanged:
    """The shard has the tag that was known."""


Finding = ShardIndex | Fault | Unchanged


def look(task: Task[T]) -> T | Fault:
    """Looks at one shard. Never raises for what is wrong with it, so that all get looked at."""
    try:
        return task.find()
    except ShardStreamError as error:
        return Fault(str(error))
    except Exception as error:  # noqa: BLE001 - a reader tripped over this shard: it is named like any bad one
        return Fault(
            str(ManifestError("the shard cannot be read", url=task.url, found=f"{type(error).__name__}: {error}"))
        )


def look_at_all(tasks: Sequence[Task[T]], num_workers: int | None, executor: Executor | None) -> Iterator[T | Fault]:
    """Yields what is found, in the order of the tasks; about four results per worker are held.

    A shard that kills the process that looks at it (a library that aborts, memory that runs out) is a fault like any
    other: what was under way is looked at again, one shard at a time in a process of its own, and the others go on.

    Args:
        tasks: One per shard.
        num_workers: Processes; 0 looks in this process; None decides by the number and size of shards.
        executor: Used instead, if given, until it breaks; it is left running.

    Raises:
        ManifestError: If processes cannot be started.
    """
    if executor is None and num_workers is None:
        num_workers = default_num_workers([task.url for task in tasks])
    if executor is None and num_workers == 0:
        yield from map(look, tasks)
        return
    num_found = 0
    while num_found < len(tasks):
        rest = tasks[num_found:]
        if executor is None:
            num_workers = min(num_workers or default_num_workers([task.url for task in rest]) or 1, len(rest))
            limit = num_workers * _UNDER_WAY
            findings = _pooled(rest, num_workers, limit)
        else:
            limit = most_under_way(executor)
            findings = _given(rest, executor, limit)
        try:
            with contextlib.closing(findings):
                for finding in findings:
                    num_found += 1
                    yield finding
        except BrokenExecutor:  # of what was under way nobody knows which one did it
            executor = None
            with contextlib.closing(_one_by_one(tasks[num_found : num_found + limit])) as findings:
                for finding in findings:
                    num_found += 1
                    yield finding


def default_num_workers(urls: Sequence[str]) -> int:
    """Returns as many processes as there are cores to use, or 0 where starting them would take longer than the work."""
    most = num_cores()
    if most == 1 or len(urls) == 1:
        return 0
    if len(urls) < _FEW_SHARDS:
        paths = [storage.local_path(url) for url in urls]
        with contextlib.suppress(OSError):
            if all(path is not None for path in paths) and sum(os.stat(str(p)).st_size for p in paths) < _FEW_BYTES:  # noqa: PTH116
                return 0
    return min(most, len(urls))


def _given(tasks: Sequence[Task[T]], executor: Executor, limit: int) -> Generator[T | Fault, None, None]:
    """On an executor that is left running."""
    under_way: deque[Future[T | Fault]] = deque()
    try:
        yield from _in_order(executor.submit, tasks, limit, under_way)
    finally:
        for future in under_way:
            future.cancel()


def _pooled(tasks: Sequence[Task[T]], num_workers: int, limit: int) -> Generator[T | Fault, None, None]:
    """In processes of our own. The pool cancels what is under way: it must not find it cancelled when it is ended."""
    with pool_of(num_workers) as pool:
        yield from _in_order(pool.submit, tasks, limit, deque())


def _in_order(
    submit: Callable[..., Future[T | Fault]], tasks: Sequence[Task[T]], limit: int, under_way: deque[Future[T | Fault]]
) -> Iterator[T | Fault]:
    waiting = iter(tasks)
    for task in tasks:
        with interrupts_held():
            under_way.append(submit(look, task))
        if len(under_way) >= limit:
            yield _result(under_way.popleft(), next(waiting))
    while under_way:
        yield _result(under_way.popleft(), next(waiting))


def _result(future: Future[T | Fault], task: Task[T]) -> T | Fault:
    """What was found, or what became of the task on an executor of which we know nothing."""
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except Exception as error:  # noqa: BLE001 - each executor has errors of its own for a worker that was lost
        found = f"{type(error).__name__}: {error}"
        return Fault(str(ManifestError("the executor did not look at the shard", url=task.url, found=found)))


def _one_by_one(tasks: Sequence[Task[T]]) -> Generator[T | Fault, None, None]:
    """In one process, which is replaced when a shard kills it."""
    left = deque(tasks)
    while left:
        with pool_of(1) as pool:
            try:
                with interrupts_held():
                    started = pool.submit(int)
                started.result()
            except BrokenExecutor as error:
                hint = 'a script must call it under `if __name__ == "__main__":`, or with num_workers=0'
                what = "processes that index shards cannot be started"
                raise ManifestError(what, found=error, hint=hint) from error
            try:
                while left:
                    finding = pool.submit(look, left[0]).result()
                    left.popleft()
                    yield finding
            except BrokenExecutor:
                url = left.popleft().url
                found = "a crash in a library, or too little memory"
                hint = "fetch or write it again, or leave it out"
                what = "the process that looked at the shard died"
                yield Fault(str(ManifestError(what, url=url, found=found, hint=hint)))
