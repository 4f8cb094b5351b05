"""``StreamingDataset``: the micro-batches of one rank, as an ``IterableDataset``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError
from shardstream.fetch import Reading, ReadStats
from shardstream.manifest import Manifest
from shardstream.order import Shuffle
from shardstream.packing import Packed, Packing, PackingMode
from shardstream.plan import Plan
from shardstream.torch.assemble import Assembly
from shardstream.torch.batch import Batch, Place
from shardstream.torch.packed import constant_targets, packed_assembly, packing_of
from shardstream.torch.passes import Pass, Source, Worker
from shardstream.torch.start import SharedStart
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
        sequence_length: T: samples are packed sequences of T tokens, and their columns those of ``packed_layout``:
            ``input_ids``, ``labels``, ``position_ids``, ``document_ids``, ``cu_seqlens`` and the spans of documents.
        tokens_column: Column of token lists; the one that the manifest counted by default.
        eos_id: Token that is put after every document.
        packing: ``"whole"`` for documents that are not cut, or a ``Packing`` with all of it.
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
        sequence_length: int | None = None,
        tokens_column: str | None = None,
        eos_id: int | None = None,
        packing: Packing | PackingMode | None = None,
        topology: Topology | None = None,
        reading: Reading | None = None,
    ) -> None:
        super().__init__()
        self.manifest = manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
        self.columns = None if columns is None else tuple(columns)
        self.reading = reading or Reading()
        self.stats = ReadStats()
        self._assembly = Assembly(transform, collate, dict(targets or {}), shifted, ignore_index, seed)
        packed = packing_of(packing, sequence_length, tokens_column, eos_id, self.manifest)
        if packed is None:
            self._assembly.check(self.manifest, self.columns)
        else:
            self._assembly = packed_assembly(self._assembly, self.columns)
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "global_batch": global_batch,
            "accumulate": accumulate,
            "seed": seed,
            "shuffle": shuffle,
            "lanes": lanes,
            "tail": tail,
            "packing": None if packed is None else Packed.of(self.manifest, packed),
        }
        self._given_topology = self._topology = topology
        self._plan: Plan | None = None
        self._start = SharedStart()
        self._loaded: Cursor | None = None
        if topology is not None:
            _ = self.plan  # settings that do not fit are refused here, not in a worker

    # ------------------------------------------------------------------------------------------------ plan and start

    @property
    def topology(self) -> Topology:
        """Rank and world size; resolved once, in the main process."""
        self._settle()
        if self._topology is None:
            self._topology = resolve_topology()
        return self._topology

    @property
    def plan(self) -> Plan:
        """The plan; its lanes are those of a loaded cursor, if there is one."""
        world_size = self.topology.world_size
        if self._plan is None:
            self._plan = Plan.make(self.manifest, world_size=world_size, **self._options)
        lanes = self._start.read().lanes
        if lanes and lanes != self._plan.lanes:
            self._plan = replace(self._plan, lanes=lanes)
        return self._plan

    @property
    def start(self) -> Cursor:
        """The cursor where the next pass begins."""
        return self.plan.cursor(*self._start.read()[:3])

    @property
    def num_seeks(self) -> int:
        """How often ``set_epoch`` or ``load_state_dict`` said where to go on."""
        return self._start.num_seeks

    @contextmanager
    def begin_at(self, start: Cursor) -> Iterator[None]:
        """Lets the pass that is begun inside start at a cursor of this plan. In the main process only."""
        with self._start.held():
            self._start.write(start.epoch, start.position, start.grid_start)
            yield

    def consumed(self, place: Place) -> None:
        """Counts a batch as consumed: its pass begins again, or the next epoch if it was the pass's last batch."""
        self._start.consumed(place)

    def end_epoch(self, epoch: int) -> None:
        """Lets the next pass be the epoch after ``epoch``."""
        self._start.write(epoch + 1)

    def constant_targets(self, place: Place) -> dict[str, int] | None:
        """Returns the targets of each head in the window of a batch, over all ranks, where nobody need count them."""
        return constant_targets(self.plan, self._assembly, place)

    def _settle(self) -> None:
        """Makes a dataset that was handed to another process (``mp.spawn``) that process's own.

        DataLoader workers are not meant: they see what their main process sees.
        """
        if self._start.home_pid == os.getpid() or get_worker_info() is not None:
            return
        self._start = SharedStart(self._start.read())
        if self._given_topology is None:  # what was found elsewhere is another process's rank
            self._topology = self._plan = None

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass be the given epoch, as training frameworks and ``DistributedSampler`` users call it.

        The epoch of a loaded cursor keeps the cursor's position. Call it in the main process, between passes.

        Raises:
            CursorError: If it goes back behind a loaded cursor, which would train on consumed data again.
            PlanError: If the epoch is negative.
        """
        self._settle()
        if self._loaded is not None:
            if epoch < self._loaded.epoch:
                raise CursorError(
                    "set_epoch would go back behind the loaded cursor",
                    expected=f"epoch {self._loaded.epoch} or later",
                    found=epoch,
                    hint="start the loop at the cursor's epoch, or make a new dataset to begin again",
                )
            if epoch == self._loaded.epoch:
                self._seek(self._loaded)
                return
        if epoch < 0:
            raise PlanError("the epoch must not be negative", found=epoch)
        self._start.seek(epoch)

    def _seek(self, cursor: Cursor) -> None:
        self._start.seek(cursor.epoch, cursor.position, cursor.grid_start, cursor.lanes)

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
        _, cursor = self.plan.resume(Cursor.from_state_dict(state), allow_batch_change=allow_batch_change)
        if get_worker_info() is not None:
            return  # a StatefulDataLoader restores its workers through their iterators
        self._loaded = cursor
        self._seek(cursor)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.plan  # spawned workers see neither process group nor rank
        return self.__dict__.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingDataset:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__, stats=ReadStats(), _start=SharedStart(self._start.read()))
        return copy  # the rest are frozen values

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
        if info is None:
            return Pass(self._source, Worker(0, 1))
        return Pass(self._source, Worker(info.id, info.num_workers, self._start.begin(info.seed - info.id)))

    def _source(self) -> Source:
        plan = self.plan
        return Source(plan, self.topology.rank, self._start, self._assembly, self.columns, self.reading, self.stats)
