from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.columns import Dense, Objects, Rows, Scattered, Slices, python_values
from shardstream.errors import DecodeError
from shardstream.gathering import gather, slice_rows

# A row is (number or None, numbers or None, text or None, anything): what a column of each kind can hold.
ROW = st.tuples(
    st.none() | st.integers(-5, 5),
    st.none() | st.lists(st.integers(-9, 9), max_size=4),
    st.none() | st.text(max_size=3),
    st.none() | st.dictionaries(st.text(max_size=1), st.integers(), max_size=1),
)


def slices(values, kind, dtype=np.uint8):
    """A column whose rows lie in memory backwards, with gaps, as a decoder may leave them."""
    arrays = [np.array(value if value is not None else [], dtype) for value in values]
    starts, lengths, memory = [], [len(array) for array in arrays], [np.full(3, 99, dtype)]
    for array in reversed(arrays):
        starts.insert(0, sum(map(len, memory)))
        memory += [array, np.full(1, 99, dtype)]
    nulls = np.array([value is None for value in values], bool)
    offsets = np.array(starts, np.int64), np.array(lengths, np.int64)
    return Slices(np.concatenate(memory), *offsets, kind, nulls if nulls.any() else None)


def rows_of(rows):
    numbers, lists, texts, anything = zip(*rows, strict=True) if rows else ((), (), (), ())
    nulls = np.array([number is None for number in numbers], bool)
    encoded = [None if text is None else list(text.encode()) for text in texts]
    pairs = np.array([[number or 0, 7] for number in numbers], np.int16).reshape(len(rows), 2)
    columns = {
        "number": Dense(np.array([number or 0 for number in numbers], np.int32), nulls if nulls.any() else None),
        "pair": Dense(pairs),
        "list": slices(lists, "list", np.int32),
        "text": slices(encoded, "text"),
        "bytes": slices(encoded, "bytes"),
        "anything": Objects(anything),
    }
    return Rows(len(rows), columns)


