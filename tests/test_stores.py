"""Every kind of store, by the same steps: index, list, write the manifest, read, see what changed or is gone.

What each was tested against is said in docs/stores.md; that table is checked here.
"""

from __future__ import annotations

import importlib
import re
import sys
import zipfile
from pathlib import Path
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream import storage
from shardstream.errors import ManifestError, ReadError, ShardChangedError
from shardstream.fetch import fetch
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from shardstream.reading import Reading
from tests.support import stores
from tests.support.stores import Store

NUM_SHARDS, NUM_ROWS = 3, 10


def shard_bytes(number: int) -> bytes:
    sink = pa.BufferOutputStream()
    rows = range(number * NUM_ROWS, (number + 1) * NUM_ROWS)
    pq.write_table(pa.table({"x": rows}), sink, row_group_size=4)
    return sink.getvalue().to_pybytes()


def read_ids(manifest: Manifest, storage_options: dict[str, object]) -> list[int]:
    """The values of an epoch, as two ranks read them."""
    plan = Plan.make(manifest, batch_size=3, world_size=2, seed=1)
    read: list[int] = []
    for rank in range(2):
        for gathered in fetch(
            plan, plan.micro_batches(rank, plan.cursor()), reading=Reading(storage_options=storage_options)
        ):
            read += gathered.rows.columns["x"].values.tolist()
    return read


def exercise(store: Store, *, can_write: bool = True) -> None:
    for number in range(NUM_SHARDS):
        store.put(f"{number}.parquet", shard_bytes(number))
    options, root = {**store.storage_options, "retry_timeout_s": 20}, store.root
    entries = [root + "/{0..2}.parquet"]
    entries += [root + "/", root + "/[0-9]*.parquet"] if store.is_listed else []
    manifests = [build_manifest(entry, storage_options=options, num_workers=0) for entry in entries]
    assert {manifest.fingerprint for manifest in manifests} == {manifests[0].fingerprint}
    manifest = manifests[0]
    if can_write:
        url = root + "/all.manifest.parquet"
        build_manifest(root + "/", url, storage_options=options, num_workers=0)
        manifest = Manifest.load(url, storage_options=options)
    assert sorted(read_ids(manifest, options)) == list(range(NUM_SHARDS * NUM_ROWS))
    with pytest.raises(ManifestError, match=r"nothere\.parquet"):
        build_manifest(root + "/nothere.parquet", storage_options={**options, "retry_timeout_s": 2}, num_workers=0)
    store.put("1.parquet", shard_bytes(7))
    with pytest.raises(ShardChangedError, match=r"1\.parquet"):
        read_ids(Manifest.load(url, storage_options=options) if can_write else manifests[-1], options)


# ------------------------------------------------------------------------------------------------- without a server


def test_memory():
    root = f"memory://{uuid4().hex}/data"
    exercise(Store(root, {}, fsspec.filesystem("memory")))


def test_file_urls(tmp_path):
    (tmp_path / "data").mkdir()
    exercise(Store(f"file://{tmp_path}/data", {}, fsspec.filesystem("file")))


def test_http(tmp_path):
    with stores.web(tmp_path) as store:
        exercise(store, can_write=False)


def test_a_chain_that_caches_whole_files(tmp_path):
    with stores.web(tmp_path / "served") as store:
        for number in range(NUM_SHARDS):
            store.put(f"{number}.parquet", shard_bytes(number))
        options = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
        entry = f"simplecache::{store.root}/{{0..2}}.parquet"
        manifest = build_manifest(entry, storage_options=options, num_workers=0)
        assert sorted(read_ids(manifest, options)) == list(range(NUM_SHARDS * NUM_ROWS))
        assert len(list((tmp_path / "cache").iterdir())) == NUM_SHARDS


def test_a_chain_into_an_archive(tmp_path):
    with stores.web(tmp_path) as store:
        path = tmp_path / "data" / "all.zip"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            for number in range(NUM_SHARDS):
                archive.writestr(f"{number}.parquet", shard_bytes(number))
        manifest = build_manifest(f"zip://{{0..2}}.parquet::{store.root}/all.zip", num_workers=0)
        assert sorted(read_ids(manifest, {})) == list(range(NUM_SHARDS * NUM_ROWS))


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket/a.parquet", "s3fs", "s3"),
        ("gs://bucket/a.parquet", "gcsfs", "gcs"),
        ("az://container/a.parquet", "adlfs", "azure"),
        ("abfs://container/a.parquet", "adlfs", "azure"),
        ("hf://datasets/user/name/a.parquet", "huggingface_hub", "hf"),
        ("simplecache::az://container/a.parquet", "adlfs", "azure"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch, url, module, extra):
    registered = importlib.import_module("fsspec.registry")._registry
    for protocol in ("s3", "gs", "az", "abfs", "hf"):
        monkeypatch.delitem(registered, protocol, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ReadError, match=rf"pip install 'shardstream\[{extra}\]'"):
        storage.stat(url)


def test_credentials_of_the_environment_are_used(monkeypatch):
    with stores.s3() as store:
        store.put("0.parquet", shard_bytes(0))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.storage_options["endpoint_url"])
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        manifest = build_manifest(store.root + "/", num_workers=0)
        assert manifest.num_samples == NUM_ROWS
        assert set(read_ids(manifest, {})) == set(range(NUM_ROWS))


# ----------------------------------------------------------------------------------------------------- with servers


@pytest.mark.rest
def test_s3():
    with stores.s3() as store:
        exercise(store)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore")  # of the emulator and the client's own parts
def test_gs():
    pytest.importorskip("gcp_storage_emulator")
    with stores.gs() as store:
        exercise(store)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(stores.azurite() is None, reason="needs Azurite: make emulators")
def test_az(tmp_path):
    pytest.importorskip("adlfs")
    with stores.az(tmp_path) as store:
        exercise(store)


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore")
def test_hf_against_a_stub_of_its_api(tmp_path):
    pytest.importorskip("huggingface_hub")
    with stores.hub(tmp_path) as store:
        exercise(store, can_write=False)


def test_the_docs_say_how_each_store_was_tested():
    page = (Path(__file__).parents[1] / "docs" / "stores.md").read_text()
    tests = set(re.findall(r"`(test_\w+)`", page))
    assert tests
    assert tests <= {name for name in globals() if name.startswith("test_")}
    for protocol in (
        "file://",
        "memory://",
        "http(s)://",
        "s3://",
        "gs://",
        "az://",
        "hf://",
        "simplecache::",
        "zip://",
    ):
        assert protocol in page
