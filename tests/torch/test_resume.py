"""Resuming from a cursor: anywhere, through dataset or loader, at any topology; nothing twice, nothing never."""

from __future__ import annotations

import json
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.cursor import Cursor
from shardstream.errors import CursorError
from shardstream.reading import Reading
from shardstream.torch import StreamingDataset, StreamingLoader, Topology
from tests.support.corpora import parquet_manifest, with_runs
from tests.support.streams import joined, loader_of, real_ids, uids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def rank_dataset(manifest, rank=0, world_size=1, **options):
    options = {"batch_size": 2, "seed": 5, "columns": ["uid"], **options}
    return StreamingDataset(manifest, topology=Topology(rank, world_size), **options)


def run(manifest, world_size, cursor=None, num_windows=None, *, allow_batch_change=False, **options):
    """What every rank reads: from the cursor, so many windows (or to the end of the epoch)."""
    batches = []
    for rank in range(world_size):
        dataset = rank_dataset(manifest, rank, world_size, **options)
        if cursor is not None:
            dataset.load_state_dict(cursor, allow_batch_change=allow_batch_change)
        most = None if num_windows is None else num_windows * dataset.plan.accumulate
        batches.append(list(islice(dataset, most)))
    return batches


@pytest.mark.parametrize("kind", ["batch.cursor", "loader"])
def test_resumed_at_every_step_the_rest_of_the_epoch_and_the_next_one_are_the_same(corpus, kind):
    dataset = rank_dataset(corpus, 1, 2, batch_size=4, accumulate=2)  # windows of 16: five, no padding
    loader = StreamingLoader(dataset)
    states = []
    batches = []
    for batch in loader:
        batches.append(batch)
        states.append(json.loads(json.dumps(loader.state_dict() if kind == "loader" else batch.cursor.state_dict())))
    whole, after = uids(batches), uids(loader)
    for step, state in enumerate(states, 1):
        assert state["position"] == (step // 2 * 16) % 80, "inside a window it is the window's start"
        assert state["epoch"] == step // 2 * 16 // 80
        resumed = StreamingLoader(rank_dataset(corpus, 1, 2, batch_size=4, accumulate=2))
        resumed.load_state_dict(state)
        if state["epoch"] == 0:
            assert len(resumed) == len(batches) - step // 2 * 2
            assert uids(resumed) == whole[step // 2 * 2 :]
        assert uids(resumed) == after
    assert states[-1]["epoch"] == 1


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven", "continue"])
def test_the_cursor_is_the_same_on_every_rank(corpus, tail):
    options = {"tail": tail, "batch_size": 3, "accumulate": 2}
    ranks = run(corpus, 3, num_windows=6, **options)
    for step in zip(*ranks, strict=tail != "uneven"):
        assert len({batch.cursor for batch in step}) == 1
        assert len({batch.position for batch in step}) == 1
        place = step[0].place
        consumed = 18 * (place.window_index + place.is_last_in_window)
        at_end = consumed > (62 if tail == "drop" else 79)
        expected = divmod(consumed, 80) if tail == "continue" else (1, 0) if at_end else (0, consumed)
        assert (place.cursor.epoch, place.cursor.position) == expected


CASE_C38 = {
    "2->1": (1, "uneven", [6], 0, 0),
    "2->3": (3, "uneven", [2, 2, 2], 0, 0),
    "2->4, pad": (4, "pad", [2, 2, 2, 2], 4, 0),
    "2->4, drop": (4, "drop", [1, 1, 1, 1], 0, 4),
    "2->4, uneven": (4, "uneven", [2, 2, 2, 2], 0, 0),
}


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("c38"), [8, 8, 8], 8)


@pytest.mark.filterwarnings("ignore:the global batch changes:shardstream.errors.ShardStreamWarning")
@pytest.mark.parametrize("case", CASE_C38)
def test_case_c38_other_world_sizes(three_shards, case):
    """Two ranks, batch 2, stopped after 3 steps; then other ranks with the same micro-batch: another global batch."""
    world_size, tail, num_batches, num_padding, num_dropped = CASE_C38[case]
    before = run(three_shards, 2, num_windows=3, tail=tail)
    consumed = real_ids(joined(before))
    assert len(set(consumed)) == 12
    cursor = before[0][-1].cursor
    after = run(three_shards, world_size, cursor, tail=tail, allow_batch_change=True)
    left = real_ids(joined(after))
    assert [len(batches) for batches in after] == num_batches
    assert sum(int(batch.is_padding.sum()) for batch in joined(after)) == num_padding
    assert sorted(consumed + left)[: 24 - num_dropped] == sorted(set(consumed + left))
    assert len(consumed + left) == 24 - num_dropped
    if world_size != 2:
        with pytest.raises(CursorError, match=r"global_batch: 4 in the cursor.*allow_batch_change=True"):
            run(three_shards, world_size, cursor, tail=tail)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_case_c38_other_numbers_of_workers(three_shards, num_workers):
    before = run(three_shards, 2, num_windows=3)
    seen = real_ids(joined(before))
    for rank in range(2):
        loader = loader_of("streaming", rank_dataset(three_shards, rank, 2), num_workers)
        loader.load_state_dict(before[1 - rank][-1].cursor)  # any rank's will do
        seen += real_ids(loader)
    assert sorted(seen) == list(range(24))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("epoch", "step", "num_rows"), [(0, 61, [6, 128, 128, 128]), (1, 20, [88, 128, 128])], ids=["epoch 0", "epoch 1"]
)
def test_case_c40_epochs_after_a_resume_are_whole(tmp_path, num_workers, epoch, step, num_rows):
    manifest = parquet_manifest(tmp_path, [32] * 4, 8)
    unbroken = loader_of("streaming", rank_dataset(manifest), 0)
    expected = [uids(unbroken) for _ in range(4)]
    for kind in ("plain", "streaming"):
        dataset = rank_dataset(manifest)
        dataset.load_state_dict(dataset.plan.cursor(epoch, 2 * step).state_dict())
        loader = loader_of(kind, dataset, num_workers, persistent=True)
        seen = [uids(loader) for _ in num_rows]
        assert [len(joined(rows)) for rows in seen] == num_rows
        assert seen == [expected[epoch][step:], *expected[epoch + 1 :]]


