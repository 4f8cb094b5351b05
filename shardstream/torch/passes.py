"""One pass of one worker over a dataset: from the start that is valid when it begins to the end of the epoch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, DecodeError, TopologyError
from shardstream.fetch import Fetched, Gathered, Reading, ReadStats, fetch
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.plan import PlannedBatch
from shardstream.quarantine import MaskedSample
from shardstream.torch.assemble import Assembly
from shardstream.torch.batch import Batch, Place
from shardstream.torch.bundle import Bundle, Bundles, SingleBatches
from shardstream.torch.masking import MaskingMaker, without_faults
from shardstream.torch.mixed import by_source, source_names, without_source
from shardstream.torch.packed import known_targets
from shardstream.torch.start import PassId, SharedStart


@dataclass(frozen=True, eq=False)
class Source:
    """What the passes of a rank read from.

    Attributes:
        plan: The plan, with the lanes that are valid now.
        rank: Data-parallel rank.
        start: Where passes begin.
        assembly: What is done to rows.
        columns: Columns to read; None for all.
        reading: Threads, look-ahead, storage options.
        stats: Is counted up.
        masks: Whether what cannot be decoded is masked.
    """

    plan: AnyPlan
    rank: int
    start: SharedStart
    assembly: Assembly
    columns: tuple[str, ...] | None
    reading: Reading
    stats: ReadStats
    masks: bool = False


class _Begun(NamedTuple):
    source: Source
    plan: AnyPlan
    origin: Cursor


class Worker(NamedTuple):
    """Who reads a pass."""

    worker_index: int
    num_workers: int
    """1 if the main process reads by itself."""
    pass_id: PassId = PassId()

    @property
    def is_main(self) -> bool:
        """Whether it is the main process."""
        return self.pass_id.pool == 0


class Pass(Iterator[Batch]):
    """The micro-batches of one worker. It begins at the first ``next``: what the main process wrote until then counts.

    Args:
        source: Returns what is valid when the pass begins.
        worker: Who reads it.
    """

    def __init__(self, source: Callable[[], Source], worker: Worker) -> None:
        self._source, self._worker = source, worker
        self._begun: _Begun | None = None
        self._next_index = worker.worker_index
        self._batches: Generator[Batch, None, None] | None = None
        self._error: Exception | None = None

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error  # a loop that swallowed it must not take what is missing for the end of the epoch
        if self._batches is None:
            self._batches = _read(self.begin(), self._worker, self._next_index)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            self._error = error
            raise
        self._next_index += self._worker.num_workers
        if self._worker.is_main:
            self.begin().source.start.arrived(batch)
        return batch

    def _end(self) -> None:
        source, _, origin = self.begin()
        if self._worker.is_main and self._next_index == self._worker.worker_index and origin.tail != "continue":
            source.start.write(origin.epoch + 1)  # no batch of this pass will say so

    def close(self) -> None:
        """Cancels reads that are under way and closes every file."""
        if self._batches is not None:
            self._batches.close()

    def begin(self) -> _Begun:
        """Finds out where the pass begins; the same from then on."""
        if self._begun is None:
            source = self._source()
            if not self._worker.is_main:
                _check_home(source.start)
            start = source.start.read(self._worker.pass_id)
            plan = source.plan.with_pin(start.lanes)
            self._begun = _Begun(source, plan, plan.cursor(*start[:3]))
        return self._begun

    # A StatefulDataLoader keeps one state a worker: filled before the first batch, exact for the same P, W and b.

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's state: where the pass began, and the worker's own next micro-batch."""
        source, plan, origin = self.begin()
        return {
            "origin": origin.state_dict(),
            "num_workers": self._worker.num_workers,
            "next_index": self._next_index,
            "batch_size": plan.batch_size,
            "accumulate": plan.accumulate,
            "world_size": plan.world_size,
            "num_positions": plan.num_positions,
            "num_micro_batches": _num_micro_batches(source.rank, plan, origin),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where a worker of the same rank, worker count and micro-batch was.

        Raises:
            CursorError: If any of these differs; it names the way out.
        """
        source = self._source()
        plan, origin = source.plan.resume(Cursor.from_state_dict(state["origin"]))
        mine = {
            "num_workers": self._worker.num_workers,
            "batch_size": plan.batch_size,
            "accumulate": plan.accumulate,
            "world_size": plan.world_size,
        }
        different = [
            f"{name}: {state[name]} in the state, {mine[name]} here" for name in mine if state[name] != mine[name]
        ]
        if different:
            raise CursorError(
                "a StatefulDataLoader's state is exact for the same topology only: " + "; ".join(different),
                hint="load Cursor.from_torchdata(state), or a batch.cursor, with dataset.load_state_dict instead",
            )
        self._begun, self._next_index, self._batches = _Begun(source, plan, origin), int(state["next_index"]), None


def bundles(source: Callable[[], Source], worker: Worker) -> Bundles:
    """Yields the micro-batches of one worker in bundles, for a loader that cuts them apart when they arrive."""
    begun = Pass(source, worker).begin()
    make = _BatchMaker(begun, worker.pass_id)
    stats = begun.source.stats
    told = stats.told()  # the main process has what it was forked with
    with closing(_gathers(begun, worker, worker.worker_index)) as gathers:
        for gathered in gathers:
            told = stats.told(told)
            yield (make.bundle(gathered) or SingleBatches(make.one_by_one(gathered))).telling(told)


def _read(begun: _Begun, worker: Worker, first_index: int) -> Generator[Batch, None, None]:
    # Not a method: a generator that refers to its pass would be closed not when a loop is left, but some time later, by
    # the garbage collector.
    make = _BatchMaker(begun, worker.pass_id)
    with closing(_gathers(begun, worker, first_index)) as gathers:
        for gathered in gathers:
            yield from make.batches(gathered)


def _gathers(begun: _Begun, worker: Worker, first_index: int) -> Generator[Gathered, None, None]:
    source, plan, origin = begun
    planned = plan.micro_batches(
        source.rank, origin, worker=worker.worker_index, num_workers=worker.num_workers, first_index=first_index
    )
    reading = source.reading
    if not worker.is_main:  # workers are the parallelism there
        reading = replace(reading, num_threads=reading.num_threads or 1)
    return fetch(
        plan,
        planned,
        layout=source.assembly.layout(plan, source.columns, finds_faults=source.masks),
        reading=reading,
        stats=source.stats,
        num_workers=worker.num_workers,
        finds_faults=source.masks,
    )


def _num_micro_batches(rank: int, plan: AnyPlan, origin: Cursor) -> int | None:
    """Micro-batches to the end of the epoch; None if the epoch goes on for others when this rank is through."""
    if isinstance(plan, MixturePlan) or plan.tail == "continue":
        return None
    deal = plan.epoch(origin.epoch, origin.position).deal
    num_micro_batches = deal.num_micro_batches(rank)
    return num_micro_batches if -(-num_micro_batches // plan.accumulate) == deal.num_windows else None


def _check_home(start: SharedStart) -> None:
    """Refuses workers of a process that the dataset was not told of: its rank, or its epochs, would be another's."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != start.home_pid:
        raise TopologyError(
            "the dataset was made in one process and is read by the DataLoader workers of another",
            expected=f"workers of process {start.home_pid}",
            found=f"workers of process {parent.pid}",
            hint="make the dataset in the process that trains, or call its set_epoch there first",
        )


class _BatchMaker:
    """Turns gathers into batches."""

    def __init__(self, begun: _Begun, pass_id: PassId) -> None:
        source, self._plan, origin = begun
        self._assembly, self._token, self._names = source.assembly, source.start.token, source_names(self._plan)
        self._pass_start = (origin.epoch, origin.position, origin.grid_start, self._plan.pin, *pass_id)
        self._masking = None
        if source.masks:
            self._masking = MaskingMaker(source.assembly, self._plan, source.rank, source.columns, source.reading)

    def bundle(self, gathered: Gathered) -> Bundle | None:
        """Makes the batches of a gather together; None if they must be made one by one."""
        if self._assembly.is_per_batch or gathered.faults:
            return None
        is_padding = torch.from_numpy(np.concatenate([batch.is_padding for batch in gathered.batches]))
        rows, source_index = without_source(gathered.rows)
        rows, documents = without_faults(rows)
        if documents is not None:
            return None
        sources = None if source_index is None else source_index.numpy()
        known = None
        if self._masking is None:  # a masked document has no targets, also in sequences that it does not begin in
            known = known_targets(self._plan, self._assembly, gathered.sample_ids, sources)
        try:
            num_targets = None if known is None else torch.from_numpy(known)
            columns, valid_tokens = self._assembly.whole(rows, is_padding, num_targets)
        except DecodeError:
            return None  # it is of one of the batches: those before it must come through
        return Bundle(
            columns=columns,
            sample_ids=torch.from_numpy(gathered.sample_ids),
            is_padding=is_padding,
            valid_tokens=by_source(valid_tokens, source_index, self._names),
            sizes=[len(batch.positions) for batch in gathered.batches],
            places=[self._place(batch) for batch in gathered.batches],
            origin_token=self._token,
            source_index=source_index,
            source_names=self._names,
        )

    def batches(self, gathered: Gathered) -> Iterator[Batch]:
        """Yields the batches of a gather."""
        bundle = self.bundle(gathered)
        return self.one_by_one(gathered) if bundle is None else bundle.batches()

    def one_by_one(self, gathered: Gathered) -> Iterator[Batch]:
        """Yields the batches of a gather, each made by itself when it is asked for."""
        return map(self._batch, gathered.micro_batches())

    def _batch(self, fetched: Fetched) -> Batch:
        rows, source_index = without_source(fetched.rows)
        rows, documents = without_faults(rows)
        fetched, masked = fetched._replace(rows=rows), list[MaskedSample]()
        if fetched.faults and isinstance(self._plan, MixturePlan):  # rows at fault have the source of those they hold
            source_index = torch.from_numpy(self._plan.sources(fetched.batch.positions).source.astype(np.int64))
        if self._masking is None:
            columns, valid_tokens = self._assembly.columns(fetched, self._plan)
            is_padding = torch.from_numpy(np.array(fetched.batch.is_padding))
        else:
            columns, valid_tokens, is_padding, masked = self._masking.made(fetched)
            masked += self._masking.told(fetched, documents)
        return Batch(
            columns,
            sample_ids=torch.from_numpy(fetched.sample_ids),
            is_padding=is_padding,
            valid_tokens=by_source(valid_tokens, source_index, self._names),
            place=self._place(fetched.batch),
            origin_token=self._token,
            source_index=source_index,
            source_names=self._names,
            masked=masked,
        )

    def _place(self, planned: PlannedBatch) -> Place:
        return Place(
            position=planned.position,
            cursor=self._plan.cursor_after(planned, self._pass_start[2]),
            window_index=planned.window,
            micro_index=planned.micro,
            is_last_in_window=planned.is_last_in_window,
            is_last_in_pass=planned.is_last_in_epoch and self._plan.has_end,
            pass_start=self._pass_start,
        )
