"""Stores that fail, for real: an epoch is exact or the job ends soon, saying why; wrong bytes never come."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import threading
import time

import pyarrow.parquet as pq
import pytest

from shardstream import storage
from shardstream.errors import ManifestError, PlanError, ReadError, ShardChangedError, ShardStreamWarning
from shardstream.fetch import ReadStats, fetch
from shardstream.index import IndexSettings
from shardstream.plan import Plan
from shardstream.reading import Reading
from tests.support.corpora import manifest_of_files, parquet_manifest, tar_manifest, with_runs
from tests.support.faults import HANGING, Once, soon_try_again, wait_for_answers
from tools.faults import LYING, PASSING, Faults, FaultyServer, Folder, Upstream, all_rows

DATA = bytes(range(256)) * 50


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.bin").write_bytes(DATA)
    with FaultyServer(Folder(tmp_path / "served")) as running:
        yield running


@contextlib.contextmanager
def s3_server(folder):
    """moto with a bucket of the folder's files, and a faulty server before it."""
    import boto3
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    try:
        address = "http://{}:{}".format(*moto.get_host_and_port())
        client = boto3.client(
            "s3", endpoint_url=address, aws_access_key_id="k", aws_secret_access_key="s", region_name="us-east-1"
        )
        client.create_bucket(Bucket="bucket")
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket="bucket", Key=path.name, Body=path.read_bytes())
        with FaultyServer(Upstream(address)) as running:
            yield running, client
    finally:
        moto.stop()


