"""Arrow memory as columns: views wherever Arrow's layout allows, Python objects only for what numpy cannot hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream.arrow_memory import nulls as nulls_of
from shardstream.arrow_memory import numbers
from shardstream.columns import Column, Dense, Objects, Rows, SliceKind, Slices

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_NUMBERS = frozenset(kind.id for kind in (*_INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.bool_()))
_LIST_KINDS = (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
_LISTS = frozenset((pa.list_(pa.int8(), 1).id, *(kind(pa.int8()).id for kind in _LIST_KINDS)))


def rows_of(table: pa.Table | pa.RecordBatch) -> Rows:
    """Turns a table or a record batch into rows that view its memory.

    Args:
        table: Columns of any Arrow type.

    Returns:
        The rows; numbers and lists of numbers, text and bytes without a copy.

    Example:
        >>> rows = rows_of(pa.table({"tokens": [[1, 2], None, []]}))
        >>> rows.columns["tokens"].lengths.tolist(), rows.columns["tokens"].nulls.tolist()
        ([2, 0, 0], [False, True, False])
    """
    return rows_of_arrays(dict(zip(table.schema.names, table.columns, strict=True)), table.num_rows, table.nbytes)


def rows_of_arrays(arrays: Mapping[str, pa.Array | pa.ChunkedArray], num_rows: int, num_bytes: int) -> Rows:
    """Turns named arrays of equal length into rows, as ``rows_of`` does: no table need be made of them."""
    return Rows(num_rows, {name: column_of(array) for name, array in arrays.items()}, num_bytes)


def column_of(array: pa.Array | pa.ChunkedArray) -> Column:
    """Turns one Arrow column into a ``Dense``, ``Slices`` or ``Objects`` column.

    ==================================  ==========================================================
    Arrow                               column
    ==================================  ==========================================================
    numbers, bool                       ``Dense[n]``
    fixed-size list of numbers          ``Dense[n, k]``
    list, large list, list view of      ``Slices(kind="list")``
    numbers
    string, binary, fixed-size binary   ``Slices(kind="text")``, ``Slices(kind="bytes")``
    dictionary, extension               as their values, as their storage
    everything else                     ``Objects``; times in microseconds
    lists that hold a null              ``Objects``
    ==================================  ==========================================================

    Args:
        array: The Arrow column.

    Returns:
        The column; None stays None and an empty list stays an empty list.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    while array.type != plain_type(array.type):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.dictionary_decode()
    kind = array.type
    if is_number(kind):
        return Dense(numbers(array), nulls_of(array))
    if is_number_list(kind):
        return _fixed_lists(array) if pa.types.is_fixed_size_list(kind) else _lists(array)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return _texts(array, "text" if text else "bytes")
    if pa.types.is_fixed_size_binary(kind):
        return _fixed_bytes(array)
    return _objects(array)


def is_number(kind: pa.DataType) -> bool:
    """Whether numpy holds values of this type as numbers: integers, floats and bool."""
    return kind.id in _NUMBERS


def is_number_list(kind: pa.DataType) -> bool:
    """Whether this is a type of lists of numbers, of any of Arrow's list layouts."""
    return kind.id in _LISTS and is_number(kind.value_type)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type as rows show it: of a dictionary its values, of an extension its storage.

    Example:
        >>> plain_type(pa.dictionary(pa.int32(), pa.string()))
        DataType(string)
    """
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    return plain_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


def without_list_views(array: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns list views as large lists, other arrays as they are: pyarrow's own cast can lack the last offset.

    Example:
        >>> without_list_views(pa.array([[1, 2], None, [], [3]], pa.list_view(pa.int32()))).to_pylist()
        [[1, 2], None, [], [3]]
    """
    if not (pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type)):
        return array
    if isinstance(array, pa.ChunkedArray):
        chunks = [without_list_views(chunk) for chunk in array.chunks]
        return pa.chunked_array(chunks, pa.large_list(array.type.value_field))
    nulls = nulls_of(array)
    sizes = numbers(array.sizes).astype(np.int64)
    if nulls is not None:
        sizes[nulls] = 0
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    kind, mask = pa.large_list(array.type.value_field), None if nulls is None else pa.array(nulls)
    return pa.LargeListArray.from_arrays(offsets, array.flatten(), type=kind, mask=mask)


