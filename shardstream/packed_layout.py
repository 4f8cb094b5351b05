"""Packed sequences as the rows of batches: what is copied out of runs, and how labels and positions are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.columns import Dense, Rows, Slices
from shardstream.deal import BoolArray
from shardstream.errors import DecodeError, PlanError
from shardstream.gathering import join_slices
from shardstream.grouping import stable_order
from shardstream.layout import Planned, RunKey, by_first_use
from shardstream.manifest import Manifest
from shardstream.packed_faults import FAULTS, blank_run, faults_of, with_faults, without_holes
from shardstream.packed_run import PackedRun, packed_run
from shardstream.packing import Packed, PackedOrder, Packing, Pieces
from shardstream.permutation import Int64Array
from shardstream.plan import Plan, PlannedBatch

COLUMNS = (
    "input_ids",
    "labels",
    "position_ids",
    "document_ids",
    "cu_seqlens",
    "span_sample_ids",
    "span_starts",
    "span_lengths",
)
_ROW_NUM_BYTES = 32  # of a token, in the columns of a batch and in what they are made of


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Rows that are packed sequences.

    Attributes:
        plan: A plan with a packing.
        ignore_index: The label of what is no target.
        wanted: Which of ``COLUMNS`` to make; None for all.
        finds_faults: Whether documents that cannot be decoded are told in a column ``FAULTS``, their targets masked,
            instead of raising what they fail with.

    Raises:
        PlanError: If a column is wanted that sequences do not have.
    """

    plan: Plan
    ignore_index: int = -100
    wanted: Sequence[str] | None = None
    finds_faults: bool = False

    def __post_init__(self) -> None:
        for name in self.wanted or ():
            if name not in COLUMNS:
                raise PlanError(f"packed sequences have no column {name!r}", expected=" or ".join(COLUMNS))

    @cached_property
    def _packed(self) -> Packed:
        assert self.plan.packed is not None  # noqa: S101 - it is for such plans
        return self.plan.packed

    @cached_property
    def columns(self) -> Sequence[str] | None:
        """The columns that tokens are in; of tars all fields (views of one array), where some samples lack them."""
        packing, manifest = self._packed.packing, self.plan.manifest
        named = [name for name in (packing.column, packing.loss_mask_column) if name is not None]
        missing = any(column.num_missing for column in manifest.columns if column.name in named)
        return None if missing and manifest.formats[0].startswith("tar") else named

    def source(self, key: RunKey) -> tuple[Manifest, Sequence[str] | None]:  # noqa: ARG002 - there is only one
        """Returns the plan's manifest, and ``columns``."""
        return self.plan.manifest, self.columns

    @property
    def row_num_bytes(self) -> int:
        """What a sequence takes."""
        return _ROW_NUM_BYTES * self._packed.packing.sequence_length

    def planned(self, batches: list[PlannedBatch]) -> Planned:
        """Finds the pieces of each sequence."""
        num_positions = self.plan.num_positions
        places = np.concatenate([batch.epoch * num_positions + batch.positions for batch in batches])
        epochs, positions = np.divmod(places, num_positions)
        ids = np.empty(len(places), np.int64)
        found: list[Pieces] = []
        known, num_blocks = np.unique(epochs).tolist(), self.plan.manifest.num_blocks
        for index, epoch in enumerate(known):
            rows = np.flatnonzero(epochs == epoch)
            order = self._order(epoch)
            ids[rows] = order.sample_ids(positions[rows])
            pieces = order.pieces(ids[rows])
            found.append(pieces._replace(sequence=rows[pieces.sequence], block=pieces.block + index * num_blocks))
        joined = Pieces(*map(np.concatenate, zip(*found, strict=True)))
        in_order = stable_order(joined.sequence)
        sequence, block, run, begin, end = (array[in_order] for array in joined)
        num_runs = int(run.max(initial=0)) + 1
        codes, key_of_piece = by_first_use(block * num_runs + run)
        keys = []
        for index, run_index in (divmod(code, num_runs) for code in codes):
            epoch_index, block_index = divmod(index, num_blocks)
            keys.append(RunKey(block_index, run_index, known[epoch_index]))
        places_of_pieces = np.stack((sequence, key_of_piece, begin, end), axis=1)
        make = partial(self._made, num_rows=len(places), pieces=places_of_pieces)
        return Planned(batches, ids, keys, make)

    def prepared(self, key: RunKey, rows: Rows) -> PackedRun:
        """Lays the run's documents end to end.

        Raises:
            DecodeError: If it holds other tokens than the manifest says, or something else.
        """
        manifest, order, packing = self.plan.manifest, self._order(key.epoch), self._packed.packing
        first_sample = self._first_sample(key)
        url = manifest.url_of_block(key.block)
        try:
            rows, faults = without_holes(rows, first_sample, packing) if self.finds_faults else (rows, {})
            run = packed_run(rows, order.samples.run_rows(key.block, key.run), first_sample, packing)
        except DecodeError as error:
            raise DecodeError(str(error), url=url, block=key.block) from error
        expected = order.run_length(key.block, key.run)
        if run.num_places != expected:
            raise DecodeError(
                f"run {key.run} holds other tokens than when it was indexed",
                url=url,
                block=key.block,
                expected=expected,
                found=run.num_places,
                hint="index the shards again, and start from the new manifest",
            )
        return with_faults(run, faults)

    def undecodable(self, key: RunKey, error: DecodeError) -> PackedRun:
        """Returns padding in place of the run: as many tokens, none of them a target."""
        order = self._order(key.epoch)
        num_rows = len(order.samples.run_rows(key.block, key.run))
        ids = self._first_sample(key) + np.arange(num_rows)
        return blank_run(order.run_length(key.block, key.run), ids, self._packed.packing, error)

    def _first_sample(self, key: RunKey) -> int:
        manifest = self.plan.manifest
        return int(manifest.block_start[key.block]) + key.run * int(manifest.block_run_rows[key.block])

    def _order(self, epoch: int) -> PackedOrder:
        order = self.plan.order(epoch)
        assert isinstance(order, PackedOrder)  # noqa: S101 - narrows the type
        return order

    def _made(self, runs: Sequence[PackedRun], *, num_rows: int, pieces: _Places) -> Rows:
        wanted = self.wanted or COLUMNS
        columns = sequences(runs, pieces, num_rows, self._packed.packing, self.ignore_index, wanted)
        num_bytes = sum(int(column.values.nbytes) for column in columns.values())
        if not self.finds_faults:
            return Rows(num_rows, {**columns}, num_bytes)
        faults = faults_of(runs, pieces, num_rows, self._packed.packing.sequence_length)
        return Rows(num_rows, {**columns, FAULTS: faults}, num_bytes)