def s3_options(url, **more):
    return {"key": "k", "secret": "s3cret", "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}, **more}


# ------------------------------------------------------------------------------------------------ one range


@pytest.mark.parametrize("kind", [*PASSING, "silent", "drip"])
def test_a_fault_that_passes_costs_another_request(server, monkeypatch, kind):
    if kind in HANGING:
        soon_try_again(monkeypatch)
    server.faults = Once(kind)
    got = storage.read_versioned(server.url + "/a.bin", 100, 5000)
    assert got[0] == DATA[100:5000]
    assert got[1] == storage.stat(server.url + "/a.bin").version_tag
    assert server.counts[kind] == 1


@pytest.mark.parametrize("kind", [*PASSING, "drip"])
def test_a_store_that_never_recovers_is_given_up_within_the_deadline(server, monkeypatch, kind):
    if kind not in HANGING:
        wait_for_answers(monkeypatch)
    server.faults = Faults(1.0, (kind,))
    begun = time.monotonic()
    url = server.url.replace("http://", "http://me:s3cret@") + "/a.bin?X-Amz-Signature=s3cret"
    with pytest.raises(ReadError, match=r"a\.bin") as caught:
        storage.read_range(url, 100, 5000, {"retry_timeout_s": 0.5})
    assert time.monotonic() - begun < 10
    assert "s3cret" not in str(caught.value)
    reason = {"429": "429", "500": "500", "503": "503", "whole": "ignores byte ranges", "short": "instead of",
              "wrong-range": "instead of", "stall": "no whole answer within", "silent": "no whole answer within",
              "drip": "no whole answer within", "reset": "Server|Connection|Client"}  # fmt: skip
    assert re.search(reason.get(kind, "Payload|Connection|Client"), str(caught.value))


def test_the_server_says_when_to_come_back(server):
    server.faults = Once("retry-after")
    begun = time.monotonic()
    assert storage.read_range(server.url + "/a.bin", 100, 5000) == DATA[100:5000]
    assert time.monotonic() - begun >= 1.0


def test_a_pause_longer_than_the_deadline_is_not_waited_for(server, monkeypatch):
    wait_for_answers(monkeypatch)
    server.faults = Faults(1.0, ("retry-after",))
    with pytest.raises(ReadError, match="503"):
        storage.read_range(server.url + "/a.bin", 100, 5000, {"retry_timeout_s": 0.9})
    assert server.counts["retry-after"] == 1


def test_nobody_listens(server, monkeypatch):
    wait_for_answers(monkeypatch)
    server.close()
    begun = time.monotonic()
    with pytest.raises(ReadError, match=r"a\.bin.*(Connect|connect)"):
        storage.read_range(server.url + "/a.bin", 0, 10, {"retry_timeout_s": 0.5})
    assert time.monotonic() - begun < 10


def test_expired_credentials_are_not_tried_again(server):
    server.faults = Faults(1.0, ("expired",))
    with pytest.raises(ReadError, match=r"403.*have they expired"):
        storage.read_range(server.url + "/a.bin", 0, 10)
    assert server.counts["expired"] == 1


def test_a_file_that_ends_before_the_range_is_told_from_a_broken_body(server):
    url = server.url + "/a.bin"
    assert storage.read_versioned(url, len(DATA) + 5, len(DATA) + 10) == (b"", "")
    data, tag = storage.read_versioned(url, len(DATA) - 5, len(DATA) + 5)
    assert (data, tag) == (DATA[-5:], storage.stat(url).version_tag)


def test_a_version_without_etag_is_size_and_time(tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    with FaultyServer(Folder(tmp_path, with_etag=False)) as running:
        url = running.url + "/a.bin"
        tag = storage.stat(url).version_tag
        assert tag.startswith(f"{len(DATA)}-")
        assert storage.read_versioned(url, 5, 10) == (DATA[5:10], tag)


# ------------------------------------------------------------------------------------------------ epochs


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_an_epoch_in_which_a_fifth_of_the_requests_fails_is_exact(server, tmp_path, kind):
    from aiohttp import ClientTimeout

    make = parquet_manifest if kind == "parquet" else tar_manifest
    local = make(tmp_path / "served" / "shards", [70] * 8)
    options = {"client_kwargs": {"timeout": ClientTimeout(sock_read=1)}}  # until one that stalls is asked again
    server.faults = Faults(0.2, PASSING)
    remote = manifest_of_files([f"{server.url}/shards/{url}" for url in local.urls], storage_options=options)
    assert all_rows(remote, storage_options=options) == all_rows(local)
    assert sum(server.counts[kind] for kind in PASSING) >= 10 or kind == "tar"


@pytest.mark.parametrize("has_obstore", [True, False])
def test_an_epoch_from_s3_in_which_a_fifth_of_the_requests_fails_is_exact(tmp_path, monkeypatch, has_obstore):
    if not has_obstore:
        monkeypatch.setattr("shardstream.storage._obstore.is_installed", lambda: False)
    local = parquet_manifest(tmp_path / "shards", [70] * 4)
    with s3_server(tmp_path / "shards") as (server, _):
        options = s3_options(server.url, config_kwargs={"read_timeout": 1})  # until one that stalls is asked again
        server.faults = Faults(0.2, PASSING)
        remote = manifest_of_files([f"s3://bucket/{url}" for url in local.urls], storage_options=options)
        assert all_rows(remote, storage_options=options) == all_rows(local)
        assert sum(server.counts[kind] for kind in PASSING) >= 5

        server.faults = Faults(1.0, ("expired",))
        with pytest.raises(ReadError, match=r"part-0000\d\.parquet.*have they expired") as caught:
            all_rows(remote, storage_options=options)
        assert "s3cret" not in str(caught.value)

        wait_for_answers(monkeypatch)
        options = s3_options(server.url, retry_timeout_s=1)
        server.faults = Faults(1.0, ("503",))
        begun = time.monotonic()
        with pytest.raises(ReadError, match=r"part-0000\d\.parquet.*Service Unavailable"):
            all_rows(remote, storage_options=options)
        server.close()
        with pytest.raises(ReadError, match=r"part-0000\d\.parquet.*(Connect|connect)"):
            all_rows(remote, storage_options=options)
        assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("store", "change"),
    [(store, change) for store in ("http", "http without etag") for change in ("replaced", "cut", "deleted")]
    + [("s3", "cut")],
)
def test_a_shard_that_changes_in_mid_epoch_is_noticed(tmp_path, change, store):
    """The change keeps the size where it can, and nothing of the shard was asked for ahead."""
    local = parquet_manifest(tmp_path / "shards", [70])
    path = tmp_path / "shards" / local.urls[0]
    with contextlib.ExitStack() as stack:
        if store == "s3":
            server, client = stack.enter_context(s3_server(tmp_path / "shards"))
            url, options = f"s3://bucket/{path.name}", s3_options(server.url)
        else:
            folder = Folder(tmp_path / "shards", with_etag=store == "http")
            server, client = stack.enter_context(FaultyServer(folder)), None
            url, options = f"{server.url}/{path.name}", {}
        remote = manifest_of_files([url], storage_options=options)
        plan = Plan.make(remote, batch_size=7, shuffle=False)
        reading = Reading(storage_options=options, look_ahead=1, ahead_num_bytes=1, gather_rows=7)
        gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading)
        next(gathers)
        _change(path, change, client)
        expected = ReadError if change == "deleted" else ShardChangedError
        with pytest.raises(expected, match=re.escape(path.name)):
            list(gathers)


