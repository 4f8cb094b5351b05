"""Fetching: from planned micro-batches to rows in memory.

The plan knows every future read, so reads are scheduled, not guessed. Micro-batches are taken several at a time (a
*gather*); the runs that a gather needs are opened by a bounded pool of threads in the order of first use, some gathers
ahead of the consumer; when a gather's runs are there, its rows are copied out of them, once, and cut into
micro-batches. A run is held from the first gather that needs it to the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardstream.ahead import BlocksAhead
from shardstream.block_check import BlockCheck
from shardstream.columns import Rows
from shardstream.errors import DecodeError, ReadError, ShardStreamError
from shardstream.faults import NO_FAULTS, Made, is_of_data, made_without_faults
from shardstream.formats import Shard, decoded_runs, format_of
from shardstream.gathering import slice_rows
from shardstream.layout import Layout, Planned, RunKey
from shardstream.memory import fitted, gather_batches, most_kept_runs
from shardstream.mixture_layout import layout_of, manifests_of
from shardstream.mixture_plan import AnyPlan
from shardstream.permutation import Int64Array
from shardstream.plan import PlannedBatch
from shardstream.processes import num_cores
from shardstream.read_stats import OpenedBlock, ReadStats
from shardstream.reading import Reading

__all__ = ["Fetched", "Gathered", "ReadStats", "Reading", "fetch"]

_THREAD_NAME = "shardstream-read"
_HEAD_START_S = 0.5
_LARGEST_KEPT = (32 << 20) - (1 << 16)  # the most that glibc learns from


class Fetched(NamedTuple):
    """A micro-batch with its data."""

    batch: PlannedBatch
    sample_ids: Int64Array
    """int64[n]."""
    rows: Rows
    faults: Mapping[int, Exception] = NO_FAULTS
    """Row → why it could not be made; see ``Made``."""


class Gathered(NamedTuple):
    """Some micro-batches that were read together, with the data of all."""

    batches: list[PlannedBatch]
    sample_ids: Int64Array
    """int64[n], of all their rows."""
    rows: Rows
    faults: Mapping[int, Exception] = NO_FAULTS
    """Row → why it could not be made; see ``Made``."""

    def micro_batches(self) -> Iterator[Fetched]:
        """Yields each micro-batch with its rows, as views."""
        begin = 0
        for batch in self.batches:
            end = begin + len(batch.positions)
            faults = {row - begin: error for row, error in self.faults.items() if begin <= row < end}
            yield Fetched(batch, self.sample_ids[begin:end], slice_rows(self.rows, begin, end), faults)
            begin = end


def fetch(
    plan: AnyPlan,
    batches: Iterable[PlannedBatch],
    *,
    layout: Layout | None = None,
    reading: Reading | None = None,
    stats: ReadStats | None = None,
    num_workers: int = 1,
    finds_faults: bool = False,
) -> Generator[Gathered, None, None]:
    """Reads planned micro-batches, in order, ahead of the consumer, several at a time.

    Closing the generator (or dropping it) cancels what is under way and closes every file.

    Args:
        plan: The plan that the batches are of.
        batches: From ``plan.micro_batches``.
        layout: What rows are; ``RowsLayout`` with the columns wanted; default: with all.
        reading: Threads, look-ahead, storage options.
        stats: Is counted up.
        num_workers: Among how many workers the rank's micro-batches are dealt.
        finds_faults: Whether rows that cannot be decoded are told in ``faults``, instead of raising why.

    Yields:
        Gathers: the first holds one micro-batch, later ones more.

    Raises:
        PlanError: If it would take more memory than it may; see ``memory.fitted``.
        ReadError: If storage failed, data cannot be decoded, or the deadline passed.
    """
    _keep_freed_memory()
    layout = layout if layout is not None else layout_of(plan, None)
    reading = fitted(plan, reading or Reading(), num_workers)
    stats = stats if stats is not None else ReadStats()
    num_threads = reading.num_threads or min(4, num_cores())
    runs = _OpenRuns(plan, layout, reading, num_threads, stats, num_workers, finds_faults=finds_faults)
    copying = _Copying(is_ahead=runs.has_core_left)
    ahead: deque[_Gather] = deque()
    waiting = runs.asking_ahead(_gathers(layout, iter(batches), gather_batches(plan, layout, reading, num_workers)))
    is_late, is_first = False, True
    try:
        for planned in islice(waiting, reading.look_ahead):
            ahead.append(_gather(planned, runs))
            if len(ahead) == 1:
                copying.begin(ahead[0])
                # Who plans takes the interpreter's lock from those that decode: those go first.
                runs.wait(planned.keys[: 1 - num_threads or None], _HEAD_START_S)
            if ahead[0].is_ready():  # the first batch does not wait while others are planned
                break
        while ahead:
            gather = ahead.popleft()
            try:
                rows, faults = copying.made(gather, reading.timeout_s)
            except FutureTimeoutError:
                is_late = True
                raise _too_late(layout, gather.planned, reading.timeout_s) from None
            stats.num_samples += rows.num_rows
            stats.num_bytes += rows.num_bytes
            gathered = Gathered(gather.planned.batches, gather.planned.sample_ids, rows, faults)
            if is_first:  # nothing else is planned or copied before its consumer has it
                yield gathered
            # The next gather takes its runs before this one gives back its own: what both need stays open.
            ahead.extend(_gather(planned, runs) for planned in islice(waiting, min(reading.look_ahead - len(ahead), 2)))
            if ahead:  # of later ones runs are held, which give their rows when it is their turn
                copying.begin(ahead[0])
            runs.release(gather.planned)
            if not is_first:
                yield gathered
            is_first = False
    finally:
        # A read that hangs is not waited for. And the garbage collector may close a forgotten generator in any thread:
        # one of a pool must not wait for a pool.
        is_reader = threading.current_thread().name.startswith(_THREAD_NAME)
        runs.close(wait=not (is_late or is_reader))
        copying.close(wait=not (is_late or is_reader))


def _keep_freed_memory() -> None:
    """Lets gathers be made in the memory of earlier ones.

    glibc maps anew what is larger than all that was freed so far, and gives the end of a heap back from twice that size
    on: of a gather's 5 MB every page would be a page fault, time and again. It learns from one large piece that is
    freed, which is never touched and so takes no memory.
    """
    np.empty(_LARGEST_KEPT, np.uint8)


# ---------------------------------------------------------------------------------------------------------- gathers


class _Gather(NamedTuple):
    planned: Planned
    opened: list[_Opened]
    """Its runs."""
    make: Callable[[], Made]
    """Waits for its runs and copies the rows."""

    def is_ready(self, timeout_s: float = 0) -> bool:
        """Whether its runs are there, or will be in time."""
        return not wait(self.opened, timeout_s).not_done


class _Copying:
    """Copies the rows of gathers, one ahead in a thread of its own: neither decoding nor the consumer waits for it.

    Where no core is left for that (not ``is_ahead``), it is done when a gather is asked for: waking a thread, and its
    waits for the interpreter's lock, would take more from those that decode than it gives.
    """

    def __init__(self, *, is_ahead: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD_NAME) if is_ahead else None
        self._next: Future[Made] | None = None

    def begin(self, gather: _Gather) -> None:
        """Says which gather is asked for next."""
        if self._thread is not None:
            self._next = self._thread.submit(gather.make)

    def made(self, gather: _Gather, timeout_s: float) -> Made:
        """Returns the gather that was begun.

        Raises:
            FutureTimeoutError: If its runs are not there in time.
        """
        if self._next is not None:
            return self._next.result(timeout_s)
        if not gather.is_ready(timeout_s):
            raise FutureTimeoutError
        return gather.make()

    def close(self, *, wait: bool) -> None:
        """Ends its thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=wait, cancel_futures=True)


