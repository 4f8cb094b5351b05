"""Counts per sample that need a column's lists: token lengths and valid targets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardstream.columns import Column, Dense, Slices


def list_lengths(column: Column) -> npt.NDArray[np.int32]:
    """Returns the length of each row's list: int32[n]; rows without a value count 0.

    Example:
        >>> from shardstream.columns import Objects
        >>> list_lengths(Objects([[7, 8, None], [], None])).tolist()
        [3, 0, 0]
    """
    if isinstance(column, Slices):
        return column.lengths.astype(np.int32)
    if isinstance(column, Dense):
        lengths = np.full(len(column), column.values.shape[1], np.int32)
        if column.nulls is not None:
            lengths[column.nulls] = 0
        return lengths
    return np.array([0 if row is None else len(row) for row in column.values], np.int32)


def num_valid_targets(column: Column, ignore_index: int) -> npt.NDArray[np.int32]:
    """Returns how many entries of each row are targets: int32[n].

    Args:
        column: Lists of labels, or one label a row.
        ignore_index: The label that is not a target; nulls are none either.

    Example:
        >>> num_valid_targets(Dense(np.array([[1, -100], [-100, -100], [3, 4]])), -100).tolist()
        [1, 0, 2]
    """
    if isinstance(column, Slices):
        before = np.zeros(len(column.values) + 1, np.int64)
        np.cumsum(column.values != ignore_index, out=before[1:])
        in_rows = before[column.starts + column.lengths] - before[column.starts]
        return np.asarray(in_rows, np.int32)
    if isinstance(column, Dense):
        is_target = np.asarray(column.values != ignore_index).reshape(len(column), -1)
        counts: npt.NDArray[np.int32] = is_target.sum(axis=1, dtype=np.int32)
        if column.nulls is not None:
            counts[column.nulls] = 0
        return counts
    rows = (row if isinstance(row, list) else [row] for row in column.values)
    return np.array([sum(x is not None and x != ignore_index for x in row) for row in rows], np.int32)
