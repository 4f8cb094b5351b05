"""Which epoch a pass is, after full passes, breaks and ``set_epoch``: the same for every loader, worker and start."""

from __future__ import annotations

import copy
import pickle
import time
from itertools import islice

import pytest
from torch.utils.data import get_worker_info

from shardstream.errors import CursorError, PlanError
from shardstream.torch import StreamingDataset, StreamingLoader, Topology
from tests.support.streams import joined, loader_of, real_ids, uids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUM_BATCHES = 20  # 80 samples by 4


def dataset_of(manifest, **options):
    options = {"batch_size": 4, "seed": 3, "topology": Topology(0, 1), "columns": ["uid"], **options}
    return StreamingDataset(manifest, **options)


@pytest.fixture(scope="module")
def epochs(corpus):
    """What epoch e holds, read by the main process alone."""
    dataset = dataset_of(corpus)
    expected = []
    for epoch in range(5):
        dataset.set_epoch(epoch)
        expected.append(uids(dataset))
    assert len({str(epoch) for epoch in expected}) == 5
    assert all(sorted(joined(epoch)) == list(range(80)) for epoch in expected)
    return expected


def a_life(loader, dataset):
    """A loop's life: passes to the end, broken ones, untouched ones, ``set_epoch``. Yields what each pass showed."""
    yield "whole", 0, uids(loader)
    yield "broken early", 1, uids(islice(loader, 5))
    yield "broken near the end", 1, uids(islice(loader, NUM_BATCHES - 2))
    yield "broken behind its last batch", 1, uids(islice(loader, NUM_BATCHES))
    for number, _ in enumerate(loader, 1):
        if number == 3:
            break  # nothing was touched
    yield "after an untouched, broken one", 2, uids(loader)
    assert sum(1 for _ in loader) == NUM_BATCHES  # epoch 3, untouched
    yield "after an untouched one", 4, uids(islice(loader, 5))
    dataset.set_epoch(1)
    yield "set back, in the middle of a loop's life", 1, uids(loader)
    yield "and on", 2, uids(islice(loader, 2))
    dataset.set_epoch(2)
    yield "set to what a broken pass had", 2, uids(loader)
    yield "last", 3, uids(loader)


FORKED = [
    (0, None, False),
    (1, "fork", True),
    (2, "fork", False),
    (2, "fork", True),
    (3, "fork", True),
    (5, "fork", True),
]
STARTED = [(2, "spawn", True), (2, "forkserver", True)]


@pytest.mark.parametrize("kind", ["plain", "streaming"])
@pytest.mark.parametrize(
    ("num_workers", "method", "persistent"),
    [*FORKED, *(pytest.param(*case, marks=pytest.mark.slow) for case in STARTED)],
)
def test_epochs_and_breaks(corpus, epochs, kind, num_workers, method, persistent):
    dataset = dataset_of(corpus)
    loader = loader_of(kind, dataset, num_workers, method, persistent=persistent)
    for what, epoch, seen in a_life(loader, dataset):
        assert seen == epochs[epoch][: len(seen)], what
    assert dataset.start.epoch == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_new_workers_for_each_epoch_read_where_it_begins(corpus, epochs, method):
    loader = loader_of("plain", dataset_of(corpus), 1, method)
    assert [uids(loader) for _ in range(2)] == epochs[:2]


def test_set_epoch_with_persistent_workers_equals_fresh_ones_in_any_order(corpus, epochs):
    """Case C35: the order of an epoch depends on seed and epoch only."""
    for persistent in (False, True):
        dataset = dataset_of(corpus)
        loader = loader_of("plain", dataset, 2, "fork", persistent=persistent)
        for epoch in (2, 0, 1):
            dataset.set_epoch(epoch)
            assert uids(loader) == epochs[epoch]


