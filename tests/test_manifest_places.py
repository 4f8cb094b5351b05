"""Where a manifest may say that its shards lie: one that somebody else made must not make a job read what it likes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream.errors import ManifestError, ShardStreamWarning
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.manifest_file import DatasetInfo, ManifestWriter, ShardRow
from shardstream.mixing import Mixture
from shardstream.torch import StreamingDataset
from tests.support.served import served


def write(path, *urls, root="/data", stored_root=None):
    """A manifest as anybody could write it."""
    ones = np.ones(1, np.int64)
    with Path(path).open("w+b") as file:
        writer = ManifestWriter(file)
        for url in urls:
            writer.add(ShardRow(url, "parquet", 9, "9-1", "d", ones, ones, ones, ones))
        writer.finish(DatasetInfo(root=root), stored_root=stored_root)
    return path


OUTSIDE = [
    "../secret.parquet",
    "a/../../secret.parquet",
    "..",
    "/etc/passwd",
    "http://host/a.parquet",
    "file:///etc/passwd",
    "s3://other/a.parquet",
    "zip://a.parquet::https://host/a.zip",
    "simplecache::s3://other/a.parquet",
]


@pytest.mark.parametrize("url", OUTSIDE)
@pytest.mark.parametrize("root", ["/data", "s3://bucket/data", ""])
def test_shards_elsewhere_are_refused(tmp_path, url, root):
    path = write(tmp_path / "m", "good.parquet" if root else "/data/good.parquet", url, root=root)
    with pytest.raises(ManifestError, match=r"outside.*allow_url") as caught:
        Manifest.load(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ManifestError, match="outside"):
        Manifest.load(path, root="/elsewhere")  # wherever the user says that the shards are
    assert Manifest.load(path, allow_url=lambda _: True).urls[1] == url


@pytest.mark.parametrize("url", ["%2e%2e/secret.parquet", "a/%2E./%2e%2e/x.parquet", "a/..%2f..%2fx.parquet"])
def test_hidden_ways_up_are_ways_up_where_a_server_takes_them_so(tmp_path, url):
    with pytest.raises(ManifestError, match="outside"):
        Manifest.load(write(tmp_path / "m", url, root="https://host/data"))
    assert Manifest.load(write(tmp_path / "n", url, root="/data")).urls == [url]  # a name like any other


@pytest.mark.parametrize("url", ["a..b.parquet", "..a/b.parquet", "a/...", "%2e.parquet", "a:b::c.parquet", "ä/日.tar"])
def test_strange_names_are_below_the_root(tmp_path, url):
    for number, root in enumerate(("/data", "s3://bucket")):
        assert Manifest.load(write(tmp_path / f"{number}", url, root=root)).url(0) == f"{root}/{url}"


@pytest.mark.parametrize(
    ("allow", "accepted"),
    [
        ("s3://other/*", True),
        (["/nowhere/*", "s3://other/a.parquet"], True),
        (("s3://*",), True),
        ("s3://other", False),
        ("S3://OTHER/*", False),
        ([], False),
        (lambda url: url == "s3://other/a.parquet", True),
        (lambda url: False, False),
    ],
)
def test_what_is_allowed(tmp_path, allow, accepted):
    path = write(tmp_path / "m", "s3://other/a.parquet", root="")
    if accepted:
        assert Manifest.load(path, allow_url=allow).url(0) == "s3://other/a.parquet"
    else:
        with pytest.raises(ManifestError, match="outside"):
            Manifest.load(path, allow_url=allow)


@pytest.mark.parametrize("root", ["/data", "s3://bucket/data"])
def test_a_pattern_means_the_place_and_not_the_way_to_it(tmp_path, root):
    path = write(tmp_path / "m", "../secret/a.parquet", root=root)
    with pytest.raises(ManifestError, match="outside"):
        Manifest.load(path, allow_url=f"{root}/*")
    place = f"{root.removesuffix('data')}secret/*"
    assert Manifest.load(path, allow_url=place).num_shards == 1


def test_a_manifest_on_disk_may_name_any_root(tmp_path):
    """It was made, or put there, by whoever runs the job: indexing a bucket and training from it is all there is."""
    for number, root in enumerate(("s3://bucket/data", "https://host/data", "/data")):
        assert Manifest.load(write(tmp_path / f"{number}", "a.parquet", root=root)).url(0) == f"{root}/a.parquet"


@pytest.mark.parametrize("root", ["..", "../x", "/etc", "http://host"])
def test_a_root_that_is_called_relative_is(tmp_path, root):
    with pytest.raises(ManifestError, match="outside"):
        Manifest.load(write(tmp_path / "m", "a.parquet", stored_root=root))


@pytest.fixture
def address(tmp_path):
    """The address of a server of a folder."""
    with served(tmp_path) as url:
        yield url


def test_a_manifest_from_a_server_may_speak_of_that_server_only(tmp_path, address):
    write(tmp_path / "here", "a.parquet", root=f"{address}/data")
    assert Manifest.load(f"{address}/here").url(0) == f"{address}/data/a.parquet"
    write(tmp_path / "beside", "a.parquet", stored_root="data")
    assert Manifest.load(f"{address}/beside").url(0) == f"{address}/data/a.parquet"
    for number, root in enumerate(("/etc", "http://127.0.0.1:1/x", "s3://bucket", "")):
        write(tmp_path / f"{number}", "a.parquet", root=root)
        with pytest.raises(ManifestError, match="outside"):
            Manifest.load(f"{address}/{number}")
        assert Manifest.load(f"{address}/{number}", root="s3://mine").url(0) == "s3://mine/a.parquet"
        assert Manifest.load(f"{address}/{number}", allow_url="*").root == root


def test_shards_without_a_common_folder_are_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("shardstream.storage.common_root", lambda urls: ("", list(urls)))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.warns(ShardStreamWarning, match=rf"allow_url={tmp_path}/\*"):
        build_manifest(str(tmp_path / "a.parquet"), tmp_path / "m.manifest.parquet", num_workers=0)
    with pytest.raises(ManifestError, match="outside"):
        Manifest.load(tmp_path / "m.manifest.parquet")


def test_datasets_and_mixtures_and_commands_say_it_too(tmp_path):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    folder = tmp_path / "deep"
    folder.mkdir()
    made = build_manifest(str(tmp_path / "a.parquet"), folder / "good", num_workers=0)
    rows = ShardRow("../a.parquet", "parquet", int(made.num_bytes[0]), *made.version_tags, *made.digests,
                    made.block_rows, made.block_run_rows, made.block_offset, made.block_num_bytes)  # fmt: skip
    path = folder / "shared.manifest.parquet"
    with path.open("w+b") as file:
        writer = ManifestWriter(file)
        writer.add(rows)
        info = DatasetInfo(str(folder), made.columns, made.arrow_schema)
        writer.finish(info, stored_root=".")
    with pytest.raises(ManifestError, match="outside"):
        StreamingDataset(path, batch_size=2)
    dataset = StreamingDataset(path, batch_size=2, allow_url=f"{tmp_path}/*")
    assert [sorted(batch["x"].tolist()) for batch in dataset] == [[1, 2]]
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(json.dumps({"sources": {"a": {"manifest": str(path), "weight": 1}}}))
    with pytest.raises(ManifestError, match="outside"):
        Mixture.load(mixture)
    assert Mixture.load(mixture, allow_url="*").names == ("a",)


@pytest.mark.parametrize("command", [["inspect"], ["audit"], ["bench"]])
def test_commands_take_it(tmp_path, command):
    from click.testing import CliRunner

    from shardstream.cli import main

    path = write(tmp_path / "m", "../a.parquet", root="/data")
    runner = CliRunner(env={**os.environ, "COLUMNS": "200"})
    refused = runner.invoke(main, [*command, str(path), "--json"])
    assert refused.exit_code == 1
    assert "outside" in str(refused.output) + str(refused.exception)
    allowed = runner.invoke(main, [*command, str(path), "--json", "--allow-url", "/a.parquet"])
    assert "outside" not in str(allowed.output) + str(allowed.exception)
