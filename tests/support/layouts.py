"""Manifests of any layout, and the golden values, for tests of the pure core."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from shardstream.manifest import Manifest

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "order_golden.json").read_text())


def manifest_of(block_rows, run_rows, blocks_per_shard=None):
    """A manifest of blocks of these sizes; run_rows is one number per block; one shard unless told otherwise."""
    shards = [len(block_rows)] if blocks_per_shard is None else blocks_per_shard
    num_blocks, num_shards = len(block_rows), len(shards)
    return Manifest(
        root="mem://",
        urls=[f"{k}.parquet" for k in range(num_shards)],
        formats=["parquet"] * num_shards,
        num_bytes=np.zeros(num_shards, np.int64),
        version_tags=[""] * num_shards,
        digests=[""] * num_shards,
        shard_first_block=np.cumsum([0, *shards]).astype(np.int64),
        block_rows=np.array(block_rows, np.int32),
        block_run_rows=np.array(run_rows, np.int32),
        block_offset=np.zeros(num_blocks, np.int64),
        block_num_bytes=np.zeros(num_blocks, np.int64),
    )
