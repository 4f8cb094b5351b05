from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstream.columns import Dense, Objects, Rows, Slices
from shardstream.errors import DecodeError, PlanError
from shardstream.torch.collate import (
    collate_samples,
    columns_to_torch,
    count_valid,
    mask_padding,
    pad_tokens,
    rows_to_samples,
)
from shardstream.torch.ragged import Ragged

IGNORE = -100


def slices(rows, kind="list", dtype=np.int64):
    """The rows one after the other, as a gather leaves them."""
    lengths = np.array([len(row or ()) for row in rows], np.int64)
    starts = np.cumsum(lengths) - lengths
    if kind == "list":
        values = np.array([value for row in rows for value in row or ()], dtype)
    else:
        values = np.frombuffer(b"".join(row or b"" for row in rows), np.uint8)
    nulls = np.array([row is None for row in rows]) if None in rows else None
    return Slices(values, starts, lengths, kind, nulls)


def ragged(rows, dtype=np.int64):
    return columns_to_torch(Rows(len(rows), {"x": slices(rows, dtype=dtype)}))["x"]


def typed(columns):
    """Columns as something that can be compared: kind, dtype, values."""
    shown = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            shown[name] = ("ragged", column.values.dtype, column.tolist())
        else:
            is_tensor = isinstance(column, torch.Tensor)
            shown[name] = ("tensor", column.dtype, column.tolist()) if is_tensor else ("list", column)
    return shown


ALL = Rows(
    3,
    {
        "int": Dense(np.array([1, 2, 3], np.int32)),
        "float": Dense(np.array([0.5, 1.5, 2.5], np.float32)),
        "flag": Dense(np.array([True, False, True])),
        "small": Dense(np.array([1, 2, 65535], np.uint16)),
        "vector": Dense(np.arange(6, dtype=np.float32).reshape(3, 2)),
        "tokens": slices([[1, 2], [], [3]], dtype=np.uint16),
        "same": slices([[1, 2], [3, 4], [5, 6]]),
        "holes": slices([[1], None, [2, 3]]),
        "text": slices([b"a", None, "ü".encode()], "text"),
        "raw": slices([b"\xff", b"", None], "bytes"),
        "any": Objects([{"a": 1}, None, "b"]),
    },
)


def test_columns_become_tensors_ragged_and_lists():
    columns = typed(columns_to_torch(ALL))
    assert columns == {
        "int": ("tensor", torch.int32, [1, 2, 3]),
        "float": ("tensor", torch.float32, [0.5, 1.5, 2.5]),
        "flag": ("tensor", torch.bool, [True, False, True]),
        "small": ("tensor", torch.uint16, [1, 2, 65535]),
        "vector": ("tensor", torch.float32, [[0, 1], [2, 3], [4, 5]]),
        "tokens": ("ragged", torch.uint16, [[1, 2], [], [3]]),
        "same": ("ragged", torch.int64, [[1, 2], [3, 4], [5, 6]]),
        "holes": ("ragged", torch.int64, [[1], None, [2, 3]]),
        "text": ("list", ["a", None, "ü"]),
        "raw": ("list", [b"\xff", b"", None]),
        "any": ("list", [{"a": 1}, None, "b"]),
    }


def test_a_transform_that_changes_nothing_changes_no_batch():
    samples = [dict(sample) for sample in rows_to_samples(ALL)]
    assert typed(collate_samples(samples, ALL.columns)) == typed(columns_to_torch(ALL))


def test_samples_are_python_values_and_views():
    first, second, third = rows_to_samples(ALL)
    assert (type(first["int"]), type(first["float"]), type(first["flag"])) == (int, float, bool)
    assert second["holes"] is None
    assert (third["text"], third["raw"], third["any"]) == ("ü", None, "b")
    assert np.shares_memory(third["holes"], ALL.columns["holes"].values)
    assert np.shares_memory(third["vector"], ALL.columns["vector"].values)
    assert rows_to_samples(Rows(2, {"x": Dense(np.array([1, 2]), np.array([True, False]))})) == [{"x": None}, {"x": 2}]


def test_memory_is_shared_where_it_can_be():
    values = np.arange(4)
    shared = columns_to_torch(Rows(4, {"x": Dense(values)}))["x"]
    assert shared.data_ptr() == values.ctypes.data
    column = slices([[1, 2], [3]])
    assert columns_to_torch(Rows(2, {"x": column}))["x"].values.data_ptr() == column.values.ctypes.data


