"""torchdata's StatefulDataLoader: exact for the same topology; for any other, the cursor that its state holds."""

from __future__ import annotations

import copy
import json

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardstream.cursor import Cursor
from shardstream.errors import CursorError
from shardstream.torch import StreamingDataset, Topology
from tests.support.streams import real_ids, uids

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),
]

NUM_BATCHES = 10  # 80 samples, 2 ranks, by 4


def dataset_of(manifest, rank=1, world_size=2, **options):
    options = {"batch_size": 4, "seed": 8, "columns": ["uid"], **options}
    return StreamingDataset(manifest, topology=Topology(rank, world_size), **options)


def stateful(dataset, num_workers, every=1, *, persistent=False):
    options = {"multiprocessing_context": "fork", "persistent_workers": persistent} if num_workers else {}
    return StatefulDataLoader(
        dataset, batch_size=None, num_workers=num_workers, snapshot_every_n_steps=every, **options
    )


def saved_at_every_step(loader):
    batches, states = [], []
    for batch in loader:
        batches.append(batch["uid"].tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    return batches, states


@pytest.mark.parametrize(
    ("num_workers", "every", "persistent"), [(0, 1, False), (1, 1, False), (2, 1, True), (2, 5, False), (3, 5, True)]
)
def test_exact_at_every_step_and_into_the_next_two_epochs(corpus, num_workers, every, persistent):
    loader = stateful(dataset_of(corpus), num_workers, every, persistent=persistent)
    first = uids(loader)
    whole, states = saved_at_every_step(loader)  # epoch 1
    after = [uids(loader), uids(loader)]
    assert first != whole
    steps = range(1, NUM_BATCHES) if num_workers < 2 else (1, 2, 5, 6, 9)
    for step in steps:
        resumed = stateful(dataset_of(corpus), num_workers, every, persistent=persistent)
        resumed.load_state_dict(copy.deepcopy(states[step - 1]))
        assert uids(resumed) == whole[step:], step
        if step in (1, 6, 9):
            assert [uids(resumed), uids(resumed)] == after


def test_a_state_before_the_first_batch(corpus):
    for num_workers in (0, 2):
        state = stateful(dataset_of(corpus), num_workers).state_dict()
        resumed = stateful(dataset_of(corpus), num_workers)
        resumed.load_state_dict(state)
        assert uids(resumed) == uids(dataset_of(corpus))


def test_workers_without_a_batch_are_restored_too(corpus):
    """Case C34: more workers than batches."""
    options = {"batch_size": 40, "world_size": 1, "rank": 0}
    whole, states = saved_at_every_step(stateful(dataset_of(corpus, **options), 3))
    resumed = stateful(dataset_of(corpus, **options), 3)
    resumed.load_state_dict(states[0])
    assert uids(resumed) == whole[1:]
    assert len(whole) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"world_size": 4, "batch_size": 2}, "batch_size: 4 in the state, 2 here; world_size: 2 in the state, 4 here"),
        ({"batch_size": 2, "accumulate": 2}, "batch_size: 4 in the state, 2 here; accumulate: 1 in the state, 2 here"),
    ],
)
def test_another_topology_is_refused_with_the_way_out(corpus, change, named):
    loader = stateful(dataset_of(corpus), 0)
    _, states = saved_at_every_step(loader)
    with pytest.raises(CursorError, match=named + r"; load Cursor\.from_torchdata\(state\)"):
        iter(_loaded(stateful(dataset_of(corpus, **change), 0), states[3]))
    with pytest.raises(CursorError, match=r"load Cursor\.from_torchdata\(state\)|use Cursor\.from_torchdata"):
        dataset_of(corpus, **change).load_state_dict(_worker_state(states[3]))


def _loaded(loader, state):
    loader.load_state_dict(copy.deepcopy(state))
    return loader


def _worker_state(state):
    return state["fetcher_state"]["dataset_iter_state"]


def test_another_number_of_workers_is_refused(corpus):
    _, states = saved_at_every_step(stateful(dataset_of(corpus), 2))
    with pytest.raises((CursorError, AssertionError)):
        next(iter(_loaded(stateful(dataset_of(corpus), 1), states[3])))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("num_workers", "every", "persistent"), [(0, 1, False), (2, 1, True), (3, 1, False), (3, 5, False)]
)
def test_its_cursor_goes_on_at_any_topology(corpus, num_workers, every, persistent, accumulate):
    """Workers stand at different batches; the cursor is that of the last whole window which was handed out."""
    options = {"accumulate": accumulate}
    global_batch = 8 * accumulate
    loader = stateful(dataset_of(corpus, **options), num_workers, every, persistent=persistent)
    if persistent:
        uids(loader)
    epoch = int(persistent)
    batches, states = saved_at_every_step(loader)
    consumed = {}
    for rank in range(2):
        dataset = dataset_of(corpus, rank, **options)
        dataset.set_epoch(epoch)
        consumed[rank] = list(dataset)
    for step, state in enumerate(states, 1):
        cursor = Cursor.from_torchdata(state)
        position = step // accumulate * global_batch
        ended = position >= 80 or step == len(batches)
        assert (cursor.epoch, cursor.position) == ((epoch + 1, 0) if ended else (epoch, position)), step
        if step in (1, 4, 7) and not ended:
            rest = []
            for rank in range(4):
                dataset = dataset_of(corpus, rank, 4, batch_size=2, accumulate=accumulate)
                dataset.load_state_dict(cursor)
                rest += real_ids(dataset)
            before = [
                sample for rank in range(2) for sample in real_ids(b for b in consumed[rank] if b.position < position)
            ]
            assert sorted(before + rest) == list(range(80))


def test_a_rank_that_is_through_before_the_others_does_not_end_the_epoch_for_them(corpus):
    """80 samples in windows of 39: two are left for the last one, and rank 2 has no part in it."""
    options = {"world_size": 3, "batch_size": 13, "tail": "uneven"}
    ends = []
    for rank in range(3):
        _, states = saved_at_every_step(stateful(dataset_of(corpus, rank, **options), 0))
        cursor = Cursor.from_torchdata(states[-1])
        ends.append((len(states), cursor.epoch, cursor.position))
    assert ends == [(3, 1, 0), (3, 1, 0), (2, 0, 78)]


def test_what_is_no_state_of_ours_is_refused():
    with pytest.raises(CursorError, match="no state of a StreamingDataset was found"):
        Cursor.from_torchdata({"_snapshot": {"a": 1}})
