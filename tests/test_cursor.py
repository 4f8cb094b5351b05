from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from shardstream.cursor import CURSOR_VERSION, Cursor, way_out
from shardstream.deal import Deal
from shardstream.errors import CursorError
from shardstream.manifest import Manifest
from shardstream.plan import Plan

CURSOR = Cursor(fingerprint="ab" * 16, seed=1, epoch=2, position=64, global_batch=32, shuffle=True, lanes=8, tail="pad")


@st.composite
def cursors(draw):
    number, text = st.integers(0, 2**70), st.text(max_size=20)
    return Cursor(
        fingerprint=draw(text),
        seed=draw(st.integers(-(2**70), 2**70)),
        epoch=draw(number),
        position=draw(number),
        global_batch=1 + draw(number),
        shuffle=draw(st.sampled_from([True, False, "full", "torch"])),
        lanes=1 + draw(number),
        tail=draw(text),
        grid_start=draw(number),
        packing=draw(st.none() | st.dictionaries(text, st.integers() | text, max_size=3)),
        world_size=draw(st.none() | st.integers(1, 4096)),
        manifest=draw(st.none() | text),
        shards=draw(st.none() | text),
        order_version=draw(st.integers(1, 9)),
    )


# ------------------------------------------------------------------------------------------------ JSON


@given(cursors())
def test_a_cursor_survives_every_way_to_keep_it(cursor):
    assert Cursor.from_json(cursor.to_json()) == cursor
    assert Cursor.from_json(cursor.to_json().encode()) == cursor
    assert Cursor.from_state_dict(json.loads(json.dumps(cursor.state_dict()))) == cursor
    assert Cursor.from_state_dict(cursor) is cursor
    assert pickle.loads(pickle.dumps(cursor)) == cursor
    assert hash(Cursor.from_json(cursor.to_json())) == hash(cursor)
    assert "\n" not in cursor.to_json()


def test_a_cursor_is_small():
    assert len(CURSOR.to_json()) < 1024
    manifest = Manifest.synthetic(num_shards=64, blocks_per_shard=3, rows_per_block=9)
    assert len(Plan.make(manifest, batch_size=64).cursor(7, 2**40).to_json()) < 1024


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(json_values)
def test_any_json_is_a_cursor_or_a_cursor_error(value):
    with pytest.raises(CursorError):
        Cursor.from_json(json.dumps(value))


@given(st.text() | st.binary())
def test_any_text_is_a_cursor_or_a_cursor_error(text):
    with pytest.raises(CursorError):
        Cursor.from_json(text)


@given(st.sampled_from([f.name for f in dataclasses.fields(Cursor)]), json_values)
def test_any_value_of_a_field_is_accepted_as_it_is_or_refused(name, value):
    state = {**CURSOR.state_dict(), name: value}
    try:
        cursor = Cursor.from_json(json.dumps(state))
    except CursorError:
        return
    assert getattr(cursor, name) == value
    assert type(getattr(cursor, name)) is type(value)
    # What was accepted can be used: it moves, is compared and is written again.
    assert Cursor.from_json(cursor.advanced(1, num_positions=100).to_json()).epoch >= 0
    assert all(text.startswith(name) for text in cursor.differences(CURSOR))


@given(st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), json_values, max_size=3))
def test_foreign_fields_are_refused_whatever_their_names_are(foreign):
    state = {**CURSOR.state_dict(), **foreign, 5: 1}
    with pytest.raises(CursorError, match="unknown fields"):
        Cursor.from_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": CURSOR_VERSION + 1}, "the cursor is of a newer version: expected 1, found 2; upgrade shardstream"),
        ({"version": CURSOR_VERSION + 1, "new": 1}, "the cursor is of a newer version"),
        ({"version": 0}, "a cursor's version is wrong"),
        ({"version": "1"}, "a cursor's version is wrong: expected a whole number from 1 on, found '1'"),
        ({"seed": 1.0}, "a cursor's seed is wrong: expected a whole number, found 1.0"),
        ({"seed": True}, "a cursor's seed is wrong"),
        ({"epoch": -1}, "a cursor's epoch is wrong: expected a whole number from 0 on, found -1"),
        ({"position": None}, "a cursor's position is wrong"),
        ({"global_batch": 0}, "a cursor's global_batch is wrong: expected a whole number from 1 on, found 0"),
        ({"lanes": 0}, "a cursor's lanes is wrong"),
        ({"world_size": "2"}, "a cursor's world_size is wrong"),
        ({"shuffle": 1}, "a cursor's shuffle must be true, false or a text: found 1"),
        ({"fingerprint": None}, "a cursor's fingerprint must be a text: found None"),
        ({"manifest": 3}, "a cursor's manifest must be a text: found 3"),
        ({"packing": []}, "a cursor's packing must be a mapping: found []"),
        ({"speed": 1}, "a cursor has unknown fields: found speed"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change, message):
    with pytest.raises(CursorError) as refused:
        Cursor.from_state_dict({**CURSOR.state_dict(), **change})
    assert str(refused.value).startswith(message)


