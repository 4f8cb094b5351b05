"""Checksums when indexing: of every byte, kept by updates, without a trace in the order, and fetched once."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner

from shardstream.checksums import checksum, checksums_of
from shardstream.cli import main
from shardstream.errors import ManifestError
from shardstream.index import IndexSettings
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from tests.support.corpora import manifest_of_files, parquet_manifest, tar_manifest
from tools.faults import FaultyServer, Folder

CHECKED = IndexSettings(checksum=True)
NAMES = ["block_checksum", "rest_checksum"]


def test_blocks_and_the_rest_are_every_byte_once():
    data = bytes(range(100))
    made = checksums_of(io.BytesIO(data), [(10, 30), (25, 40), (60, 60), (70, 100)], 100)
    assert made.blocks == [checksum(data[10:30]), checksum(data[25:40]), checksum(b""), checksum(data[70:])]
    assert made.rest == checksum(data[:10], data[40:70])
    with pytest.raises(EOFError, match="5 bytes early"):
        checksums_of(io.BytesIO(data), [(0, 50)], 105)


def paths_of(manifest):
    return [manifest.url(shard) for shard in range(manifest.num_shards)]


@pytest.mark.parametrize("suffix", [".parquet", ".tar", ".tar.gz", ".tar.zst"])
def test_every_flipped_bit_is_in_some_checksum(tmp_path, suffix):
    if suffix == ".parquet":
        (path,) = paths_of(parquet_manifest(tmp_path, [30]))
    else:
        (path,) = paths_of(tar_manifest(tmp_path, [30], ".tar.gz" if suffix == ".tar.gz" else ".tar"))
        if suffix == ".tar.zst":
            raw = Path(path).read_bytes()
            path = path + ".zst"
            Path(path).write_bytes(b"".join(zstandard.compress(raw[at : at + 3000]) for at in range(0, len(raw), 3000)))
    manifest = manifest_of_files([path], settings=CHECKED)
    known = manifest.lists.read(0, NAMES)
    assert len(known["block_checksum"]) == manifest.num_blocks
    starts, sizes = manifest.block_offset.tolist(), manifest.block_num_bytes.tolist()
    spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    raw = Path(path).read_bytes()
    for place in np.random.default_rng(0).integers(0, len(raw), 60).tolist():
        damaged = raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]
        made = checksums_of(io.BytesIO(damaged), spans, len(raw))
        differs = {
            k for k, (one, other) in enumerate(zip(made.blocks, known["block_checksum"], strict=True)) if one != other
        }
        assert differs == {k for k, (start, end) in enumerate(spans) if start <= place < end}
        assert bool(differs) != (made.rest != known["rest_checksum"])


def test_the_order_does_not_know_of_them(tmp_path):
    plain = parquet_manifest(tmp_path, [20, 30])
    with_sums = manifest_of_files(paths_of(plain), settings=CHECKED).save(tmp_path / "m.manifest.parquet")
    assert with_sums.fingerprint == plain.fingerprint
    cursors = [Plan.make(manifest, batch_size=4).cursor() for manifest in (with_sums, plain)]
    assert replace(cursors[0], manifest=None) == cursors[1]
    loaded = Manifest.load(with_sums.path)
    assert loaded.lists.read(1, NAMES)["block_checksum"] == with_sums.lists.read(1, NAMES)["block_checksum"]
    assert plain.lists.names.isdisjoint(NAMES), "manifests without them are as they were"
    assert "checksum" not in plain.metadata


def test_an_update_keeps_them_and_hashes_what_is_new(tmp_path):
    paths = paths_of(parquet_manifest(tmp_path, [20, 30, 10]))
    old = manifest_of_files(paths[:2], settings=CHECKED)
    table = pq.read_table(paths[1])
    pq.write_table(table.slice(5), paths[1], row_group_size=7)
    new = manifest_of_files(paths, update=old)
    assert new.metadata["checksum"] == "blake2b-16"
    kept, changed, added = (new.lists.read(shard, NAMES) for shard in range(3))
    assert kept == old.lists.read(0, NAMES)
    assert changed != old.lists.read(1, NAMES)
    assert len(added["block_checksum"]) == 2
    before = manifest_of_files(paths)
    assert manifest_of_files(paths, update=before, settings=CHECKED).lists.read(0, NAMES) == kept
    without = manifest_of_files(paths, update=new, settings=IndexSettings(checksum=False))
    assert without.lists.names.isdisjoint(NAMES)


@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
def test_a_remote_shard_is_fetched_once(tmp_path, suffix):
    make = tar_manifest if suffix == ".tar" else parquet_manifest
    (path,) = paths_of(make(tmp_path / "s", [40]))
    with FaultyServer(Folder(tmp_path / "s")) as server:
        remote = manifest_of_files([f"{server.url}/part-00000{suffix}"], settings=CHECKED)
        assert server.num_bytes == remote.num_bytes[0]
    local = manifest_of_files([path], settings=CHECKED)
    assert remote.lists.read(0, NAMES) == local.lists.read(0, NAMES)
    assert remote.digests == local.digests


def test_what_is_wrong_with_a_remote_shard_names_the_shard(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes() + b"rubbish" * 100)
    with FaultyServer(Folder(tmp_path)) as server, pytest.raises(ManifestError) as caught:
        manifest_of_files([f"{server.url}/a.tar"], settings=CHECKED)
    assert f"[{server.url}/a.tar]" in str(caught.value)
    assert "/shardstream-" not in str(caught.value)


def test_the_command(tmp_path):
    parquet_manifest(tmp_path / "s", [20])
    output = str(tmp_path / "m.manifest.parquet")
    done = CliRunner().invoke(main, ["index", str(tmp_path / "s"), "-o", output, "--checksum", "--workers", "0"])
    assert done.exit_code == 0, done.output
    assert Manifest.load(output).lists.names.issuperset(NAMES)
