"""Columns in memory: what formats hand over, fetching gathers and batches are made of. Numpy only.

A column of n rows is one of three frozen values. ``Dense`` and ``Slices`` are views of the memory that the decoder
filled, or of a copy of just their size where that would keep too much alive (``tight``); ``gather`` copies from there
into the batch. Of bytes it only notes where they lie (``Scattered``): each value is an object of Python's, and those of
a batch stay in the processor's cache if they are made and dropped batch by batch, not a gather at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt

from shardstream.errors import DecodeError
from shardstream.grouping import stable_order

_PlaceOfPart: TypeAlias = Callable[[int], Mapping[str, Any]] | None
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


def gather(
    parts: Sequence[Rows],
    part_of_row: npt.NDArray[np.int64],
    row_in_part: npt.NDArray[np.int64],
    place_of_part: _PlaceOfPart = None,
    dtypes: Mapping[str, np.dtype[Any]] = MappingProxyType({}),
) -> Rows:
    """Copies rows out of several parts into new columns, each value once.

    Numbers land in one array; lists of numbers one row after the other in one array; text becomes Python values
    (``Objects``), which batches hold it as. Bytes stay where they are until a batch is made of them (``Scattered``).

    Args:
        parts: Where the rows are now; all with the same columns.
        part_of_row: int64[n], which part each row is in.
        row_in_part: int64[n], where it is there.
        place_of_part: Returns where a part comes from (``url=``, ``block=``), for messages.
        dtypes: Columns of bytes that are raw numbers, and of which type: they become lists of numbers, with one copy.

    Returns:
        n rows. Columns are in the order of the first part.

    Raises:
        DecodeError: If text is not UTF-8, or bytes are not a whole number of numbers.

    Example:
        >>> parts = [Rows(2, {"x": Dense(np.array([1, 2]))}), Rows(1, {"x": Dense(np.array([7]))})]
        >>> gather(parts, np.array([1, 0, 0]), np.array([0, 1, 0])).columns["x"].values.tolist()
        [7, 2, 1]
    """
    by_part = stable_order(part_of_row)
    bounds = np.searchsorted(part_of_row[by_part], np.arange(len(parts) + 1)).tolist()
    places = [by_part[begin:end] for begin, end in pairwise(bounds)]
    picks = [row_in_part[place] for place in places]
    columns: dict[str, Column] = {}
    for name in parts[0].columns:
        sources = [part.columns[name] for part in parts]
        if name in dtypes:
            columns[name] = _gather_numbers(name, sources, places, picks, place_of_part, dtypes[name])
        else:
            columns[name] = _gather_column(name, sources, places, picks, place_of_part)
    return Rows(len(part_of_row), columns, sum(map(_num_bytes, columns.values())))


def slice_rows(rows: Rows, begin: int, end: int) -> Rows:
    """Returns rows ``begin`` .. ``end - 1`` of what ``gather`` made, as views.

    Example:
        >>> slice_rows(Rows(3, {"x": Objects(["a", "b", "c"])}), 1, 3).columns["x"].values
        ['b', 'c']
    """
    columns = {name: _slice_column(column, begin, end) for name, column in rows.columns.items()}
    return Rows(end - begin, columns, rows.num_bytes * (end - begin) // max(rows.num_rows, 1))


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


_Places: TypeAlias = Sequence[npt.NDArray[np.int64]]
_Bytes: TypeAlias = Slices | Scattered


def _gather_column(
    name: str, columns: Sequence[Column], places: _Places, picks: _Places, place_of_part: _PlaceOfPart
) -> Column:
    num_rows, kinds = sum(map(len, places)), {getattr(column, "kind", type(column)) for column in columns}
    if kinds == {Dense}:
        return _gather_dense(cast("Sequence[Dense]", columns), places, picks, num_rows)
    if kinds == {"list"}:
        return _gather_lists(cast("Sequence[Slices]", columns), places, picks, num_rows)
    found = [_bytes_of(column) for column in columns]
    if all(found_in is not None for found_in in found):
        return Objects(_gather_bytes(cast("Sequence[_Bytes]", found), places, picks, num_rows))
    values: list[Any] = [None] * num_rows
    for part, (column, place, pick) in enumerate(zip(columns, places, picks, strict=True)):
        try:
            picked = python_values(name, column, pick)
        except DecodeError as error:
            raise DecodeError(str(error), **({} if place_of_part is None else place_of_part(part))) from error
        for where, value in zip(place.tolist(), picked, strict=True):
            values[where] = value
    return Objects(values)


def _gather_dense(columns: Sequence[Dense], places: _Places, picks: _Places, num_rows: int) -> Dense:
    dtype = np.result_type(*(column.values.dtype for column in columns))
    values = np.empty((num_rows, *columns[0].values.shape[1:]), dtype)
    for column, place, pick in zip(columns, places, picks, strict=True):
        values[place] = column.values[pick]
    return Dense(values, _gather_nulls(columns, places, picks, num_rows))


def _gather_lists(columns: Sequence[_Bytes], places: _Places, picks: _Places, num_rows: int) -> Slices:
    sources, array_of_row, starts, lengths = _where(columns, places, picks, num_rows)
    arrays = [source if isinstance(source, np.ndarray) else source.values for source in sources]
    values = join_slices(arrays, _bounds(array_of_row, starts, lengths))
    starts = np.cumsum(lengths) - lengths
    return Slices(values, starts, lengths, "list", _gather_nulls(columns, places, picks, num_rows))


def _gather_numbers(
    name: str,
    columns: Sequence[Column],
    places: _Places,
    picks: _Places,
    place_of_part: _PlaceOfPart,
    dtype: np.dtype[Any],
) -> Slices:
    num_rows, size = sum(map(len, places)), dtype.itemsize
    raw = _gather_lists([_raw_bytes(name, column) for column in columns], places, picks, num_rows)
    odd = raw.lengths % size != 0
    if odd.any():  # looked for once: numpy lets go of the interpreter's lock in each reduction
        part, place = next((part, place) for part, place in enumerate(places) if odd[place].any())
        raise DecodeError(
            f"the bytes of column {name!r} are no {dtype.name}",
            expected=f"a multiple of {size} bytes",
            found=int(raw.lengths[place[odd[place]][0]]),
            hint="say their type in dtypes=, or leave the column out of it to get bytes",
            **({} if place_of_part is None else place_of_part(part)),
        )
    return Slices(raw.values.view(dtype), raw.starts // size, raw.lengths // size, "list", raw.nulls)


def _raw_bytes(name: str, column: Column) -> _Bytes:
    found = _bytes_of(column)
    if found is not None:
        return found
    if isinstance(column, Objects) and all(value is None for value in column.values):
        none = np.zeros(len(column), np.int64)
        return Slices(np.empty(0, np.uint8), none, none, "bytes", np.ones(len(column), np.bool_))
    what = f"column {name!r} holds no bytes, which dtypes= says are numbers"
    raise DecodeError(what, hint="leave it out of dtypes=: it comes as it is")


def _bounds(
    array_of_row: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    return zip(array_of_row.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)


def _bytes_of(column: Column) -> _Bytes | None:
    """Where the bytes of a column lie; None if it is of something else."""
    if isinstance(column, Slices):
        return column if column.kind == "bytes" else None
    return column.values if isinstance(column, Objects) and isinstance(column.values, Scattered) else None


def _gather_bytes(columns: Sequence[_Bytes], places: _Places, picks: _Places, num_rows: int) -> Scattered:
    return Scattered(*_where(columns, places, picks, num_rows), _gather_nulls(columns, places, picks, num_rows))


def _where(
    columns: Sequence[_Bytes], places: _Places, picks: _Places, num_rows: int
) -> tuple[list[npt.NDArray[Any] | ByteSource], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The arrays that rows lie in, in which of them each is, and where: ``array_of_row``, ``starts``, ``lengths``."""
    arrays: list[npt.NDArray[Any] | ByteSource] = []
    array_of_row, starts, lengths = (np.empty(num_rows, np.int64) for _ in range(3))
    for column, place, pick in zip(columns, places, picks, strict=True):
        if isinstance(column, Scattered):
            array_of_row[place] = len(arrays) + column.array_of_row[pick]
            arrays += column.arrays
        else:
            array_of_row[place] = len(arrays)
            arrays.append(column.values if column.source is None else column.source)
        starts[place], lengths[place] = column.starts[pick], column.lengths[pick]
    return arrays, array_of_row, starts, lengths


