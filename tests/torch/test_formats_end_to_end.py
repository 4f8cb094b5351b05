"""Data sets that other packages wrote, trained on: every sample once over ranks and workers, the same with a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardstream.index import build_manifest
from shardstream.torch import Ragged, StreamingDataset, StreamingLoader, Topology

PEERS = Path(__file__).parents[1] / "formats" / "peers"

pytestmark = pytest.mark.filterwarnings("ignore:.*its values come as bytes:shardstream.errors.ShardStreamWarning")


def epoch(manifest, rank, num_workers=0, state=None):
    dataset = StreamingDataset(
        manifest, batch_size=2, global_batch=4, seed=3, topology=Topology(rank=rank, world_size=2)
    )
    loader = StreamingLoader(dataset, num_workers=num_workers)
    if state is not None:
        loader.load_state_dict(state)
    return list(loader)


@pytest.mark.parametrize("folder", ["mds", "mds-zstd", "litdata", "litdata-rows", "datasets"])
def test_every_sample_comes_once_and_a_resume_goes_on(folder):
    manifest = build_manifest(PEERS / folder, num_workers=0)
    batches = [epoch(manifest, rank) for rank in range(2)]
    real = torch.cat([batch["uid"][~batch.is_padding] for rank in batches for batch in rank])
    assert sorted(real.tolist()) == list(range(manifest.num_samples))
    resumed = epoch(manifest, 0, state=batches[0][0].cursor.state_dict())
    assert [batch["uid"].tolist() for batch in resumed] == [batch["uid"].tolist() for batch in batches[0][1:]]


def test_columns_are_tensors_where_they_are_numbers():
    (batch, *_) = epoch(build_manifest(PEERS / "mds", num_workers=0), 0)
    assert isinstance(batch["tokens"], Ragged)
    assert batch["matrix"].shape == (2, 2, 3)
    assert batch["vector"].dtype == torch.float32
    assert json.loads(batch["meta"][0])["row"] == int(batch["uid"][0])
    assert isinstance(batch["thing"][0], bytes)


@pytest.mark.slow
def test_workers_send_the_same():
    manifest = build_manifest(PEERS / "litdata", num_workers=0)
    here, there = epoch(manifest, 0), epoch(manifest, 0, num_workers=2)
    assert [batch["uid"].tolist() for batch in here] == [batch["uid"].tolist() for batch in there]
    assert all(torch.equal(one["array"].values, other["array"].values) for one, other in zip(here, there, strict=True))