@pytest.mark.parametrize("values", [np.broadcast_to(np.array([7]), 3), np.arange(3, dtype=">i4"), np.arange(3)[::-1]])
def test_memory_that_torch_cannot_use_is_copied(values):
    assert columns_to_torch(Rows(3, {"x": Dense(values)}))["x"].tolist() == values.tolist()


def test_rows_that_lie_anywhere_are_put_in_order():
    column = Slices(np.arange(10), np.array([7, 2, 0, 2]), np.array([2, 3, 0, 1]), "list")
    assert columns_to_torch(Rows(4, {"x": column}))["x"].tolist() == [[7, 8], [2, 3, 4], [], [2]]
    shifted = Slices(np.arange(10), np.array([4, 6]), np.array([2, 1]), "list")
    assert columns_to_torch(Rows(2, {"x": shifted}))["x"].tolist() == [[4, 5], [6]]
    nothing = Slices(np.arange(10), np.zeros(0, np.int64), np.zeros(0, np.int64), "list")
    assert columns_to_torch(Rows(0, {"x": nothing}))["x"].tolist() == []


def test_times_stay_python_values():
    times = np.array(["2024-01-01", "2024-01-02"], "datetime64[us]")
    assert columns_to_torch(Rows(2, {"when": Dense(times)}))["when"] == times.tolist()


def test_numbers_without_a_value_are_refused():
    rows = Rows(3, {"score": Dense(np.zeros(3), np.array([False, True, True]))})
    with pytest.raises(DecodeError, match=r"'score' has no value in 2 of 3 rows.*first: 1.*transform=.*columns="):
        columns_to_torch(rows)
    with pytest.raises(DecodeError, match="'score' has no value in 2 of 3"):
        collate_samples(rows_to_samples(rows), rows.columns)
    assert columns_to_torch(Rows(1, {"x": Dense(np.ones(1), np.array([False]))}))["x"].tolist() == [1.0]


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(DecodeError, match="'text'"):
        columns_to_torch(Rows(1, {"text": slices([b"\xff"], "text")}))


def test_collate_samples_goes_by_what_the_values_are():
    samples = [
        {
            "n": 1,
            "mixed": 1,
            "f": 0.5,
            "b": True,
            "a": np.zeros(2),
            "t": torch.ones(1, 2),
            "r": np.array([1]),
            "s": "x",
        },
        {
            "n": 2,
            "mixed": 0.5,
            "f": 1,
            "b": False,
            "a": np.ones(2),
            "t": torch.ones(1, 2),
            "r": np.array([1, 2]),
            "s": None,
        },
    ]
    columns = typed(collate_samples(samples))
    assert columns["n"] == ("tensor", torch.int64, [1, 2])
    assert columns["mixed"] == ("tensor", torch.float64, [1.0, 0.5])
    assert columns["f"][:2] == ("tensor", torch.float64)
    assert columns["b"] == ("tensor", torch.bool, [True, False])
    assert columns["a"] == ("tensor", torch.float64, [[0, 0], [1, 1]])
    assert columns["t"] == ("tensor", torch.float32, [[[1, 1]], [[1, 1]]])
    assert columns["r"] == ("ragged", torch.int64, [[1], [1, 2]])
    assert columns["s"] == ("list", ["x", None])


def test_collate_samples_at_the_edges():
    images = [np.zeros((2, 2)), np.zeros((3, 2))]
    assert collate_samples([{"image": image} for image in images])["image"] == images
    assert typed(collate_samples([{"r": None}, {"r": np.array([1])}]))["r"] == ("ragged", torch.int64, [None, [1]])
    assert collate_samples([{"x": None}, {"x": None}])["x"] == [None, None]
    seeds = collate_samples([{"__seed__": 2**64 - 1}, {"__seed__": 1}])["__seed__"]
    assert (seeds.dtype, seeds.tolist()) == (torch.uint64, [2**64 - 1, 1])
    assert collate_samples([{"x": 2**70}, {"x": 1}])["x"] == [2**70, 1]
    assert typed(collate_samples([{"x": 300}], {"x": Dense(np.array([3], np.uint8))}))["x"] == (
        "tensor",
        torch.int64,
        [300],
    )
    assert typed(collate_samples([{"x": 0.5}], {"x": Dense(np.array([3], np.uint8))}))["x"][1] == torch.float64
    assert collate_samples([]) == {}