_Places = Int64Array  # [n, 4]: row, run, first place in the run, behind the last one


def sequences(
    runs: Sequence[PackedRun],
    pieces: _Places,
    num_rows: int,
    packing: Packing,
    ignore_index: int,
    wanted: Sequence[str] = COLUMNS,
) -> dict[str, Dense | Slices]:
    """Makes sequences of the pieces of runs.

    Args:
        runs: The runs.
        pieces: int64[n, 4], for each piece its row, its run, and where it is in the run; row by row, in order.
        num_rows: How many sequences.
        packing: How.
        ignore_index: The label of what is no target.
        wanted: Which columns, in this order.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``: int64[num_rows, T]; ``document_ids``: int32[num_rows, T], counted
        in each sequence, -1 where there is no token. Lists, one a sequence: ``cu_seqlens`` int32, where each document
        begins and T at the end; of each document's span ``span_sample_ids``, ``span_starts`` (its tokens before it)
        and ``span_lengths``, int64.
    """
    length = packing.sequence_length
    row, run_of_piece, begin, end = _token_bounds(runs, pieces)
    sizes = end - begin
    is_first = np.diff(row, prepend=-1) != 0
    before = np.cumsum(sizes) - sizes
    place = before - np.repeat(before[is_first], np.diff(np.append(np.flatnonzero(is_first), len(row))))
    filled = np.bincount(row, weights=sizes, minlength=num_rows).astype(np.int64)
    where = (row, run_of_piece, begin, end)
    tokens = _lines([run.tokens for run in runs], where, filled, length + 1)
    input_ids, labels = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
    if any(run.is_target is not None for run in runs):
        masks = [np.ones(len(run.tokens), np.bool_) if run.is_target is None else run.is_target for run in runs]
        np.copyto(labels, ignore_index, where=~_lines(masks, where, filled, length + 1)[:, 1:])
    for here in np.flatnonzero(filled <= length).tolist():
        input_ids[here, filled[here] :] = packing.pad_id
        labels[here, filled[here] - 1 :] = ignore_index
    made: dict[str, Dense | Slices] = {"input_ids": Dense(input_ids), "labels": Dense(labels)}
    if not made.keys() >= set(wanted):
        stretches = _Stretches(row, run_of_piece, begin, np.minimum(end, begin + length - place), place)
        made |= _Spans.of(runs, stretches, np.minimum(filled, length), length).columns(wanted)
    return {name: made[name] for name in wanted}