def _gathers(layout: Layout, batches: Iterator[PlannedBatch], most: int) -> Iterator[Planned]:
    """Groups micro-batches: first one alone, so that the first batch waits for its own blocks only, then more."""
    size = 1
    while group := list(islice(batches, size)):
        yield layout.planned(group)
        size = min(2 * size, most)


def _gather(planned: Planned, runs: _OpenRuns) -> _Gather:
    """Takes the runs that a gather needs, opening those that are not held."""
    runs.epoch = planned.batches[0].epoch
    futures = {key: runs.acquire(key) for key in planned.keys}

    def run_of(key: RunKey) -> Any:
        return runs.prepared(key, futures[key])

    def make() -> Made:
        try:
            return Made(planned.make([run_of(key) for key in planned.keys]))
        except DecodeError as error:
            if not runs.finds_faults or not is_of_data(error):
                raise
        return made_without_faults(runs.layout, planned, run_of)

    return _Gather(planned, [*futures.values()], make)


def _too_late(layout: Layout, planned: Planned, timeout_s: float) -> ReadError:
    key = planned.keys[0]
    manifest, _ = layout.source(key)
    return ReadError(
        f"data was not there after {timeout_s:g} s",
        url=manifest.url_of_block(key.block),
        block=key.block,
        hint="see whether the store answers, or give Reading(timeout_s=)",
    )