@pytest.mark.parametrize(
    ("label", "who"),
    [({"__id__": 7, "__key__": "a/7"}, "__id__ 7"), ({"__key__": "a/7"}, "__key__ 'a/7'"), ({}, "row 1")],
)
def test_a_missing_key_names_the_sample(label, who):
    samples = [{**label, "x": 1, "y": 2}, {**label, "x": 1}]
    with pytest.raises(DecodeError, match=rf"{who} lacks \['y'\]"):
        collate_samples(samples)


# --------------------------------------------------------------------------------------------------- valid targets

ROWS = st.lists(st.none() | st.lists(st.sampled_from([IGNORE, 5, 6]), max_size=5), max_size=6)


@given(rows=ROWS, shifted=st.booleans())
def test_count_valid_is_what_a_loop_counts(rows, shifted):
    expected = [sum(label != IGNORE for label in (row or [])[0 if shifted else 1 :]) for row in rows]
    counted = count_valid(ragged(rows), IGNORE, shifted=shifted)
    assert (counted.dtype, counted.tolist()) == (torch.int64, expected)
    padded = ragged(rows).padded(IGNORE)
    assert count_valid(padded, IGNORE, shifted=shifted).tolist() == expected


# Case C48: two ranks with two micro-batches of one sample each.
C48_LABELS = [
    [7, 7, 7, *[IGNORE] * 6],
    [IGNORE, IGNORE, 7, *[IGNORE] * 6],
    [*[7] * 8, IGNORE],
    [IGNORE, 7, 7, 7, 7, *[IGNORE] * 4],
]


@pytest.mark.parametrize(("shifted", "per_uid"), [(True, [3, 1, 8, 4]), (False, [2, 1, 7, 4])])
def test_case_c48_counts_as_stored_and_with_next_token_shift(tmp_path, shifted, per_uid):
    pq.write_table(pa.table({"labels": pa.array(C48_LABELS, pa.list_(pa.int64()))}), tmp_path / "part-0.parquet")
    stored = pq.read_table(tmp_path / "part-0.parquet")["labels"].combine_chunks()
    offsets = stored.offsets.to_numpy().astype(np.int64)
    column = Slices(stored.values.to_numpy(), offsets[:-1], np.diff(offsets), "list")
    labels = columns_to_torch(Rows(4, {"labels": column}))["labels"]
    assert count_valid(labels, IGNORE, shifted=shifted).tolist() == per_uid
    assert count_valid(labels.padded(), IGNORE, shifted=shifted).tolist() == per_uid


def test_one_label_a_row_counts_as_it_is():
    labels = torch.tensor([3, IGNORE, 0])
    assert count_valid(labels, IGNORE, shifted=False).tolist() == [1, 0, 1]
    assert count_valid(labels, IGNORE, shifted=True).tolist() == [1, 0, 1]
    masks = torch.tensor([[[1, 255], [255, 255]], [[1, 1], [1, 1]]])
    assert count_valid(masks, 255, shifted=True).tolist() == [1, 4]


def test_an_ignore_index_that_the_dtype_cannot_hold_is_in_no_row():
    labels = torch.tensor([[65436, 1]]).to(torch.uint16)  # 65436 is -100 modulo 2^16
    assert count_valid(labels, IGNORE, shifted=True).tolist() == [2]
    assert count_valid(torch.tensor([True, False]), IGNORE, shifted=True).tolist() == [1, 1]


def test_targets_must_be_numbers():
    with pytest.raises(PlanError, match=r"targets must be numbers.*found list"):
        count_valid(["a"], IGNORE, shifted=True)
    with pytest.raises(PlanError, match=r"targets must be numbers.*found list"):
        mask_padding(["a"], torch.tensor([False]), IGNORE)


@given(rows=ROWS, data=st.data())
def test_masked_padding_never_counts(rows, data):
    is_padding = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), dtype=torch.bool
    )
    column = ragged(rows)
    before = column.tolist()
    expected = [
        row if row is None or not padding else [IGNORE] * len(row)
        for row, padding in zip(before, is_padding.tolist(), strict=True)
    ]
    assert mask_padding(column, is_padding, IGNORE).tolist() == expected
    assert column.tolist() == before
    masked = mask_padding(column.padded(7), is_padding, IGNORE)
    assert count_valid(masked, IGNORE, shifted=True)[is_padding].sum() == 0
    assert torch.equal(masked[~is_padding], column.padded(7)[~is_padding])


