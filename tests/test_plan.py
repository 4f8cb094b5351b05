from __future__ import annotations

import dataclasses
import itertools
import pickle
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import CursorError, PlanError, ShardStreamWarning
from shardstream.manifest import Manifest
from shardstream.order import EpochOrder
from shardstream.plan import Plan
from tests.support.layouts import manifest_of

MANIFEST = manifest_of([7, 9, 1, 14, 8, 11, 13], [4, 20, 1, 5, 3, 11, 6], [2, 0, 4, 1])
NUM_SAMPLES = 63


def plan_of(manifest=MANIFEST, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardStreamWarning)  # of steps that drop leaves; tested by itself
        return Plan.make(manifest, **{"batch_size": 2, "seed": 5, **settings})


def batches_of(plan, rank, start=None, num_workers=1, **settings):
    """A rank's micro-batches in the order in which a DataLoader collects them from its workers."""
    start = plan.cursor() if start is None else start
    workers = [
        list(plan.micro_batches(rank, start, worker=worker, num_workers=num_workers, **settings))
        for worker in range(num_workers)
    ]
    return [batch for turn in itertools.zip_longest(*workers) for batch in turn if batch is not None]


def shown(batch):
    return tuple(field.tolist() if isinstance(field, np.ndarray) else field for field in batch)


def real_of(batch):
    return batch.positions[~batch.is_padding].tolist()