def _change(path, change, client):
    if change == "deleted":
        path.unlink()
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:1500])
    else:
        table = pq.read_table(path)
        pq.write_table(table.take(list(range(len(table)))[::-1]), path, row_group_size=7)
    if client is not None and change == "deleted":
        client.delete_object(Bucket="bucket", Key=path.name)
    elif client is not None:
        client.put_object(Bucket="bucket", Key=path.name, Body=path.read_bytes())
    elif change != "deleted":
        os.utime(path, (2_000_000_000, 2_000_000_000))  # HTTP's times are of whole seconds


def test_a_listing_of_an_hour_ago_names_what_is_gone(tmp_path):
    local = parquet_manifest(tmp_path / "shards", [7, 7, 7])
    with FaultyServer(Folder(tmp_path / "shards"), keeps_listings=True) as server:
        assert len(manifest_of_files([f"{server.url}/"]).urls) == 3
        (tmp_path / "shards" / local.urls[1]).unlink()
        with pytest.raises(
            ManifestError, match=r"1 of 3 shards cannot be used(?s:.*)part-00001\.parquet.*check the path"
        ):
            manifest_of_files([f"{server.url}/"])


# ------------------------------------------------------------------------------------------------ answers that lie

CHECKED = IndexSettings(checksum=True)


@pytest.mark.parametrize("kind", ["parquet", "tar", "tar.gz"])
@pytest.mark.parametrize("is_local", [True, False])
def test_blocks_are_checked_before_they_are_decoded(tmp_path, kind, is_local):
    folder = tmp_path / "s"
    known = parquet_manifest(folder, [70, 30]) if kind == "parquet" else tar_manifest(folder, [70, 30], f".{kind}")
    with FaultyServer(Folder(folder)) as server:
        paths = [folder / url if is_local else f"{server.url}/{url}" for url in known.urls]
        manifest = manifest_of_files(paths, settings=CHECKED)
        before, stats = server.num_bytes, ReadStats()
        assert all_rows(manifest, stats=stats, verify_checksums=True) == all_rows(known)
        assert stats.num_blocks_verified == stats.num_blocks_opened
        num_bytes = server.num_bytes - before
        all_rows(manifest)
        assert server.num_bytes - before == 2 * num_bytes, "nothing is fetched twice"

        path = folder / known.urls[0]
        raw, place = bytearray(path.read_bytes()), int(manifest.block_offset[0] + manifest.block_num_bytes[0] // 2)
        raw[place] ^= 1
        written = path.stat().st_mtime_ns
        path.write_bytes(raw)
        os.utime(path, ns=(written, written))  # as a disk does it: nobody wrote
        sums = manifest.lists.read(0, ["block_checksum"])["block_checksum"]
        with pytest.raises(ShardChangedError, match=rf"{re.escape(path.name)}, block 0.*expected {sums[0].hex()}"):
            all_rows(manifest, verify_checksums=True)


def test_lies_of_a_store_are_asked_about_again(tmp_path):
    local = parquet_manifest(tmp_path / "s", [70] * 3)
    with FaultyServer(Folder(tmp_path / "s")) as server:
        manifest = manifest_of_files([f"{server.url}/{url}" for url in local.urls], settings=CHECKED)
        for cache in ({}, {"cache_dir": tmp_path / "cache"}):
            server.counts.clear()
            server.faults = Faults(0.1, LYING, seed=3)
            assert all_rows(manifest, verify_checksums=True, **cache) == all_rows(local)
            assert sum(server.counts[kind] for kind in LYING) >= 2
        server.faults = Faults(1.0, LYING)
        assert all_rows(manifest, verify_checksums=True, **cache) == all_rows(local), "the cache has what was right"
        with pytest.raises(ShardChangedError, match="other bytes than when it was indexed"):
            all_rows(manifest, verify_checksums=True)


def test_parts_of_blocks_are_not_checked_and_not_counted(tmp_path):
    manifest = parquet_manifest(tmp_path / "s", [70], settings=CHECKED)
    stats = ReadStats()
    all_rows(manifest, columns=("uid",), stats=stats, verify_checksums=True)
    all_rows(with_runs(manifest, 3), stats=stats, verify_checksums=True)
    assert stats.num_blocks_verified == 0


def test_without_checksums_there_is_nothing_to_verify(tmp_path):
    with pytest.raises(PlanError, match=r"no checksums.*--checksum"):
        all_rows(parquet_manifest(tmp_path / "s", [7]), verify_checksums=True)


# ------------------------------------------------------------------------------------------------ jobs


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_store_that_dies_in_mid_epoch_ends_the_loader(tmp_path, monkeypatch, num_workers):
    from shardstream.torch import StreamingDataset, StreamingLoader, Topology

    wait_for_answers(monkeypatch)
    local = parquet_manifest(tmp_path / "s", [70] * 4)
    with FaultyServer(Folder(tmp_path / "s")) as server:
        manifest = manifest_of_files([f"{server.url}/{url}" for url in local.urls])
        reading = Reading(storage_options={"retry_timeout_s": 1}, look_ahead=1, gather_rows=8, ahead_num_bytes=1)
        dataset = StreamingDataset(manifest, batch_size=4, topology=Topology(0, 1), lanes=1, reading=reading)
        batches = iter(StreamingLoader(dataset, num_workers=num_workers))
        next(batches)
        server.faults = Faults(1.0, ("503",))
        with pytest.raises(ReadError, match=r"part-0000\d\.parquet.*503"):
            list(batches)


def test_requests_that_nobody_wants_any_more_are_not_tried_again(tmp_path):
    """The first error ends the epoch; the others, which would have gone on for a minute, end with it."""
    local = parquet_manifest(tmp_path / "s", [70] * 40)
    with FaultyServer(Folder(tmp_path / "s")) as server:
        manifest = manifest_of_files([f"{server.url}/{url}" for url in local.urls])
        plan = Plan.make(manifest, batch_size=40)
        seen_until = time.monotonic() + 60
        while server.counts["503"] < 3:  # again, should all that is asked for at first have come before the fault did
            assert time.monotonic() < seen_until
            server.faults = Faults()
            gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), reading=Reading(num_range_threads=1))
            next(gathers)
            server.faults = Faults(1.0, ("503",))
            time.sleep(2)
            begun = time.monotonic()
            gathers.close()
            assert time.monotonic() - begun < 10, "not a minute"