def test_missing_fields_are_named():
    state = CURSOR.state_dict()
    del state["seed"], state["lanes"]
    with pytest.raises(CursorError, match="a cursor lacks fields: expected lanes, seed, found "):
        Cursor.from_state_dict(state)
    with pytest.raises(CursorError, match="a cursor must be a mapping: found list"):
        Cursor.from_state_dict([1])


def test_fields_that_came_later_may_be_missing():
    state = {name: value for name, value in CURSOR.state_dict().items() if value is not None and name != "grid_start"}
    assert Cursor.from_state_dict(state) == CURSOR


# ------------------------------------------------------------------------------------------------ differences


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Cursor)])
def test_every_field_but_the_place_is_compared(name):
    other = dataclasses.replace(CURSOR, **{name: "other"})
    expected = [f"{name}: {getattr(CURSOR, name)!r} in the cursor, 'other' here"]
    is_free = name in {"epoch", "position", "grid_start", "manifest", "shards"}
    assert CURSOR.differences(other) == ([] if is_free else expected)
    assert CURSOR.differences(CURSOR) == []


def test_another_global_batch_is_accepted_when_allowed():
    other = dataclasses.replace(CURSOR, global_batch=64, seed=2)
    assert CURSOR.differences(other) == ["seed: 1 in the cursor, 2 here", "global_batch: 32 in the cursor, 64 here"]
    assert CURSOR.differences(other, allow_batch_change=True) == ["seed: 1 in the cursor, 2 here"]


# ------------------------------------------------------------------------------------------------ advancing

numbers = st.integers(1, 5)


@given(
    st.integers(1, 70),
    numbers,
    numbers,
    numbers,
    st.sampled_from(["pad", "drop", "uneven", "repeat", "truncate"]),
    st.integers(0, 69),
)
def test_advancing_ends_the_epoch_where_the_deal_does(num_positions, world_size, batch_size, accumulate, tail, start):
    """The cursor is in the next epoch exactly when no window is left: never before, and never one step too late."""
    deal = Deal(num_positions, world_size, batch_size, accumulate, tail, start=min(start, num_positions))
    cursor = Cursor("", 0, 3, deal.start, deal.global_batch, shuffle=False, lanes=1, tail=tail, world_size=world_size)
    for num_windows in range(deal.num_windows + 1):
        after = cursor.advanced(num_windows, num_positions=num_positions)
        if num_windows == deal.num_windows:
            assert (after.epoch, after.position, after.grid_start) == (4, 0, 0)
        else:
            assert (after.epoch, after.position) == (3, deal.start + num_windows * deal.global_batch)
            rest = dataclasses.replace(deal, start=after.position)
            assert rest.num_windows == deal.num_windows - num_windows > 0


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 9), st.integers(0, 9))
def test_advancing_in_an_endless_order_counts_every_sample(num_positions, global_batch, first, second):
    cursor = Cursor("", 0, 0, 0, global_batch, shuffle=True, lanes=1, tail="continue")
    after = cursor.advanced(first, num_positions=num_positions).advanced(second, num_positions=num_positions)
    assert after.epoch * num_positions + after.position == (first + second) * global_batch
    assert 0 <= after.position < num_positions
    assert after == cursor.advanced(first + second, num_positions=num_positions)
    assert (after.position - after.grid_start) % global_batch == 0


# ------------------------------------------------------------------------------------------------ torchdata


def worker_state(next_index, **change):
    state = {"origin": CURSOR.state_dict(), "next_index": next_index, "accumulate": 2, "num_positions": 200}
    return {**state, **change}


