"""Reading from an object store: few requests, none for what is known, and the same rows as from disk."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shardstream.errors import ShardChangedError
from shardstream.fetch import Reading, ReadStats, fetch
from shardstream.formats import _span
from shardstream.layout import RowsLayout
from shardstream.plan import Plan
from shardstream.ranges import Ranges
from tests.support.corpora import manifest_of_files, parquet_manifest, with_runs
from tests.support.threads import readers
from tools.bench.range_server import RangeServer

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left_asked(monkeypatch):
    """What was asked for ahead was read or taken back, whenever a reader ends by itself."""
    left, close = [], Ranges.close

    def watched(self, **options):
        left.append(len(self._asked))
        close(self, **options)

    monkeypatch.setattr(Ranges, "close", watched)
    yield left
    assert not any(left)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(folder):
    with RangeServer(folder, latency_s=0.0, bytes_per_s=1e10) as running:
        yield running


def write_wide(folder, num_shards=2):
    """Shards of 3 row groups; between two small columns lies one of 400 kB a group."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(num_shards):
        uid = np.arange(shard * 30, shard * 30 + 30)
        wide = [rng.bytes(40_000) for _ in uid]
        table = pa.table({"uid": uid, "wide": wide, "tokens": rng.integers(0, 1 << 30, 30), "more": uid * 2})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=10)
    return sorted(folder.glob("*.parquet"))


def write_tars(folder, suffix):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for shard in range(2):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            for uid in range(shard * 20, shard * 20 + 20):
                member = tarfile.TarInfo(f"{uid:04d}.bin")
                member.size = 200_000
                tar.addfile(member, io.BytesIO(rng.bytes(200_000)))
        data, frame = raw.getvalue(), 1_000_000
        if suffix == ".tar.zst":
            data = b"".join(zstandard.compress(data[at : at + frame]) for at in range(0, len(data), frame))
        (folder / f"{shard}{suffix}").write_bytes(data)
    return sorted(folder.glob(f"*{suffix}"))


def remote(server, folder, paths):
    """The manifest of files as the store shows them."""
    urls = [f"s3://bench/{path.relative_to(folder)}" for path in paths]
    manifest = manifest_of_files(urls, storage_options=server.storage_options)
    server.served()
    return manifest


def read(manifest, server=None, *, columns=None, stats=None, **options):
    """All rows of an epoch in its order: the bytes of each column, end to end."""
    plan = Plan.make(manifest, batch_size=5, accumulate=2, lanes=5, seed=1)
    if server is not None:
        options["storage_options"] = server.storage_options
    gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), layout=RowsLayout(plan, columns), stats=stats,
                    reading=Reading(**options))  # fmt: skip
    shown, of_others = [], readers()  # what another test left is not a fault of this one
    for gathered in gathers:
        for sample, *values in zip(
            gathered.sample_ids.tolist(), *map(_values, gathered.rows.columns.values()), strict=True
        ):
            shown.append((sample, *values))
    assert readers() <= of_others
    return shown


def _values(column):
    from shardstream.columns import python_values

    values = python_values("", column)
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]


def test_one_request_for_each_block_that_is_opened_and_none_for_anything_else(folder, server):
    parquet_manifest(folder / "plain", [100, 0, 60], 10)
    local = manifest_of_files(sorted((folder / "plain").glob("*.parquet")))
    manifest = remote(server, folder, sorted((folder / "plain").glob("*.parquet")))
    stats = ReadStats()
    assert read(manifest, server, stats=stats) == read(local)
    served = server.served()
    assert served.num_others == 0, "no HEAD: the answers say which version they are of"
    assert served.num_gets == stats.num_requests == stats.num_blocks_opened
    assert served.num_bytes == stats.num_bytes_fetched
    assert stats.num_blocks_needed == manifest.num_blocks


def test_columns_far_apart_are_ranges_of_their_own(folder, server):
    paths = write_wide(folder / "wide")
    manifest, local = remote(server, folder, paths), manifest_of_files(paths)
    stats = ReadStats()
    assert read(manifest, server, columns=("more", "uid"), stats=stats) == read(local, columns=("more", "uid"))
    served = server.served()
    assert served.num_gets == 2 * stats.num_blocks_opened
    assert served.num_bytes < stats.num_blocks_opened * 5_000
    assert read(manifest, server, columns=("uid", "wide")) == read(local, columns=("uid", "wide"))
    needed = int(manifest.block_num_bytes[0]) * stats.num_blocks_opened
    assert server.served().num_bytes <= 1.1 * needed


