from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardstream.columns import Dense, Objects, Rows, Slices, python_values, tight
from shardstream.errors import DecodeError


def test_what_is_held_for_long_is_copied_where_it_may_hold_more_than_its_values():
    pairs, single = np.arange(12).reshape(6, 2)[1:4], np.arange(3)
    nulls = np.array([False, True, False])
    places = np.array([0, 2, 2]), np.array([2, 0, 1])
    columns = {
        "pair": Dense(pairs, nulls),
        "single": Dense(single),
        "list": Slices(np.arange(9, dtype=np.int32)[:3], *places, "list"),
        "text": Slices(np.frombuffer(b"abcdef", np.uint8), *places, "text", nulls),
        "object": Objects(["a", None, "b"]),
    }
    rows, sizes = Rows(3, columns, 40), []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return bytearray(num_bytes)

    assert tight(rows) is rows
    held = tight(replace(rows, allocate=allocate))
    assert (held.num_rows, held.num_bytes, held.allocate) == (3, 40, None)
    assert sizes == [48, 12, 6], "not of plain numbers: a decoder knows beforehand how many come"
    assert held.columns["single"] is columns["single"]
    assert not np.shares_memory(held.columns["pair"].values, pairs)
    assert held.columns["pair"].nulls is nulls
    for name, column in columns.items():
        found, wanted = python_values(name, held.columns[name]), python_values(name, column)
        assert [np.array_equal(one, other) for one, other in zip(found, wanted, strict=True)] == [True] * 3, name


def test_values_are_python_s_with_none_where_there_is_none():
    nulls = np.array([False, True])
    places = np.array([1, 0]), np.array([2, 0])
    text = Slices(np.frombuffer("xäb".encode(), np.uint8), *places, "text", nulls)
    assert python_values("t", text) == ["ä", None]
    assert python_values("t", replace(text, kind="bytes"), np.array([1, 0])) == [None, "ä".encode()]
    assert python_values("n", Dense(np.array([1.5, 2]), nulls)) == [1.5, None]
    assert python_values("o", Objects([{}, None]), np.array([1])) == [None]


def test_text_that_is_not_utf_8_is_refused_unless_it_is_a_key():
    broken = Slices(np.array([0xFF], np.uint8), np.zeros(1, np.int64), np.ones(1, np.int64), "text")
    with pytest.raises(DecodeError, match=r"column 't' holds text that is not UTF-8.*store it as binary"):
        python_values("t", broken)
    assert python_values("__key__", broken) == ["\udcff"]
