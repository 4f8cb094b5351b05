"""Fetching: from planned micro-batches to rows in memory.

The plan knows every future read, so reads are scheduled, not guessed. Micro-batches are taken several at a time (a
*gather*); the runs that a gather needs are opened by a bounded pool of threads in the order of first use, some gathers
ahead of the consumer; when a gather's runs are there, its rows are copied out of them, once, and cut into
micro-batches. A run is held from the first gather that needs it to the last one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from shardstream.closing import close_apart
from shardstream.columns import Rows
from shardstream.errors import DecodeError, ReadError
from shardstream.faults import NO_FAULTS, Made, is_of_data, made_without_faults
from shardstream.gathering import slice_rows
from shardstream.layout import Layout, Planned, RunKey
from shardstream.memory import fitted, gather_batches
from shardstream.mixture_layout import layout_of
from shardstream.mixture_plan import AnyPlan
from shardstream.open_runs import THREAD_NAME, OpenedRun, OpenRuns
from shardstream.permutation import Int64Array
from shardstream.plan import PlannedBatch
from shardstream.read_stats import ReadStats
from shardstream.reading import Reading

__all__ = ["Fetched", "Gathered", "ReadStats", "Reading", "fetch"]

_HEAD_START_S = 0.5
_CLOSING_S = 10.0  # the longest that a loop which is left waits for its threads
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

    Closing the generator (or dropping it) cancels what is under way and closes every file; what is under way is waited
    for, for 10 s at the most. Nobody waits where it is dropped in another thread than it was last used in.

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
    runs = OpenRuns(plan, layout, reading, stats, num_workers, finds_faults=finds_faults)
    copying = _Copying(is_ahead=runs.has_core_left)
    ahead: deque[_Gather] = deque()
    waiting = runs.asking_ahead(_gathers(layout, iter(batches), gather_batches(plan, layout, reading, num_workers)))
    is_late, is_forgotten, is_first, home = False, False, True, threading.get_ident()
    try:
        for planned in islice(waiting, reading.look_ahead):
            ahead.append(_gather(planned, runs))
            if len(ahead) == 1:
                copying.begin(ahead[0])
                # Who plans takes the interpreter's lock from those that decode: those go first.
                wait(ahead[0].runs[: 1 - runs.num_threads or None], _HEAD_START_S, FIRST_EXCEPTION)
            if ahead[0].is_ready():  # the first batch does not wait while others are planned
                break
        while ahead:
            home = threading.get_ident()
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
    except GeneratorExit:
        is_forgotten = threading.get_ident() != home
        raise
    finally:
        # A read that hangs is not waited for, nor is any where the garbage collector found a loop that was forgotten.
        close = partial(_close, runs, copying, wait=not is_late)
        close_apart(close, timeout_s=0 if is_late or is_forgotten else _CLOSING_S)


def _close(runs: OpenRuns, copying: _Copying, *, wait: bool) -> None:
    runs.close(wait=wait)  # first: what is copied waits for it
    copying.close(wait=wait)


def _keep_freed_memory() -> None:
    """Lets gathers be made in the memory of earlier ones.

    glibc maps anew what is larger than all that was freed so far, and gives the end of a heap back from twice that size
    on: of a gather's 5 MB every page would be a page fault, time and again. It learns from one large piece that is
    freed, which is never touched and so takes no memory.
    """
    np.empty(_LARGEST_KEPT, np.uint8)


class _Gather(NamedTuple):
    planned: Planned
    runs: list[OpenedRun]
    """Its runs, in the order in which they are used."""
    make: Callable[[], Made]
    """Waits for its runs and copies the rows."""
    keeps_faults: bool
    """Whether a run that cannot be decoded is no reason to stop."""

    def is_ready(self, timeout_s: float = 0) -> bool:
        """Whether ``make`` need not wait, or will not have to in time: all runs are there, or why it fails."""
        deadline = time.monotonic() + timeout_s
        for run in self.runs:
            if not run.done() and wait([run], max(0, deadline - time.monotonic())).not_done:
                return False
            if not self.keeps_faults and run.exception() is not None:
                break
        return True


class _Copying:
    """Copies the rows of gathers, one ahead in a thread of its own: neither decoding nor the consumer waits for it.

    Where no core is left for that (not ``is_ahead``), it is done when a gather is asked for: waking a thread, and its
    waits for the interpreter's lock, would take more from those that decode than it gives.
    """

    def __init__(self, *, is_ahead: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME) if is_ahead else None
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


def _gather(planned: Planned, runs: OpenRuns) -> _Gather:
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

    return _Gather(planned, [*futures.values()], make, runs.finds_faults)


def _too_late(layout: Layout, planned: Planned, timeout_s: float) -> ReadError:
    key = planned.keys[0]
    manifest, _ = layout.source(key)
    return ReadError(
        f"data was not there after {timeout_s:g} s",
        url=manifest.url_of_block(key.block),
        block=key.block,
        hint="see whether the store answers, or give Reading(timeout_s=)",
    )
