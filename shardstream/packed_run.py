"""A run as packing reads it: its documents' tokens end to end in the order of the epoch, and where each begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.columns import Column, Dense, Objects, Rows, Slices
from shardstream.deal import BoolArray
from shardstream.errors import DecodeError
from shardstream.fitting import Parts, best_fit, cut_documents
from shardstream.gathering import join_slices
from shardstream.packing import Packing
from shardstream.permutation import Int64Array

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PackedRun:
    """The tokens of a run, laid end to end.

    Attributes:
        tokens: ``[n]``, of the column's dtype; sequence by sequence where the run has its own.
        part_start: int64[p + 1], where in ``tokens`` each document, or part of one, begins; the last entry is n.
        sample_ids: int64[p], the sample that each is of.
        part_offset: int64[p], tokens of the sample that come before it.
        is_target: bool[n], False where a token must not be a target; None where all may.
        sequence_start: int64[s + 1], where each sequence begins; None in ``"tokens"`` mode.
        faults: Sample id of a part → (sample id, error) of what is told to be at fault with it.
    """

    tokens: Numbers
    part_start: Int64Array
    sample_ids: Int64Array
    part_offset: Int64Array
    is_target: BoolArray | None
    sequence_start: Int64Array | None
    faults: Mapping[int, Sequence[tuple[int, DecodeError]]] = field(default_factory=dict)

    @property
    def num_places(self) -> int:
        """Tokens of the run; its sequences where it has its own."""
        return len(self.tokens) if self.sequence_start is None else len(self.sequence_start) - 1


def packed_run(rows: Rows, order: Int64Array, first_sample: int, packing: Packing) -> PackedRun:
    """Lays a run's documents end to end.

    Args:
        rows: The run, with the columns that the packing names.
        order: int64[num_rows], its rows in the order of the epoch.
        first_sample: Sample id of its first row.
        packing: How.

    Raises:
        DecodeError: If a row holds no tokens (nulls in a list, other values than whole numbers), or its loss mask
            does not fit; it names the sample.

    Example:
        >>> lists = Slices(np.array([5, 6, 7]), np.array([0, 2]), np.array([2, 1]), "list")
        >>> run = packed_run(Rows(2, {"tokens": lists}), np.array([1, 0]), 40, Packing(4, eos_id=0))
        >>> run.tokens.tolist(), run.part_start.tolist(), run.sample_ids.tolist()
        ([7, 0, 5, 6, 0], [0, 2, 5], [41, 40])
    """
    dtype = packing.tokens_dtype
    column = rows.columns[packing.column]
    lists = _lists_of(packing.column, column, None if dtype is None else np.dtype(dtype), first_sample)
    kept = order if lists.nulls is None else order[~lists.nulls[order]]
    tokens, lengths = _end_to_end(lists, kept, packing.eos_id)
    if tokens.dtype.kind not in "iu":
        raise DecodeError(f"column {packing.column!r} holds no tokens", expected="whole numbers", found=tokens.dtype)
    is_target = None
    if packing.loss_mask_column is not None:
        is_target = _loss_mask(packing, rows, lists, kept, first_sample)
    has_tokens = lengths > 0
    run = PackedRun(
        tokens=tokens,
        part_start=_starts(lengths[has_tokens]),
        sample_ids=first_sample + kept[has_tokens],
        part_offset=np.zeros(int(has_tokens.sum()), np.int64),
        is_target=is_target,
        sequence_start=None,
    )
    if not packing.is_line:
        run = _fitted(run, packing)
    elif packing.mask_document_starts:
        run = _without_starts(run)
    return run


def _fitted(run: PackedRun, packing: Packing) -> PackedRun:
    """Puts documents together to sequences; each stays by itself if they are unpacked.

    Where a sequence stands follows from its first document's place in the run.
    Documents of one length are taken in the epoch's order, so that others meet in each epoch.
    """
    parts = cut_documents(np.diff(run.part_start), packing.sequence_length)
    num_parts, capacity = len(parts.length), packing.sequence_length + 1
    sequence = best_fit(parts.length, capacity) if packing.mode == "whole" else np.arange(num_parts)
    first_part = np.full(int(sequence.max(initial=-1)) + 1, len(sequence))
    np.minimum.at(first_part, sequence, np.arange(len(sequence)))
    place = np.argsort(np.argsort(first_part))[sequence]
    by_sequence = np.argsort(place, kind="stable")
    document, offset, length = Parts(*(array[by_sequence] for array in parts))
    begin = run.part_start[document] + offset
    slices = list(zip([0] * len(begin), begin.tolist(), (begin + length).tolist(), strict=True))
    per_sequence = np.bincount(place, weights=parts.length, minlength=len(first_part)).astype(np.int64)
    fitted = PackedRun(
        tokens=join_slices([run.tokens], slices),
        part_start=_starts(length),
        sample_ids=run.sample_ids[document],
        part_offset=offset,
        is_target=None if run.is_target is None else join_slices([run.is_target], slices),
        sequence_start=_starts(per_sequence),
    )
    return _without_starts(fitted)


def _without_starts(run: PackedRun) -> PackedRun:
    """The first token of a document, or of a part of one, is no target."""
    is_target = np.ones(len(run.tokens), np.bool_) if run.is_target is None else run.is_target
    is_target[run.part_start[:-1]] = False
    return PackedRun(run.tokens, run.part_start, run.sample_ids, run.part_offset, is_target, run.sequence_start)


def _starts(lengths: Int64Array) -> Int64Array:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


# -------------------------------------------------------------------------------------------------------- columns


class _Lists(NamedTuple):
    """One list of numbers a row."""

    values: Numbers
    starts: Int64Array
    lengths: Int64Array
    nulls: BoolArray | None
    dtype: np.dtype[Any]  # of the numbers; where values are raw bytes it differs from theirs


def _lists_of(name: str, column: Column, raw_dtype: np.dtype[Any] | None, first_sample: int) -> _Lists:
    if isinstance(column, Slices) and column.kind == "list":
        return _Lists(column.values, column.starts, column.lengths, column.nulls, column.values.dtype)
    if isinstance(column, Dense) and column.values.ndim == 2:  # noqa: PLR2004 - lists of a fixed size
        num_rows, size = column.values.shape
        lengths = np.full(num_rows, size, np.int64)
        values = column.values.reshape(-1)
        return _Lists(values, np.arange(num_rows) * size, lengths, column.nulls, values.dtype)
    if isinstance(column, Slices) and column.kind == "bytes":
        if raw_dtype is None:
            hint = "say what they are: Packing(tokens_dtype='uint16')"
            raise DecodeError(f"column {name!r} holds bytes", expected="lists of tokens", hint=hint)
        odd = np.flatnonzero(column.lengths % raw_dtype.itemsize)
        if len(odd):
            expected, found = f"a multiple of {raw_dtype.itemsize}", int(column.lengths[odd[0]])
            what = f"the bytes of {name!r} of sample {first_sample + int(odd[0])} are no {raw_dtype}"
            raise DecodeError(what, expected=expected, found=found)
        return _Lists(column.values, column.starts, column.lengths, column.nulls, raw_dtype.newbyteorder("<"))
    if isinstance(column, Objects):
        row = next((row for row, value in enumerate(column.values) if value is not None and None in value), 0)
        raise DecodeError(f"column {name!r} of sample {first_sample + row} is no list of tokens: a null is in it")
    raise DecodeError(f"column {name!r} holds no lists of tokens", found=type(column).__name__)


def _end_to_end(lists: _Lists, rows: Int64Array, eos: int | None) -> tuple[Numbers, Int64Array]:
    """The numbers of rows end to end, ``eos`` after each if given, and int64[len(rows)] how many each has with it."""
    starts, lengths = lists.starts[rows], lists.lengths[rows]
    slices = zip([0] * len(rows), starts.tolist(), (starts + lengths).tolist(), strict=True)
    itemsize = lists.dtype.itemsize if lists.dtype != lists.values.dtype else 1
    if eos is None:
        return join_slices([lists.values], slices).view(lists.dtype), lengths // itemsize
    if lists.dtype.kind in "iu" and eos > np.iinfo(lists.dtype).max:
        expected = f"at most {np.iinfo(lists.dtype).max}, which {lists.dtype} holds"
        raise DecodeError("eos_id does not fit the tokens' type", expected=expected, found=eos)
    end = np.array([eos], lists.dtype).view(lists.values.dtype)
    ended = [(1, 0, len(end))] * (2 * len(rows))
    ended[::2] = slices
    return join_slices([lists.values, end], ended).view(lists.dtype), lengths // itemsize + 1


def _loss_mask(packing: Packing, rows: Rows, tokens: _Lists, kept: Int64Array, first_sample: int) -> BoolArray:
    name = str(packing.loss_mask_column)
    mask = _lists_of(name, rows.columns[name], np.dtype(np.uint8), first_sample)
    num_tokens = tokens.lengths
    if tokens.dtype != tokens.values.dtype:
        num_tokens = num_tokens // tokens.dtype.itemsize
    wrong = kept[mask.lengths[kept] != num_tokens[kept]]
    if len(wrong):
        row = int(wrong[0])
        raise DecodeError(
            f"the loss mask {name!r} of sample {first_sample + row} needs one number a token",
            expected=int(num_tokens[row]),
            found=int(mask.lengths[row]),
        )
    is_target: BoolArray = _end_to_end(mask, kept, None if packing.eos_id is None else 1)[0] != 0
    return is_target
