"""Packed sequences as the rows of batches: what is copied out of runs, and how labels and positions are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.columns import Dense, Rows, Slices
from shardstream.deal import BoolArray
from shardstream.errors import DecodeError, PlanError
from shardstream.layout import Planned, RunKey
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
        found: list[tuple[Pieces, int]] = []
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            order = self._order(epoch)
            ids[rows] = order.sample_ids(positions[rows])
            pieces = order.pieces(ids[rows])
            found.append((pieces._replace(sequence=rows[pieces.sequence]), epoch))
        epoch_of_piece = np.concatenate([np.full(len(pieces.sequence), epoch) for pieces, epoch in found])
        joined = Pieces(*(np.concatenate(arrays) for arrays in zip(*(pieces for pieces, _ in found), strict=True)))
        in_order = np.argsort(joined.sequence, kind="stable")
        joined = Pieces(*(array[in_order] for array in joined))
        keys: dict[RunKey, int] = {}
        named = zip(joined.block.tolist(), joined.run.tolist(), epoch_of_piece[in_order].tolist(), strict=True)
        key_of_piece = [keys.setdefault(RunKey(*name), len(keys)) for name in named]
        make = partial(
            self._made,
            num_rows=len(places),
            pieces=list(
                zip(joined.sequence.tolist(), key_of_piece, joined.begin.tolist(), joined.end.tolist(), strict=True)
            ),
        )
        return Planned(batches, ids, list(keys), make)

    def prepared(self, key: RunKey, rows: Rows) -> PackedRun:
        """Lays the run's documents end to end.

        Raises:
            DecodeError: If it holds other tokens than the manifest says, or something else.
        """
        manifest, order, packing = self.plan.manifest, self._order(key.epoch), self._packed.packing
        first_sample = self._first_sample(key)
        url = manifest.url(int(manifest.shard_of_block(np.array([key.block]))[0]))
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


_Places = list[tuple[int, int, int, int]]  # row, run, first place in the run, behind the last one


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
        pieces: For each piece its row, its run, and where it is in the run; row by row, in order.
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
    spans = _Spans(num_rows, packing.sequence_length)
    input_ids = np.empty((num_rows, packing.sequence_length), np.int64)
    labels = np.empty((num_rows, packing.sequence_length), np.int64)
    filled = 0
    for index, (row, run_index, first, last) in enumerate(pieces):
        run = runs[run_index]
        if run.sequence_start is None:
            begin, end = first, last
        else:
            begin, end = int(run.sequence_start[first]), int(run.sequence_start[last])
        _copy(run, begin, end, input_ids[row], labels[row], filled, ignore_index)
        spans.add(run, row, begin, min(end, begin + packing.sequence_length - filled), filled)
        filled += end - begin
        if index + 1 == len(pieces) or pieces[index + 1][0] != row:
            input_ids[row, filled:] = packing.pad_id
            labels[row, filled - 1 :] = ignore_index
            spans.end_row(row, filled)
            filled = 0
    made = {"input_ids": Dense(input_ids), "labels": Dense(labels), **spans.columns(wanted)}
    return {name: made[name] for name in wanted}


def _copy(
    run: PackedRun,
    begin: int,
    end: int,
    input_ids: Int64Array,
    labels: Int64Array,
    place: int,
    ignore_index: int,
) -> None:
    """Puts tokens into a sequence at a place: as inputs there, as labels one place before."""
    length, tokens = len(input_ids), run.tokens[begin:end]
    input_ids[place : place + len(tokens)] = tokens[: length - place]
    skipped = int(place == 0)  # the sequence's first token is no target of it
    target = slice(place - 1 + skipped, place - 1 + len(tokens))
    labels[target] = tokens[skipped:]
    if run.is_target is not None:
        labels[target][~run.is_target[begin + skipped : end]] = ignore_index


class _Spans:
    """Which documents lie where in sequences, collected piece by piece."""

    def __init__(self, num_rows: int, length: int) -> None:
        self._num_rows, self._length = num_rows, length
        self._begins: list[Int64Array] = []  # in all the tokens of all rows, padding as a span of its own
        self._ids: list[Int64Array] = []
        self._offsets: list[Int64Array] = []
        self._num_spans = np.zeros(num_rows, np.int64)
        self._has_padding = np.zeros(num_rows, np.bool_)

    def add(self, run: PackedRun, row: int, begin: int, end: int, place: int) -> None:
        """Adds the spans of the tokens ``begin`` .. ``end - 1`` of a run, which stand at a place of a row."""
        if end <= begin:
            return
        first = int(run.part_start.searchsorted(begin, "right")) - 1
        last = int(run.part_start.searchsorted(end, "left"))
        begins = run.part_start[first:last] - begin
        before = run.part_offset[first:last]
        if begins[0] < 0:
            before = before.copy()
            before[0] -= begins[0]
            begins[0] = 0
        self._begins.append(begins + (row * self._length + place))
        self._ids.append(run.sample_ids[first:last])
        self._offsets.append(before)
        self._num_spans[row] += last - first

    def end_row(self, row: int, filled: int) -> None:
        """Ends a row, the rest of which is padding."""
        if filled < self._length:
            self._begins.append(np.array([row * self._length + filled]))
            self._has_padding[row] = True

    def columns(self, wanted: Sequence[str]) -> dict[str, Dense | Slices]:
        """Returns those columns of ``wanted`` that say where documents are."""
        makers: dict[str, Callable[[], Dense | Slices]] = {
            "position_ids": self._position_ids,
            "document_ids": self._document_ids,
            "cu_seqlens": self._cu_seqlens,
            "span_sample_ids": lambda: _lists(np.concatenate(self._ids), self._num_spans),
            "span_starts": lambda: _lists(np.concatenate(self._offsets), self._num_spans),
            "span_lengths": lambda: _lists(self._sizes[~self._is_padding], self._num_spans),
        }
        return {name: makers[name]() for name in wanted if name in makers}

    @cached_property
    def _begin(self) -> Int64Array:
        """int64[num_spans + 1], padding included; the last entry is the number of tokens."""
        return np.concatenate([*self._begins, np.array([self._num_rows * self._length])])

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
        """Counts up, and falls back to 0 at each document: place in the row, less where in it the document begins."""
        ids = np.repeat(self._begin[:-1] % self._length, self._sizes).reshape(self._num_rows, self._length)
        np.subtract(np.arange(self._length), ids, out=ids)  # in place, because memory is what this costs
        return Dense(ids)

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
