"""Values of samples that lie one after the other in a byte array, as columns: without a step of Python for numbers.

A ``Make`` turns where a field's values lie (``values`` uint8, ``starts`` and ``lengths`` int64[n]) into a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream.columns import Column, Dense, Objects, SliceKind, Slices

Bytes: TypeAlias = npt.NDArray[np.uint8]
Places: TypeAlias = npt.NDArray[np.int64]
Make: TypeAlias = Callable[[Bytes, Places, Places], Column]
Header: TypeAlias = Callable[[bytes], "tuple[np.dtype[Any], tuple[int, ...], int]"]


@dataclass(frozen=True)
class Field:
    """A field of every sample.

    Attributes:
        name: Its column.
        type: What its values are, as Arrow says it.
        make: Makes a column of them.
        num_bytes: Size of every value, or None where it varies.
    """

    name: str
    type: pa.DataType
    make: Make
    num_bytes: int | None = None


def numbers(name: str, dtype: npt.DTypeLike, shape: Sequence[int] = (), *, is_sized: bool = True) -> Field:
    """Returns a field of numbers, or of arrays that all have one shape (``Dense[n, *shape]``).

    Args:
        name: Its column.
        dtype: Of the numbers.
        shape: Of every value.
        is_sized: Whether samples leave out the size of these values, as it never differs.

    Example:
        >>> field = numbers("x", "<i2")
        >>> field.make(np.array([9, 7, 0, 8, 0], np.uint8), np.array([1, 3]), np.array([2, 2])).values.tolist()
        [7, 8]
    """
    kind = np.dtype(dtype)
    width = int(np.prod(shape, dtype=np.int64)) * kind.itemsize

    def make(values: Bytes, starts: Places, lengths: Places) -> Column:
        if np.any(lengths != width):
            raise ValueError(f"a value takes {int(lengths[np.argmax(lengths != width)])} bytes, not {width}")
        return Dense(gathered(values, starts, width).view(kind).reshape(len(starts), *shape))

    arrow_type = pa.from_numpy_dtype(kind)
    for size in reversed(shape):
        arrow_type = pa.list_(arrow_type, size)
    return Field(name, arrow_type, make, width if is_sized else None)


def lists(name: str, dtype: npt.DTypeLike) -> Field:
    """Returns a field of lists of numbers without a header.

    Example:
        >>> field = lists("x", "<i2")
        >>> field.make(np.array([7, 0, 8, 0], np.uint8), np.array([0, 4]), np.array([4, 0])).lengths.tolist()
        [2, 0]
    """
    kind = np.dtype(dtype)
    return Field(name, pa.list_(pa.from_numpy_dtype(kind)), partial(_lists, dtype=kind))


def arrays(name: str, of_first: tuple[str, int] | None, header: Header, flat: Callable[..., Column | None]) -> Field:
    """Returns a field of arrays that say their type and shape themselves.

    Args:
        name: Its column.
        of_first: Type of the numbers and number of dimensions, as far as is known: those of the first value.
        header: Takes a value apart: its dtype, its shape, and where the numbers begin.
        flat: Makes the column, fast, if all arrays have one dimension and one type; else returns None.
    """

    def make(values: Bytes, starts: Places, lengths: Places) -> Column:
        column = flat(values, starts, lengths) if len(starts) else None
        return column if column is not None else _objects(values, starts, lengths, one)

    def one(value: bytes) -> npt.NDArray[Any]:
        dtype, shape, begin = header(value)
        return np.frombuffer(value, dtype, offset=begin).reshape(shape)

    dtype, num_dims = of_first or (None, 1)
    arrow_type = pa.null() if dtype is None else pa.from_numpy_dtype(np.dtype(dtype))
    for _ in range(num_dims):
        arrow_type = pa.list_(arrow_type)
    return Field(name, arrow_type, make)


def text(name: str) -> Field:
    """Returns a field of UTF-8 text."""
    return Field(name, pa.string(), partial(_slices, kind="text"))


def data(name: str) -> Field:
    """Returns a field of bytes, as they are stored."""
    return Field(name, pa.binary(), partial(_slices, kind="bytes"))


def objects(name: str, arrow_type: pa.DataType, decode: Callable[[bytes], Any]) -> Field:
    """Returns a field that needs a step of Python for every value.

    Args:
        name: Its column.
        arrow_type: How its values are stored.
        decode: Makes a value.
    """
    return Field(name, arrow_type, partial(_objects, decode=decode))


def column_as(column: Column, arrow_type: pa.DataType) -> Column:
    """Returns a column of numbers in the type that all shards share; any other as it is."""
    while pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        arrow_type = arrow_type.value_type
    if isinstance(column, Objects) or (isinstance(column, Slices) and column.kind != "list"):
        return column
    wanted = np.dtype(arrow_type.to_pandas_dtype())
    if column.values.dtype == wanted or wanted.kind not in "biuf":
        return column
    values = column.values.astype(wanted)
    return Dense(values) if isinstance(column, Dense) else Slices(values, column.starts, column.lengths, "list")


def gathered(values: Bytes, starts: Places, width: int) -> Bytes:
    """Returns uint8[n, width]: the bytes that begin at each place, copied.

    Raises:
        ValueError: If some lie outside.
    """
    if not len(starts) or not width:
        return np.empty((len(starts), width), np.uint8)
    if starts.min() < 0 or starts.max() + width > len(values):
        raise ValueError("a value lies outside its sample")
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    return np.ascontiguousarray(windows[starts])


def shifted_lists(values: Bytes, starts: Places, lengths: Places, header_num_bytes: Places, dtype: Any) -> Slices:
    """Returns lists of numbers that stand behind a header."""
    return _lists(values, starts + header_num_bytes, lengths - header_num_bytes, np.dtype(dtype))


def _slices(values: Bytes, starts: Places, lengths: Places, kind: SliceKind) -> Slices:
    return Slices(values, starts, lengths, kind)


def _lists(values: Bytes, starts: Places, lengths: Places, dtype: np.dtype[Any]) -> Slices:
    """A view where the lists lie one after the other at addresses that fit; else a copy, list by list."""
    if np.any(lengths % dtype.itemsize) or np.any(lengths < 0):
        raise ValueError(f"a list takes a number of bytes that is no multiple of {dtype.itemsize}")
    ends = np.cumsum(lengths)
    first, num_bytes = (int(starts[0]), int(ends[-1])) if len(starts) else (0, 0)
    packed = values[first : first + num_bytes]
    if not np.array_equal(starts - first, ends - lengths) or packed.ctypes.data % dtype.itemsize:
        packed = np.empty(num_bytes, np.uint8)
        if num_bytes:
            pairs = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
            np.concatenate([values[begin:end] for begin, end in pairs], out=packed)
    return Slices(packed.view(dtype), (ends - lengths) // dtype.itemsize, lengths // dtype.itemsize, "list")


def _objects(values: Bytes, starts: Places, lengths: Places, decode: Callable[[bytes], Any]) -> Objects:
    made = []
    memory = np.ascontiguousarray(values).data
    for row, (begin, end) in enumerate(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)):
        try:
            made.append(decode(bytes(memory[begin:end])))
        except (ValueError, KeyError, IndexError, ArithmeticError, UnicodeError) as error:
            raise ValueError(f"row {row} of the run: {type(error).__name__}: {error}") from error
    return Objects(made)