# ------------------------------------------------------------------------------------------------ the cache's disk


@contextlib.contextmanager
def mounted(folder, options):
    """A real file system of its own; skips where mounting is not allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed: {done.stderr!r}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount")
@pytest.mark.parametrize(("options", "found"), [("size=24k", "No space left"), ("ro", "Read-only file system")])
def test_a_cache_on_a_full_or_read_only_disk(tmp_path, options, found):
    local = parquet_manifest(tmp_path / "s", [70] * 4)
    with FaultyServer(Folder(tmp_path / "s")) as server, mounted(tmp_path / "disk", options) as disk:
        manifest = manifest_of_files([f"{server.url}/{url}" for url in local.urls])
        with pytest.warns(ShardStreamWarning, match=f"{found}.*read from the store instead"):
            assert all_rows(manifest, cache_dir=disk) == all_rows(local)
        assert all_rows(manifest, cache_dir=disk) == all_rows(local)
        assert not list(disk.rglob("*.tmp"))


def test_a_cache_that_is_damaged_while_it_is_read(tmp_path):
    local = parquet_manifest(tmp_path / "s", [140] * 4)
    want, cache, stop = all_rows(local), tmp_path / "cache", threading.Event()

    def damage():
        chosen = random.Random(0)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                for path in cache.rglob("*.range"):
                    kind = chosen.choice(("flip", "cut", "empty", "delete", "keep"))
                    if kind == "delete":
                        path.unlink()
                    elif kind in ("cut", "empty"):
                        os.truncate(path, path.stat().st_size // 2 if kind == "cut" else 0)
                    elif kind == "flip":
                        with path.open("r+b") as file:
                            file.seek(chosen.randrange(path.stat().st_size or 1))
                            file.write(b"\xa5")
                    else:
                        shutil.rmtree(path.parent, ignore_errors=True)
            stop.wait(0.002)

    with FaultyServer(Folder(tmp_path / "s")) as server:
        manifest = manifest_of_files([f"{server.url}/{url}" for url in local.urls])
        assert all_rows(manifest, cache_dir=cache) == want
        thread = threading.Thread(target=damage)
        thread.start()
        try:
            stats = ReadStats()
            for _ in range(4):
                assert all_rows(manifest, stats=stats, cache_dir=cache) == want
        finally:
            stop.set()
            thread.join()
        assert stats.num_requests > 0, "what was damaged was read again"
        assert all_rows(manifest, cache_dir=cache) == want
