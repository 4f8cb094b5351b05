"""``StreamingDataset``: the micro-batches of one rank, as an ``IterableDataset``.

Where a pass begins is a *place* (epoch, position, start of the window grid, lanes): four int64 words in shared memory,
written by the main process only, read by workers when they begin to iterate. A plain DataLoader tells nobody how far
its consumer came, so a batch counts as consumed when the main process first touches its data: the pass's last batch
then moves the place to the next epoch, any other one to where the pass began. No lock is needed: while workers read
the words, the main process waits for their first batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError
from shardstream.fetch import Fetched, Reading, ReadStats, fetch
from shardstream.manifest import Manifest
from shardstream.order import Shuffle
from shardstream.plan import Plan
from shardstream.torch.assemble import Assembly
from shardstream.torch.batch import Batch, Place, register_receiver
from shardstream.torch.topology import Topology, resolve_topology

ManifestLike: TypeAlias = Manifest | str | os.PathLike[str]


class StreamingDataset(IterableDataset[Batch]):
    """Micro-batches of one rank from the global order; use it with ``batch_size=None`` in any DataLoader.

    Every worker of every rank computes its share from the same plan; nothing is communicated. What a rank sees depends
    on neither the number of workers nor how they are started.

    Args:
        manifest: A manifest, or where it lies.
        batch_size: Samples of a micro-batch (one rank, one forward).
        global_batch: Samples of one optimizer step over all ranks; ``world size x batch_size x accumulate``.
        accumulate: Micro-batches of a rank in a step, as the other way to give the global batch.
        seed: The job's seed.
        shuffle: True, False, ``"full"`` or ``"torch"`` (see ``EpochOrder``).
        lanes: Blocks read side by side; chosen from the global batch by default.
        tail: What happens to the last, partial window of an epoch: ``"pad"``, ``"drop"``, ``"uneven"``,
            ``"continue"``, ``"repeat"`` or ``"truncate"``.
        columns: Columns to read; None for all.
        transform: Called with each sample (a dict with ``__id__``, ``__seed__`` and ``__url__``), returns a sample.
        collate: Called with the list of a micro-batch's samples, returns its columns as a dict. If it has an attribute
            ``takes_columns`` that is true (``pad_tokens`` has), it is called with the dict of collated columns instead.
        targets: Head name → column of labels, or a callable of the columns that returns int64[b].
        shifted: Whether label columns are shifted already; unshifted ones count from the second entry on. Must be
            said when ``targets`` has columns.
        ignore_index: The label that does not count; label columns of padding rows are filled with it.
        topology: Rank and world size; found in the process group or the launcher's variables by default.
        reading: Threads, look-ahead, storage options.

    Raises:
        PlanError: If settings do not fit together.
        ManifestError: If the manifest cannot be read.
        TopologyError: If rank and world size are contradictory.

    Example:
        >>> dataset = StreamingDataset("corpus.manifest.parquet", batch_size=8, seed=42)  # doctest: +SKIP
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 - one option each; the design names them
        self,
        manifest: ManifestLike,
        *,
        batch_size: int,
        global_batch: int | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        shuffle: Shuffle = True,
        lanes: int | None = None,
        tail: str = "pad",
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        collate: Callable[[Any], Mapping[str, Any]] | None = None,
        targets: Mapping[str, str | Callable[[Mapping[str, Any]], Tensor]] | None = None,
        shifted: bool | None = None,
        ignore_index: int = -100,
        topology: Topology | None = None,
        reading: Reading | None = None,
    ) -> None:
        super().__init__()
        self.manifest = manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
        self.columns = None if columns is None else tuple(columns)
        self.reading = reading or Reading()
        self.stats = ReadStats()
        self._assembly = Assembly(transform, collate, dict(targets or {}), shifted, ignore_index, seed)
        self._assembly.check(self.manifest, self.columns)
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "global_batch": global_batch,
            "accumulate": accumulate,
            "seed": seed,
            "shuffle": shuffle,
            "lanes": lanes,
            "tail": tail,
        }
        self._topology = topology
        self._plan: Plan | None = None
        self._place = _shared(torch.zeros(4, dtype=torch.int64))
        self._loaded: Cursor | None = None
        self._origin_token = register_receiver(self)
        if topology is not None:
            _ = self.plan  # settings that do not fit are refused here, not in a worker

    # ------------------------------------------------------------------------------------------------ plan and place

    @property
    def topology(self) -> Topology:
        """Rank and world size; resolved once, in the main process."""
        if self._topology is None:
            self._topology = resolve_topology()
        return self._topology

    @property
    def plan(self) -> Plan:
        """The plan; its lanes are those of a loaded cursor, if there is one."""
        if self._plan is None:
            self._plan = Plan.make(self.manifest, world_size=self.topology.world_size, **self._options)
        lanes = int(self._place[3])
        if lanes and lanes != self._plan.lanes:
            self._plan = replace(self._plan, lanes=lanes)
        return self._plan

    @property
    def start(self) -> Cursor:
        """The cursor where the next pass begins."""
        epoch, position, grid_start, _ = self._place.tolist()
        return self.plan.cursor(epoch, position, grid_start)

    def move_to(self, start: Cursor) -> None:
        """Lets the next pass begin at a cursor of this plan. In the main process only."""
        self._write_place(start.epoch, start.position, start.grid_start)

    def _write_place(self, epoch: int, position: int = 0, grid_start: int = 0) -> None:
        self._place[:3] = torch.tensor([epoch, position, grid_start])

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass be the given epoch, as training frameworks and ``DistributedSampler`` users call it.

        The epoch of a loaded cursor keeps the cursor's position. Call it in the main process.

        Raises:
            CursorError: If it goes back behind a loaded cursor, which would train on consumed data again.
        """
        if self._loaded is not None:
            if epoch < self._loaded.epoch:
                raise CursorError(
                    "set_epoch would go back behind the loaded cursor",
                    expected=f"epoch {self._loaded.epoch} or later",
                    found=epoch,
                    hint="start the loop at the cursor's epoch, or make a new dataset to begin again",
                )
            if epoch == self._loaded.epoch:
                self.move_to(self._loaded)
                return
        if epoch < 0:
            raise PlanError("the epoch must not be negative", found=epoch)
        self._write_place(epoch)

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor where the next pass begins; while training save ``batch.cursor`` instead."""
        return self.start.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Cursor, *, allow_batch_change: bool = False) -> None:
        """Lets the next pass begin at a cursor: one of a batch, a window or a loader, from any topology.

        Args:
            state: A cursor or its ``state_dict()``.
            allow_batch_change: Accept a cursor of another global batch. Learning rate and warm-up are then another
                problem.

        Raises:
            CursorError: If it belongs to another manifest, seed, order, batch or tail; it lists the differences.
        """
        plan, cursor = self.plan.resume(Cursor.from_state_dict(state), allow_batch_change=allow_batch_change)
        if get_worker_info() is not None:
            return  # a StatefulDataLoader restores its workers through their iterators
        self._plan = plan
        self._place[3] = plan.lanes
        self._loaded = cursor
        self.move_to(cursor)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.plan  # spawned workers see neither process group nor rank
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._place.is_shared():  # type: ignore[no-untyped-call]  # a copy, not a worker's view: it goes its own way
            self._place = _shared(self._place)
            self._origin_token = register_receiver(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingDataset:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        own = {"stats": ReadStats(), "_place": _shared(self._place), "_origin_token": register_receiver(copy)}
        copy.__dict__.update(self.__dict__, **own)  # the rest are frozen values
        return copy

    # ------------------------------------------------------------------------------------------------ iteration

    def __len__(self) -> int:
        """Returns the micro-batches of this rank in the pass that begins next, over all workers.

        Raises:
            TypeError: If the tail is ``"continue"``, which has no end.
        """
        return self.num_micro_batches(self.start)

    def num_micro_batches(self, start: Cursor) -> int:
        """Returns the micro-batches of this rank from a cursor to the end of its epoch.

        Raises:
            TypeError: If the tail is ``"continue"``, which has no end.
        """
        if self.plan.tail == "continue":
            raise TypeError("a dataset with tail='continue' has no length: it has no end")
        return self.plan.epoch(start.epoch, start.position).deal.num_micro_batches(self.topology.rank)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return _Pass(self, worker, num_workers, is_main=info is None)

    def arrived(self, batch: Batch) -> None:
        """Is called by each of this dataset's batches that reaches the main process."""
        batch._on_touch = lambda: self._consumed(batch.place)  # noqa: SLF001 - the hook is made for this
        if batch.place.is_last_in_pass:
            self._consumed(batch.place)  # a loop that touches nothing has seen the whole pass, too

    def _consumed(self, place: Place) -> None:
        epoch, position, grid_start = place.pass_start
        if place.is_last_in_pass:
            self._write_place(place.cursor.epoch if place.cursor.epoch > epoch else epoch + 1)
        else:
            self._write_place(epoch, position, grid_start)


def _shared(place: Tensor) -> Tensor:
    """Returns a copy in shared memory."""
    copy: Tensor = place.clone().share_memory_()  # type: ignore[no-untyped-call]
    return copy


class _Pass(Iterator[Batch]):
    """One pass of one worker. It begins at the first ``next``: what the main process wrote until then counts."""

    def __init__(self, dataset: StreamingDataset, worker: int, num_workers: int, *, is_main: bool) -> None:
        self._dataset, self._worker, self._num_workers, self._is_main = dataset, worker, num_workers, is_main
        self._origin: Cursor | None = None
        self._next_index = worker
        self._batches: Generator[Batch, None, None] | None = None

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._read()
        batch = next(self._batches)
        self._next_index += self._num_workers
        if self._is_main:
            self._dataset.arrived(batch)
        return batch

    def close(self) -> None:
        """Cancels reads that are under way and closes every file."""
        if self._batches is not None:
            self._batches.close()

    def _begin(self) -> Cursor:
        if self._origin is None:
            self._origin = self._dataset.start
        return self._origin

    def _read(self) -> Generator[Batch, None, None]:
        dataset, origin = self._dataset, self._begin()
        plan = dataset.plan
        planned = plan.micro_batches(
            dataset.topology.rank,
            origin,
            worker=self._worker,
            num_workers=self._num_workers,
            first_index=self._next_index,
        )
        reading = dataset.reading
        if not self._is_main and reading.num_threads is None:
            reading = replace(reading, num_threads=1)  # workers are the parallelism there
        make = _BatchMaker(dataset, plan, origin)
        fetched = fetch(
            plan,
            planned,
            columns=dataset.columns,
            reading=reading,
            stats=dataset.stats,
            num_workers=self._num_workers,
        )
        try:
            yield from map(make, fetched)
        finally:
            fetched.close()

    # A StatefulDataLoader keeps one state a worker: filled before the first batch, exact for the same P, W and b.

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's state: where the pass began, and the worker's own next micro-batch."""
        plan = self._dataset.plan
        return {
            "origin": self._begin().state_dict(),
            "num_workers": self._num_workers,
            "next_index": self._next_index,
            "batch_size": plan.batch_size,
            "accumulate": plan.accumulate,
            "world_size": plan.world_size,
            "num_positions": plan.num_positions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where a worker of the same rank, worker count and micro-batch was.

        Raises:
            CursorError: If any of these differs; it names the way out.
        """
        plan, origin = self._dataset.plan.resume(Cursor.from_state_dict(state["origin"]))
        mine = {
            "num_workers": self._num_workers,
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
        self._dataset._plan = plan  # noqa: SLF001 - adopts the lanes of the state
        self._origin, self._next_index, self._batches = origin, int(state["next_index"]), None


class _BatchMaker:
    """Turns fetched rows into batches."""

    def __init__(self, dataset: StreamingDataset, plan: Plan, origin: Cursor) -> None:
        self._plan, self._assembly, self._manifest = plan, dataset._assembly, dataset.manifest  # noqa: SLF001
        self._pass_start = (origin.epoch, origin.position, origin.grid_start)
        self._token = dataset._origin_token  # noqa: SLF001

    def __call__(self, fetched: Fetched) -> Batch:
        planned, plan = fetched.batch, self._plan
        epoch, _, grid_start = self._pass_start
        cursor = plan.cursor_after(
            planned, grid_start if planned.epoch == epoch else planned.position % plan.global_batch
        )
        columns, valid_tokens = self._assembly.columns(fetched, self._manifest)
        return Batch(
            columns,
            sample_ids=torch.from_numpy(fetched.sample_ids),
            is_padding=torch.from_numpy(np.array(planned.is_padding)),
            valid_tokens=valid_tokens,
            place=Place(
                position=planned.position,
                cursor=cursor,
                window_index=planned.window,
                micro_index=planned.micro,
                is_last_in_window=planned.is_last_in_window,
                is_last_in_pass=planned.is_last_in_epoch and plan.tail != "continue",
                pass_start=self._pass_start,
            ),
            origin_token=self._token,
        )