def test_a_large_block_is_cut_into_ranges_read_side_by_side(folder, server, monkeypatch):
    monkeypatch.setattr(_span, "PIECE_NUM_BYTES", 100_000)
    paths = write_wide(folder / "cut")
    manifest, local = remote(server, folder, paths), manifest_of_files(paths)
    stats = ReadStats()
    assert read(manifest, server, stats=stats) == read(local)
    served = server.served()
    assert served.num_gets == stats.num_blocks_opened * -(-int(manifest.block_num_bytes[0]) // 100_000)
    assert served.num_bytes <= 1.001 * int(manifest.block_num_bytes.max()) * stats.num_blocks_opened


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_tars(folder, server, suffix):
    paths = write_tars(folder / f"tars{suffix}", suffix)
    manifest, local = remote(server, folder, paths), manifest_of_files(paths)
    stats = ReadStats()
    assert read(manifest, server, stats=stats) == read(local)
    served = server.served()
    assert (served.num_gets, served.num_others) == (stats.num_blocks_opened, 0)


def test_what_is_streamed_is_read_once_and_only_a_piece_too_far(folder, server, monkeypatch):
    monkeypatch.setattr(_span, "PIECE_NUM_BYTES", 100_000)
    paths = write_wide(folder / "streamed", 1)
    manifest, local = (with_runs(made, 3) for made in (remote(server, folder, paths), manifest_of_files(paths)))
    stats = ReadStats()
    assert read(manifest, server, stats=stats) == read(local)
    served = server.served()
    block = int(manifest.block_num_bytes[0])
    assert served.num_bytes <= stats.num_blocks_opened * (block + 200_000)


# ------------------------------------------------------------------------------------------------ another file


def test_a_file_that_was_replaced_is_refused_at_whichever_request_meets_it(folder, server, nothing_is_left_asked):
    paths = write_wide(folder / "replaced", 1)
    manifest = remote(server, folder, paths)
    plan = Plan.make(manifest, batch_size=2, lanes=1, shuffle=False)
    with RangeServer(folder, latency_s=0.0, bytes_per_s=1e10) as other:
        pq.write_table(pa.table({"uid": [0], "wide": [b""], "tokens": [1], "more": [2]}), paths[0])
        reading = Reading(storage_options=other.storage_options)
        with pytest.raises(ShardChangedError, match=r"0\.parquet"):
            list(fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading))
    nothing_is_left_asked.clear()  # what failed is given up


@pytest.mark.parametrize("keeps", [True, False])
def test_a_block_that_stays_for_the_end_of_the_epoch_is_not_asked_for_again(folder, server, keeps):
    name = f"kept-{keeps}"
    parquet_manifest(folder / name, [740, 467], 20)
    manifest = remote(server, folder, sorted((folder / name).glob("*.parquet")))
    plan, stats = Plan.make(manifest, batch_size=24, lanes=8), ReadStats()
    reading = Reading(keeps_lane_ends=keeps, gather_rows=24, look_ahead=1, storage_options=server.storage_options)
    for _ in fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading, stats=stats):
        pass
    assert (stats.num_blocks_opened == manifest.num_blocks) is keeps
    assert stats.num_requests == stats.num_blocks_opened


def test_data_that_was_moved_is_looked_at_once_a_shard(folder, server):
    paths = write_wide(folder / "moved")
    local = manifest_of_files(paths)
    manifest = replace(local, root="s3://bench/moved")
    server.served()
    stats = ReadStats()
    assert read(manifest, server, stats=stats) == read(local)
    served = server.served()
    assert stats.num_requests == stats.num_blocks_opened
    assert manifest.num_shards <= served.num_others <= 2 * stats.num_requests, "stat, and the footer's digest"
    assert read(manifest, server) == read(local)
    assert server.served().num_others == 0


