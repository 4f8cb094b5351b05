"""Gathering: rows of several runs, put together for some batches, each value copied once; and cut apart again.

Numbers land in new arrays. Of bytes it is only noted where they lie (``Scattered``): each value is an object of
Python's, and those of a batch stay in the processor's cache if they are made and dropped batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from shardstream.columns import ByteSource, Column, Dense, Objects, Rows, Scattered, Slices, python_values
from shardstream.errors import DecodeError
from shardstream.grouping import stable_order

_PlaceOfPart: TypeAlias = Callable[[int], Mapping[str, Any]] | None
_Places: TypeAlias = Sequence[npt.NDArray[np.int64]]
_Bytes: TypeAlias = Slices | Scattered


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
