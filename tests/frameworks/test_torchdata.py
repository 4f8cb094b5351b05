"""torchdata's StatefulDataLoader and nodes, as their page says."""

from __future__ import annotations

import copy

import pytest
import torch

from shardstream.torch import StreamingLoader
from tests.support.frameworks import (
    GLOBAL_BATCH,
    accumulate_of,
    labelled_manifest,
    launch,
    once_each,
    real,
    right_weights,
    weights,
)
from tests.support.pages import page_code
from tests.support.streams import joined
from tests.support.training import TokenModel

pytestmark = [
    pytest.mark.rest,
    pytest.mark.distributed,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # torchdata calls it
]


def _train(rank, manifest, cursor, num_steps=None, saved=None):
    page = page_code("torchdata")
    trained, cursors = [], []

    def after_step(window):
        trained.append(joined(map(real, window.batches)))
        cursors.append(window.cursor.state_dict())
        return len(trained) == num_steps

    net = TokenModel()
    if saved is not None:
        torch.nn.utils.vector_to_parameters(saved.clone(), net.parameters())
    page.train(net, manifest, accumulate_of(2), 2, cursor, after_step)
    return trained, cursors[-1], weights(net), _first_batches(page, manifest, cursor)


def _first_batches(page, manifest, cursor):
    """What a StatefulDataLoader of this rank begins with, two batches of the same topology's state skipped."""
    if cursor is not None:
        return None
    loader = page.stateful(manifest, accumulate_of(2))
    batches = iter(loader)
    consumed = [real(next(batches)) for _ in range(6)]
    state = copy.deepcopy(loader.state_dict())
    again = [real(batch) for batch in page.stateful(manifest, accumulate_of(2), state)]
    return consumed, again, state


def _go_on(rank, manifest, state):
    page = page_code("torchdata")
    return [real(batch) for batch in page.stateful(manifest, accumulate_of(2), state, is_same_topology=False)]


def test_resumes_in_mid_epoch_on_another_number_of_ranks(tmp_path):
    manifest = labelled_manifest(tmp_path)
    before = launch(_train, 2, manifest, None, 8)
    cursor = before[0][1]
    assert (cursor["epoch"], cursor["position"]) == (1, 2 * GLOBAL_BATCH)
    after = launch(_train, 1, manifest, cursor, None, before[0][2])
    assert once_each(joined(ids for trained, *_ in [*before, *after] for ids in trained), num_epochs=2)
    assert torch.allclose(after[0][2], right_weights(manifest, num_epochs=2), rtol=1e-10, atol=1e-12)

    stateful = [each[3] for each in before]  # a rank's own state, on its own
    assert once_each(joined(joined(part) for consumed, again, _ in stateful for part in (consumed, again)))
    rest = launch(_go_on, 1, manifest, stateful[0][2])
    assert once_each([*joined(joined(consumed) for consumed, *_ in stateful), *joined(rest[0])])


@pytest.mark.parametrize("snapshot_frequency", [1, 3])
def test_the_state_of_a_graph_is_that_of_what_it_handed_out(tmp_path, snapshot_frequency):
    page = page_code("torchdata")
    manifest = labelled_manifest(tmp_path)

    def source():
        return StreamingLoader(page.dataset_of(manifest, 1), num_workers=2, multiprocessing_context="fork")

    whole = list(page.graph(source()))
    loader = page.graph(source(), snapshot_frequency)
    batches = iter(loader)
    first = [real(next(batches)) for _ in range(7)]
    state = copy.deepcopy(loader.state_dict())
    del batches
    resumed = page.graph(source(), snapshot_frequency)
    resumed.load_state_dict(state)
    assert first + list(map(real, resumed)) == list(map(real, whole))
    assert once_each(joined(map(real, resumed))), "and the next epoch whole"