def test_batches_that_are_kept_do_not_move_a_later_pass(corpus, epochs):
    dataset = dataset_of(corpus)
    loader = loader_of("plain", dataset, 0)
    kept = list(loader)
    dataset.set_epoch(3)
    assert uids(kept) == epochs[0]
    assert uids(loader) == epochs[3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_goes_its_own_way(corpus, epochs, copied):
    dataset = dataset_of(corpus)
    assert uids(dataset) == epochs[0]
    other = copied(dataset)
    assert other.start == dataset.start
    assert uids(loader_of("plain", other, 2, "fork")) == epochs[1]
    assert (other.start.epoch, dataset.start.epoch) == (2, 1)
    dataset.set_epoch(0)
    assert other.start.epoch == 2


# ------------------------------------------------------------------------------------------------ StreamingLoader


def test_on_break_restart_is_refused_when_a_loop_breaks_at_the_same_place_again(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus), 0)
    assert uids(islice(loader, 5)) == epochs[0][:5]
    assert uids(islice(loader, 6)) == epochs[0][:6]
    assert uids(islice(loader, 5)) == epochs[0][:5]
    assert uids(islice(loader, 5)) == epochs[0][:5]
    for _ in range(2):
        with pytest.raises(CursorError, match=r"left epoch 0 at position 20 for the second time.*on_break='continue'"):
            iter(loader)
    loader.set_epoch(0)  # said aloud, it is what is wanted
    assert uids(islice(loader, 5)) == epochs[0][:5]
    assert uids(loader) == epochs[0]
    assert uids(islice(loader, 5)) == epochs[1][:5]


def test_on_break_restart_allows_the_same_break_in_every_epoch_that_was_finished(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus), 0)
    for epoch in range(3):
        assert uids(islice(loader, 5)) == epochs[epoch][:5]
        assert uids(loader) == epochs[epoch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_break_continue_goes_on_behind_the_last_whole_window(corpus, num_workers):
    options = {"batch_size": 2, "accumulate": 2}
    whole = uids(dataset_of(corpus, **options))
    dataset = dataset_of(corpus, **options)
    loader = loader_of("streaming", dataset, num_workers, persistent=True, on_break="continue")
    assert uids(islice(loader, 6)) == whole[:6]
    assert len(loader) == 34
    assert uids(islice(loader, 3)) == whole[6:9]  # the second window is broken off half-way
    assert len(loader) == 32
    assert uids(loader) == whole[8:]
    assert len(loader) == 40


@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_break_next_goes_on_with_the_next_epoch(corpus, epochs, num_workers):
    loader = loader_of("streaming", dataset_of(corpus), num_workers, on_break="next")
    assert uids(islice(loader, 5)) == epochs[0][:5]
    assert uids(islice(loader, NUM_BATCHES)) == epochs[1]  # a loop that breaks behind the last batch has seen them all
    assert uids(islice(loader, 1)) == epochs[2][:1]
    assert loader.state_dict()["epoch"] == 2
    assert uids(loader) == epochs[3]


def test_a_break_behind_the_last_batch_is_a_finished_pass(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus), 0)
    for epoch in range(3):
        seen = []
        for number, batch in enumerate(loader, 1):
            seen.append(batch["uid"].tolist())
            if number == len(loader):
                break
        assert seen == epochs[epoch]


def test_what_is_touched_later_moves_nothing(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus), 2, "fork")
    first = list(loader)
    assert first[0]["uid"].tolist() == epochs[0][0]
    assert uids(loader) == epochs[1]


def test_len_is_exact_in_every_state(corpus):
    dataset = dataset_of(corpus)
    loader = loader_of("streaming", dataset, 0)
    assert len(loader) == len(dataset) == NUM_BATCHES
    loader.load_state_dict(dataset.plan.cursor(0, 60))
    assert len(loader) == 5
    batches = iter(loader)
    assert len(loader) == len(batches) == 5
    next(batches)
    assert len(loader) == 5, "the pass under way"
    assert sum(1 for _ in batches) == 4
    assert len(loader) == NUM_BATCHES, "the next one"
    for _ in loader:
        break
    assert len(loader) == NUM_BATCHES
    loader.load_state_dict(dataset.plan.cursor(3, 76))
    assert len(loader) == 1
    loader.set_epoch(4)
    assert len(loader) == NUM_BATCHES


def test_two_passes_side_by_side(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus), 0)
    pairs = list(zip(loader, loader, strict=True))
    assert uids(pair[0] for pair in pairs) == uids(pair[1] for pair in pairs) == epochs[0]
    assert uids(loader) == epochs[1]


def test_an_older_pass_ends_when_persistent_workers_serve_a_newer_one(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus), 1, "fork", persistent=True)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(PlanError, match="two passes side by side"):
        next(older)
    assert uids(newer) == epochs[0]


def test_iterating_without_taking_a_batch_changes_nothing(corpus, epochs):
    loader = loader_of("streaming", dataset_of(corpus, batch_size=40), 1, "fork", persistent=True)
    for _ in range(3):
        iter(loader)
    first, second = loader
    assert [*first["uid"].tolist(), *second["uid"].tolist()]
    assert (first.position, first.cursor.epoch, second.cursor.epoch) == (0, 0, 1)


