"""Case C32: what a rank gets does not depend on its workers; and what is large or strangely named is like any other."""

from __future__ import annotations

import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from shardstream.errors import ShardStreamWarning
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from shardstream.torch import StreamingDataset, StreamingLoader, Topology


def manifest_of(path, num_rows, **columns):
    pq.write_table(pa.table({"uid": list(range(num_rows)), **columns}), path / "part.parquet", row_group_size=16)
    return build_manifest(path / "part.parquet", num_workers=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize(
    ("num_rows", "batch_size", "tail", "num_batches", "num_samples"),
    [
        (1000, 128, "drop", 7, 896),
        (1000, 128, "uneven", 8, 1000),
        (46, 8, "drop", 5, 40),
        (46, 8, "uneven", 6, 46),
        (50, 8, "drop", 6, 48),
        (50, 8, "pad", 7, 50),
    ],
)
def test_case_c32_batches_do_not_depend_on_workers(
    tmp_path, num_rows, batch_size, tail, num_batches, num_samples, num_workers
):
    manifest = manifest_of(tmp_path, num_rows)
    for loader_of in (StreamingLoader, lambda data, **how: DataLoader(data, batch_size=None, **how)):
        dataset = StreamingDataset(manifest, batch_size=batch_size, tail=tail, topology=Topology(0, 1))
        loader = loader_of(dataset, num_workers=num_workers)
        batches = list(loader)
        assert len(batches) == len(loader) == num_batches
        ids = [
            int(uid)
            for batch in batches
            for uid, padded in zip(batch["uid"], batch.is_padding, strict=True)
            if not padded
        ]
        assert len(ids) == len(set(ids)) == num_samples
        assert sum(len(batch["uid"]) < batch_size for batch in batches) == (tail == "uneven")


def test_case_c32_a_batch_larger_than_the_data_is_dropped_with_a_warning(tmp_path):
    manifest = manifest_of(tmp_path, 10)
    with pytest.warns(ShardStreamWarning, match=r"10.*16|16.*10"):
        dataset = StreamingDataset(manifest, batch_size=16, tail="drop", topology=Topology(0, 1))
    assert list(dataset) == []


@pytest.mark.slow
def test_ten_thousand_shards_and_a_million_blocks(tmp_path):
    made = Manifest.synthetic(num_shards=10_000, blocks_per_shard=100, rows_per_block=1000, run_rows=500)
    made.save(tmp_path / "m")
    read = Manifest.load(tmp_path / "m")
    assert (read.num_shards, read.num_blocks, read.num_samples) == (10_000, 10**6, 10**9)
    assert read.fingerprint == made.fingerprint
    plan = Plan.make(read, batch_size=4, global_batch=1024, world_size=64, seed=1)
    assert plan.num_positions == 10**9
    assert plan.epoch(0).deal.num_windows == -(-(10**9) // 1024)


NAMES = ["日本語/ü", "e\u0301-\u00e9", "a b\tc", "😀" * 20, "%2e%2e", "#1?x=[2]{3}", "-rf", "\u202egnp", "x" * 200]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_shards_in_any_script_are_kept_and_read(tmp_path, name):
    path = tmp_path / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({name: [1, 2]}), path)
    build_manifest(path, tmp_path / "m", num_workers=0)
    manifest = Manifest.load(tmp_path / "m")
    assert manifest.url(0) == str(path)
    dataset = StreamingDataset(manifest, batch_size=2, topology=Topology(0, 1))
    assert [sorted(batch[name].tolist()) for batch in dataset] == [[1, 2]]


@pytest.mark.parametrize("key", [b"\xff\xfe", "日本".encode(), b"a\nb", "e\u0301".encode(), b"\xc3"])
def test_keys_of_any_bytes_are_kept(tmp_path, key):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo(key.decode("utf-8", "surrogateescape") + ".txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"hi"))
    build_manifest(tmp_path / "a.tar", tmp_path / "m", num_workers=0)
    manifest = Manifest.load(tmp_path / "m")
    assert manifest.lists.read(0, ["sample_keys"])["sample_keys"] == [key]
    dataset = StreamingDataset(manifest, batch_size=1, topology=Topology(0, 1))
    (batch,) = dataset
    assert batch["txt"] == [b"hi"]
    assert [text.encode("utf-8", "surrogateescape") for text in batch["__key__"]] == [key]