WRITTEN = [(1, 12, 1), (1, 4, 3), (2, 6, 1), (2, 3, 2), (3, 4, 1), (3, 2, 2), (4, 3, 1), (6, 1, 2), (12, 1, 1)]


@settings(max_examples=25)
@given(
    stops=st.lists(st.tuples(st.sampled_from(WRITTEN), st.integers(0, 3)), min_size=4, max_size=4),
    tail=st.sampled_from(["pad", "drop", "uneven", "continue"]),
    num_workers=st.just(0),
    run_rows=st.sampled_from([2, 5, 100]),
)
def test_chains_of_resumes_keep_the_windows_and_read_each_sample_once(corpus, stops, tail, num_workers, run_rows):
    """Global batch 12 written as other ranks x micro-batch x accumulation at each resume."""
    manifest = with_runs(corpus, run_rows)
    whole = run(manifest, 1, batch_size=12, tail=tail, num_windows=14)[0]
    windows = [sorted(real_ids([batch])) for batch in whole]
    cursor, seen = None, []
    for (world_size, batch_size, accumulate), num_windows in stops:
        options = {"batch_size": batch_size, "accumulate": accumulate, "tail": tail}
        ranks = run(manifest, world_size, cursor, num_windows, **options)
        cursors = {batch.cursor for batches in ranks for batch in batches[-1:]}
        for window in range(num_windows):
            share = slice(window * accumulate, (window + 1) * accumulate)
            rows = sorted(joined(real_ids(batches[share]) for batches in ranks))
            seen += [rows] if rows else []
        if num_windows:
            cursor = max(cursors, key=lambda cursor: (cursor.epoch, cursor.position))
        if cursor is not None and cursor.epoch and tail != "continue":
            break
    assert seen == windows[: len(seen)]


def test_another_accumulation_or_micro_batch_keeps_what_a_window_holds(corpus):
    for (world_size, batch_size, accumulate), (other_world, other_size, other_accumulate) in pairwise(WRITTEN):
        one = run(corpus, world_size, batch_size=batch_size, accumulate=accumulate, num_windows=2)
        two = run(corpus, other_world, batch_size=other_size, accumulate=other_accumulate, num_windows=2)
        for first in (0, 12):
            assert sorted(real_ids(b for b in joined(one) if b.position == first)) == sorted(
                real_ids(b for b in joined(two) if b.position == first)
            )


