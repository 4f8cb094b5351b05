"""Read amplification: against counting every open by hand, and against the design's numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardstream.audit import amplification as module
from shardstream.audit import audit, read_cost
from shardstream.audit.advice import startup_warnings
from shardstream.audit.amplification import estimated_amplification
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from tests.support.layouts import manifest_of


def opens_by_hand(plan, num_readers):
    """Follows every lane row by row; a reader opens a block for each stretch of it that it reads a row of."""
    here = plan.epoch(0)
    visit, last = {}, {}
    for position in range(plan.num_positions):
        lane = position % plan.lanes
        line = int(here.order.lane_cut.line_index(np.array([position]))[0])
        block = int(here.order.rows(np.array([position])).block[0])
        before = last.get(lane)
        number = 0 if before is None else before[2] + (before[0] != block or before[1] > line)
        last[lane] = (block, line, number)
        visit[position] = (lane, number)
    opens = set()
    for rank in range(plan.world_size):
        for worker in range(num_readers):
            for batch in plan.micro_batches(rank, plan.cursor(), worker=worker, num_workers=num_readers):
                if batch.epoch:
                    break
                places = batch.positions[batch.positions < plan.num_positions].tolist()
                opens |= {(visit[position], rank, worker) for position in places}
    return len(opens)


@st.composite
def plans(draw):
    block_rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    run_rows = [draw(st.sampled_from([rows, 5])) for rows in block_rows]
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    accumulate, readers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    global_batch = world_size * batch_size * accumulate
    divisors = [d for d in range(1, global_batch + 1) if global_batch % d == 0]
    multiples = [k * global_batch for k in (2, 3, readers)]
    lanes = draw(st.sampled_from([*divisors, *multiples, 5, 7]))
    plan = Plan.make(
        manifest_of(block_rows, run_rows),
        batch_size=batch_size,
        world_size=world_size,
        accumulate=accumulate,
        lanes=lanes,
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
        tail=draw(st.sampled_from(["pad", "uneven", "continue"])),
    )
    return plan, readers


@given(plans())
def test_opens_are_what_counting_gives(plan_and_readers):
    plan, readers = plan_and_readers
    cost = read_cost(plan, readers)
    assert cost.num_opens == opens_by_hand(plan, readers)
    assert cost.amplification == cost.num_opens / plan.manifest.num_blocks


@given(plans(), st.integers(1, 4))
def test_arithmetic_and_dealing_agree(plan_and_readers, readers):
    plan, _ = plan_and_readers
    cost = read_cost(plan, readers)
    assume("arithmetic" in cost.how)
    here = plan.epoch(0)
    pairs = module._pairs(module.Visits(here.order), here.deal, readers, 0, here.deal.num_whole_windows + 1)
    assert cost.num_opens == len(pairs)


def synthetic(num_blocks, rows_per_block=128, run_rows=None):
    return Manifest.synthetic(
        num_shards=1, blocks_per_shard=num_blocks, rows_per_block=rows_per_block, run_rows=run_rows
    )


def uneven(num_blocks):
    """Blocks of which no end falls on a lane's, in whole windows of 64."""
    rows = [121 + k % 13 for k in range(num_blocks)]
    rows[0] += -sum(rows) % 64
    return manifest_of(rows, rows)


@pytest.mark.parametrize(("num_blocks", "amplification"), [(512, 1.12), (200, 1.32), (100, 1.63), (65, 1.97)])
def test_lane_ends_cut_blocks(num_blocks, amplification):
    plan = Plan.make(uneven(num_blocks), batch_size=64, lanes=64)
    assert read_cost(plan).num_opens == pytest.approx(num_blocks + 63, abs=2)
    assert read_cost(plan).amplification == pytest.approx(amplification, abs=0.02)


def test_phases_cut_again():
    whole = read_cost(Plan.make(synthetic(513), batch_size=64, lanes=64))
    phases = read_cost(Plan.make(synthetic(513, run_rows=32), batch_size=64, lanes=64))
    assert whole.num_opens == pytest.approx(513 + 63, abs=1)
    assert phases.num_opens == pytest.approx(513 + 63 + 64, abs=3)