def join_slices(arrays: Sequence[npt.NDArray[Any]], slices: Iterable[tuple[int, int, int]]) -> npt.NDArray[Any]:
    """Copies slices of arrays, one behind the other, into a new one.

    Args:
        arrays: At least one, of one dimension; of dtypes whose values one dtype can hold.
        slices: (which array, begin, end) of each.

    Example:
        >>> join_slices([np.array([1, 2, 3]), np.array([7, 8])], [(1, 0, 2), (0, 1, 2)]).tolist()
        [7, 8, 2]
    """
    # Not np.concatenate: for each slice of over 500 numbers it lets go of the interpreter's lock and takes it back,
    # waiting for the threads that use it meanwhile: with one of them for 30 to 200 times as long. This lets go once.
    # And slices of arrays, not of their memoryviews, which the garbage collector would count and look at.
    sources = _of_one_dtype(arrays)
    parts: list[Any] = [sources[k][begin:end] for k, begin, end in slices]
    return np.frombuffer(bytearray().join(parts), sources[0].dtype)


def _of_one_dtype(arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
    """The arrays in a dtype that holds the values of all: the arrays themselves, where it is one."""
    if len({array.dtype for array in arrays}) == 1 and all(array.flags.c_contiguous for array in arrays):
        return arrays
    dtype = np.result_type(*arrays)
    return [np.ascontiguousarray(array, dtype) for array in arrays]


def _gather_nulls(
    columns: Sequence[Dense | Slices | Scattered], places: _Places, picks: _Places, num_rows: int
) -> npt.NDArray[np.bool_] | None:
    if all(column.nulls is None for column in columns):
        return None
    nulls = np.zeros(num_rows, np.bool_)
    for column, place, pick in zip(columns, places, picks, strict=True):
        if column.nulls is not None:
            nulls[place] = column.nulls[pick]
    return nulls if nulls.any() else None


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


def _slice_column(column: Column, begin: int, end: int) -> Column:
    if isinstance(column, Objects):
        return Objects(column.values[begin:end])
    nulls = None if column.nulls is None else column.nulls[begin:end]
    if isinstance(column, Dense):
        return Dense(column.values[begin:end], nulls)
    starts, lengths = column.starts[begin:end], column.lengths[begin:end]
    if begin == end:
        return Slices(column.values[:0], starts, lengths, column.kind, nulls)
    first, last = int(starts[0]), int(starts[-1] + lengths[-1])
    return Slices(column.values[first:last], starts - first, lengths, column.kind, nulls)


def _num_bytes(column: Column) -> int:
    if isinstance(column, Objects) and isinstance(column.values, Scattered):
        return int(column.values.lengths.sum())
    if isinstance(column, Objects):
        return sum(len(value) for value in column.values if isinstance(value, (bytes, str)))
    return int(column.values.nbytes)
