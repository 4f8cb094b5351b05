"""Credentials in URLs and storage options are used, and come out nowhere: messages, reports, cursors, logs, files."""

from __future__ import annotations

import json
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.consumed import ConsumedLog
from shardstream.errors import ManifestError, ReadError, ShardStreamError, shown_url
from shardstream.fetch import Reading
from shardstream.formats import IndexOptions
from shardstream.index import build_manifest, expand_shards
from shardstream.index._look import Look
from shardstream.manifest import Manifest
from shardstream.prepare import PrepareSettings
from shardstream.torch import StreamingDataset, Topology
from shardstream.verify._shard import Checks
from tests.support.served import served

SECRET = "geheim"
OPTIONS = {"headers": {"X-Api-Key": SECRET}, "retry_timeout_s": 0.1}
WAYS = {
    "signed": ("http://", f"?X-Amz-Signature={SECRET}&X-Amz-Date=1"),
    "sas": ("http://", f"?sv=1&sig={SECRET}%3D"),
    "token": ("http://", f"?token={SECRET}"),
    "user": (f"http://me:{SECRET}@", ""),
    "key": (f"http://{SECRET}@", ""),
}


@pytest.fixture
def data(tmp_path):
    """A server with shards and their manifest; gives its address without the scheme."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"x": [1, 2]}), folder / f"{name}.parquet")
    build_manifest(folder, folder / "m.manifest.parquet", num_workers=0)
    with served(folder) as url:
        yield url.removeprefix("http://")


def told(error):
    """All that an error could show: its chain, causes included."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error)] if isinstance(error, ShardStreamError) else []
        error = error.__cause__
    return "\n".join(texts)


@pytest.mark.parametrize("way", WAYS)
def test_a_manifest_behind_a_signed_url(data, way, tmp_path):
    before, after = WAYS[way]
    url = f"{before}{data}/m.manifest.parquet{after}"
    manifest = Manifest.load(url, storage_options=OPTIONS)
    dataset = StreamingDataset(
        manifest, batch_size=2, topology=Topology(0, 1), reading=Reading(storage_options=OPTIONS)
    )
    batch = next(iter(dataset)) if after else None  # (user and password are part of the root then, and used)
    cursor = dataset.plan.cursor() if batch is None else batch.cursor
    with ConsumedLog(tmp_path / "log", 0, 1, 0, cursor, dataset.plan) as log:
        log.window(epoch=0, position=0, ids=[0, 1])
    written = b"".join(path.read_bytes() for path in (tmp_path / "log").iterdir())
    manifest.save(tmp_path / "copy")
    for text in (cursor.to_json(), written.decode(), repr(dataset.reading), (tmp_path / "copy").read_bytes().hex()):
        assert SECRET not in text
        assert SECRET.encode().hex() not in text


@pytest.mark.parametrize("way", WAYS)
def test_errors_about_what_is_missing(data, way):
    before, after = WAYS[way]
    with pytest.raises((ManifestError, ReadError)) as caught:
        Manifest.load(f"{before}{data}/gone.manifest.parquet{after}", storage_options=OPTIONS)
    assert "gone" in str(caught.value)
    assert SECRET not in told(caught.value)
    manifest = Manifest.load(f"http://{data}/m.manifest.parquet", root=f"{before}{data}/moved", storage_options=OPTIONS)
    dataset = StreamingDataset(
        manifest, batch_size=2, topology=Topology(0, 1), reading=Reading(storage_options=OPTIONS)
    )
    with pytest.raises(ReadError) as caught:
        list(dataset)
    assert SECRET not in told(caught.value)


@pytest.mark.parametrize("way", ["signed", "user"])
@pytest.mark.parametrize("command", ["inspect", "audit", "bench", "index", "verify"])
def test_commands_show_none(data, way, command, tmp_path):
    before, after = WAYS[way]
    options = [f"--storage-option=headers={json.dumps(OPTIONS['headers'])}", "--storage-option=retry_timeout_s=0.1"]
    place = f"{before}{data}/gone.parquet{after}" if command == "index" else f"{before}{data}/m.manifest.parquet{after}"
    more = ["-o", str(tmp_path / "m"), "--workers=0"] if command == "index" else []
    more += {"bench": ["--seconds=0.2"], "verify": ["--workers=0"]}.get(command, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for extra in ([], ["--json"]):
            ran = CliRunner().invoke(main, [command, place, *more, *options, *extra])
            shown = f"{ran.output}\n{ran.exception!r}\n{told(ran.exception)}"
            assert SECRET not in shown.replace(place, "")
    assert ran.exit_code in (0, 1)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "key"])
def test_shards_behind_signed_urls_are_refused_before_anything_is_written(way, tmp_path):
    before, after = WAYS[way]
    with pytest.raises(ManifestError, match="credentials") as caught:
        expand_shards(f"{before}host/a.parquet{after}")
    assert SECRET not in told(caught.value)


def test_values_that_hold_options_do_not_show_them():
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=1)
    (check,) = Checks(manifest, [0], has_checksums=False, storage_options=OPTIONS)
    settings = PrepareSettings(storage_options=OPTIONS)
    for value in (Reading(storage_options=OPTIONS), Look("a.tar", IndexOptions(), OPTIONS), check, settings):
        assert SECRET not in repr(value)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/a",
        f"s3://key:{SECRET}/with/slashes@bucket/a",
        f"https://{SECRET}@host/a",
        f"https://host/a?token={SECRET}",
        f"simplecache::https://me:{SECRET}@host/a?sig={SECRET}",
        f"Cannot connect to https://me:{SECRET}@host:443/a?sig={SECRET} [timeout]",
        f"url=URL('https://host/a?X-Amz-Signature={SECRET}')",
    ],
)
def test_no_form_of_url_shows_them(url):
    assert SECRET not in shown_url(url)
