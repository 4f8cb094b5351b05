"""Hugging Face Accelerate, as its page says; and the second split that it would make of other loaders."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from shardstream.errors import PlanError, TopologyError
from shardstream.torch import StreamingDataset, StreamingLoader
from tests.support.frameworks import (
    DATA,
    GLOBAL_BATCH,
    NUM_SAMPLES,
    accumulate_of,
    as_launched,
    labelled_manifest,
    launch,
    needs,
    once_each,
    real,
    right_weights,
    weights,
)
from tests.support.pages import page_code
from tests.support.streams import joined
from tests.support.training import TokenModel

pytestmark = [pytest.mark.rest, pytest.mark.distributed, pytest.mark.timeout(400), needs("accelerate")]


def _train(rank, world_size, manifest, folder, num_steps=None):
    """One run that saves and stops after so many steps; returns the ids of this rank, and the weights."""
    as_launched(rank, world_size)
    page = page_code("accelerate")
    trained = []

    def after_step(window, save):
        trained.append(joined(map(real, window.batches)))
        if len(trained) == num_steps:
            save(folder)
        return len(trained) == num_steps

    net = TokenModel()
    page.train(net, manifest, accumulate_of(2), 2, None if num_steps else folder, after_step)
    return trained, weights(net)


def test_resumes_in_mid_epoch_on_another_number_of_ranks(tmp_path):
    manifest, folder = labelled_manifest(tmp_path), tmp_path / "saved"
    before = launch(_and_what_else, 2, 2, manifest, folder, 8)
    cursor = torch.load(folder / "custom_checkpoint_0.pkl", weights_only=True)
    assert (cursor["epoch"], cursor["position"]) == (1, 2 * GLOBAL_BATCH)
    after = launch(_train, 1, 1, manifest, folder)
    assert once_each(joined(ids for trained, _ in [*before, *after] for ids in trained), num_epochs=2)
    found, expected = after[0][1], right_weights(manifest, num_epochs=2)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12), (found - expected).abs().max()
    assert torch.equal(before[0][1], before[1][1])


def _and_what_else(rank, world_size, manifest, *rest):
    result = _train(rank, world_size, manifest, *rest)
    _a_second_split(manifest)
    return result


def _a_second_split(manifest):
    """What a plain DataLoader comes to, so that the page's warning stays true."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from shardstream.torch.integrations.accelerate import windows_of

    accelerator = Accelerator(cpu=True)
    dataset = StreamingDataset(manifest, **DATA)
    streaming = StreamingLoader(dataset)
    assert accelerator.prepare(streaming) is streaming

    dicts = DataLoader(dataset, batch_size=None, collate_fn=_with_ids)
    split = accelerator.prepare(dicts)
    with pytest.raises(TopologyError, match=r"among the ranks again: .*found DataLoaderDispatcher"):
        windows_of(accelerator, split)
    seen = accelerator.gather(torch.cat([batch["ids"] for batch in split]))
    assert len(set(seen.tolist())) <= NUM_SAMPLES // 2 + 1, "if this fails: Accelerate reads all of it now"

    shard = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    with pytest.raises(TopologyError, match="found DataLoaderShard"):
        windows_of(shard, shard.prepare(DataLoader(dataset, batch_size=None)))
    with pytest.raises(PlanError, match=r"expected Accelerator\(gradient_accumulation_steps=1\)"):
        windows_of(Accelerator(cpu=True, gradient_accumulation_steps=2), streaming)


def _with_ids(batch):
    return {"ids": batch.sample_ids}