# ------------------------------------------------------------------------------------------------ the cache


@pytest.fixture
def cached(folder, server, tmp_path):
    shutil.rmtree(folder / "cached", ignore_errors=True)
    manifest = remote(server, folder, write_wide(folder / "cached"))
    return manifest, {"cache_dir": tmp_path / "cache"}


def test_a_second_epoch_comes_from_the_cache(cached, server, tmp_path):
    manifest, options = cached
    first = read(manifest, server, **options)
    server.served()
    stats = ReadStats()
    assert read(manifest, server, stats=stats, **options) == first
    served = server.served()
    assert (served.num_gets, served.num_others) == (0, 0)
    assert stats.num_cache_hits == stats.num_blocks_opened
    assert stats.num_requests == 0
    assert list((tmp_path / "cache").rglob("*.range"))


def test_damaged_cache_files_are_read_again(cached, server, tmp_path):
    manifest, options = cached
    first = read(manifest, server, **options)
    for number, path in enumerate(sorted((tmp_path / "cache").rglob("*.range"))):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        [path.write_bytes(raw), path.write_bytes(raw[:-7]), path.unlink()][
            number % 3
        ] if number % 3 < 2 else path.unlink()
    server.served()
    assert read(manifest, server, **options) == first
    assert server.served().num_gets > 0
    assert read(manifest, server, **options) == first
    assert server.served().num_gets == 0


def test_manifests_of_other_versions_share_a_folder_and_never_bytes(cached, server, nothing_is_left_asked):
    manifest, options = cached
    first = read(manifest, server, **options)
    others = [replace(manifest, digests=["0" * 32] * 2), replace(manifest, version_tags=["another"] * 2)]
    stats = ReadStats()
    with pytest.raises(ShardChangedError):
        read(replace(others[0], version_tags=["another"] * 2), server, **options)
    nothing_is_left_asked.clear()
    assert read(others[1], server, stats=stats, **options) == first
    assert stats.num_cache_hits == 0


def test_local_files_are_kept_if_asked(cached, folder, tmp_path):
    local = manifest_of_files(sorted((folder / "cached").glob("*.parquet")))
    want = read(local)
    stats = ReadStats()
    assert read(local, stats=stats, cache_dir=tmp_path / "local") == want
    assert not (tmp_path / "local").exists(), "by their paths, which is faster"
    for num_hits in (0, 1):
        stats = ReadStats()
        assert read(local, stats=stats, cache_dir=tmp_path / "local", cache_local=True) == want
        assert stats.num_cache_hits == num_hits * stats.num_blocks_opened


# ------------------------------------------------------------------------------------------------ far ahead


def test_requests_run_far_ahead_of_what_is_decoded(folder, server, nothing_is_left_asked):
    parquet_manifest(folder / "far", [200, 200, 200], 4)
    manifest = remote(server, folder, sorted((folder / "far").glob("*.parquet")))
    plan = Plan.make(manifest, batch_size=4, lanes=4, seed=1)
    reading = Reading(storage_options=server.storage_options, look_ahead=1, gather_rows=4)
    stats, of_others = ReadStats(), readers()
    gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading, stats=stats)
    for _ in islice(gathers, 12):
        pass
    opened = stats.num_blocks_opened
    gathers.close()
    assert opened <= 4 * 5, "decoded are those of the gathers so far and of one more"
    assert server.served().num_gets > opened
    assert nothing_is_left_asked[0] > 8, "which closing takes back"
    nothing_is_left_asked.clear()
    assert readers() <= of_others


@pytest.mark.parametrize(("num_bytes", "most"), [(1, 12), (1 << 30, 1000)])
def test_how_far_is_bounded_in_bytes(folder, server, nothing_is_left_asked, num_bytes, most):
    parquet_manifest(folder / f"bounded{most}", [200, 200, 200], 4)
    manifest = remote(server, folder, sorted((folder / f"bounded{most}").glob("*.parquet")))
    plan = Plan.make(manifest, batch_size=4, lanes=4, seed=1)
    reading = Reading(storage_options=server.storage_options, look_ahead=1, gather_rows=4, ahead_num_bytes=num_bytes)
    gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading)
    for _ in islice(gathers, 20):
        pass
    gathers.close()
    assert nothing_is_left_asked[0] <= most
    assert nothing_is_left_asked[0] > 20 or most == 12
    nothing_is_left_asked.clear()