topologies = st.sampled_from(
    [(p, b, 24 // p // b) for p in (1, 2, 3, 4, 6, 8, 12, 24) for b in range(1, 25) if 24 // p % b == 0]
)


# ------------------------------------------------------------------------------------------------ chains of resumes


@given(
    st.sampled_from(["pad", "drop", "uneven"]),
    st.sampled_from([None, 1, 5, 8, 24]),
    st.lists(st.tuples(topologies, st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=7),
)
def test_chains_of_resumes_cover_each_epoch_exactly_once(tail, lanes, hops):
    """At other world sizes, micro-batches, accumulation and workers: the windows are those of one unbroken process."""
    manifest = Manifest.synthetic(num_shards=3, blocks_per_shard=3, rows_per_block=7, run_rows=3)
    unbroken = plan_of(manifest, batch_size=24, tail=tail, lanes=lanes)
    expected = [
        (epoch, batch.position, sorted(real_of(batch)))
        for epoch in range(20)
        for batch in batches_of(unbroken, 0, unbroken.cursor(epoch))
    ]
    trained, cursor = [], unbroken.cursor()
    for (world_size, batch_size, accumulate), num_workers, num_windows in hops:
        plan = plan_of(
            manifest, batch_size=batch_size, world_size=world_size, accumulate=accumulate, tail=tail, lanes=3
        )
        plan, cursor = plan.resume(cursor)
        ranks = [batches_of(plan, rank, cursor, num_workers) for rank in range(world_size)]
        deal = plan.epoch(cursor.epoch, cursor.position).deal
        steps = min(num_windows, deal.num_windows)
        for window in range(steps):
            here = [batch for batches in ranks for batch in batches if batch.window == window]
            assert {(batch.epoch, batch.position) for batch in here} == {
                (cursor.epoch, cursor.position + window * plan.global_batch)
            }
            trained.append((here[0].epoch, here[0].position, sorted(itertools.chain(*map(real_of, here)))))
        after = {
            plan.cursor_after(batch) for batches in ranks for batch in batches
            if batch.window == steps - 1 and batch.is_last_in_window
        }  # fmt: skip
        assert len(after) == 1
        cursor = after.pop()
    assert trained == expected[: len(trained)]
    whole = NUM_SAMPLES if tail != "drop" else 48
    for epoch in range(cursor.epoch):
        seen = sorted(itertools.chain.from_iterable(real for e, _, real in trained if e == epoch))
        assert seen == list(range(whole))


@given(topologies, st.sampled_from([1, 4, 5]), st.lists(st.tuples(topologies, st.integers(1, 9)), max_size=5))
def test_chains_of_resumes_of_an_endless_run_have_no_gap(first, lanes, hops):
    cursor, seen = plan_of(batch_size=24, tail="continue", lanes=lanes).cursor(), []
    for (world_size, batch_size, accumulate), num_windows in [(first, 3), *hops]:
        plan = plan_of(batch_size=batch_size, world_size=world_size, accumulate=accumulate, tail="continue", lanes=2)
        plan, cursor = plan.resume(cursor)
        after = set()
        for rank in range(world_size):
            batches = list(itertools.islice(plan.micro_batches(rank, cursor), num_windows * accumulate))
            seen += [batch.epoch * NUM_SAMPLES + position for batch in batches for position in batch.positions.tolist()]
            after.add(plan.cursor_after(batches[-1]))
        assert len(after) == 1
        cursor = after.pop()
    assert sorted(seen) == list(range(cursor.epoch * NUM_SAMPLES + cursor.position))


def test_a_cursor_moves_with_the_windows_last_micro_batch_only():
    plan = plan_of(world_size=2, accumulate=3, lanes=4)
    for rank in range(2):
        batches = batches_of(plan, rank)
        assert [plan.cursor_after(batch).position for batch in batches[:7]] == [0, 0, 12, 12, 12, 24, 24]
        assert plan.cursor_after(batches[-1]) == plan.cursor(1)
        assert [batch.is_last_in_epoch for batch in batches] == [False] * (len(batches) - 1) + [True]


# ------------------------------------------------------------------------------------------------ workers


@given(
    topologies,
    st.sampled_from(["pad", "drop", "uneven"]),
    st.sampled_from([1, 4, 5, 24]),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(0, 40),
)
def test_what_a_rank_reads_does_not_depend_on_workers(topology, tail, lanes, num_workers, whole_windows, first_index):
    world_size, batch_size, accumulate = topology
    plan = plan_of(batch_size=batch_size, world_size=world_size, accumulate=accumulate, tail=tail, lanes=lanes)
    start = plan.cursor(2, whole_windows * 24)
    for rank in range(min(world_size, 3)):
        alone = list(map(shown, batches_of(plan, rank, start)))
        assert [batch[0] for batch in alone] == list(range(len(alone)))
        assert len(alone) == plan.epoch(2, start.position).deal.num_micro_batches(rank)
        if first_index == 0:
            assert list(map(shown, batches_of(plan, rank, start, num_workers))) == alone
        later = [
            shown(batch)
            for worker in range(num_workers)
            for batch in plan.micro_batches(
                rank, start, worker=worker, num_workers=num_workers, first_index=first_index
            )
        ]
        assert sorted(later) == alone[first_index:]


@given(st.integers(1, 4), st.integers(0, 90))
def test_workers_of_an_endless_run_agree(num_workers, first_index):
    plan = plan_of(world_size=2, accumulate=5, tail="continue", lanes=4)
    alone = [shown(batch) for batch in itertools.islice(plan.micro_batches(1, plan.cursor()), 120)]
    workers = [
        plan.micro_batches(1, plan.cursor(), worker=worker, num_workers=num_workers, first_index=first_index)
        for worker in range(num_workers)
    ]
    for batch in alone[first_index:]:
        assert shown(next(workers[batch[0] % num_workers])) == batch
    assert [batch[0] for batch in alone] == list(range(120))
    assert [batch[3] for batch in alone] == [index // 5 for index in range(120)]


def test_windows_longer_than_many_are_dealt_at_once(monkeypatch):
    plan = plan_of(batch_size=3, world_size=2, accumulate=2, lanes=4)
    expected = list(map(shown, batches_of(plan, 1)))
    for at_once in (1, 6, 13):
        monkeypatch.setattr("shardstream.plan._DEALT_AT_ONCE", at_once)
        assert list(map(shown, batches_of(plan, 1, num_workers=2))) == expected


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_and_workers_that_do_not_exist_are_refused_at_once(rank):
    plan = plan_of(world_size=2)
    with pytest.raises(PlanError, match=rf"no such rank: expected 0\.\.1, found {rank}"):
        plan.micro_batches(rank, plan.cursor())
    with pytest.raises(PlanError, match=rf"no such worker: expected 0\.\.1, found {rank}"):
        plan.micro_batches(0, plan.cursor(), worker=rank, num_workers=2)


# ------------------------------------------------------------------------------------------------ the order


def test_positions_beyond_the_epoch_are_of_the_epochs_that_follow():
    plan = plan_of(lanes=4, tail="continue")
    positions = np.array([62, 63, 5, 127, 64, 190])
    located = plan.locate(3, positions)
    for k, position in enumerate(positions.tolist()):
        epoch, place = 3 + position // NUM_SAMPLES, position % NUM_SAMPLES
        alone = EpochOrder(MANIFEST, 5, epoch, 4).rows(np.array([place]))
        assert [array[k] for array in located] == [array[0] for array in alone]


def test_a_plan_is_a_value_that_pickles_bare():
    plan = plan_of(lanes=4)
    bare = len(pickle.dumps(plan))
    expected = plan.locate(0, np.arange(NUM_SAMPLES))
    assert plan.manifest.fingerprint
    assert len(pickle.dumps(plan)) == bare
    again = pickle.loads(pickle.dumps(plan))
    assert all((a == b).all() for a, b in zip(again.locate(0, np.arange(NUM_SAMPLES)), expected, strict=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 3


# ------------------------------------------------------------------------------------------------ making


@pytest.mark.parametrize(
    ("settings", "lanes"),
    [
        ({}, 2),
        ({"world_size": 4, "accumulate": 3}, 24),
        ({"batch_size": 96}, 48),
        ({"batch_size": 96, "lanes": 7}, 7),
        ({"shuffle": False}, 1),
        ({"shuffle": False, "lanes": 3}, 3),
        ({"shuffle": "full"}, 1),
        ({"shuffle": "torch"}, 1),
        ({"tail": "repeat"}, 1),
        ({"tail": "truncate"}, 1),
    ],
)
def test_lanes_have_defaults(settings, lanes):
    assert plan_of(**settings).lanes == lanes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1: found 0"),
        ({"batch_size": 0}, "batch_size must be at least 1: found 0"),
        ({"lanes": 0}, "lanes must be at least 1: found 0"),
        ({"lanes": 2, "shuffle": "full"}, "shuffle='full' has one lane"),
        ({"lanes": 2, "tail": "repeat"}, "tail='repeat' is DistributedSampler's and has one lane"),
        ({"tail": "last"}, "unknown tail"),
        ({"shuffle": "maybe"}, "unknown shuffle"),
        ({"global_batch": 3}, "a global batch of 3 is not a multiple of"),
        ({"seed": 0.5}, "the seed must be a whole number: found 0.5"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(PlanError) as refused:
        plan_of(**settings)
    assert message in str(refused.value)


def test_a_data_set_without_samples_says_where_it_looked():
    manifest = dataclasses.replace(manifest_of([], [], [0, 0]), root="s3://KEY:SECRET@bucket/x")
    with pytest.raises(PlanError) as refused:
        Plan.make(manifest, batch_size=2)
    assert str(refused.value) == (
        "the data set has no samples: found 2 shards: s3://bucket/x/0.parquet, s3://bucket/x/1.parquet"
    )


def test_a_tail_that_leaves_no_step_warns_with_both_numbers():
    with pytest.warns(ShardStreamWarning, match="63 samples do not fill one global batch of 64"):
        plan = Plan.make(MANIFEST, batch_size=8, world_size=8, tail="drop")
    assert batches_of(plan, 0) == []
    with pytest.warns(ShardStreamWarning, match="63 samples do not fill"):
        Plan.make(MANIFEST, batch_size=1, world_size=64, tail="truncate")


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 3, np.int64(7)])
def test_any_whole_number_is_a_seed(seed):
    plan = plan_of(seed=seed, lanes=4)
    assert sorted(plan.epoch(2**40).order.sample_ids(np.arange(63)).tolist()) == list(range(63))
    again, cursor = plan.resume(plan.cursor(2**40).from_json(plan.cursor(2**40).to_json()))
    assert again.seed == int(seed)
    assert cursor.seed == int(seed)


@pytest.mark.parametrize("world_size", [1, 5, 70])
def test_few_samples_on_many_ranks(world_size):
    """N < P, N < G and P = 1: every rank steps equally often, every sample comes once."""
    plan = plan_of(manifest_of([3], [3]), world_size=world_size, accumulate=2)
    ranks = [batches_of(plan, rank) for rank in range(world_size)]
    assert len(set(map(len, ranks))) == 1
    assert sorted(position for batches in ranks for batch in batches for position in real_of(batch)) == [0, 1, 2]
    assert {plan.cursor_after(batches[-1]) for batches in ranks} == {plan.cursor(1)}


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "seed: 5 in the cursor, 6 here; set seed as in the cursor; or start a new run"),
        ({"shuffle": False}, "shuffle: True in the cursor, False here; set shuffle as in the cursor"),
        ({"tail": "drop"}, "tail: 'pad' in the cursor, 'drop' here; set tail as in the cursor"),
        (
            {"global_batch": 16},
            (
                "global_batch: 8 in the cursor, 16 here; keep the global batch (change accumulate with the world "
                "size), or pass allow_batch_change=True; or start a new run without the cursor"
            ),
        ),
        (
            {"manifest": manifest_of([63], [9])},
            (
                "; shards: 4 of the 4 shards are missing or have changed; 0.parquet was added or has changed; "
                "resume with the manifest the run began with; or start a new run without the cursor"
            ),
        ),
        ({"seed": 6, "tail": "drop"}, "6 here; tail: 'pad' in the cursor, 'drop' here; set seed, tail as in"),
    ],
)
def test_a_cursor_of_another_run_is_refused_naming_the_difference_and_the_way_out(change, message):
    cursor = plan_of(global_batch=8).cursor(1, 16)
    with pytest.raises(CursorError) as refused:
        plan_of(**{"global_batch": 8, **change}).resume(cursor)
    assert str(refused.value).startswith("the cursor does not belong to this run: ")
    assert message in str(refused.value)


def test_a_cursor_of_another_order_version_is_refused():
    cursor = dataclasses.replace(plan_of().cursor(), order_version=2)
    with pytest.raises(CursorError, match="order_version: 2 in the cursor, 1 here"):
        plan_of().resume(cursor)


def test_parity_tails_are_tied_to_their_world_size():
    cursor = plan_of(world_size=2, accumulate=2, tail="repeat").cursor(0, 16)
    plan_of(world_size=2, accumulate=2, tail="repeat").resume(cursor)
    with pytest.raises(CursorError, match="world_size: 2 in the cursor, 4 here"):
        plan_of(world_size=4, tail="repeat").resume(cursor)


def test_lanes_are_taken_from_the_cursor():
    plan, cursor = plan_of(lanes=3).resume(plan_of(lanes=7).cursor(1, 4))
    assert plan.lanes == cursor.lanes == 7
    assert plan.epoch(1).order.lanes == 7


def test_a_changed_global_batch_begins_a_new_grid():
    cursor = plan_of(global_batch=8, lanes=4).cursor(1, 24)
    with pytest.warns(
        ShardStreamWarning, match="from 8 to 10 samples at position 24 of epoch 1: learning rate and warm"
    ):
        plan, start = plan_of(global_batch=10, lanes=4).resume(cursor, allow_batch_change=True)
    assert (start.epoch, start.position, start.grid_start, start.global_batch) == (1, 24, 24, 10)
    batches = batches_of(plan, 0, start)
    assert sorted(position for batch in batches for position in real_of(batch)) == list(range(24, 63))
    after = plan.cursor_after(batches[4], start.grid_start)
    assert (after.position, after.grid_start) == (34, 24)
    again, same = plan_of(global_batch=10).resume(after)
    assert same == after
    assert sorted(p for batch in batches_of(again, 0, same) for p in real_of(batch)) == list(range(34, 63))
    assert plan.cursor_after(batches[-1], start.grid_start) == plan.cursor(2)


def test_a_larger_batch_that_no_window_is_left_for_goes_on_in_the_next_epoch():
    cursor = plan_of(global_batch=4, tail="drop", lanes=2).cursor(0, 56)
    with pytest.warns(ShardStreamWarning, match="learning rate"):
        plan, start = plan_of(global_batch=8, tail="drop").resume(cursor, allow_batch_change=True)
    assert (start, start.lanes) == (plan.cursor(1), 2)
    assert batches_of(plan, 0, start)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (63, r"outside the epoch: expected 0\.\.62, found 63"),
        (17, "not at the start of a window: expected 0 . a multiple of 8, found 17"),
    ],
)
def test_a_cursor_at_an_impossible_place_is_refused(position, message):
    plan = plan_of(global_batch=8)
    with pytest.raises(CursorError, match=message):
        plan.resume(plan.cursor(0, position))


