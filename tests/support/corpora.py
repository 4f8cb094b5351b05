"""Small data sets on disk whose samples say who they are: ``uid`` is the sample id."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardstream.index import build_manifest
from shardstream.manifest import Manifest


def tokens_of(uid: int) -> list[int]:
    """The tokens of a document: 0 to 4 of them."""
    return list(range(uid, uid + uid % 5))


def text_of(uid: int) -> str:
    return f"text {uid} ü"


def manifest_of_files(urls, **options) -> Manifest:
    """Indexes shards without starting a process."""
    return build_manifest([str(url) for url in urls], num_workers=0, **options)


def parquet_manifest(folder: Path, sizes: Sequence[int], row_group_size: int = 7, **options) -> Manifest:
    """Writes one shard per size (0 for a shard without rows) and indexes them."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    urls = []
    for shard, size in enumerate(sizes):
        uids = range(first, first + size)
        table = pa.table(
            {
                "uid": pa.array(uids, pa.int64()),
                "tokens": pa.array([tokens_of(uid) for uid in uids], pa.list_(pa.int32())),
                "text": pa.array([text_of(uid) for uid in uids], pa.string()),
            }
        )
        urls.append(folder / f"part-{shard:05d}.parquet")
        pq.write_table(table, urls[-1], row_group_size=row_group_size)
        first += size
    return manifest_of_files(urls, **options)


def tar_manifest(folder: Path, sizes: Sequence[int], suffix: str = ".tar") -> Manifest:
    """Writes one WebDataset shard per size, ``uid.txt`` and ``text.bin`` in each sample, and indexes them."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    urls = []
    for shard, size in enumerate(sizes):
        urls.append(folder / f"part-{shard:05d}{suffix}")
        with tarfile.open(urls[-1], "w:gz" if suffix.endswith("gz") else "w") as tar:
            for uid in range(first, first + size):
                for name, value in (("uid", str(uid)), ("text", text_of(uid))):
                    data = value.encode()
                    member = tarfile.TarInfo(f"{uid:06d}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        first += size
    return manifest_of_files(urls)


def with_runs(manifest: Manifest, run_rows: int) -> Manifest:
    """The same data with blocks cut into runs of so many rows, as if they were large."""
    return replace(manifest, block_run_rows=np.minimum(manifest.block_rows, run_rows).astype(np.int32))