# ---------------------------------------------------------------------------------------------------- views


def _lists(array: pa.Array) -> Column:
    """Lists of numbers of varying length."""
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        starts = numbers(array.offsets).astype(np.int64)
        lengths = numbers(array.sizes).astype(np.int64)
    else:
        offsets = numbers(array.offsets).astype(np.int64)
        starts, lengths = offsets[:-1], np.diff(offsets)
    nulls = nulls_of(array)
    if nulls is not None:
        lengths[nulls] = 0  # Arrow allows a null row to span values
    values = array.values
    if values.null_count:
        first, end = int(starts.min(initial=len(values))), int((starts + lengths).max(initial=0))
        if first < end and values.slice(first, end - first).null_count:
            return _objects(array)
    return Slices(numbers(values), starts, lengths, "list", nulls)


def _fixed_lists(array: pa.FixedSizeListArray) -> Column:
    """Lists of numbers that all have the same length."""
    size = array.type.list_size
    values = array.values.slice(array.offset * size, len(array) * size)
    nulls = nulls_of(array)
    if values.null_count:
        holes = np.asarray(nulls_of(values)).reshape(len(array), size)
        if np.any(holes if nulls is None else holes[~nulls]):
            return _objects(array)
    return Dense(numbers(values).reshape(len(array), size), nulls)


def _texts(array: pa.Array, kind: SliceKind) -> Slices:
    """Strings and binaries."""
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        array = array.cast(pa.large_string() if kind == "text" else pa.large_binary())
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_bytes, data = array.buffers()
    if len(array) == 0 or offset_bytes is None:
        offsets = np.zeros(1, np.int64)
    else:
        offset_type = np.int64 if wide else np.int32
        raw = np.frombuffer(offset_bytes, offset_type)[array.offset : array.offset + len(array) + 1]
        offsets = raw.astype(np.int64)
    lengths = np.diff(offsets)
    nulls = nulls_of(array)
    if nulls is not None:
        lengths[nulls] = 0
    return Slices(_bytes_of(data), offsets[:-1], lengths, kind, nulls)


def _fixed_bytes(array: pa.Array) -> Slices:
    """Binaries that all have the same length."""
    width = array.type.byte_width
    starts = (np.arange(len(array), dtype=np.int64) + array.offset) * width
    lengths = np.full(len(array), width, np.int64)
    nulls = nulls_of(array)
    if nulls is not None:
        lengths[nulls] = 0
    return Slices(_bytes_of(array.buffers()[1]), starts, lengths, "bytes", nulls)


def _bytes_of(data: pa.Buffer | None) -> npt.NDArray[np.uint8]:
    """A buffer as uint8; Arrow has none where all rows are empty."""
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


# -------------------------------------------------------------------------------------------------- objects


_IN_MICROSECONDS = {pa.time64("ns"): pa.time64("us"), pa.duration("ns"): pa.duration("us")}


def _objects(array: pa.Array) -> Objects:
    """One Python value a row."""
    kind = _python_type(array.type)
    return Objects((array if kind == array.type else array.cast(kind, safe=False)).to_pylist())


def _python_type(kind: pa.DataType) -> pa.DataType:
    """The type with nanoseconds made microseconds, which is what Python's date and time types hold."""
    of = pa.types
    if kind in _IN_MICROSECONDS:
        return _IN_MICROSECONDS[kind]
    if of.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if of.is_struct(kind):
        return pa.struct(
            [kind.field(place).with_type(_python_type(kind.field(place).type)) for place in range(kind.num_fields)]
        )
    if of.is_list(kind):
        return pa.list_(kind.value_field.with_type(_python_type(kind.value_type)))
    if of.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_python_type(kind.value_type)))
    return kind
