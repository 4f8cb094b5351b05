from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, default_convert
from torch.utils.data._utils.pin_memory import pin_memory

from shardstream.torch.batch import ARRIVALS, Batch, Place, register_receiver
from shardstream.torch.ragged import Ragged


def ragged_of(rows, dtype=torch.int64):
    lengths = [0 if row is None else len(row) for row in rows]
    values = torch.tensor([value for row in rows for value in row or ()], dtype=torch.int64).to(dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    is_null = torch.tensor([row is None for row in rows]) if None in rows else None
    return Ragged(values, offsets, is_null)


def make_batch(first=0, token=None, rows=2):
    ids = torch.arange(first, first + rows)
    return Batch(
        {"x": ids * 10, "tokens": ragged_of([[1, 2]] * rows), "name": ["a"] * rows, "deep": {"y": (ids, [None])}},
        sample_ids=ids,
        is_padding=torch.tensor([False] * (rows - 1) + [True]),
        valid_tokens={"lm": torch.tensor([2] * (rows - 1) + [0])},
        place=Place(
            position=first, cursor=("cursor", first), window_index=first // rows, micro_index=1, is_last_in_window=True
        ),
        origin_token=token,
    )


def assert_same(batch, expected):
    assert isinstance(batch, Batch)
    assert batch.keys() == expected.keys()
    assert batch["x"].tolist() == expected["x"].tolist()
    assert batch["tokens"].tolist() == expected["tokens"].tolist()
    assert batch["name"] == expected["name"]
    assert batch["deep"]["y"][0].tolist() == expected["deep"]["y"][0].tolist()
    assert batch["deep"]["y"][1] == [None]
    assert batch.sample_ids.tolist() == expected.sample_ids.tolist()
    assert batch.is_padding.tolist() == expected.is_padding.tolist()
    assert batch.valid_tokens["lm"].tolist() == expected.valid_tokens["lm"].tolist()
    assert batch.place == expected.place
    assert batch.origin_token == expected.origin_token


ROWS = st.lists(st.none() | st.lists(st.integers(0, 9), max_size=5), max_size=6)


@given(rows=ROWS, length=st.none() | st.integers(0, 6), side=st.sampled_from(["right", "left"]))
def test_padded_is_what_a_loop_over_rows_makes(rows, length, side):
    ragged = ragged_of(rows)
    width = max([len(row or ()) for row in rows], default=0) if length is None else length
    expected, filled = [], []
    for row in rows:
        kept = (row or [])[:width]
        gap = [-1] * (width - len(kept))
        expected.append(kept + gap if side == "right" else gap + kept)
        filled.append([True] * len(kept) + [False] * len(gap))
        filled[-1] = filled[-1] if side == "right" else filled[-1][::-1]
    assert ragged.padded(-1, length, side).shape == (len(rows), width)
    assert ragged.padded(-1, length, side).tolist() == expected
    assert ragged.filled_mask(length, side).tolist() == filled
    assert ragged.tolist() == rows
    assert ragged.lengths.tolist() == [len(row or ()) for row in rows]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float32, torch.bool])
def test_padded_keeps_the_dtype(dtype):
    padded = ragged_of([[1, 0], [1]], dtype).padded()
    assert padded.dtype == dtype
    assert padded.tolist() == [[1, 0], [1, 0]]


def test_rows_are_views_and_nulls_are_none():
    ragged = ragged_of([[1, 2], None, [], [3]])
    assert len(ragged) == 4
    assert ragged[1] is None
    assert ragged[-1].tolist() == [3]
    assert ragged[2].tolist() == []
    ragged[0][1] = 7
    assert ragged.values.tolist() == [1, 7, 3]
    assert [row if row is None else row.tolist() for row in ragged] == [[1, 7], None, [], [3]]
    with pytest.raises(IndexError):
        ragged[4]


def test_nested_shares_values():
    ragged = ragged_of([[1, 2], [], [3]])
    nested = ragged.nested()
    assert nested.is_nested
    assert nested.layout == torch.jagged
    assert [row.tolist() for row in nested.unbind()] == [[1, 2], [], [3]]
    assert nested.values().data_ptr() == ragged.values.data_ptr()


def test_to_converts_values_only():
    ragged = ragged_of([[1], None]).to("cpu", torch.float32)
    assert (ragged.values.dtype, ragged.offsets.dtype, ragged.is_null.dtype) == (
        torch.float32,
        torch.int64,
        torch.bool,
    )
    assert ragged.to("meta").values.device.type == "meta"


def test_bad_offsets_and_sides_are_refused():
    with pytest.raises(ValueError, match=r"int64\[b \+ 1\], found torch.int32"):
        Ragged(torch.tensor([1]), torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="side must be"):
        ragged_of([[1]]).padded(side="middle")


def test_neither_is_a_mapping_nor_a_sequence():
    for value in (make_batch(), ragged_of([[1]])):
        assert not isinstance(value, Mapping | Sequence)
        assert default_convert(value) is value


def test_batch_works_like_a_dict_of_columns():
    batch = make_batch()
    assert len(batch) == 2
    assert batch.keys() == list(batch) == ["x", "tokens", "name", "deep"]
    assert "x" in batch
    assert "y" not in batch
    assert dict(batch) == batch.model_inputs() == dict(batch.items())
    assert list(dict(**batch)) == batch.keys()
    with pytest.raises(KeyError, match=r"no column 'y'.*\['x', 'tokens', 'name', 'deep'\]"):
        batch["y"]
    batch.model_inputs().clear()
    assert "x" in batch
    assert (batch.position, batch.window_index, batch.micro_index, batch.is_last_in_window) == (0, 0, 1, True)


