"""Folders and files that say themselves which shards they are; the data was written by the packages themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.errors import ManifestError
from shardstream.index import build_manifest, expand_shards
from shardstream.manifest import Manifest
from tests.formats.conformance import read_all

PEERS = Path(__file__).parent / "formats" / "peers"

pytestmark = pytest.mark.filterwarnings("ignore:.*its values come as bytes:shardstream.errors.ShardStreamWarning")


@pytest.fixture
def copied(tmp_path):
    def copy(name: str) -> Path:
        shutil.copytree(PEERS / name, tmp_path / name)
        return tmp_path / name

    return copy


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("mds", ["shard.00000.mds", "shard.00001.mds", "shard.00002.mds"]),
        ("mds/index.json", ["shard.00000.mds", "shard.00001.mds", "shard.00002.mds"]),
        ("mds-zstd", ["shard.00000.mds.zstd", "shard.00001.mds.zstd", "shard.00002.mds.zstd"]),
        ("litdata", ["chunk-0-0.bin", "chunk-0-1.bin"]),
        ("litdata-zstd/index.json", ["chunk-0-0.zstd.bin", "chunk-0-1.zstd.bin"]),
        ("datasets", ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]),
        ("datasets-splits/train", ["data-00000-of-00001.arrow"]),
        ("wids/tiny.json", ["shard-0.tar", "shard-1.tar"]),
    ],
)
def test_a_described_data_set_is_the_shards_it_names(entry, names):
    manifest = build_manifest(PEERS / entry, num_workers=0)
    assert manifest.urls == names
    assert manifest.num_samples == {"datasets-splits/train": 3, "wids/tiny.json": 5}.get(entry, 12)


@pytest.mark.parametrize("folder", ["mds", "mds-zstd", "litdata", "datasets", "wids"])
def test_in_a_store_as_well(folder):
    root, memory = f"memory://{uuid4().hex}", fsspec.filesystem("memory")
    for file in (PEERS / folder).iterdir():
        memory.pipe_file(f"{root}/{file.name}", file.read_bytes())
    entry = "wids/tiny.json" if folder == "wids" else folder
    local, remote = build_manifest(PEERS / entry, num_workers=0), build_manifest(
        f"{root}/{entry.partition('/')[2]}" if folder == "wids" else root + "/", num_workers=0
    )  # fmt: skip
    assert remote.fingerprint == local.fingerprint
    assert str(read_all(remote)) == str(read_all(local))


def test_files_beside_a_described_data_set_are_no_shards(copied):
    folder = copied("mds")
    (folder / "old").mkdir()
    for name in ("shard.00009.mds", "old/shard.00000.mds"):
        shutil.copy(folder / "shard.00000.mds", folder / name)
    assert len(expand_shards(folder)) == 3
    assert len(expand_shards(folder.parent)) == 3
    assert len(expand_shards(f"{folder.parent}/**")) == 3


def test_raw_shards_are_taken_where_both_are_there(copied):
    folder = copied("mds-zstd")
    for file in (PEERS / "mds").glob("*.mds"):
        shutil.copy(file, folder)
    assert build_manifest(folder, num_workers=0).formats == ["mds"] * 3
    assert build_manifest(folder / "index.json", num_workers=0).formats == ["mds"] * 3


def test_a_folder_of_data_sets_is_all_of_them(copied):
    root = copied("mds").parent
    (root / "mds").rename(root / "a")
    copied("mds").rename(root / "b")
    assert [Path(url).parent.name for url in expand_shards(root)] == ["a"] * 3 + ["b"] * 3


def test_splits_are_not_mixed():
    with pytest.raises(ManifestError, match=r"several splits.*train, test; name one of them"):
        build_manifest(PEERS / "datasets-splits", num_workers=0)


@pytest.mark.parametrize(
    ("entry", "file", "old", "new"),
    [
        ("wids/tiny.json", "tiny.json", '"nsamples": 2', '"nsamples": 3'),
        ("mds", "index.json", '"samples": 5', '"samples": 6'),
        ("litdata", "index.json", '"chunk_size": 6', '"chunk_size": 7'),
    ],
)
def test_numbers_of_samples_are_checked(copied, entry, file, old, new):
    folder = copied(entry.partition("/")[0])
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(ManifestError, match="samples"):
        build_manifest(folder.parent / entry, num_workers=0)


def test_a_missing_shard_is_named(copied):
    folder = copied("mds")
    (folder / "shard.00001.mds").unlink()
    with pytest.raises(ManifestError, match=r"1 of 3 shards.*\n.*shard\.00001\.mds"):
        build_manifest(folder, num_workers=0)


def test_a_selection_saved_as_row_numbers_is_refused(copied):
    state = copied("datasets") / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(ManifestError, match="flatten_indices"):
        build_manifest(state.parent, num_workers=0)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"version": 2, "shards": [{"format": "json"}]}, "not MDS.*found json"),
        ({"version": 2, "shards": [{}]}, "cannot be read.*KeyError"),
        (
            {"version": 2, "shards": [{"format": "mds", "raw_data": {"basename": "../x.mds"}, "samples": 1}]},
            "outside of its folder",
        ),
        (
            {
                "version": 2,
                "shards": [{"format": "mds", "raw_data": {"basename": "x.mds"}, "zip_data": {"basename": "x.mds.br"}}],
            },
            "compressed in another way.*zstd",
        ),
        ({"chunks": [], "config": {"encryption": {}, "compression": "lz4"}}, "compressed with lz4"),
        ({"wids_version": 2}, "unknown version"),
        ({"wids_version": 1, "shardlist": []}, "lists no shards"),
    ],
)
def test_descriptions_that_cannot_be_used_are_refused(tmp_path, told, says):
    (tmp_path / "index.json").write_text(json.dumps(told))
    with pytest.raises(ManifestError, match=says):
        build_manifest(tmp_path, num_workers=0)


def test_other_json_is_left_alone(copied):
    folder = copied("wids")
    (folder / "index.json").write_text('{"any": "thing"}')
    (folder / "state.json").write_text("[1, 2]")
    assert [Path(url).name for url in expand_shards(folder)] == ["shard-0.tar", "shard-1.tar"]


def test_json_that_is_too_deep_is_left_alone(copied):
    folder = copied("wids")
    (folder / "index.json").write_text('{"chunks": ' + "[" * 200_000)
    assert [Path(url).name for url in expand_shards(folder)] == ["shard-0.tar", "shard-1.tar"]


@pytest.mark.parametrize("text", ["no JSON", '{"shardlist": ' + "[" * 200_000])
def test_a_part_of_a_wids_index_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "part.json").write_text(text)
    told = {"wids_version": 1, "datasets": [{"source_url": "part.json"}]}
    (tmp_path / "index.json").write_text(json.dumps(told))
    with pytest.raises(ManifestError, match="description of a data set cannot be read"):
        expand_shards(tmp_path / "index.json")


def test_a_wids_index_that_a_folder_holds_names_nothing_outside_of_it(copied, tmp_path):
    shard = copied("wids") / "shard-0.tar"
    (tmp_path / "found").mkdir()
    index = tmp_path / "found" / "index.json"
    for url in (str(shard), "../wids/shard-0.tar", "http://127.0.0.1:9/shard-0.tar"):
        index.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": url, "nsamples": 3}]}))
        with pytest.raises(ManifestError, match=r"outside of its folder.*name the index itself"):
            expand_shards(tmp_path / "found")
    index.write_text(json.dumps({"wids_version": 1, "datasets": [{"source_url": "http://127.0.0.1:9/part.json"}]}))
    with pytest.raises(ManifestError, match="outside of its folder"):
        expand_shards(tmp_path / "found")
    index.write_text(json.dumps({"wids_version": 1, "shardlist": [{"url": str(shard), "nsamples": 3}]}))
    assert expand_shards(index) == [str(shard)]


def test_wids_lists_may_lie_apart_from_their_shards(copied, tmp_path):
    folder = copied("wids")
    inner = {"base": str(folder), "shardlist": [{"url": "shard-1.tar", "nsamples": 2}]}
    (tmp_path / "part.json").write_text(json.dumps(inner))
    told = {"wids_version": 1, "base": "wids", "shardlist": [{"url": "shard-0.tar", "nsamples": 3}]}
    told["datasets"] = [{"source_url": "part.json"}]
    (tmp_path / "all.json").write_text(json.dumps(told))
    assert build_manifest(tmp_path / "all.json", num_workers=0).num_samples == 5


def test_the_command_recognises_them_too(tmp_path):
    output = tmp_path / "m.manifest.parquet"
    done = CliRunner().invoke(main, ["index", str(PEERS / "datasets"), "-o", str(output), "-q"])
    assert done.exit_code == 0, done.output
    assert Manifest.load(output).num_samples == 12