def test_workers_open_again_unless_they_divide_accumulate_or_lanes_are_theirs():
    manifest = uneven(4095)
    cost = {
        (workers, accumulate, lanes): read_cost(
            Plan.make(manifest, batch_size=16 // accumulate, world_size=4, accumulate=accumulate, lanes=lanes), workers
        ).amplification
        for workers, accumulate, lanes in [(1, 1, 64), (4, 1, 64), (4, 4, 64), (3, 4, 64), (4, 1, 4 * 64)]
    }
    assert cost[1, 1, 64] == pytest.approx(1.02, abs=0.01)
    assert cost[4, 1, 64] == pytest.approx(4.06, abs=0.02)
    assert cost[4, 4, 64] == pytest.approx(1.02, abs=0.01)
    assert cost[3, 4, 64] > 2.9
    assert cost[4, 1, 256] == pytest.approx(1.06, abs=0.01)  # 1 + 255 / 4095: a factor of 1.0 beside the lanes' own


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 8, 12, 16, 48, 56, 64])
def test_sharing_among_ranks_adds_little(world_size):
    manifest = synthetic(512, 1344)
    alone = read_cost(Plan.make(manifest, batch_size=1344, lanes=112))
    shared = read_cost(Plan.make(manifest, batch_size=1344 // world_size, world_size=world_size, lanes=112))
    assert 1.0 <= shared.amplification / alone.amplification <= 1.5


def test_file_order_is_opened_by_every_rank():
    plan = Plan.make(synthetic(100), batch_size=4, world_size=8, shuffle=False)
    assert read_cost(plan).amplification == pytest.approx(8.0)
    assert read_cost(plan, 2).amplification == pytest.approx(16.0)


def test_random_access_opens_a_block_for_almost_every_sample():
    plan = Plan.make(synthetic(1000, 10), batch_size=4, world_size=2, shuffle="full")
    assert read_cost(plan).amplification == pytest.approx(10.0, rel=0.01)
    assert "exact" in read_cost(plan).how


def test_large_plans_without_a_rule_say_so(monkeypatch):
    plan = Plan.make(synthetic(100), batch_size=4, world_size=4, lanes=5)
    assert "dealing every row" in read_cost(plan).how
    monkeypatch.setattr(module, "_MOST_POSITIONS", 1000)
    assert read_cost(plan).amplification is None
    assert read_cost(plan).how == "unknown: neither of 5 lanes and a global batch of 16 divides the other"


def test_estimates_say_so(monkeypatch):
    plan = Plan.make(synthetic(100), batch_size=4, world_size=4, shuffle="full")
    exact = read_cost(plan)
    monkeypatch.setattr(module, "_MOST_POSITIONS", 1000)
    estimated = read_cost(plan)
    assert "estimated from 62 of 800 windows" in estimated.how
    assert estimated.num_opens == pytest.approx(exact.num_opens, rel=0.02)


def test_open_runs_and_bytes():
    rows = [100] * 64
    manifest = manifest_of(rows, [50] * 64)
    assert read_cost(Plan.make(manifest, batch_size=8, world_size=2)).open_num_bytes is None  # sizes are not known
    sized = dataclasses.replace(manifest, block_num_bytes=np.arange(64) * 1000)
    cost = read_cost(Plan.make(sized, batch_size=8, world_size=2, lanes=16))
    assert cost.open_runs == 8  # lanes of a rank
    assert cost.open_num_bytes == 8 * 63_000 // 2
    assert read_cost(Plan.make(sized, batch_size=8, world_size=2, lanes=32), 2).open_runs == 8


def test_advice_holds_what_it_says():
    plan = Plan.make(synthetic(4095, 129), batch_size=8, world_size=4, accumulate=1, lanes=32)
    reading = audit(plan, num_workers=4).reading
    assert reading.amplification == pytest.approx(4.0, abs=0.1)
    assert "num_workers=0: 1.01, 8 open runs a reader" in reading.advice
    figure = read_cost(Plan.make(synthetic(4095, 129), batch_size=2, world_size=4, accumulate=4, lanes=32), 4)
    assert f"batch_size=2, accumulate=4: {figure.amplification:.2f}, 2 open runs a reader" in reading.advice
    assert any(text.startswith("lanes=128 (a global batch mixes up to 32 blocks): 1.03") for text in reading.advice)


def test_no_advice_where_nothing_is_to_be_gained():
    assert audit(Plan.make(synthetic(4095, 129), batch_size=8, world_size=4, lanes=32)).reading.advice == ()


# ------------------------------------------------------------------------------------------------ at start-up


@pytest.mark.parametrize("run_rows", [128, 32])
@pytest.mark.parametrize(("world_size", "batch_size", "accumulate"), [(1, 4, 1), (1, 6, 3), (3, 8, 4), (8, 4, 1)])
@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_the_estimate_is_close_to_the_exact_figure(run_rows, world_size, batch_size, accumulate, num_readers):
    manifest = manifest_of([128] * 200, [run_rows] * 200)
    global_batch = world_size * batch_size * accumulate
    settings = {"batch_size": batch_size, "world_size": world_size, "accumulate": accumulate}
    for shuffle, lanes in ((True, global_batch), (True, 2 * global_batch), (False, 1), (False, 2), ("full", 1)):
        plan = Plan.make(manifest, **settings, shuffle=shuffle, lanes=lanes)
        exact = read_cost(plan, num_readers).amplification
        assert estimated_amplification(plan, num_readers) == pytest.approx(exact, rel=0.15)


def large(**settings):
    """4 GiB in 10^4 blocks."""
    manifest = Manifest.synthetic(num_shards=4, blocks_per_shard=2500, rows_per_block=200)
    manifest = dataclasses.replace(manifest, formats=["parquet"] * 4, num_bytes=np.full(4, 1 << 30))
    return Plan.make(manifest, **{"batch_size": 16, **settings})


@pytest.mark.parametrize(
    ("settings", "num_workers", "says"),
    [
        ({}, 0, []),
        ({}, 1, []),
        ({"accumulate": 4}, 2, []),
        ({"lanes": 32}, 2, []),
        ({}, 2, ["num_workers=2 opens each block about 2.0 times an epoch: the workers", "num_workers=0 (1.00)"]),
        ({"world_size": 4, "shuffle": False}, 0, ["in one lane opens each block about 4.0 times", "each of 4 ranks"]),
        ({"shuffle": False}, 0, []),
        (
            {"shuffle": "full"},
            0,
            ["shuffle='full' opens each block about 199.9 times", "shuffle=True, lanes=16 (1.00)"],
        ),
        ({"shuffle": "torch"}, 0, ["shuffle='torch' is O(N): every reader of every rank permutes all 2,000,000"]),
    ],
)
def test_a_job_is_told_what_reading_costs_where_it_matters(settings, num_workers, says):
    texts = startup_warnings(large(**settings), num_workers)
    assert len(texts) == bool(says) + (settings.get("shuffle") == "torch")
    assert all(part in texts[0] for part in says)


def test_data_that_stays_in_the_page_cache_is_not_warned_of_unless_it_is_read_at_random():
    small = {"manifest": dataclasses.replace(large().manifest, num_bytes=np.full(4, 1 << 20))}
    assert startup_warnings(dataclasses.replace(large(), **small), 2) == []
    assert startup_warnings(dataclasses.replace(large(world_size=4, shuffle=False), **small), 0) == []
    assert len(startup_warnings(dataclasses.replace(large(shuffle="full"), **small), 0)) == 1
    assert startup_warnings(Plan.make(manifest_of([10] * 50, [10] * 50), batch_size=4, shuffle="torch"), 0) == []