# ------------------------------------------------------------------------------------------------ an S3 server


def test_a_real_s3_protocol_and_an_object_replaced_while_it_is_read(tmp_path, nothing_is_left_asked):
    import boto3
    from moto.server import ThreadedMotoServer

    paths = write_wide(tmp_path / "shards")
    local = manifest_of_files(paths)
    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    try:
        address = "http://{}:{}".format(*moto.get_host_and_port())
        options = {"key": "k", "secret": "s", "endpoint_url": address, "client_kwargs": {"region_name": "us-east-1"}}
        client = boto3.client("s3", endpoint_url=address, aws_access_key_id="k", aws_secret_access_key="s",
                              region_name="us-east-1")  # fmt: skip
        client.create_bucket(Bucket="bucket")
        for path in paths:
            client.put_object(Bucket="bucket", Key=path.name, Body=path.read_bytes())
        manifest = manifest_of_files([f"s3://bucket/{path.name}" for path in paths], storage_options=options)
        stats = ReadStats()
        assert read(manifest, storage_options=options, stats=stats) == read(local)
        assert stats.num_requests == stats.num_blocks_opened
        plan = Plan.make(manifest, batch_size=2, lanes=1, shuffle=False)
        reading = Reading(storage_options=options, ahead_num_bytes=1, look_ahead=1, gather_rows=2)
        gathers = fetch(plan, plan.micro_batches(0, plan.cursor()), reading=reading)
        next(gathers)
        table = pq.read_table(paths[0])
        changed = table.set_column(0, "uid", pa.array(list(reversed(table["uid"].to_pylist()))))
        pq.write_table(changed, tmp_path / "changed", row_group_size=10)
        client.put_object(Bucket="bucket", Key=paths[0].name, Body=(tmp_path / "changed").read_bytes())
        with pytest.raises(ShardChangedError, match=r"0\.parquet"):
            list(gathers)
        nothing_is_left_asked.clear()
    finally:
        moto.stop()


# ------------------------------------------------------------------------------------------------ ranks of a host

RANK = """
import hashlib, json, sys
import numpy as np
from shardstream.fetch import Reading, fetch
from shardstream.manifest import Manifest
from shardstream.plan import Plan
path, rank, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
plan = Plan.make(Manifest.load(path), batch_size=5, world_size=2, lanes=10, seed=1)
for epoch in range(int(sys.argv[4])):
    ids, hasher = [], hashlib.blake2b()
    gathers = fetch(plan, plan.micro_batches(rank, plan.cursor()), reading=Reading(**options))
    for gathered in gathers:
        ids += gathered.sample_ids.tolist()
        for name in ("uid", "more", "tokens"):
            hasher.update(np.ascontiguousarray(gathered.rows.columns[name].values).tobytes())
        print("read", len(ids), file=sys.stderr, flush=True)
print(json.dumps([ids, hasher.hexdigest()]))
"""


def rank_of(path, rank, options, num_epochs=1):
    command = [sys.executable, "-c", RANK, path, str(rank), json.dumps(options), str(num_epochs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(processes):
    found = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), found
    return [json.loads(out) for out, _ in found]


def test_ranks_share_a_cache_and_one_of_them_is_killed(folder, server, tmp_path):
    paths = write_wide(folder / "ranks", 4)
    path = remote(server, folder, paths).save(tmp_path / "remote").path
    local = manifest_of_files(paths).save(tmp_path / "local").path
    options = {"storage_options": dict(server.storage_options), "cache_dir": str(tmp_path / "cache")}
    want = said([rank_of(local, rank, {}) for rank in (0, 1)])
    killed = rank_of(path, 0, options, 10_000)
    assert killed.stderr.readline().startswith("read")
    killed.kill()
    killed.communicate(timeout=30)
    assert said([rank_of(path, rank, options) for rank in (0, 1)]) == want
    server.served()
    assert said([rank_of(path, rank, options, 3) for rank in (1, 0)]) == want[::-1]
    assert server.served().num_gets == 0