def test_a_dataset_that_is_told_where_to_go_on_is_obeyed_after_a_break(corpus, epochs):
    dataset = dataset_of(corpus)
    loader = StreamingLoader(dataset, on_break="continue")
    next(iter(loader))
    dataset.set_epoch(2)  # at the dataset, as frameworks do
    assert loader.state_dict() == dataset.state_dict()
    assert uids(islice(loader, 3)) == epochs[2][:3]
    dataset.load_state_dict(dataset.plan.cursor(3, 40))
    assert uids(loader) == epochs[3][10:]


def test_set_epoch_and_a_loaded_cursor(corpus, epochs):
    dataset = dataset_of(corpus)
    dataset.load_state_dict(dataset.plan.cursor(1, 40))
    with pytest.raises(CursorError, match="go back behind the loaded cursor: expected epoch 1 or later, found 0"):
        dataset.set_epoch(0)
    dataset.set_epoch(1)
    assert uids(dataset) == epochs[1][10:]
    dataset.set_epoch(2)
    assert uids(dataset) == epochs[2]
    with pytest.raises(PlanError, match="must not be negative"):
        dataset_of(corpus).set_epoch(-1)


# ------------------------------------------------------------------------------------------------ tail="continue"


def endless(manifest, **options):
    return dataset_of(manifest, **{"tail": "continue", "batch_size": 3, "accumulate": 4, **options})


def test_continue_has_no_length_and_flows_from_epoch_to_epoch(corpus):
    dataset = endless(corpus)
    loader = StreamingLoader(dataset, on_break="continue")
    with pytest.raises(TypeError, match="has no end"):
        len(loader)
    batches = list(islice(loader, 80))  # 240 samples: three epochs in windows of 12
    seen = joined(uids(batches))
    assert sorted(seen) == sorted([*range(80)] * 3)
    assert len(set(seen[:72])) == len(set(seen[84:156])) == 72, "what lies within one epoch"
    assert not any(batch.is_padding.any() for batch in batches)
    assert not any(batch.place.is_last_in_pass for batch in batches)
    assert (batches[-1].cursor.epoch, batches[-1].cursor.position) == (3, 0)
    assert (batches[27].cursor.epoch, batches[27].cursor.position, batches[27].cursor.grid_start) == (1, 4, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_continue_after_breaks_is_one_stream(corpus, num_workers):
    whole = uids(islice(endless(corpus), 80))
    loader = loader_of("streaming", endless(corpus), num_workers, on_break="continue")
    seen = []
    for windows in (1, 6, 5, 8):  # over the borders of epochs, too
        seen += uids(islice(loader, 4 * windows))
    assert seen == whole


def test_continue_with_set_epoch_and_next(corpus):
    dataset = endless(corpus)
    loader = StreamingLoader(dataset, on_break="next")
    dataset.set_epoch(1)
    first = joined(uids(islice(loader, 20)))  # 60 samples of epoch 1
    assert len(set(first)) == 60
    after = next(iter(loader))
    assert (after.position, after.cursor.epoch) == (0, 2)


# ------------------------------------------------------------------------------------------------ late workers


class WithALateWorker(StreamingDataset):
    """Its second worker begins each pass long after the first one, as happens on a machine under load."""

    def __iter__(self):
        info = get_worker_info()
        if info is not None and info.id == 1:
            time.sleep(0.5)
        return super().__iter__()


@pytest.mark.parametrize("kind", ["plain", "streaming"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_begins_late_begins_where_the_others_did(corpus, kind, persistent):
    """Untouched passes of few batches: the last one arrives before the late worker has begun."""
    dataset = WithALateWorker(corpus, batch_size=27, seed=3, topology=Topology(0, 1))
    loader = loader_of(kind, dataset, 2, persistent=persistent)
    for _ in range(3):
        kept = list(loader)
        assert len(kept) == 3
        assert sorted(real_ids(kept)) == list(range(80))


@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_a_late_worker_without_a_batch_of_its_own_adds_none(corpus, epochs, kind):
    """One batch is left: when it has been consumed the other worker may not have begun yet."""
    dataset = WithALateWorker(corpus, batch_size=4, seed=3, topology=Topology(0, 1), columns=["uid"])
    loader = loader_of(kind, dataset, 2, persistent=True)
    for epoch in (0, 1, 3):
        dataset.load_state_dict(dataset.plan.cursor(epoch, 76))
        assert uids(loader) == epochs[epoch][19:]
    assert uids(loader) == epochs[4]