@pytest.mark.parametrize(
    "through",
    [
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: pickle.loads(bytes(ForkingPickler.dumps(batch))),
        copy.copy,
        copy.deepcopy,
        lambda batch: batch.to("cpu"),
        lambda batch: batch.pin_memory(),
        lambda batch: pin_memory(batch, "cpu"),
        lambda batch: batch.replace(batch.model_inputs()),
    ],
    ids=["pickle", "ForkingPickler", "copy", "deepcopy", "to", "pin_memory", "torch's pin_memory", "replace"],
)
def test_nothing_is_lost(through):
    batch = make_batch(first=6, token=12)
    assert_same(through(batch), batch)


def test_to_moves_columns_and_padding_but_not_the_counts():
    batch = make_batch().to("meta", non_blocking=True)
    assert {batch["x"].device.type, batch["tokens"].offsets.device.type, batch.is_padding.device.type} == {"meta"}
    assert batch["deep"]["y"][0].device.type == "meta"
    assert {batch.sample_ids.device.type, batch.valid_tokens["lm"].device.type} == {"cpu"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device")
def test_pin_memory_pins():
    batch = pin_memory(make_batch(), "cuda")
    assert batch["x"].is_pinned()
    assert batch["tokens"].values.is_pinned()
    assert_same(batch.to("cuda", non_blocking=True).to("cpu"), make_batch())


TOUCHES = {
    "[]": lambda batch: batch["x"],
    "keys": lambda batch: batch.keys(),
    "iteration": iter,
    "items": lambda batch: batch.items(),
    "model_inputs": lambda batch: batch.model_inputs(),
    "to": lambda batch: batch.to("cpu"),
    "sample_ids": lambda batch: batch.sample_ids,
    "cursor": lambda batch: batch.cursor,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}
NO_TOUCHES = {
    "len": len,
    "repr": repr,
    "in": lambda batch: "x" in batch,
    "place": lambda batch: (batch.position, batch.window_index, batch.micro_index, batch.is_last_in_window),
    "counts": lambda batch: (batch.valid_tokens, batch.is_padding),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_the_first_touch_is_told_once(touch):
    told = []
    batch = make_batch()
    batch._on_touch = lambda: told.append(1)
    touch(batch)
    touch(batch)
    assert told == [1]


@pytest.mark.parametrize("look", NO_TOUCHES.values(), ids=NO_TOUCHES.keys())
def test_a_look_is_no_touch(look):
    told = []
    batch = make_batch()
    batch._on_touch = lambda: told.append(1)
    look(batch)
    assert told == []


def test_pinning_hands_the_touch_on():
    told = []
    batch = make_batch()
    batch._on_touch = lambda: told.append(1)
    pinned = batch.pin_memory()
    assert told == []
    assert pinned["x"].tolist() == [0, 10]
    assert told == [1]
    assert batch["x"].tolist() == [0, 10]
    assert told == [1]


class Inbox:
    def __init__(self):
        self.positions = []
        self.touched = []

    def arrived(self, batch):
        self.positions.append(batch.position)
        batch._on_touch = lambda: self.touched.append(batch.position)


class Batches(IterableDataset):
    def __init__(self, token, count):
        self.token, self.count = token, count

    def __iter__(self):
        return (make_batch(2 * index, self.token) for index in range(self.count))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_batches_from_workers_arrive_and_are_touched_in_the_main_process(method):
    inbox = Inbox()
    token = register_receiver(inbox)
    loader = DataLoader(
        Batches(token, 4), batch_size=None, num_workers=1, multiprocessing_context=method, prefetch_factor=2
    )
    seen = []
    for batch in loader:
        assert batch.position not in inbox.touched
        assert_same(batch, make_batch(batch.position, token))
        seen.append(batch.position)
    assert seen == [0, 2, 4, 6]
    assert inbox.positions == inbox.touched == seen


def test_without_workers_nothing_is_pickled_and_nothing_lost():
    batches = list(DataLoader(Batches(None, 3), batch_size=None))
    for index, batch in enumerate(batches):
        assert_same(batch, make_batch(2 * index))


def between_processes(batch):
    return pickle.loads(bytes(ForkingPickler.dumps(batch)))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_only_batches_from_another_process_arrive(again):
    """A stored or copied batch of an earlier epoch, looked at later, must not move the dataset back there."""
    inbox = Inbox()
    batch = between_processes(make_batch(token=register_receiver(inbox)))
    assert inbox.positions == [0]
    again(batch)["x"]
    again(batch)["x"]
    assert inbox.positions == inbox.touched == [0]


def test_a_receiver_that_is_gone_is_not_called():
    inbox = Inbox()
    token = register_receiver(inbox)
    assert ARRIVALS[token] is inbox
    stored = bytes(ForkingPickler.dumps(make_batch(token=token)))
    del inbox
    gc.collect()
    assert token not in ARRIVALS
    assert_same(pickle.loads(stored), make_batch(token=token))


def test_receivers_have_numbers_of_their_own():
    first, second = Inbox(), Inbox()
    assert register_receiver(first) != register_receiver(second)