# ---------------------------------------------------------------------------------------------------------- runs


_Run: TypeAlias = Rows | Callable[[], Rows]
_Stream: TypeAlias = Generator[_Run, None, None]
_Opened: TypeAlias = "Future[tuple[Future[Any], _Stream]]"  # a run as prepared, and the stream that reads the next one


@dataclass
class _Held:
    opened: _Opened
    num_users: int = 0
    is_continued: bool = False  # the stream was handed to the next run


class _OpenRuns:
    """The runs that planned gathers need. All its decisions are made by the one thread that plans."""

    def __init__(
        self,
        plan: AnyPlan,
        layout: Layout,
        reading: Reading,
        num_threads: int,
        stats: ReadStats,
        num_workers: int,
        *,
        finds_faults: bool,
    ) -> None:
        self.layout, self._options, self.finds_faults = layout, reading.storage_options, finds_faults
        # What is done with decoded rows has threads of its own: those that decode go on at once. But to wake one costs
        # as much as it spares where all cores are busy.
        self.has_core_left = num_threads * num_workers < num_cores()
        self._decoding, self._preparing = (
            ThreadPoolExecutor(num_threads, thread_name_prefix=_THREAD_NAME) for _ in range(2)
        )
        self._stats = stats
        self._check = BlockCheck(manifests_of(plan), stats) if reading.verify_checksums else None
        self._most_kept = most_kept_runs(plan) if reading.keeps_lane_ends else 0
        self._kept: dict[RunKey, None] = {}  # held for the end of the epoch by nobody, the longest first
        self._ranges = reading.ranges(manifests_of(plan), stats, num_workers)
        self.ahead = None
        if self._ranges is not None:
            most = (reading.look_ahead, reading.ahead_num_bytes)
            returns = self._most_kept > 0
            self.ahead = BlocksAhead(layout, self._shard_of, self._ranges, *most, keeps_returning=returns)
        self._held: dict[RunKey, _Held] = {}
        self._shards: dict[tuple[int, int], Shard] = {}
        self.epoch = 0  # of the gather that runs are acquired for

    def acquire(self, key: RunKey) -> _Opened:
        """Returns the run to be, opening it if it is not held."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = self._open(key)
        held.num_users += 1
        self._kept.pop(key, None)
        return held.opened

    def asking_ahead(self, planned: Iterator[Planned]) -> Iterator[Planned]:
        """Yields the gathers; of a remote store their blocks, and those of later ones, are asked for before."""
        return planned if self.ahead is None else self.ahead.gathers(planned)

    def wait(self, keys: Sequence[RunKey], timeout_s: float) -> None:
        """Waits until runs are opened, or one of them failed; whoever needs them finds out which it was."""
        wait([self._held[key].opened for key in keys], timeout_s, FIRST_EXCEPTION)

    def prepared(self, key: RunKey, opened: _Opened) -> Any:
        """Returns the run as the layout prepared it, or what stands for one that cannot be decoded."""
        try:
            return opened.result()[0].result()
        except DecodeError as error:
            if not self.finds_faults or not is_of_data(error):
                raise
            return self.layout.undecodable(key, error)

    def release(self, planned: Planned) -> None:
        """Gives a gather's runs back; those that nobody holds any more are dropped, their streams closed."""
        for key in planned.keys:
            self._held[key].num_users -= 1
            if self._held[key].num_users == 0:
                if key in planned.returning:
                    self._kept[key] = None
                else:
                    self._drop(key)
        # Where lanes do not divide among ranks, another one may read the end of a lane: then the next epoch's go first.
        while len(self._kept) > self._most_kept:
            longest = next(iter(self._kept))
            del self._kept[longest]
            self._drop(longest)

    def _drop(self, key: RunKey) -> None:
        held = self._held.pop(key)
        if not held.is_continued:
            held.opened.add_done_callback(_close_stream)

    def close(self, *, wait: bool) -> None:
        """Drops all runs, and lets whoever waits for one that is not there yet know."""
        if self._ranges is not None:
            self._ranges.give_up()
        for threads in (self._decoding, self._preparing):
            threads.shutdown(wait=wait, cancel_futures=True)
        for held in self._held.values():
            held.opened.add_done_callback(_close_stream)
        self._held.clear()
        if self._ranges is not None:
            self._ranges.close(wait=wait)

    def _open(self, key: RunKey) -> _Held:
        before = self._held.get(key._replace(run=key.run - 1))
        self._stats.num_runs_read += 1
        if before is not None and not before.is_continued:
            before.is_continued = True
            return _Held(self._decoding.submit(self._next_run, before.opened, key))
        self._stats.opened(OpenedBlock(self.epoch, key.source, key.block))
        return _Held(self._decoding.submit(self._first_run, key))

    def _first_run(self, key: RunKey) -> tuple[Future[Any], _Stream]:
        shard, columns = self._shard_of(key), self.layout.source(key)[1]
        if self.ahead is not None:
            self.ahead.wait(key)
        format_ = format_of("." + shard.manifest.formats[shard.index])
        check = nullcontext() if self._check is None else self._check.checked(format_, shard, key.block, columns)
        with check:
            advanced = self._advanced(decoded_runs(format_, shard, key.block, columns, key.run), key)
        if self.ahead is not None:
            self.ahead.opened(key)
        return advanced

    def _shard_of(self, key: RunKey) -> Shard:
        manifest, _ = self.layout.source(key)
        shard = int(manifest.shard_of_block(np.array(key.block)))
        if (key.source, shard) not in self._shards:
            self._shards[key.source, shard] = Shard(manifest, shard, self._options, self._ranges)
        return self._shards[key.source, shard]

    def _next_run(self, before: _Opened, key: RunKey) -> tuple[Future[Any], _Stream]:
        try:
            return self._advanced(before.result()[1], key)
        except DecodeError:
            if not self.finds_faults:
                raise
        return self._first_run(key)  # what is at fault must not depend on who read the run before

    def _advanced(self, stream: _Stream, key: RunKey) -> tuple[Future[Any], _Stream]:
        """Decodes a run; what is to be done with it then may be another thread's: this one goes on decoding."""
        manifest, _ = self.layout.source(key)
        try:
            with self._naming(key):
                run = next(stream, None)
                if run is None:
                    what, url = "the block has fewer runs than were indexed", manifest.url_of_block(key.block)
                    raise DecodeError(what, url=url, block=key.block, found=key.run)
                if (key.run + 1) * int(manifest.block_run_rows[key.block]) >= int(manifest.block_rows[key.block]):
                    stream.close()  # the block's last run: its file need not stay open as long as its rows
                return self._preparation(key, run), stream
        except ShardStreamError:
            stream.close()
            raise

    def _preparation(self, key: RunKey, run: _Run) -> Future[Any]:
        if callable(run) and self.has_core_left:
            return self._preparing.submit(self._prepared, key, run)
        prepared: Future[Any] = Future()
        prepared.set_result(self._prepared(key, run))
        return prepared

    def _prepared(self, key: RunKey, run: _Run) -> Any:
        with self._naming(key):
            return self.layout.prepared(key, run() if callable(run) else run)

    @contextmanager
    def _naming(self, key: RunKey) -> Iterator[None]:
        try:
            yield
        except ShardStreamError:
            raise
        except Exception as error:
            url = self.layout.source(key)[0].url_of_block(key.block)
            what, hint = f"reading failed with {type(error).__name__}: {error}", "the traceback above shows where"
            raise ReadError(what, url=url, block=key.block, hint=hint) from error


def _close_stream(opened: _Opened) -> None:
    if not opened.cancelled() and opened.exception() is None:
        with suppress(ValueError):  # the next run is being read from it just now: its own callback comes later
            opened.result()[1].close()