def test_shards_that_differ_are_named_from_the_two_manifests(tmp_path):
    before = MANIFEST.save(tmp_path / "before.parquet")
    cursor = plan_of(before).cursor(0, 4)
    rows = MANIFEST.block_rows.copy()
    rows[0] += 1
    after = dataclasses.replace(MANIFEST, block_rows=rows, digests=["", "", "new", ""])
    with pytest.raises(CursorError) as refused:
        plan_of(after).resume(cursor)
    assert "fingerprint: " in str(refused.value)
    assert "; shards: 0.parquet has changed; 2.parquet has changed; resume with the manifest" in str(refused.value)

    # The old manifest is gone: the cursor's own marks say which shards differ, if there are not too many.
    unmarked = dataclasses.replace(cursor, shards=None)
    after.save(tmp_path / "before.parquet", overwrite=True)
    with pytest.raises(CursorError, match=r"unknown: .*before\.parquet is no longer the cursor's manifest"):
        plan_of(after).resume(unmarked)
    (tmp_path / "before.parquet").unlink()
    with pytest.raises(CursorError, match=r"fingerprint: .*; which shards differ is unknown: .*before\.parquet"):
        plan_of(after).resume(unmarked)
    changed = "0.parquet was added or has changed; 2.parquet was added or has changed; resume with"
    with pytest.raises(CursorError, match=changed):
        plan_of(after).resume(cursor)


def test_a_cursor_has_no_marks_of_many_shards():
    few, many = (Manifest.synthetic(num_shards=n, blocks_per_shard=1, rows_per_block=2) for n in (64, 65))
    cursor = plan_of(few).cursor()
    assert len(cursor.shards) == 64 * 8
    assert plan_of(many).cursor().shards is None
    with pytest.raises(CursorError, match=r"here; shards: shard-000064\.parquet was added; resume"):
        plan_of(many).resume(cursor)
