"""Columns in memory: what formats hand over, fetching gathers and batches are made of. Numpy only.

A column of n rows is one of three frozen values. ``Dense`` and ``Slices`` are views of the memory that the decoder
filled, or of a copy of just their size where that would keep too much alive (``tight``); ``gathering`` copies from
there into batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from shardstream.errors import DecodeError

SliceKind: TypeAlias = Literal["list", "bytes", "text"]


class ByteSource(Protocol):
    """Bytes of which some can be had without touching all the memory that they are mapped to."""

    @property
    def values(self) -> npt.NDArray[np.uint8]:
        """All of them."""
        ...

    def read(self, begin: int, end: int, /) -> bytes:
        """Returns those from ``begin`` to ``end``, or raises a ``ReadError``."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """Numbers, one cell a row: ``values[n]``, or ``values[n, k]`` for lists of a fixed size.

    ``nulls`` is ``bool[n]`` (True where the row has no value; ``values`` holds anything there) or None.
    """

    values: npt.NDArray[Any]
    nulls: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, eq=False)
class Slices:
    """Rows of varying length: row i is ``values[starts[i] : starts[i] + lengths[i]]``.

    ``kind`` says what a row is: "list" (numbers), "bytes" or "text" (both ``values`` of uint8; text is UTF-8).
    ``starts`` and ``lengths`` are int64[n]; rows may lie anywhere in ``values``, in any order.
    ``nulls`` is ``bool[n]`` (True where the row has no value, its length is 0 then) or None.
    ``source``, of bytes, is where single rows are read from at less expense than from ``values``, or None.
    """

    values: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    kind: SliceKind
    nulls: npt.NDArray[np.bool_] | None = None
    source: ByteSource | None = None

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, eq=False)
class Objects:
    """Everything else: one Python value a row (None where there is no value)."""

    values: Sequence[Any]

    def __len__(self) -> int:
        return len(self.values)


@final
@dataclass(frozen=True, eq=False)
class Scattered(Sequence[bytes | None]):
    """The ``bytes`` of rows that were gathered, made when they are asked for, of where they lie.

    Row i is ``arrays[array_of_row[i]][starts[i] : starts[i] + lengths[i]]``. ``arrays`` are of uint8 or sources of it;
    ``array_of_row``, ``starts`` and ``lengths`` int64[n]; ``nulls`` is ``bool[n]`` or None, as in ``Slices``. Slices of
    it are of the same kind.
    """

    arrays: Sequence[npt.NDArray[np.uint8] | ByteSource]
    array_of_row: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    nulls: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            row = range(len(self))[key]
            return next(iter(self[row : row + 1]))
        nulls = None if self.nulls is None else self.nulls[key]
        return Scattered(self.arrays, self.array_of_row[key], self.starts[key], self.lengths[key], nulls)

    def __iter__(self) -> Iterator[bytes | None]:
        arrays = map(self.arrays.__getitem__, self.array_of_row.tolist())
        bounds = zip(arrays, self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True)
        values = (
            array[begin:end].tobytes() if isinstance(array, np.ndarray) else array.read(begin, end)
            for array, begin, end in bounds
        )
        if self.nulls is None:
            return values
        return (None if is_null else value for value, is_null in zip(values, self.nulls.tolist(), strict=True))


Column: TypeAlias = Dense | Slices | Objects
Allocate: TypeAlias = Callable[[int], Any]
"""Returns a buffer of so many bytes."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows held in memory together (a run, or what was gathered for a batch): columns of equal length by name.

    ``allocate`` gives memory for a copy, where they lie in more of it than they need, as a decoder left it; else None.
    """

    num_rows: int
    columns: dict[str, Column]
    num_bytes: int = 0
    allocate: Allocate | None = None


def tight(rows: Rows) -> Rows:
    """Returns rows that are held for long in no more memory than they need.

    A decoder lets its memory grow, and cuts off what it did not need; between runs that stay, such ends are never put
    together. Where it gets all back at once, it fills the same memory again and again, which the processor still has in
    its cache: what the copy costs, decoding gains.

    Example:
        >>> loose = Slices(np.arange(8)[2:4], np.array([0, 1]), np.array([1, 1]), "list")
        >>> tight(Rows(2, {"x": loose}, allocate=bytearray)).columns["x"].values
        array([2, 3])
    """
    allocate = rows.allocate
    if allocate is None:
        return rows
    columns = {name: _tight(column, allocate) for name, column in rows.columns.items()}
    return Rows(rows.num_rows, columns, rows.num_bytes)


def _tight(column: Column, allocate: Allocate) -> Column:
    if isinstance(column, Objects) or (isinstance(column, Dense) and column.values.ndim == 1):
        return column  # of plain numbers a decoder knows beforehand how many come
    values = np.ndarray(column.values.shape, column.values.dtype, allocate(column.values.nbytes))
    values[...] = column.values
    return replace(column, values=values)


def python_values(name: str, column: Column, rows: npt.NDArray[np.int64] | None = None) -> list[Any]:
    """Returns rows of a column as Python values: numbers, ``bytes``, ``str``; lists of numbers as numpy arrays (views).

    Args:
        name: Of the column, for messages.
        column: The column.
        rows: int64[n], which rows; None for all.

    Returns:
        n values, None where there is no value.

    Raises:
        DecodeError: If text is not UTF-8.

    Example:
        >>> python_values("x", Slices(np.frombuffer(b"abc", np.uint8), np.array([0, 1]), np.array([1, 2]), "text"))
        ['a', 'bc']
    """
    if isinstance(column, Objects):
        return list(column.values) if rows is None else [column.values[row] for row in rows.tolist()]
    pick: Any = slice(None) if rows is None else rows
    if isinstance(column, Dense):
        picked = column.values[pick]
        values = picked.tolist() if picked.ndim == 1 else list(picked)
    else:
        starts, lengths = column.starts[pick], column.lengths[pick]
        values = _slice_values(name, column, zip(starts.tolist(), (starts + lengths).tolist(), strict=True))
    if column.nulls is None:
        return values
    return [None if is_null else value for value, is_null in zip(values, column.nulls[pick].tolist(), strict=True)]


def _slice_values(name: str, column: Slices, bounds: Iterable[tuple[int, int]]) -> list[Any]:
    if column.kind == "list":
        return [column.values[begin:end] for begin, end in bounds]
    memory = np.ascontiguousarray(column.values).data
    if column.kind == "bytes":
        return [bytes(memory[begin:end]) for begin, end in bounds]
    errors = (
        "surrogateescape" if name == "__key__" else "strict"
    )  # a key is a file's name, and read as os.fsdecode does
    try:
        return [str(memory[begin:end], "utf-8", errors) for begin, end in bounds]
    except UnicodeDecodeError as error:
        hint = "store it as binary, or leave it out with columns="
        raise DecodeError(f"column {name!r} holds text that is not UTF-8", found=error.reason, hint=hint) from error