@pytest.mark.parametrize(
    ("states", "steps_since", "position"),
    [
        ([0], 0, 64),
        ([1], 0, 64),
        ([2], 0, 96),
        ([2, 3], 0, 96),
        ([4, 3], 0, 96),
        ([6, 4, 5], 0, 128),
        ([0, 1], 3, 96),
        ([2, 1], 3, 128),
    ],
)
def test_worker_states_become_the_position_of_all_ranks(states, steps_since, position):
    workers = {f"worker_{k}": {"fetcher_state": {"dataset_iter_state": worker_state(n)}} for k, n in enumerate(states)}
    state = {"_snapshot": {"_worker_snapshots": workers, "_snapshot_step": 1}, "_steps_since_snapshot": steps_since}
    assert Cursor.from_torchdata({"loader": state, "step": 3}) == dataclasses.replace(CURSOR, position=position)


def test_the_end_of_an_epoch_is_the_start_of_the_next():
    """136 positions are left: 4 whole windows of 2 micro-batches, and one of a single, half-empty one."""
    assert Cursor.from_torchdata(worker_state(8, num_micro_batches=9)).position == 64 + 4 * 32
    after = Cursor.from_torchdata(worker_state(9, num_micro_batches=9))
    assert (after.epoch, after.position) == (3, 0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "no state of a StreamingDataset was found"),
        ([], "no state of a StreamingDataset was found"),
        ({"_snapshot": {"worker_0": {"origin": {}}}}, "no state of a StreamingDataset was found"),
        (worker_state(-1), "a cursor's next_index is wrong"),
        (worker_state("2"), "a cursor's next_index is wrong"),
        (worker_state(1, accumulate=0), "a cursor's accumulate is wrong"),
        (worker_state(1, num_positions=None), "a cursor's num_positions is wrong"),
        (worker_state(1, num_micro_batches="x"), "a cursor's num_micro_batches is wrong"),
        (worker_state(1, origin={}), "a cursor lacks fields"),
        (worker_state(1, origin=None), "a cursor must be a mapping"),
        ({"a": worker_state(1), "_steps_since_snapshot": None}, "a cursor's _steps_since_snapshot is wrong"),
        (
            {"a": worker_state(1), "b": worker_state(1, origin=dataclasses.replace(CURSOR, epoch=3).state_dict())},
            "the workers of a StatefulDataLoader are not in the same pass: found epoch 2 from position 64 on, epoch 3 ",
        ),
    ],
)
def test_states_that_say_nothing_are_refused(state, message):
    with pytest.raises(CursorError) as refused:
        Cursor.from_torchdata(state)
    assert str(refused.value).startswith(message)


@given(json_values)
def test_any_state_is_refused_with_a_cursor_error(value):
    with pytest.raises(CursorError):
        Cursor.from_torchdata({"a": worker_state(1, origin=value), "b": value})


def test_a_worker_state_is_not_taken_for_a_cursor():
    with pytest.raises(CursorError, match=r"not a cursor; use Cursor\.from_torchdata\(state\)"):
        Cursor.from_state_dict(worker_state(1))


class Counting(IterableDataset):
    """Micro-batches 0..num - 1 dealt to workers in turn, with the states of a StreamingDataset's iterators."""

    def __init__(self, num):
        self.num = num

    def __iter__(self):
        return CountingIterator(self.num)


class CountingIterator:
    def __init__(self, num):
        info = get_worker_info()
        self.next_index, self.num_workers = (info.id, info.num_workers) if info else (0, 1)
        self.num = num

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index >= self.num:
            raise StopIteration
        self.next_index += self.num_workers
        return self.next_index - self.num_workers

    def state_dict(self):
        return worker_state(self.next_index, num_micro_batches=self.num)

    def load_state_dict(self, state):
        self.next_index = state["next_index"]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on machines with fewer cores
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize(("num_workers", "every"), [(0, 1), (2, 1), (2, 4), (3, 5)])
def test_a_real_stateful_data_loader_hands_over_its_place(num_workers, every):
    """At every step, snapshots that are older than the step included."""
    loader = StatefulDataLoader(
        Counting(9),
        batch_size=None,
        num_workers=num_workers,
        snapshot_every_n_steps=every,
        multiprocessing_context=None,
    )
    for step, batch in enumerate(loader, start=1):
        assert batch == step - 1
        cursor = Cursor.from_torchdata(loader.state_dict())
        expected = (3, 0) if step == 9 else (2, 64 + step // 2 * 32)
        assert (cursor.epoch, cursor.position) == expected


def test_an_order_version_is_no_setting():
    told = way_out(["order_version: 2 in the cursor, 1 here", "seed: 1 in the cursor, 2 here"])
    assert told.startswith("use a release of shardstream that has the cursor's order_version, and set seed as")
