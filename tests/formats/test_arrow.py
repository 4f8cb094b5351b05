from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.columns import Dense, Objects, Slices
from shardstream.formats._arrow import column_of, rows_of
from tests.formats.conformance import python_values

INT = st.none() | st.integers(-100, 100)
TEXT = st.none() | st.text(max_size=5)
LISTS = st.none() | st.lists(st.integers(0, 100), max_size=4)
PAIRS = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)).map(list)

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any], type]] = [
    (pa.int8(), INT, Dense),
    (pa.uint64(), st.none() | st.integers(0, 2**64 - 1), Dense),
    (pa.float32(), st.none() | st.floats(width=32, allow_nan=False), Dense),
    (pa.bool_(), st.none() | st.booleans(), Dense),
    (pa.list_(pa.int32()), LISTS, Slices),
    (pa.large_list(pa.int64()), LISTS, Slices),
    (pa.list_view(pa.uint16()), LISTS, Slices),
    (pa.large_list_view(pa.float64()), LISTS, Slices),
    (pa.list_(pa.bool_()), st.none() | st.lists(st.booleans(), max_size=3), Slices),
    (pa.list_(pa.int32(), 2), PAIRS, Dense),
    (pa.string(), TEXT, Slices),
    (pa.large_string(), TEXT, Slices),
    (pa.string_view(), TEXT, Slices),
    (pa.binary(), st.none() | st.binary(max_size=5), Slices),
    (pa.large_binary(), st.none() | st.binary(max_size=5), Slices),
    (pa.binary_view(), st.none() | st.binary(max_size=20), Slices),
    (pa.binary(3), st.none() | st.binary(min_size=3, max_size=3), Slices),
    (pa.list_(pa.string()), st.none() | st.lists(TEXT, max_size=3), Objects),
    (pa.list_(pa.list_(pa.int32())), st.none() | st.lists(LISTS, max_size=3), Objects),
    (pa.struct({"x": pa.int64()}), st.none() | st.fixed_dictionaries({"x": INT}), Objects),
    (pa.null(), st.none(), Objects),
    (pa.date32(), st.none() | st.dates(), Objects),
    (pa.decimal128(9, 2), st.none() | st.decimals(-100, 100, places=2), Objects),
]


@pytest.mark.parametrize(("kind", "values", "made"), KINDS, ids=[str(kind) for kind, _, _ in KINDS])
@settings(max_examples=30)
@given(data=st.data())
def test_every_type_keeps_its_rows_also_in_slices(
    kind: pa.DataType, values: st.SearchStrategy[Any], made: type, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(values, max_size=8))
    array = pa.array(rows, kind)
    first = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(first, len(rows)))
    for part, expected in ((array, rows), (array.slice(first, end - first), rows[first:end])):
        column = column_of(part)
        assert isinstance(column, made)
        assert python_values(column) == expected
    assert python_values(column_of(pa.chunked_array([array, array], kind))) == rows + rows


def test_lists_that_hold_a_null_are_objects() -> None:
    for kind in (pa.list_(pa.int32()), pa.list_view(pa.int32()), pa.list_(pa.int32(), 2)):
        array = pa.array([[1, 2], [3, None], None], kind)
        assert isinstance(column_of(array), Objects)
        assert python_values(column_of(array)) == [[1, 2], [3, None], None]
        assert isinstance(column_of(array.slice(0, 1)), (Dense, Slices))


def test_a_null_row_may_span_values() -> None:
    offsets, mask = pa.array([0, 2, 4], pa.int32()), pa.array([False, True])
    array = pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3, None]), mask=mask)
    assert python_values(column_of(array)) == [[1, 2], None]


def test_numbers_lists_and_text_are_views() -> None:
    for array in (
        pa.array([1, 2, None]),
        pa.array([[1, 2], None]),
        pa.array(["a", "b"]),
        pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
    ):
        assert not column_of(array).values.flags.owndata  # type: ignore[union-attr]


def test_dictionaries_and_extensions_are_their_values() -> None:
    assert python_values(column_of(pa.array(["a", "b", None, "a"]).dictionary_encode())) == ["a", "b", None, "a"]
    tensors = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), [2, 2]), pa.array([[1, 2, 3, 4]], pa.list_(pa.int32(), 4))
    )
    assert python_values(column_of(tensors)) == [[1, 2, 3, 4]]


def test_times_are_in_microseconds() -> None:
    stamp = 1_600_000_000_123_456_789
    instant = dt.datetime(2020, 9, 13, 12, 26, 40, 123456)  # noqa: DTZ001
    naive = pa.array([stamp, None], pa.timestamp("ns"))
    assert python_values(column_of(naive)) == [instant, None]
    (aware,) = python_values(column_of(pa.array([stamp], pa.timestamp("ns", "UTC"))))
    assert aware == instant.replace(tzinfo=dt.timezone.utc)
    nested = pa.array([[stamp]], pa.list_(pa.timestamp("ns")))
    assert python_values(column_of(nested)) == [[instant]]
    inside = pa.array([{"at": stamp, "for": 1001}], pa.struct({"at": pa.timestamp("ns"), "for": pa.duration("ns")}))
    assert python_values(column_of(inside)) == [{"at": instant, "for": dt.timedelta(microseconds=1)}]


def test_rows_have_the_size_of_what_they_show() -> None:
    rows = rows_of(pa.table({"x": np.arange(100), "d": [decimal.Decimal(1)] * 100}))
    assert rows.num_rows == 100
    assert rows.num_bytes == 800 + 1600