def _token_bounds(runs: Sequence[PackedRun], pieces: _Places) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Row and run of each piece, and which tokens of the run it has."""
    row, run_of_piece, begin, end = pieces.T.copy()
    for index, run in enumerate(runs):
        if run.sequence_start is not None:
            mine = np.flatnonzero(run_of_piece == index)
            begin[mine], end[mine] = run.sequence_start[begin[mine]], run.sequence_start[end[mine]]
    return row, run_of_piece, begin, end


def _lines(
    numbers: Sequence[npt.NDArray[Any]], where: tuple[Int64Array, ...], filled: Int64Array, width: int
) -> npt.NDArray[Any]:
    """The numbers of a row's pieces end to end, ``[len(filled), width]``, with zeros behind them.

    Args:
        numbers: Of each run.
        where: Row, run, begin and end of each piece.
        filled: How many numbers the pieces of each row have.
        width: Of rows.
    """
    row, run, begin, end = where
    if len({each.dtype for each in numbers}) > 1:  # one of them stands for a run that cannot be decoded
        numbers = [each.astype(np.int64) for each in numbers]
    short = np.flatnonzero(filled < width)
    if len(short):
        numbers = [*numbers, np.zeros(width, numbers[0].dtype)]
        behind = np.searchsorted(row, short, side="right")
        run = np.insert(run, behind, len(numbers) - 1)
        begin, end = np.insert(begin, behind, filled[short]), np.insert(end, behind, width)
    slices = zip(run.tolist(), begin.tolist(), end.tolist(), strict=True)
    return join_slices(numbers, slices).reshape(len(filled), width)


class _Stretches(NamedTuple):
    """Tokens of runs that stand in rows as inputs: int64[n] each, row by row, in order."""

    row: Int64Array
    run: Int64Array
    begin: Int64Array
    end: Int64Array
    place: Int64Array
    """Where in its row it begins."""


@dataclass(frozen=True, eq=False)
class _Spans:
    """Which documents lie where in sequences; padding is a span of its own. Make one with ``_Spans.of``."""

    _num_rows: int
    _length: int
    _ids: Int64Array
    _offsets: Int64Array
    _num_spans: Int64Array
    _has_padding: BoolArray
    _begin: Int64Array
    """int64[num_spans + 1], in all the tokens of all rows, padding included; the last entry is their number."""

    @classmethod
    def of(cls, runs: Sequence[PackedRun], stretches: _Stretches, filled: Int64Array, length: int) -> _Spans:
        """Finds the documents of stretches.

        Args:
            runs: The runs.
            stretches: What stands in the rows.
            filled: int64[num_rows], tokens of each row; the rest is padding.
            length: Of a row.
        """
        row, run_of_stretch, begin, end, place = _Stretches(
            *(array[stretches.end > stretches.begin] for array in stretches)
        )
        num_rows = len(filled)
        first, last = np.empty(len(row), np.int64), np.empty(len(row), np.int64)
        used = np.unique(run_of_stretch).tolist()
        of_run = {index: np.flatnonzero(run_of_stretch == index) for index in used}
        for index, mine in of_run.items():
            first[mine] = runs[index].part_start.searchsorted(begin[mine], "right") - 1
            last[mine] = runs[index].part_start.searchsorted(end[mine], "left")
        counts = last - first
        behind = np.cumsum(counts)
        stretch = np.repeat(np.arange(len(row)), counts)
        part = np.arange(len(stretch)) - (behind - counts - first)[stretch]
        starts, ids, offsets = (np.empty(len(stretch), np.int64) for _ in range(3))
        for index, mine in of_run.items():
            spans = np.repeat((behind - counts)[mine] - (np.cumsum(counts[mine]) - counts[mine]), counts[mine])
            spans += np.arange(len(spans))
            run, parts = runs[index], part[spans]
            starts[spans], ids[spans], offsets[spans] = (
                run.part_start[parts],
                run.sample_ids[parts],
                run.part_offset[parts],
            )
        starts -= begin[stretch]  # below 0 where the document began before
        offsets -= np.minimum(starts, 0)
        begins = np.maximum(starts, 0) + (row * length + place)[stretch]
        has_padding = filled < length
        padding = np.flatnonzero(has_padding) * length + filled[has_padding]
        bounds = np.concatenate((begins, padding, np.array([num_rows * length])))
        bounds.sort()
        num_spans = np.bincount(row, weights=counts, minlength=num_rows).astype(np.int64)
        return cls(num_rows, length, ids, offsets, num_spans, has_padding, bounds)

    def columns(self, wanted: Sequence[str]) -> dict[str, Dense | Slices]:
        """Returns those columns of ``wanted`` that say where documents are."""
        makers: dict[str, Callable[[], Dense | Slices]] = {
            "position_ids": self._position_ids,
            "document_ids": self._document_ids,
            "cu_seqlens": self._cu_seqlens,
            "span_sample_ids": lambda: _lists(self._ids, self._num_spans),
            "span_starts": lambda: _lists(self._offsets, self._num_spans),
            "span_lengths": lambda: _lists(self._sizes[~self._is_padding], self._num_spans),
        }
        return {name: makers[name]() for name in wanted if name in makers}

    @cached_property
    def _sizes(self) -> Int64Array:
        return np.diff(self._begin)

    @cached_property
    def _per_row(self) -> Int64Array:
        return self._num_spans + self._has_padding

    @cached_property
    def _is_padding(self) -> BoolArray:
        is_padding = np.zeros(len(self._sizes), np.bool_)
        is_padding[(np.cumsum(self._per_row) - 1)[self._has_padding]] = True
        return is_padding

    def _position_ids(self) -> Dense:
        """Counts up from 0 in each document."""
        slices = ((0, 0, size) for size in self._sizes.tolist())
        return Dense(join_slices([np.arange(self._length)], slices).reshape(self._num_rows, self._length))

    def _document_ids(self) -> Dense:
        numbers = np.arange(len(self._sizes)) - np.repeat(np.cumsum(self._per_row) - self._per_row, self._per_row)
        numbers[self._is_padding] = -1
        ids = np.repeat(numbers.astype(np.int32), self._sizes)
        return Dense(ids.reshape(self._num_rows, self._length))

    def _cu_seqlens(self) -> Slices:
        """One more entry a row than spans: T, the end of the last."""
        row_of_span = np.repeat(np.arange(self._num_rows), self._per_row)
        bounds = np.empty(len(row_of_span) + self._num_rows, np.int32)
        bounds[np.arange(len(row_of_span)) + row_of_span] = self._begin[:-1] - row_of_span * self._length
        bounds[np.cumsum(self._per_row + 1) - 1] = self._length
        return _lists(bounds, self._per_row + 1)


def _lists(values: npt.NDArray[Any], lengths: Int64Array) -> Slices:
    return Slices(values, np.cumsum(lengths) - lengths, lengths, "list")
