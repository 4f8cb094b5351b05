"""Plans of mixtures: windows the same for every topology, each source exactly once per pass, and cursors."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError, ShardStreamWarning
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture, source_lanes, source_seed
from shardstream.mixture_plan import MixturePlan
from tests.support import mixing_reference as ref
from tests.support.layouts import manifest_of

G = 24
WEB, CODE, BOOKS = manifest_of([30, 20, 41, 9], [7, 100, 10, 3]), manifest_of([11, 13], [4, 4]), manifest_of([5], [5])
SOURCES = {"web": (WEB, 0.5), "code": (CODE, 0.3), "books": (BOOKS, 0.2)}


def plan_of(sources=None, *, world_size=1, batch_size=None, accumulate=1, global_batch=G, seed=3, **more):
    batch_size = global_batch // world_size // accumulate if batch_size is None else batch_size
    mixture = Mixture(SOURCES if sources is None else sources, **more)
    return MixturePlan.make(mixture, world_size=world_size, batch_size=batch_size, accumulate=accumulate, seed=seed)


def consumed(plan, start, num_windows, num_workers=1):
    """(source, id) of each window, in order, over all ranks and workers."""
    windows = [[] for _ in range(num_windows)]
    for rank in range(plan.world_size):
        for worker in range(num_workers):
            batches = plan.micro_batches(rank, start, worker=worker, num_workers=num_workers)
            for batch in batches:
                if batch.window >= num_windows:
                    break
                places = plan.sources(batch.positions)
                ids = plan.sample_ids(0, batch.positions)
                windows[batch.window] += zip(places.source.tolist(), ids.tolist(), strict=True)
    return windows


TOPOLOGIES = [(1, 24, 1), (2, 3, 4), (3, 8, 1), (4, 2, 3), (6, 1, 4), (8, 3, 1)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("world_size", "batch_size", "accumulate"), TOPOLOGIES)
def test_windows_are_the_same_for_every_topology(world_size, batch_size, accumulate, num_workers):
    reference = plan_of()
    plan = plan_of(world_size=world_size, batch_size=batch_size, accumulate=accumulate)
    expected = consumed(reference, reference.cursor(), 12)
    found = consumed(plan, plan.cursor(), 12, num_workers)
    assert [sorted(window) for window in found] == [sorted(window) for window in expected]
    assert plan.cursor() == reference.cursor()


@settings(max_examples=15)
@given(data=st.data())
def test_chains_of_resizes_go_on_with_the_same_windows(data):
    reference = plan_of()
    expected = [sorted(window) for window in consumed(reference, reference.cursor(), 40)]
    cursor, done = reference.cursor(), []
    while len(done) < 40:
        world_size, batch_size, accumulate = data.draw(st.sampled_from(TOPOLOGIES))
        plan, start = plan_of(world_size=world_size, batch_size=batch_size, accumulate=accumulate).resume(cursor)
        num_windows = data.draw(st.integers(1, 40 - len(done)))
        done += [sorted(window) for window in consumed(plan, start, num_windows)]
        last = list(islice(plan.micro_batches(0, start), num_windows * accumulate))[-1]
        cursor = Cursor.from_json(plan.cursor_after(last).to_json())
    assert done == expected


def test_quotas_are_met_and_every_source_comes_exactly_once_a_pass():
    plan = plan_of()
    windows = consumed(plan, plan.cursor(), 60)
    entries = [(0, [weight for _, (_, weight) in sorted(SOURCES.items())])]
    by_hand = ref.stream(entries, G, 60)
    for window, expected in zip(windows, by_hand, strict=True):
        assert Counter(source for source, _ in window) == Counter(source for source, _ in expected)
    sizes = [BOOKS.num_samples, CODE.num_samples, WEB.num_samples]
    for source, size in enumerate(sizes):
        places = sorted(place for window in by_hand for s, place in window if s == source)
        assert places == list(range(len(places)))
        located = plan.plans[source].sample_ids(0, np.arange(len(places)))
        ids = [i for window in windows for s, i in window if s == source]
        assert Counter(ids) == Counter(located.tolist())
        for begin in range(0, len(places) - size, size):
            assert sorted(located[begin : begin + size].tolist()) == list(range(size))


def test_a_source_has_the_same_order_whatever_others_there_are():
    alone = plan_of({"code": (CODE, 1)})
    assert plan_of().plans[1].seed == alone.plans[0].seed == source_seed(3, "code")
    renamed = plan_of({"code2": (CODE, 1)})
    ids = [plan.plans[0].sample_ids(0, np.arange(24)).tolist() for plan in (alone, renamed)]
    assert ids[0] != ids[1]


def test_ranks_stay_on_their_lanes():
    many = Manifest.synthetic(num_shards=64, blocks_per_shard=4, rows_per_block=256)
    plan = plan_of({"a": (many, 3), "b": (many, 1)}, world_size=4, global_batch=64)
    assert [each.lanes for each in plan.plans] == [48, 16]
    lanes = {}
    for rank in range(4):
        for batch in islice(plan.micro_batches(rank, plan.cursor()), 300):
            places = plan.sources(batch.positions)
            for source, position in zip(places.source.tolist(), places.position.tolist(), strict=True):
                size, width = plan.plans[source].num_positions, plan.plans[source].lanes
                lanes.setdefault((source, position % size % width), set()).add(rank)
    assert len(lanes) == 64
    assert all(len(ranks) == 1 for ranks in lanes.values())


@pytest.mark.parametrize(
    ("quota", "num_blocks", "lanes"), [(0.01, 9, 1), (5.9, 9, 5), (500, 10, 64), (500, 1000, 250), (9999, 10**6, 4096)]
)
def test_lanes_follow_the_quota(quota, num_blocks, lanes):
    assert source_lanes(quota, num_blocks) == lanes


# ---------------------------------------------------------------------------------------------------------------- stop


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_stream_stops_where_it_is_told(num_workers):
    plan = plan_of(world_size=2, accumulate=3, stop_after=100)
    assert (plan.stop, *(plan.num_micro_batches(0, plan.cursor(0, at)) for at in (0, 72, 120))) == (
        120,
        15,
        6,
        0,
    )
    found = [
        batch
        for rank in range(2)
        for worker in range(num_workers)
        for batch in plan.micro_batches(rank, plan.cursor(0, 24), worker=worker, num_workers=num_workers)
    ]
    assert sorted(np.concatenate([batch.positions for batch in found]).tolist()) == list(range(24, 120))
    assert [batch.batch_index for batch in found if batch.is_last_in_epoch] == [11, 11]
    assert list(plan.micro_batches(0, plan.cursor(0, 120))) == []


def test_the_stream_stops_at_the_end_of_a_source():
    plan = plan_of(stop_after="web")
    assert plan.counts(plan.stop)["web"] >= WEB.num_samples > plan.counts(plan.stop - G)["web"]
    assert plan.passes(plan.stop)["books"] > 7
    with pytest.raises(PlanError, match="never comes to its end"):
        _ = plan_of(schedule=[(24, {"code": 1})], stop_after="web").stop


# -------------------------------------------------------------------------------------------------------------- cursor


def resumed(before, position, after, **more):
    cursor = Cursor.from_state_dict(json.loads(json.dumps(before.cursor(0, position).state_dict())))
    return after.resume(cursor, **more)


def test_the_cursor_goes_through_json_and_pickle():
    plan = plan_of(schedule=[(100, {"web": 1})])
    cursor = plan.cursor(0, 240)
    assert Cursor.from_json(cursor.to_json()) == cursor
    assert pickle.loads(pickle.dumps(plan)).cursor(0, 240) == cursor
    assert resumed(plan, 240, plan)[1] == cursor
    assert cursor.mixture["schedule"] == [
        [0, 24, {"books": 0.2, "code": 0.3, "web": 0.5}],
        [120, 24, {"web": 1.0}],
    ]
    old = {name: value for name, value in cursor.state_dict().items() if name != "mixture"}
    assert Cursor.from_state_dict(old).mixture is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "seed: 3 in the cursor, 4 here"),
        ({"sources": {**SOURCES, "web": (WEB, 0.6)}}, "weights from position 0 on: 0.2 books"),
        ({"sources": {"web": (WEB, 0.5), "code": (CODE, 0.3)}}, "source 'books': in the cursor, gone here"),
        ({"sources": {**SOURCES, "web": (CODE, 0.5)}}, "source 'web': another manifest"),
        ({"schedule": [(200, {"web": 1})]}, "weights from position 216 on: no change in the cursor, 1 web here"),
        ({"global_batch": 48}, "global_batch: 24 in the cursor, 48 here"),
    ],
)
def test_edits_of_the_past_are_refused_and_named(change, message):
    with pytest.raises(CursorError, match=message):
        resumed(plan_of(), 240, plan_of(**change))


def test_the_same_weights_in_other_numbers_are_no_change():
    tenfold = {name: (manifest, 10 * weight) for name, (manifest, weight) in SOURCES.items()}
    assert resumed(plan_of(), 240, plan_of(tenfold))[1].position == 240


def test_a_schedule_entry_at_the_cursor_is_accepted_and_said():
    before, after = plan_of(), plan_of(schedule=[(240, {"web": 1})])
    with pytest.warns(ShardStreamWarning, match="from position 240 on: no change in the cursor, 1 web here"):
        plan, _ = resumed(before, 240, after)
    assert [plan.counts(p) for p in (240, 264)][1]["web"] == before.counts(240)["web"] + 24
    assert consumed(plan, plan.cursor(), 10) == consumed(before, before.cursor(), 10)
    again, _ = resumed(plan, 264, after)
    assert again.counts(264) == plan.counts(264)


def test_a_new_source_enters_by_a_schedule_entry_and_moves_no_other():
    before = plan_of()
    entry = [(240, {"web": 0.4, "code": 0.3, "books": 0.1, "arxiv": 0.2})]
    after = plan_of({**SOURCES, "arxiv": (CODE, 0)}, schedule=entry)
    with pytest.warns(ShardStreamWarning, match="from position 240 on"):
        plan, start = resumed(before, 240, after)
    named = [
        [(p.names[source], number) for source, number in window]
        for p in (before, plan)
        for window in consumed(p, p.cursor(), 10)
    ]
    assert named[:10] == named[10:]
    first = Counter(plan.names[source] for source, _ in consumed(plan, start, 1)[0])
    assert first["arxiv"] in (4, 5)
    with pytest.raises(CursorError, match="weights from position 0 on"):
        resumed(before, 240, plan_of({**SOURCES, "arxiv": (CODE, 0.2)}))


def test_lanes_are_the_cursors_where_an_order_has_begun():
    many = Manifest.synthetic(num_shards=4, blocks_per_shard=4, rows_per_block=50)
    before = plan_of({"a": (many, 1), "b": (many, 1)})
    after = plan_of({"a": (many, 1), "b": (many, 1)}, schedule=[(240, {"a": 5, "b": 1})])
    assert [p.lanes for p in before.plans] == [12, 12]
    assert [p.lanes for p in after.plans] == [12, 4]
    with pytest.warns(ShardStreamWarning):
        plan, _ = resumed(before, 240, after)
    assert [p.lanes for p in plan.plans] == [12, 12]
    assert plan.with_pin(plan.pin) is plan.with_pin(0) is plan
    with pytest.raises(CursorError, match="worker processes"):
        after.with_pin(plan.pin)


def test_a_changed_global_batch_begins_new_windows_and_each_source_goes_on():
    before, after = plan_of(), plan_of(global_batch=36)
    with pytest.raises(CursorError, match="allow_batch_change"):
        resumed(before, 240, after)
    with pytest.warns(ShardStreamWarning, match="from 24 to 36 samples at position 240"):
        plan, start = resumed(before, 240, after, allow_batch_change=True)
    assert plan.counts(240) == before.counts(240)
    ids = [
        pair for p, s, n in ((before, before.cursor(), 10), (plan, start, 20)) for w in consumed(p, s, n) for pair in w
    ]
    for source, size in enumerate([5, 24, 100]):
        mine = Counter(number for s, number in ids if s == source)
        assert max(mine.values()) - min(mine.values()) <= 1 or size == 5
        assert len(mine) == size
    again, cursor = resumed(plan, 240 + 72, after)
    assert again.counts(cursor.position) == plan.counts(cursor.position)
    with pytest.raises(CursorError, match="another size"):
        again.micro_batches(0, again.cursor(0, 0))


@pytest.mark.parametrize(
    "mixture",
    [{}, {"sources": {}, "schedule": []}, {"sources": {"a": {}}, "schedule": [[0, 8, {"a": 1}]]}, {"sources": 3}],
)
def test_damaged_cursors_are_refused(mixture):
    state = plan_of().cursor().state_dict() | {"mixture": mixture}
    with pytest.raises(CursorError, match="damaged"):
        plan_of().resume(Cursor.from_state_dict(state))


def test_a_cursor_of_one_data_set_and_one_of_a_mixture_do_not_fit():
    from shardstream.plan import Plan

    one = Plan.make(WEB, batch_size=24, seed=3, tail="continue")
    with pytest.raises(CursorError, match="not of a mixture"):
        plan_of().resume(one.cursor())
    with pytest.raises(CursorError, match=r"mixture: .* in the cursor, None here"):
        one.resume(plan_of().cursor())


def test_positions_inside_a_window_and_epochs_are_refused():
    with pytest.raises(CursorError, match="not at the start of a window"):
        resumed(plan_of(), 250, plan_of())
    with pytest.raises(PlanError, match="without epochs"):
        plan_of().cursor(1)
    with pytest.raises(PlanError, match="no such rank"):
        plan_of().micro_batches(1, plan_of().cursor())