@pytest.mark.filterwarnings("ignore:the global batch changes:shardstream.errors.ShardStreamWarning")
def test_a_changed_global_batch_begins_a_new_grid_and_can_be_resumed_again(corpus):
    before = run(corpus, 2, num_windows=3)  # windows of 4: position 12
    cursor = before[0][-1].cursor
    middle = run(corpus, 3, cursor, num_windows=2, batch_size=3, allow_batch_change=True)  # windows of 9: position 30
    cursor = middle[0][-1].cursor
    assert (cursor.position, cursor.grid_start, cursor.global_batch) == (30, 12, 9)
    after = run(corpus, 9, cursor, batch_size=1)  # the same windows of 9, no change to allow
    assert sorted(real_ids(joined([*before, *middle, *after]))) == list(range(80))
    assert after[0][-1].cursor == Cursor.from_state_dict(
        {**cursor.state_dict(), "epoch": 1, "position": 0, "grid_start": 0}
    )


def test_lanes_are_the_cursors_in_every_worker_and_every_later_epoch(corpus):
    first = rank_dataset(corpus, lanes=4, batch_size=4)
    loader = StreamingLoader(first)
    whole = [uids(loader), uids(loader)]
    for kind in ("plain", "streaming"):
        dataset = rank_dataset(corpus, batch_size=4, lanes=1)
        loader = loader_of(kind, dataset, 2, persistent=True)
        assert uids(loader) != whole[0]  # with workers that began with other lanes
        dataset.load_state_dict(first.plan.cursor(0, 40))
        assert [uids(loader), uids(loader)] == [whole[0][10:], whole[1]]
        assert dataset.plan.lanes == 4


@pytest.mark.parametrize("change", [{"seed": 6}, {"shuffle": False, "lanes": 2}, {"tail": "drop"}, {"batch_size": 4}])
def test_what_differs_is_refused_and_named(corpus, change):
    cursor = rank_dataset(corpus, lanes=2).plan.cursor(0, 40)
    name = {"batch_size": "global_batch"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(CursorError, match=f"the cursor does not belong to this run: {name}: .* in the cursor"):
        rank_dataset(corpus, **{"lanes": 2, **change}).load_state_dict(cursor)


@pytest.mark.parametrize("old", ["kept", "overwritten", "never saved"])
@pytest.mark.parametrize(
    ("sizes", "named"), [([4, 4, 4, 3], "part-00003.parquet was added"), ([4, 5, 4], "part-00001.parquet ")]
)
def test_case_c42_changed_shards_are_named_whatever_became_of_the_old_manifest(tmp_path, old, sizes, named):
    path = tmp_path / "corpus.manifest.parquet"
    before = parquet_manifest(tmp_path / "before", [4, 4, 4])
    before = before if old == "never saved" else before.save(path)
    batches = iter(StreamingLoader(rank_dataset(before, batch_size=1)))
    cursor = json.loads(json.dumps([next(batches) for _ in range(5)][-1].cursor.state_dict()))
    after = parquet_manifest(tmp_path / "after", sizes)
    if old == "overwritten":
        after = after.save(path, overwrite=True)
    dataset = rank_dataset(after, batch_size=1)
    with pytest.raises(CursorError, match=f"fingerprint: .* here; shards: {named}"):
        dataset.load_state_dict(cursor)
    dataset = rank_dataset(before, batch_size=1)
    dataset.load_state_dict(cursor)
    assert len(dataset) == 7


@pytest.mark.parametrize("run_rows", [3, 100])
def test_resuming_late_costs_what_starting_costs(tmp_path, run_rows):
    """Blocks opened for the first batches at 0 %, 50 % and 95 % of an epoch."""
    manifest = with_runs(parquet_manifest(tmp_path, [100] * 10, 10), run_rows)  # 100 blocks
    costs = []
    for position in (0, 500, 948):
        dataset = rank_dataset(manifest, batch_size=4, lanes=4, reading=Reading(look_ahead=1))
        dataset.load_state_dict(dataset.plan.cursor(0, position))
        batches = iter(dataset)
        next(batches)
        opened = dataset.stats.num_blocks_opened
        for _ in range(5):
            next(batches)
        costs.append((opened, dataset.stats.num_blocks_opened))
        batches.close()
    assert all(first <= costs[0][0] + 4 and later <= costs[0][1] + 4 for first, later in costs), costs
    assert costs[0][0] <= 4 * 4, "lanes, and what is looked ahead"
