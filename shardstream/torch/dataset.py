"""``StreamingDataset``: the micro-batches of one rank, as an ``IterableDataset``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shardstream.audit.advice import startup_warnings
from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError, ShardStreamWarning
from shardstream.fetch import Reading, ReadStats
from shardstream.manifest import AllowUrl, Manifest
from shardstream.mixing import Mixture, is_mixture
from shardstream.mixture_layout import manifests_of, shared_columns
from shardstream.mixture_plan import AnyPlan
from shardstream.order import Shuffle
from shardstream.packing import Packed, Packing, PackingMode
from shardstream.plan import Plan
from shardstream.torch.assemble import Assembly
from shardstream.torch.batch import Batch, Place
from shardstream.torch.budget import MaskedBudget
from shardstream.torch.mixed import plan_maker, source_heads
from shardstream.torch.orphan import end_with_parent
from shardstream.torch.packed import constant_targets, packed_assembly, packing_of
from shardstream.torch.passes import Pass, Source, Worker, bundles
from shardstream.torch.start import SharedStart
from shardstream.torch.topology import Topology, resolve_topology

ManifestLike: TypeAlias = Manifest | str | os.PathLike[str]
OnError: TypeAlias = Literal["raise", "mask"]


class StreamingDataset(IterableDataset[Batch]):
    """Micro-batches of one rank from the global order; use it with ``batch_size=None`` in any DataLoader.

    Every worker of every rank computes its share from the same plan; nothing is communicated. What a rank sees depends
    on neither the number of workers nor how they are started.

    With a plain DataLoader a batch counts as consumed when the main process first touches its data. A pass to the end
    is followed by the next epoch, one that was left is begun again. Call ``set_epoch`` between passes, not in one.

    Args:
        manifest: A manifest, or where it lies; or a ``Mixture`` of several, or its YAML file.
        batch_size: Samples of a micro-batch (one rank, one forward).
        global_batch: Samples of one optimizer step over all ranks; ``world size x batch_size x accumulate``.
        accumulate: Micro-batches of a rank in a step, as the other way to give the global batch.
        seed: The job's seed.
        shuffle: True, False, ``"full"`` or ``"torch"`` (see ``EpochOrder``).
        lanes: Blocks read side by side; chosen from the global batch by default.
        tail: What happens to the last, partial window of an epoch: ``"pad"`` (default), ``"drop"``, ``"uneven"``,
            ``"continue"`` (the only one of a mixture), ``"repeat"`` or ``"truncate"``.
        columns: Columns to read; None for all, of a mixture for all that its sources share.
        dtypes: Columns of bytes (fields of a tar, binary columns) that are raw little-endian numbers, and of which
            type: ``{"tokens.bin": "uint16"}``. They come as ``Ragged`` (numpy arrays for ``transform``), made of the
            files' bytes with one copy; without it as a list of ``bytes``.
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
        packing: ``"whole"`` for documents that are not cut, ``"unpacked"`` for one document a sequence, or a
            ``Packing`` with all of it. What a ``Mixture`` says of a source goes before.
        topology: Rank and world size; found in the process group or the launcher's variables by default. A trainer that
            splits the stream among ranks itself must be given all of it: ``Topology(rank=0, world_size=1)``.
        reading: Threads, look-ahead, storage options.
        allow_url: Shards elsewhere that the manifest may name; see ``Manifest.load``.
        on_error: ``"raise"``, or ``"mask"``: a sample that cannot be decoded, for which ``transform`` raises or returns
            None, becomes a padding row, so that ranks stay in step; ``batch.masked`` names it. Storage that fails is
            an error always.
        max_masked_fraction: Masked samples by rows, above which a rank stops; of at least 10,000 rows.
        quarantine: Folder in which each rank reports what was masked; see ``read_quarantine``.

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
        manifest: ManifestLike | Mixture,
        *,
        batch_size: int,
        global_batch: int | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        shuffle: Shuffle = True,
        lanes: int | None = None,
        tail: str | None = None,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, str] | None = None,
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
        on_error: OnError = "raise",
        max_masked_fraction: float = 0.01,
        quarantine: str | os.PathLike[str] | None = None,
        allow_url: AllowUrl = None,
    ) -> None:
        super().__init__()
        if not isinstance(manifest, (Manifest, Mixture)):
            load = Mixture.load if is_mixture(manifest) else Manifest.load
            manifest = load(manifest, allow_url=allow_url)
        self.data = manifest
        if isinstance(columns, str):
            raise PlanError("columns= is a list of names", found=repr(columns), hint=f"write [{columns!r}]")
        self.columns = None if columns is None else tuple(columns)
        self.reading = reading or Reading()
        self.stats = ReadStats()
        self._budget = _budget(on_error, max_masked_fraction, quarantine)
        raw = {name: _number_dtype(name, kind) for name, kind in (dtypes or {}).items()}
        self._assembly = Assembly(transform, collate, dict(targets or {}), shifted, ignore_index, raw)
        sources = self.data.manifests if isinstance(self.data, Mixture) else (self.data,)
        asked = [packing_of(packing, sequence_length, tokens_column, eos_id, source) for source in sources]
        if isinstance(self.data, Mixture):
            asked = list(map(self.data.packed, self.data.names, asked))
        self._is_packed = any(asked)
        if self._is_packed:
            self._assembly = packed_assembly(self._assembly, self.columns)
        else:
            if isinstance(self.data, Mixture):
                self.columns = shared_columns(self.data, self.columns)
            for source in sources:
                self._assembly.check(source, self.columns)
        self._make_plan = plan_maker(
            self.data,
            [None if how is None else Packed.of(source, how) for source, how in zip(sources, asked, strict=True)],
            batch_size=batch_size,
            global_batch=global_batch,
            accumulate=accumulate,
            seed=seed,
            shuffle=shuffle,
            lanes=lanes,
            tail=tail,
        )
        self._given_topology = self._topology = topology
        self._plan: AnyPlan | None = None
        self._start = SharedStart(budget=self._budget)
        self._loaded: Cursor | None = None
        self._sends_bundles = self._has_said_cost = False
        if topology is not None:
            _ = self.plan  # settings that do not fit are refused here, not in a worker

    # ------------------------------------------------------------------------------------------------ plan and start

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            PlanError: If the data is a mixture of several.
        """
        if isinstance(self.data, Mixture):
            raise PlanError("a mixture has several manifests", hint="look at dataset.data.manifests")
        return self.data

    @property
    def topology(self) -> Topology:
        """Rank and world size; resolved once, in the main process."""
        self._settle()
        if self._topology is None:
            self._topology = resolve_topology()
        return self._topology

    @property
    def plan(self) -> AnyPlan:
        """The plan; its lanes, and the past of a mixture, are those of a loaded cursor, if there is one."""
        world_size = self.topology.world_size
        if self._plan is None:
            self._plan = self._make_plan(world_size=world_size)
            if self._loaded is not None:
                self._plan, _ = self._plan.resume(self._loaded)
        self._plan = self._plan.with_pin(self._start.read().lanes)
        return self._plan

    @property
    def start(self) -> Cursor:
        """The cursor where the next pass begins."""
        return self.plan.cursor(*self._start.read()[:3])

    @property
    def heads(self) -> list[str]:
        """Names of the heads whose targets are counted; those of a mixture's sources are beside them."""
        return sorted(self._assembly.targets)

    @property
    def counted_column(self) -> str | None:
        """The column whose entries are the tokens of a batch, where that is known."""
        return "input_ids" if self._is_packed else manifests_of(self.plan)[0].tokens_column

    @property
    def source_heads(self) -> list[str]:
        """Names of the heads that count one source each, as ``lm/web``; empty without a mixture."""
        return source_heads(self.heads, self.plan)

    @property
    def on_error(self) -> OnError:
        """What becomes of samples that cannot be decoded."""
        return "raise" if self._budget is None else "mask"

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

    @contextmanager
    def sending_bundles(self) -> Iterator[None]:
        """Lets workers that are started inside send several micro-batches in one message, as ``Bundle``.

        For ``StreamingLoader``, which cuts them apart; a plain DataLoader would hand them to its user.
        """
        self._sends_bundles = True
        try:
            yield
        finally:
            self._sends_bundles = False

    def say_cost(self, num_workers: int) -> None:
        """Warns once, on the first rank, of settings that make it read much more than there is.

        Args:
            num_workers: Workers of each rank, 0 for none.
        """
        if self._has_said_cost or self.topology.rank != 0 or not isinstance(self.plan, Plan):
            return
        self._has_said_cost = True
        for text in startup_warnings(self.plan, num_workers):
            warnings.warn(text, ShardStreamWarning, stacklevel=3)

    def consumed(self, place: Place) -> None:
        """Counts a batch as consumed: its pass begins again, or the next epoch if it was the pass's last batch."""
        self._start.consumed(place)

    def took(self, batch: Batch) -> None:
        """Counts and reports what was masked of a batch that the loop is about to get.

        Raises:
            DecodeError: If too much was masked by now.
        """
        if self._budget is not None:
            self._budget.took(len(batch), batch.masked)

    def end_epoch(self, epoch: int) -> None:
        """Lets the next pass be the epoch after ``epoch``; a stream has none."""
        if self.plan.tail != "continue":
            self._start.write(epoch + 1)

    def constant_targets(self, place: Place) -> dict[str, int] | None:
        """Returns the targets of each head in the window of a batch, over all ranks, where nobody need count them."""
        if self._budget is not None:
            return None  # those of documents that cannot be decoded are not known beforehand
        return constant_targets(self.plan, self._assembly, place)

    def _settle(self) -> None:
        """Makes a dataset that was handed to another process (``mp.spawn``) that process's own.

        DataLoader workers are not meant: they see what their main process sees.
        """
        if self._start.home_pid == os.getpid() or get_worker_info() is not None:
            return
        self._start = SharedStart(self._start.read(), self._budget)
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
        if isinstance(self.data, Mixture):
            _ = self.plan.cursor(epoch)  # it has one epoch
        self._start.seek(epoch)

    def _seek(self, cursor: Cursor) -> None:
        self._start.seek(cursor.epoch, cursor.position, cursor.grid_start, self.plan.pin)

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
        self._loaded, self._plan = cursor, plan
        self._start.seek(cursor.epoch, cursor.position, cursor.grid_start, plan.pin)

    def __getstate__(self) -> dict[str, Any]:
        _ = self.plan  # spawned workers see neither process group nor rank
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start.budget = self._budget

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingDataset:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        budget = None if self._budget is None else self._budget.anew()
        start = SharedStart(self._start.read(), budget)
        copy.__dict__.update(self.__dict__, stats=ReadStats(), _budget=budget, _start=start)
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
        if not self.plan.has_end:
            raise TypeError("a dataset with tail='continue' has no length: it has no end")
        return self.plan.num_micro_batches(self.topology.rank, start)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None or info.id == 0:
            self.say_cost(0 if info is None else info.num_workers)
        if info is None:
            return Pass(self._source, Worker(0, 1))
        end_with_parent()
        worker = Worker(info.id, info.num_workers, self._start.begin(info.seed - info.id))
        return bundles(self._source, worker) if self._sends_bundles else Pass(self._source, worker)

    def _source(self) -> Source:
        plan = self.plan
        masks = self._budget is not None
        rank, assembly = self.topology.rank, self._assembly
        return Source(plan, rank, self._start, assembly, self.columns, self.reading, self.stats, masks)


def _number_dtype(name: str, kind: Any) -> np.dtype[Any]:
    """The dtype of raw numbers as they lie in files: little-endian, and one that torch has."""
    try:
        dtype = np.dtype(kind if isinstance(kind, str) else object)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iuf" or dtype.itemsize > np.dtype(np.int64).itemsize or dtype.str[0] == ">":
        raise PlanError(f"unknown type of numbers for column {name!r}", expected="such as uint16", found=repr(kind))
    return dtype.newbyteorder("<")


def _budget(on_error: str, max_fraction: float, quarantine: str | os.PathLike[str] | None) -> MaskedBudget | None:
    if on_error not in get_args(OnError):
        raise PlanError("unknown on_error", expected=" or ".join(get_args(OnError)), found=repr(on_error))
    if on_error == "mask":
        return MaskedBudget(max_fraction, quarantine)
    if quarantine is not None:
        raise PlanError("quarantine= is for samples that are masked", hint="give on_error='mask'")
    return None
