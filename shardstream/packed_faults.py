"""Documents that cannot be decoded, in packed sequences: they keep their length, and none of their tokens is a target.

How many tokens a run has is known beforehand, and all sequences behind it depend on that; so nothing may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardstream.columns import Column, Objects, Rows, Slices
from shardstream.errors import DecodeError
from shardstream.packed_run import PackedRun
from shardstream.packing import Packing
from shardstream.permutation import Int64Array

FAULTS = "__faults__"
"""Column with what is at fault in each sequence: (sample id, error) of each document that begins in it, or None."""


def without_holes(rows: Rows, first_sample: int, packing: Packing) -> tuple[Rows, dict[int, DecodeError]]:
    """Replaces lists of tokens with nulls in them, and loss masks of another length than their tokens.

    Args:
        rows: A run.
        first_sample: Sample id of its first row.
        packing: How it will be packed.

    Returns:
        The run with lists of the same lengths, and sample id → what is wrong with it.

    Example:
        >>> rows, faults = without_holes(Rows(2, {"tokens": Objects([[1, None], [2]])}), 40, Packing(4))
        >>> rows.columns["tokens"].values.tolist(), [(sample, str(error)) for sample, error in faults.items()]
        ([1, 0, 2], [(40, "column 'tokens' of sample 40 is no list of tokens: a null is in it")])
    """
    faults: dict[int, DecodeError] = {}
    tokens, mask_name = rows.columns[packing.column], packing.loss_mask_column
    if isinstance(tokens, Objects):
        for row, value in enumerate(tokens.values):
            if value is not None and None in value:
                what = f"column {packing.column!r} of sample {first_sample + row} is no list of tokens: a null is in it"
                faults[first_sample + row] = DecodeError(what)
        filled = [None if value is None else [token or 0 for token in value] for value in tokens.values]
        rows = replace(rows, columns={**rows.columns, packing.column: _lists(filled)})
    if mask_name is not None:
        lengths = _lengths(rows.columns[packing.column], packing.tokens_dtype)
        mask = _slices_of(rows.columns[mask_name])
        wrong = np.flatnonzero(lengths != mask.lengths)
        for row in wrong.tolist():
            what = f"the loss mask {mask_name!r} of sample {first_sample + row} needs one number a token"
            error = DecodeError(what, expected=int(lengths[row]), found=int(mask.lengths[row]))
            faults.setdefault(first_sample + row, error)
        if len(wrong):
            rows = replace(rows, columns={**rows.columns, mask_name: _with_zeros(mask, wrong, lengths)})
    return rows, faults


def with_faults(run: PackedRun, faults: Mapping[int, DecodeError]) -> PackedRun:
    """Returns the run with the tokens of some samples no targets."""
    if not faults:
        return run
    is_bad = np.isin(run.sample_ids, list(faults))
    is_target = np.ones(len(run.tokens), np.bool_) if run.is_target is None else run.is_target.copy()
    is_target[np.repeat(is_bad, np.diff(run.part_start))] = False
    return replace(run, is_target=is_target, faults={sample: ((sample, error),) for sample, error in faults.items()})


def blank_run(num_places: int, sample_ids: Int64Array, packing: Packing, error: DecodeError) -> PackedRun:
    """Returns what stands for a run that cannot be decoded: padding, as one document.

    Args:
        num_places: Tokens that it has, or sequences.
        sample_ids: int64[n], of its rows.
        packing: How.
        error: Why it cannot be decoded.
    """
    starts = np.arange(num_places + 1)
    return PackedRun(
        tokens=np.full(num_places, packing.pad_id, np.int64),
        part_start=np.array([0, num_places]) if packing.is_line else starts,
        sample_ids=np.full(1 if packing.is_line else num_places, sample_ids[0]),
        part_offset=np.zeros(1, np.int64) if packing.is_line else starts[:-1],
        is_target=np.zeros(num_places, np.bool_),
        sequence_start=None if packing.is_line else starts,
        faults={int(sample_ids[0]): tuple((sample, error) for sample in sample_ids.tolist())},
    )


def faults_of(runs: Sequence[PackedRun], pieces: Int64Array, num_rows: int, sequence_length: int) -> Objects:
    """Returns the column ``FAULTS`` of sequences; see ``packed_layout.sequences``. Each document is told once."""
    found: list[Any] = [None] * num_rows
    if not any(run.faults for run in runs):
        return Objects(found)
    filled = [0] * num_rows
    for row, run_index, first, last in pieces.tolist():
        run = runs[run_index]
        if run.sequence_start is None:
            begin, end = first, last
        else:
            begin, end = int(run.sequence_start[first]), int(run.sequence_start[last])
        inside = min(end, begin + sequence_length - filled[row])  # the token behind is an input of the next sequence
        filled[row] += end - begin
        if not run.faults:
            continue
        for part in np.flatnonzero((run.part_start[:-1] >= begin) & (run.part_start[:-1] < inside)).tolist():
            told = run.faults.get(int(run.sample_ids[part]), ()) if run.part_offset[part] == 0 else ()
            found[row] = (*(found[row] or ()), *told) or None
    return Objects(found)


def _lengths(column: Column, raw_dtype: str | None) -> Int64Array:
    """int64[n]: numbers in each row's list; 0 where there is none."""
    if isinstance(column, Slices):
        itemsize = np.dtype(raw_dtype or "uint8").itemsize if column.kind == "bytes" else 1
        return column.lengths // itemsize
    if isinstance(column, Objects):
        return np.array([0 if value is None else len(value) for value in column.values], np.int64)
    lengths = np.full(len(column), column.values.shape[1], np.int64)
    return lengths if column.nulls is None else np.where(column.nulls, 0, lengths)


def _lists(values: Sequence[Sequence[int] | None]) -> Slices:
    lengths = np.array([0 if value is None else len(value) for value in values], np.int64)
    joined = np.array([token for value in values for token in value or ()])
    nulls = np.array([value is None for value in values])
    return Slices(joined, np.cumsum(lengths) - lengths, lengths, "list", nulls if nulls.any() else None)


def _slices_of(column: Column) -> Slices:
    """A column of lists of numbers; nulls in lists become zeros."""
    if isinstance(column, Slices):
        return column
    if isinstance(column, Objects):
        return _lists([None if value is None else [number or 0 for number in value] for value in column.values])
    num_rows, size = column.values.shape
    lengths = np.full(num_rows, size, np.int64) if column.nulls is None else np.where(column.nulls, 0, size)
    return Slices(column.values.reshape(-1), np.arange(num_rows) * size, lengths, "list", column.nulls)


def _with_zeros(column: Slices, rows: Int64Array, lengths: Int64Array) -> Slices:
    """The column with as many zeros in some rows as ``lengths`` says."""
    values = np.concatenate((column.values, np.zeros(int(lengths[rows].max()), column.values.dtype)))
    starts = column.starts.copy()
    starts[rows] = len(column.values)
    return replace(column, values=values, starts=starts, lengths=lengths, nulls=None)
