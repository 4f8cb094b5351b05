from __future__ import annotations

import dataclasses
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from shardstream.errors import PlanError, ShardStreamWarning
from shardstream.manifest import Manifest
from shardstream.order import EpochOrder, Lanes, default_lanes, lane_sizes
from tests.support import order_reference as ref
from tests.support.layouts import GOLDEN, manifest_of

LARGE = 2**40


@st.composite
def layouts(draw, max_blocks=8):
    """Blocks of any size in shards of any number of blocks (none included), runs of any length."""
    rows = draw(st.lists(st.integers(1, 14), max_size=max_blocks))
    runs = [draw(st.integers(1, 16)) for _ in rows]
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    return manifest_of(rows, runs, np.diff([0, *cuts, len(rows)]).tolist())


def located(order, positions=None):
    positions = np.arange(order.num_positions) if positions is None else positions
    found = order.rows(positions)
    return [list(pair) for pair in zip(found.block.tolist(), found.row.tolist(), strict=True)]


# ------------------------------------------------------------------------------------------------ goldens and oracle


@pytest.mark.parametrize("golden", GOLDEN["orders"], ids=lambda golden: f"{golden['block_rows']}x{golden['lanes']}")
def test_orders_are_golden(golden):
    manifest = manifest_of(golden["block_rows"], [golden["run_rows"]] * len(golden["block_rows"]))
    order = EpochOrder(manifest, golden["seed"], golden["epoch"], golden["lanes"], golden["shuffle"])
    assert located(order) == golden["order"]


@pytest.mark.parametrize(("case", "lanes"), GOLDEN["default_lanes"].items())
def test_default_lanes_are_golden(case, lanes):
    assert default_lanes(*map(int, case.split(","))) == lanes


@given(st.integers(1, 300), st.integers(0, 2000))
def test_default_lanes_equal_the_oracle(global_batch, num_blocks):
    expected = ref.default_lanes(global_batch, num_blocks)
    if expected < global_batch / 4:
        with pytest.warns(ShardStreamWarning, match=f"{expected} lanes mix only"):
            assert default_lanes(global_batch, num_blocks) == expected
    else:
        assert default_lanes(global_batch, num_blocks) == expected


@given(layouts(), st.integers(-(2**64), 2**66), st.integers(0, 2**66), st.integers(1, 90), st.booleans())
def test_orders_equal_the_oracle(manifest, seed, epoch, lanes, shuffle):
    order = EpochOrder(manifest, seed, epoch, lanes, shuffle)
    rows, runs = manifest.block_rows.tolist(), manifest.block_run_rows.tolist()
    assert located(order) == list(map(list, ref.order(rows, runs, seed, epoch, lanes, shuffle)))


@given(st.integers(0, 200), st.integers(1, 250), st.booleans())
def test_lanes_equal_the_oracle_and_are_a_bijection(num_positions, lanes, has_phases):
    cut = Lanes.keyed(num_positions, lanes, seed=5, epoch=2) if has_phases else Lanes(num_positions, lanes)
    places = cut.line_index(np.arange(num_positions)).tolist()
    assert places == ref.lane_order(num_positions, lanes, 5, 2, has_phases)
    assert sorted(places) == list(range(num_positions))
    sizes = [len(range(k, num_positions, lanes)) for k in range(lanes)]
    assert lane_sizes(num_positions, lanes).tolist() == sizes


@given(st.integers(1, 10_000), st.integers(0, 2**40), st.integers(0, 50))
def test_lanes_do_not_overflow(lanes, position, seed):
    """At 2^40 samples and more every step is still exact: compared with unbounded integers."""
    n = LARGE + 7
    cut = Lanes.keyed(n, lanes, seed=seed, epoch=1)
    share, more = divmod(n, lanes)
    lane, turn = position % lanes, position // lanes
    size = share + (lane < more)
    expected = lane * share + min(lane, more) + (turn + ref.key64(seed, 1, "phase", lane) % size) % size
    assert cut.line_index(np.array([position])).tolist() == [expected]