def shown(rows):
    """Rows as plain Python values, whatever they lie in."""
    columns = {name: python_values(name, column) for name, column in rows.columns.items()}
    plain = {
        name: [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
        for name, values in columns.items()
    }
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


def expected(row):
    number, numbers, text, anything = row
    encoded = None if text is None else text.encode()
    pair = [number or 0, 7]
    return {"number": number, "pair": pair, "list": numbers, "text": text, "bytes": encoded, "anything": anything}


@given(st.lists(st.lists(ROW, min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_gather_takes_any_rows_of_any_parts_in_any_order(parts, data):
    places = [(part, row) for part, rows in enumerate(parts) for row in range(len(rows))]
    picked = data.draw(st.lists(st.sampled_from(places), max_size=12))
    gathered = gather(
        [rows_of(rows) for rows in parts],
        np.array([part for part, _ in picked], np.int64),
        np.array([row for _, row in picked], np.int64),
    )
    want = [expected(parts[part][row]) for part, row in picked]
    assert gathered.num_rows == len(picked)
    assert shown(gathered) == want
    begin = data.draw(st.integers(0, len(picked)))
    end = data.draw(st.integers(begin, len(picked)))
    piece = slice_rows(gathered, begin, end)
    assert (piece.num_rows, shown(piece)) == (end - begin, want[begin:end])


def test_lists_are_gathered_into_one_array_and_numbers_keep_their_dtype():
    rows = rows_of([(1, [1, 2], "a", None), (2, [], "", None), (3, [3], "c", None)])
    gathered = gather([rows, rows], np.array([0, 1, 0]), np.array([2, 1, 0])).columns
    assert gathered["number"].values.dtype == np.int32
    assert gathered["pair"].values.shape == (3, 2)
    assert gathered["list"].values.tolist() == [3, 1, 2]
    assert gathered["list"].values.dtype == np.int32
    assert gathered["list"].nulls is None
    assert isinstance(gathered["text"], Objects)
    assert python_values("bytes", gathered["bytes"]) == [b"c", b"", b"a"]


def test_bytes_stay_where_they_are_until_a_batch_is_made():
    rows = rows_of([(1, [], "ab", None), (2, [], "c", None)])
    memory = rows.columns["bytes"].values
    once = gather([rows, rows], np.array([1, 0, 0]), np.array([0, 1, 0]))
    again = gather([once, rows], np.array([0, 1, 0]), np.array([2, 1, 0]))
    for gathered, wanted in ((once, [b"ab", b"c", b"ab"]), (again, [b"ab", b"c", b"ab"])):
        column = gathered.columns["bytes"]
        assert isinstance(column.values, Scattered)
        assert all(np.shares_memory(array, memory) for array in column.values.arrays)
        assert (column.values[-1], list(column.values[1:])) == (wanted[-1], wanted[1:])
        assert python_values("bytes", column) == wanted


DTYPES = st.sampled_from(["uint8", "int16", "uint16", "int32", "float32", "float64"])


@given(st.lists(st.lists(st.none() | st.binary(max_size=5), max_size=5), min_size=1, max_size=4), DTYPES, st.data())
def test_raw_numbers_are_what_their_bytes_say(parts, name, data):
    dtype = np.dtype(name).newbyteorder("<")
    values = [[None if value is None else value * dtype.itemsize for value in part] for part in parts]
    rows = [
        Rows(len(part), {"x": slices([None if value is None else list(value) for value in part], "bytes")})
        for part in values
    ]
    places = [(part, row) for part, of_part in enumerate(values) for row in range(len(of_part))]
    picked = data.draw(st.lists(st.sampled_from(places), max_size=9)) if places else []
    order = np.array([part for part, _ in picked], np.int64), np.array([row for _, row in picked], np.int64)
    numbers = python_values("x", gather(rows, *order, dtypes={"x": dtype}).columns["x"])
    for (part, row), found in zip(picked, numbers, strict=True):
        value = values[part][row]
        if value is None:
            assert found is None
        else:
            assert (found.dtype, found.tobytes()) == (dtype, value)


def test_a_part_in_which_raw_numbers_are_missing_everywhere_has_nulls():
    parts = [Rows(1, {"x": Objects([None])}), Rows(1, {"x": slices([[5, 0]], "bytes")})]
    column = gather(parts, np.array([1, 0]), np.array([0, 0]), dtypes={"x": np.dtype("<u2")}).columns["x"]
    assert (column.values.tolist(), column.lengths.tolist(), column.nulls.tolist()) == ([5], [1, 0], [False, True])


def test_bytes_that_are_no_whole_numbers_and_columns_without_bytes_are_refused():
    parts = [Rows(2, {"x": slices([[1, 2, 3], [4, 5]], "bytes")})]
    dtypes = {"x": np.dtype("<u2")}
    with pytest.raises(DecodeError, match=r"'x' are no uint16 \[a\.tar, block 7\].*multiple of 2 bytes, found 3"):
        gather(parts, np.zeros(2, np.int64), np.arange(2), lambda _: {"url": "a.tar", "block": 7}, dtypes)
    assert gather(parts, np.zeros(1, np.int64), np.ones(1, np.int64), None, dtypes).columns["x"].values.tolist() == [
        1284
    ]
    with pytest.raises(DecodeError, match="'x' holds no bytes"):
        gather([Rows(1, {"x": Dense(np.ones(1))})], np.zeros(1, np.int64), np.zeros(1, np.int64), None, dtypes)


def test_parts_of_different_integer_types_become_the_one_that_holds_both():
    parts = [Rows(1, {"x": Dense(np.array([1], np.int8))}), Rows(1, {"x": Dense(np.array([70_000], np.int32))})]
    gathered = gather(parts, np.array([1, 0]), np.array([0, 0])).columns["x"]
    assert (gathered.values.tolist(), gathered.values.dtype) == ([70_000, 1], np.int32)


def test_a_column_that_is_missing_everywhere_in_one_part_is_none_there():
    parts = [Rows(1, {"x": Objects([None])}), Rows(1, {"x": slices([[97]], "text")})]
    assert gather(parts, np.array([1, 0]), np.array([0, 0])).columns["x"].values == ["a", None]


def test_a_slice_holds_on_to_its_own_values_only():
    column = slices([[1], [2, 3], [], [4]], "list")
    gathered = gather([Rows(4, {"x": column})], np.zeros(4, np.int64), np.arange(4))
    piece = slice_rows(gathered, 1, 3).columns["x"]
    assert (piece.values.tolist(), piece.starts.tolist(), piece.lengths.tolist()) == ([2, 3], [0, 2], [2, 0])
    assert len(slice_rows(gathered, 2, 2).columns["x"]) == 0


def test_bytes_are_counted():
    rows = Rows(2, {"x": Dense(np.zeros(2, np.int64)), "t": slices([[97, 98], []], "text")})
    assert gather([rows], np.zeros(2, np.int64), np.arange(2)).num_bytes == 18


def test_text_that_is_not_utf_8_names_column_part_and_way_out():
    parts = [Rows(1, {"t": slices([[97]], "text")}), Rows(1, {"t": slices([[0xFF]], "text")})]
    with pytest.raises(DecodeError, match=r"column 't' holds text that is not UTF-8.*store it as binary"):
        gather(parts, np.array([0, 1]), np.array([0, 0]))
    with pytest.raises(DecodeError, match=r"not UTF-8.*\[b\.parquet, block 7\]"):
        gather(parts, np.array([0, 1]), np.array([0, 0]), lambda part: {"url": "ab"[part] + ".parquet", "block": 7})
