"""Lists of Arrow as flat numpy arrays.

Without ``pyarrow.compute``, which takes longer to import than a first batch may.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream.arrow_memory import number_dtype, numbers


def list_lengths(lists: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Returns the length of each list: int64[n].

    Example:
        >>> list_lengths(pa.chunked_array([[[1, 2], []], [[3]]])).tolist()
        [2, 0, 1]
    """
    lengths = [np.diff(numbers(chunk.offsets)) for chunk in lists.chunks]
    return np.concatenate([np.empty(0, np.int64), *lengths])


def list_values(lists: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns the entries of all lists of numbers, end to end.

    Example:
        >>> list_values(pa.chunked_array([[[1, 2], []], [[3]]])).tolist()
        [1, 2, 3]
    """
    empty = np.empty(0, number_dtype(lists.type.value_type))
    bounds = [(chunk.offsets[0].as_py(), chunk.offsets[-1].as_py()) for chunk in lists.chunks]
    values = [
        numbers(chunk.values.slice(begin, end - begin))
        for chunk, (begin, end) in zip(lists.chunks, bounds, strict=True)
    ]
    return values[0] if len(values) == 1 else np.concatenate([empty, *values])


def column_numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns the values of a column of numbers.

    Example:
        >>> column_numbers(pa.chunked_array([[1, 2], [3]])).tolist()
        [1, 2, 3]
    """
    return np.concatenate([np.empty(0, number_dtype(column.type)), *map(numbers, column.chunks)])


def has_nulls(column: pa.ChunkedArray) -> bool:
    """Whether a row of a column, or an entry of its lists, is null."""
    entries = [chunk.values.null_count for chunk in column.chunks if pa.types.is_list(column.type)]
    return bool(column.null_count or any(entries))


def typed(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Returns a column in a type; itself where it has that."""
    return column if column.type == kind else column.cast(kind)
