"""The runs that planned gathers need: opened and decoded by a pool of threads, held from first use to last."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardstream.ahead import BlocksAhead
from shardstream.block_check import BlockCheck
from shardstream.columns import Rows
from shardstream.errors import DecodeError, ReadError, ShardStreamError
from shardstream.faults import is_of_data
from shardstream.formats import Format, Shard, decoded_runs, format_of
from shardstream.layout import Layout, Planned, RunKey
from shardstream.memory import most_kept_runs
from shardstream.mixture_layout import manifests_of
from shardstream.mixture_plan import AnyPlan
from shardstream.processes import num_cores
from shardstream.read_stats import OpenedBlock, ReadStats
from shardstream.reading import Reading

THREAD_NAME = "shardstream-read"

_Run: TypeAlias = Rows | Callable[[], Rows]
_Stream: TypeAlias = Generator[_Run, None, None]


@dataclass
class Opened:
    """A run, and the stream that reads the next one. What was decoded is let go of as soon as rows were made of it."""

    run: Any
    stream: _Stream


OpenedRun: TypeAlias = "Future[Opened]"


@dataclass
class _Held:
    opened: OpenedRun
    prepared: OpenedRun  # the same, where the thread that decodes does both
    num_users: int = 0
    is_continued: bool = False  # the stream was handed to the next run


class OpenRuns:
    """The runs that planned gathers need. All its decisions are made by the one thread that plans.

    Attributes:
        num_threads: That decode.
        has_core_left: Whether these leave a core of this process to others.
        epoch: Of the gather that runs are acquired for.
    """

    def __init__(
        self,
        plan: AnyPlan,
        layout: Layout,
        reading: Reading,
        stats: ReadStats,
        num_workers: int,
        *,
        finds_faults: bool,
    ) -> None:
        self.layout, self._options, self.finds_faults = layout, reading.storage_options, finds_faults
        # What is done with decoded rows has threads of its own: those that decode go on at once. But to wake one costs
        # as much as it spares where all cores are busy.
        self.num_threads = reading.num_threads or min(4, num_cores())
        self.has_core_left = self.num_threads * num_workers < num_cores()
        self._decoding, self._preparing = (
            ThreadPoolExecutor(self.num_threads, thread_name_prefix=THREAD_NAME) for _ in range(2)
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
        self.epoch = 0

    def acquire(self, key: RunKey) -> OpenedRun:
        """Returns the run to be, opening it if it is not held."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = self._open(key)
        held.num_users += 1
        self._kept.pop(key, None)
        return held.prepared

    def asking_ahead(self, planned: Iterator[Planned]) -> Iterator[Planned]:
        """Yields the gathers; of a remote store their blocks, and those of later ones, are asked for before."""
        return planned if self.ahead is None else self.ahead.gathers(planned)

    def prepared(self, key: RunKey, prepared: OpenedRun) -> Any:
        """Returns the run as the layout prepared it, or what stands for one that cannot be decoded."""
        try:
            return prepared.result().run
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
            opened = self._decoding.submit(self._next_run, before.opened, key)
        else:
            self._stats.opened(OpenedBlock(self.epoch, key.source, key.block))
            opened = self._decoding.submit(self._first_run, key)
        return _Held(
            opened, self._preparing.submit(self._prepare_decoded, key, opened) if self._is_split(key) else opened
        )

    def _is_split(self, key: RunKey) -> bool:
        """Whether one thread decodes a run, and another one makes rows of it."""
        return self.has_core_left and hasattr(self._format_of(key), "decode_runs")

    def _first_run(self, key: RunKey) -> Opened:
        shard, columns, format_ = self._shard_of(key), self.layout.source(key)[1], self._format_of(key)
        if self.ahead is not None:
            self.ahead.wait(key)
        check = nullcontext() if self._check is None else self._check.checked(format_, shard, key.block, columns)
        with check:
            advanced = self._advanced(decoded_runs(format_, shard, key.block, columns, key.run), key)
        if self.ahead is not None:
            self.ahead.opened(key)
        return advanced

    def _format_of(self, key: RunKey) -> Format:
        shard = self._shard_of(key)
        return format_of("." + shard.manifest.formats[shard.index])

    def _shard_of(self, key: RunKey) -> Shard:
        manifest, _ = self.layout.source(key)
        shard = manifest.shard_with(key.block)
        if (key.source, shard) not in self._shards:
            self._shards[key.source, shard] = Shard(manifest, shard, self._options, self._ranges)
        return self._shards[key.source, shard]

    def _next_run(self, before: OpenedRun, key: RunKey) -> Opened:
        try:
            return self._advanced(before.result().stream, key)
        except DecodeError:
            if not self.finds_faults:
                raise
        return self._first_run(key)  # what is at fault must not depend on who read the run before

    def _advanced(self, stream: _Stream, key: RunKey) -> Opened:
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
                return Opened(run if self._is_split(key) else self._prepare(key, run), stream)
        except ShardStreamError:
            stream.close()
            raise

    def _prepare_decoded(self, key: RunKey, opened: OpenedRun) -> Opened:
        """Makes rows of what was decoded."""
        decoded = opened.result()
        run, decoded.run = decoded.run, None
        with self._naming(key):
            return Opened(self._prepare(key, run), decoded.stream)

    def _prepare(self, key: RunKey, run: _Run) -> Any:
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


def _close_stream(opened: OpenedRun) -> None:
    if not opened.cancelled() and opened.exception() is None:
        with suppress(ValueError):  # the next run is being read from it just now: its own callback comes later
            opened.result().stream.close()