def test_mask_padding_copies_only_what_it_changes():
    labels = torch.tensor([3, 4])
    assert mask_padding(labels, torch.tensor([False, False]), IGNORE) is labels
    assert mask_padding(labels.float(), torch.tensor([False, True]), IGNORE).tolist() == [3.0, -100.0]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.bool])
def test_labels_that_cannot_hold_the_ignore_index_are_int64_in_every_batch(dtype, padding):
    masked = mask_padding(torch.tensor([1, 0]).to(dtype), torch.tensor([False, padding]), IGNORE)
    assert (masked.dtype, masked.tolist()) == (torch.int64, [1, IGNORE if padding else 0])


# ------------------------------------------------------------------------------------------------------ pad_tokens


@given(
    rows=st.lists(st.none() | st.lists(st.integers(1, 9), max_size=5), max_size=5),
    length=st.none() | st.integers(1, 6),
    shift=st.booleans(),
    side=st.sampled_from(["right", "left"]),
)
def test_pad_tokens_is_what_a_loop_over_rows_makes(rows, length, shift, side):
    width = length or max([len(row or ()) for row in rows] + [1])
    inputs, labels = [], []
    for row in rows:
        kept = (row or [])[:width]
        targets = [*kept[1:], IGNORE] if shift and kept else kept
        if not shift and kept and side == "left" and len(kept) < width:
            targets = [IGNORE, *kept[1:]]  # no token stands before it, so nothing predicts it
        gap = width - len(kept)
        left, right = (gap, 0) if side == "left" else (0, gap)
        inputs.append([0] * left + kept + [0] * right)
        labels.append([IGNORE] * left + targets + [IGNORE] * right)
    collate = pickle.loads(pickle.dumps(pad_tokens(length=length, shift=shift, side=side)))
    assert collate.takes_columns
    columns = collate({"tokens": ragged(rows, np.uint16), "id": [1]})
    assert list(columns) == ["id", "input_ids", "labels"]
    assert columns["input_ids"].dtype == columns["labels"].dtype == torch.int64
    assert columns["input_ids"].shape == columns["labels"].shape == (len(rows), width)
    assert columns["input_ids"].tolist() == inputs
    assert columns["labels"].tolist() == labels
    # Declared as pad_tokens says, both forms have the same targets.
    counted = count_valid(columns["labels"], IGNORE, shifted=shift)
    assert counted.tolist() == [max(len((row or [])[:width]) - 1, 0) for row in rows]


def test_pad_tokens_with_labels_of_their_own():
    columns = {"text": ragged([[1, 2, 3], [4]]), "mask": ragged([[IGNORE, 8, 9], [7]], np.int32)}
    as_stored = pad_tokens("text", labels="mask", shift=False, ignore_index=-1, pad_id=99)(columns)
    assert list(as_stored) == ["input_ids", "labels"]
    assert as_stored["input_ids"].tolist() == [[1, 2, 3], [4, 99, 99]]
    assert as_stored["labels"].tolist() == [[IGNORE, 8, 9], [7, -1, -1]]
    assert pad_tokens("text", labels="mask")(columns)["labels"].tolist() == [[8, 9, IGNORE], [IGNORE] * 3]
    wrong = {**columns, "mask": ragged([[1, 2, 3], [4, 5]])}
    with pytest.raises(DecodeError, match=r"'text' and 'mask' differ in length in row 1.*expected 1, found 2"):
        pad_tokens("text", labels="mask")(wrong)


def test_pad_tokens_takes_lists_of_a_fixed_size():
    columns = pad_tokens()({"tokens": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)})
    assert columns["labels"].tolist() == [[2, IGNORE], [4, IGNORE]]


def test_pad_tokens_refuses_what_it_cannot_pad():
    with pytest.raises(DecodeError, match=r"'tokens' holds no lists of tokens.*found columns \['text'\]"):
        pad_tokens()({"text": ["a"]})
    with pytest.raises(DecodeError, match="expected Ragged, found list"):
        pad_tokens()({"tokens": ["a"]})
    with pytest.raises(PlanError, match="length >= 1, found 0"):
        pad_tokens(length=0)
    with pytest.raises(PlanError, match="'middle'"):
        pad_tokens(side="middle")
