"""What every framework is tested with: a corpus with unequal targets, launched ranks, the right result."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardstream.torch import StreamingDataset, StreamingLoader, windows
from tests.support.corpora import manifest_of_files
from tests.support.processes import run_ranks
from tests.support.training import TokenModel, token_loss

NUM_SAMPLES, LENGTH, GLOBAL_BATCH = 46, 6, 8  # six windows, the last one short
DATA = {"batch_size": 2, "global_batch": GLOBAL_BATCH, "seed": 7, "targets": {"lm": "labels"}, "shifted": True}


def needs(framework: str) -> pytest.MarkDecorator:
    """Skips where an optional framework is not installed, without importing it when tests are collected."""
    reason = f"{framework} is not installed: pip install 'shardstream[frameworks]'"
    return pytest.mark.skipif(importlib.util.find_spec(framework) is None, reason=reason)


def labelled_manifest(folder: Path):
    """46 samples of 6 tokens with 0 to 5 targets each: no two micro-batches weigh the same."""
    urls = []
    for shard in range(2):
        uids = range(shard * 23, shard * 23 + 23)
        labels = [[(uid + k) % 40 if k < uid * uid % 6 else -100 for k in range(LENGTH)] for uid in uids]
        tokens = [[(7 * uid + 3 * k) % 40 for k in range(LENGTH)] for uid in uids]
        table = pa.table(
            {
                "input_ids": pa.array(tokens, pa.list_(pa.int64(), LENGTH)),
                "labels": pa.array(labels, pa.list_(pa.int64(), LENGTH)),
            }
        )
        urls.append(folder / f"part-{shard}.parquet")
        pq.write_table(table, urls[-1], row_group_size=5)
    return manifest_of_files(urls)


def as_launched(rank: int, world_size: int) -> None:
    """Sets what torchrun sets, for frameworks that look there."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    launched |= {"GROUP_RANK": 0, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ["TORCHELASTIC_RUN_ID"] = "test"


def launch(function, world_size: int, *args) -> list:
    """Runs it in so many ranks that have DataLoader workers; frameworks take long to be imported on a busy machine."""
    return run_ranks(function, world_size, *args, timeout_s=180.0, group_timeout_s=60.0, has_workers=True)


def accumulate_of(batch_size: int = 2) -> int:
    """Micro-batches that make up the global batch on these ranks."""
    return GLOBAL_BATCH // batch_size // (dist.get_world_size() if dist.is_initialized() else 1)


def right_weights(manifest, num_epochs: int, model: nn.Module | None = None, loss=token_loss, **options):
    """The parameters after training in one process with ``windows`` and SGD."""
    model = TokenModel() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = StreamingLoader(StreamingDataset(manifest, **{**DATA, **options}))
    for _ in range(num_epochs):
        for window in windows(loader):
            for micro in window.micro_batches():
                window.loss(lm=loss(model, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def real(batch) -> list[int]:
    return batch.sample_ids[~batch.is_padding].tolist()


def once_each(ids, num_epochs: int = 1) -> bool:
    return Counter(ids) == Counter(dict.fromkeys(range(NUM_SAMPLES), num_epochs))