# ------------------------------------------------------------------------------------------------ one order


@given(layouts(), st.integers(0, 5), st.integers(1, 20), st.sampled_from([True, False, "full", "torch"]))
def test_rows_sample_ids_and_locate_agree(manifest, epoch, lanes, shuffle):
    order = EpochOrder(manifest, 3, epoch, 1 if isinstance(shuffle, str) else lanes, shuffle)
    positions = np.arange(manifest.num_samples)
    ids = order.sample_ids(positions)
    assert sorted(ids.tolist()) == positions.tolist()
    block, run, row = order.rows(positions)
    assert (manifest.block_start[block] + row == ids).all()
    assert (run == row // manifest.block_run_rows[block]).all()
    shard, shard_row = order.locate(positions)
    assert (shard == manifest.shard_of_block(block)).all()
    assert (manifest.first_sample[shard] + shard_row == ids).all()
    assert all(array.dtype == np.int64 for array in (block, run, row, shard, shard_row, ids))


@given(layouts(), st.integers(1, 20), st.randoms(use_true_random=False))
def test_who_asks_for_which_positions_makes_no_difference(manifest, lanes, rnd):
    whole = EpochOrder(manifest, 1, 0, lanes)
    ids = whole.sample_ids(np.arange(whole.num_positions))
    asked = [rnd.randrange(whole.num_positions) for _ in range(12)] if whole.num_positions else []
    other = EpochOrder(manifest, 1, 0, lanes)
    for some in (asked[:5], asked[5:], asked):
        assert other.sample_ids(np.array(some, np.int64)).tolist() == ids[np.array(some, np.int64)].tolist()


def test_seeds_and_epochs_give_different_orders():
    manifest = Manifest.synthetic(num_shards=4, blocks_per_shard=5, rows_per_block=20)
    orders = {
        tuple(EpochOrder(manifest, seed, epoch, 4).sample_ids(np.arange(400)).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_shards_of_equal_blocks_are_not_read_in_step():
    """512 equal shards sorted by source: with phases a batch sees every source about as often as a uniform draw."""
    manifest = Manifest.synthetic(num_shards=512, blocks_per_shard=1, rows_per_block=100, run_rows=10)
    order = EpochOrder(manifest, 1, 0, lanes=64)
    sources = np.array(
        [np.bincount(order.rows(np.arange(t * 64, t * 64 + 64)).row // 10, minlength=10) for t in range(80)]
    )
    assert (sources > 0).sum(1).min() >= 6
    assert sources.max() <= 24


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**40, 1)])
def test_torch_shuffle_is_distributed_samplers_order(num_replicas, seed, epoch):
    manifest = manifest_of([7, 9, 1, 14], [4, 4, 4, 4], [1, 0, 3])
    order = EpochOrder(manifest, seed, epoch, shuffle="torch")
    for rank in range(num_replicas):
        sampler = DistributedSampler(range(31), num_replicas=num_replicas, rank=rank, seed=seed)
        sampler.set_epoch(epoch)
        theirs = list(sampler)[: len(range(rank, 31, num_replicas))]
        assert order.sample_ids(np.arange(rank, 31, num_replicas)).tolist() == theirs


def test_the_next_samples_stay_in_the_runs_that_are_open():
    """A lane walks run by run: 10 consecutive places of a lane touch at most two runs of 10 rows."""
    manifest = Manifest.synthetic(num_shards=2, blocks_per_shard=3, rows_per_block=40, run_rows=10)
    order = EpochOrder(manifest, 1, 0, lanes=3)
    for lane in range(3):
        block, run, _ = order.rows(np.arange(lane, 240, 3))
        changes = (np.diff(block) != 0) | (np.diff(run) != 0)
        assert changes.sum() <= 80 // 10 + 1


# ------------------------------------------------------------------------------------------------ bounds and refusals


def test_a_memo_of_runs_never_changes_what_comes_out(monkeypatch):
    manifest = Manifest.synthetic(num_shards=2, blocks_per_shard=3, rows_per_block=40, run_rows=10)
    expected = EpochOrder(manifest, 1, 0, 3).sample_ids(np.arange(240))
    monkeypatch.setattr("shardstream.order._KEPT_NUM_BYTES", 1000)
    order = EpochOrder(manifest, 1, 0, 3)
    got = [order.sample_ids(np.arange(first, first + 8)) for first in random.Random(1).sample(range(233), 60)]
    firsts = random.Random(1).sample(range(233), 60)
    assert all((ids == expected[first : first + 8]).all() for ids, first in zip(got, firsts, strict=True))
    assert 0 < len(order._permutations._kept) <= 3


def test_a_memo_of_tiny_runs_is_bounded_too(monkeypatch):
    """What a run costs is counted, not only its rows: a million blocks of one row must not be kept."""
    monkeypatch.setattr("shardstream.order._KEPT_NUM_BYTES", 100_000)
    order = EpochOrder(Manifest.synthetic(num_shards=1, blocks_per_shard=2_000, rows_per_block=1), 1, 0)
    order.sample_ids(np.arange(2_000))
    assert len(order._permutations._kept) < 400


def test_an_order_pickles_without_what_it_remembers():
    order = EpochOrder(Manifest.synthetic(num_shards=1, blocks_per_shard=5000, rows_per_block=50), 1, 3, 8)
    bare = len(pickle.dumps(order))
    ids = order.sample_ids(np.arange(2000))
    assert len(pickle.dumps(order)) == bare
    assert (pickle.loads(pickle.dumps(order)).sample_ids(np.arange(2000)) == ids).all()


@pytest.mark.parametrize("shuffle", [True, False, "full", "torch"])
@pytest.mark.parametrize("position", [-1, 12, 2**40])
def test_positions_outside_the_epoch_are_refused(shuffle, position):
    order = EpochOrder(Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=6), 1, 0, shuffle=shuffle)
    for ask in (order.rows, order.sample_ids, order.locate):
        with pytest.raises(PlanError, match=rf"expected 0\.\.11, found {position}"):
            ask(np.array([3, position]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": "yes"}, "unknown shuffle: expected True, False, 'full' or 'torch', found 'yes'"),
        ({"shuffle": 1}, "unknown shuffle"),
        ({"shuffle": None}, "unknown shuffle"),
        ({"lanes": 0}, "lanes must be at least 1: found 0"),
        ({"lanes": 2, "shuffle": "full"}, "shuffle='full' has one lane: expected 1, found 2"),
        ({"lanes": 2, "shuffle": "torch"}, "shuffle='torch' has one lane"),
        ({"epoch": -1}, "the epoch must not be negative: found -1"),
        ({"seed": 2**64, "shuffle": "torch"}, "torch's generator takes"),
        ({"seed": 2**64 - 1, "epoch": 1, "shuffle": "torch"}, "torch's generator takes"),
        ({"seed": 1.0}, "seed and epoch must be whole numbers"),
        ({"seed": "1"}, "seed and epoch must be whole numbers"),
        ({"epoch": None}, "seed and epoch must be whole numbers"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=6)
    with pytest.raises(PlanError) as refused:
        EpochOrder(manifest, **{"seed": 1, "epoch": 0, **settings})
    assert message in str(refused.value)


def test_numpy_integers_are_seeds_and_epochs_too():
    manifest = Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=9, run_rows=4)
    order = EpochOrder(manifest, np.int64(-3), np.int32(2), 2)
    assert located(order) == located(EpochOrder(manifest, -3, 2, 2))


@pytest.mark.parametrize("shuffle", [True, False, "full", "torch"])
def test_an_empty_data_set_has_an_empty_order(shuffle):
    order = EpochOrder(manifest_of([], [], [0, 0]), 1, 0, shuffle=shuffle)
    nothing = np.empty(0, np.int64)
    assert order.num_positions == 0
    assert [len(array) for array in (*order.rows(nothing), *order.locate(nothing), order.sample_ids(nothing))] == [
        0
    ] * 6


def test_orders_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EpochOrder(manifest_of([3], [3]), 1, 0).epoch = 1
