"""From shards to a manifest: what is found, in which order, and what is refused."""

from __future__ import annotations

import concurrent.futures
import io
import os
import random
import tarfile
import warnings
import zipfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from shardstream.errors import ManifestError, ShardStreamWarning
from shardstream.index import IndexSettings, advice, build_manifest, expand_shards
from shardstream.index._schemas import unify, whole_type
from shardstream.manifest import Manifest
from tests.support.served import served


def parquet(path, columns=None, rows=4, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns if columns is not None else {"uid": pa.array(range(rows), pa.int64())})
    pq.write_table(table, path, **options)
    return str(path)


def tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


# ---------------------------------------------------------------------------------------------------------- expanding


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Shards in folders, and things that are none."""
    for name in ("a/0.tar", "a/1.tar", "b/0.tar", "b/2.tar.gz", "c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for name in ("README.md", "b/_SUCCESS", ".hidden.tar", "m.manifest.parquet"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ("a/0.tar", ["a/0.tar"]),
        (["b/0.tar", "a/0.tar"], ["a/0.tar", "b/0.tar"]),
        ("a", ["a/0.tar", "a/1.tar"]),
        ("b/", ["b/0.tar", "b/2.tar.gz"]),
        (".", ["a/0.tar", "a/1.tar", "b/0.tar", "b/2.tar.gz", "c.parquet"]),
        ("*", ["a/0.tar", "a/1.tar", "b/0.tar", "b/2.tar.gz", "c.parquet"]),
        ("*/0.tar", ["a/0.tar", "b/0.tar"]),
        ("**/*.tar", ["a/0.tar", "a/1.tar", "b/0.tar"]),
        ("**", ["a/0.tar", "a/1.tar", "b/0.tar", "b/2.tar.gz", "c.parquet"]),
        ("**/*", ["a/0.tar", "a/1.tar", "b/0.tar", "b/2.tar.gz", "c.parquet"]),
        ("*.parquet", ["c.parquet"]),
        ("a/{0..1}.tar", ["a/0.tar", "a/1.tar"]),
        ("{a,b}/0.tar", ["a/0.tar", "b/0.tar"]),
        ("{a,b}/*.tar", ["a/0.tar", "a/1.tar", "b/0.tar"]),
        ("a/0.tar::b/0.tar", ["a/0.tar", "b/0.tar"]),
        ("a/{0..1}.tar::b/*.gz::c.parquet", ["a/0.tar", "a/1.tar", "b/2.tar.gz", "c.parquet"]),
        ("@list.txt", ["a/1.tar", "b/0.tar"]),
    ],
)
def test_entries_of_every_kind(folder, entries, found):
    (folder / "list.txt").write_text("b/0.tar\n\n  a/1.tar  \n")
    assert expand_shards(entries) == [str(folder / name) for name in found]
    urls = f"file://{folder}/{entries}" if isinstance(entries, str) and entries[0] not in ".@" else entries
    if "::" not in str(entries):
        assert expand_shards(urls) == [str(folder / name) for name in found]


def test_path_objects_and_iterators(folder):
    assert expand_shards(Path("a/0.tar")) == [str(folder / "a/0.tar")]
    assert expand_shards(Path(name) for name in ("c.parquet", "a/0.tar")) == [
        str(folder / "a/0.tar"),
        str(folder / "c.parquet"),
    ]


def test_zero_padded_ranges(tmp_path):
    names = [f"data-{k:06d}.tar" for k in (8, 9, 10, 11)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert expand_shards(str(tmp_path / "data-{000008..000011}.tar")) == [str(tmp_path / name) for name in names]


def test_keep_order(folder):
    entries = ["c.parquet", "b/*", "a/{1,0}.tar"]
    kept = ["c.parquet", "b/0.tar", "b/2.tar.gz", "a/1.tar", "a/0.tar"]
    assert expand_shards(entries, keep_order=True) == [str(folder / name) for name in kept]


@given(st.permutations(["a/0.tar", "a/1.tar", "b/0.tar", "b/2.tar.gz", "c.parquet"]))
@settings(max_examples=20)
def test_listing_order_never_matters(names):
    """Case C42: sorted by full path, whatever the listing."""
    entries = [f"s3://bucket/{name}" for name in names]
    assert expand_shards(entries) == sorted(entries)


@pytest.mark.parametrize(
    "entries", [["a/0.tar", "a/*.tar"], ["a", f"./a/../a/{0}.tar"], ["a/0.tar"] * 2, "a/0.tar::a/0.tar"]
)
def test_a_shard_named_twice_is_refused(folder, entries):
    with pytest.raises(ManifestError, match=r"named more than once.*a/0\.tar"):
        expand_shards(entries)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ("nope", ["nope"]),
        ("a/*.parquet", ["a/*.parquet"]),
        ("a/{0..12}.tar", ["a/2.tar", "a/11.tar", "1 more"]),
        (["a/0.tar", "x.tar", "y/*"], ["x.tar", "y/*"]),
        ([], ["empty list"]),
        ("README.md*", ["README.md*"]),
        ("memory://nothing/*.tar", ["memory://nothing/*.tar"]),
        ("memory://nothing/", ["memory://nothing/"]),
    ],
)
def test_nothing_found_says_where_it_looked(folder, entries, named):
    with pytest.raises(ManifestError, match="no shards found") as caught:
        expand_shards(entries)
    assert all(name in str(caught.value) for name in named)


GLOB_NAMES = [
    "set[1]/part-0[a].parquet",
    "a[1].parquet",
    "100% real#1.parquet",
    "x{b}.parquet",
    "q?.parquet",
    "s*.parquet",
    "two::parts.parquet",
    "@at.parquet",
    "{1..2}.parquet",
]
DECOYS = ["a1.parquet", "qq.parquet", "xb.parquet", "ss.parquet", "1.parquet", "2.parquet"]


@pytest.mark.parametrize("by_url", [False, True])
@pytest.mark.parametrize("name", GLOB_NAMES)
def test_an_existing_path_is_never_a_pattern(tmp_path, monkeypatch, name, by_url):
    """Case C44."""
    for other in DECOYS:
        parquet(tmp_path / other, rows=9)
    parquet(tmp_path / name, {"uid": [7, 8]})
    monkeypatch.chdir(tmp_path)
    entry = f"file://{tmp_path}/{name}" if by_url else name
    assert expand_shards(entry) == [str(tmp_path / name)]
    build_manifest(entry, "m", num_workers=0)
    read = Manifest.load("m")
    assert pq.read_table(read.url(0)).column("uid").to_pylist() == [7, 8]


def test_names_with_signs_survive_the_manifest(tmp_path):
    """Case C44: index, write the manifest, read it back."""
    for place, name in enumerate(GLOB_NAMES):
        parquet(tmp_path / "d" / name, {"uid": [2 * place, 2 * place + 1]})
    build_manifest(tmp_path / "d", tmp_path / "m", num_workers=0)
    read = Manifest.load(tmp_path / "m")
    uids = [uid for k in range(read.num_shards) for uid in pq.read_table(read.url(k)).column("uid").to_pylist()]
    assert sorted(uids) == list(range(2 * len(GLOB_NAMES)))


def test_remote_names_with_signs(tmp_path):
    base = f"memory://{tmp_path.name}"
    for name in ("a[1].parquet", "a1.parquet", "x{b}.parquet", "d/0.parquet"):
        fsspec.filesystem("memory").pipe(f"{base}/{name}", b"x")
    assert expand_shards(f"{base}/a[1].parquet") == [f"{base}/a[1].parquet"]
    assert expand_shards(f"{base}/x{{b}}.parquet") == [f"{base}/x{{b}}.parquet"]
    assert expand_shards(f"{base}/a?.parquet") == [f"{base}/a1.parquet"]
    assert expand_shards(f"{base}/d") == [f"{base}/d/0.parquet"]
    assert len(expand_shards(f"{base}/")) == 4


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("s3://a/1.tar::s3://b/2.tar", ["s3://a/1.tar", "s3://b/2.tar"]),
        ("simplecache::s3://a/1.tar", ["simplecache::s3://a/1.tar"]),
        ("filecache::s3://a/1.tar::s3://b/2.tar", ["filecache::s3://a/1.tar", "s3://b/2.tar"]),
        ("zip://x.tar::s3://a/1.zip", ["zip://x.tar::s3://a/1.zip"]),
        ("simplecache::zip://x.tar::s3://a/1.tar", ["simplecache::zip://x.tar::s3://a/1.tar"]),
        ("s3://a/{1..2}.tar", ["s3://a/1.tar", "s3://a/2.tar"]),
    ],
)
def test_chains_are_told_from_lists(entry, parts, monkeypatch):
    monkeypatch.setattr("shardstream.storage.kind_of", lambda *_: None)  # the network is asked for nothing else here
    assert expand_shards(entry) == parts


def test_shards_inside_an_archive(tmp_path):
    """What is named in front of a chain is the shard; its manifest can be read back."""
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("a.parquet", "b.parquet"):
            archive.write(parquet(tmp_path / name), name)
    archive = f"file://{tmp_path}/x.zip"
    with pytest.warns(ShardStreamWarning, match=rf"allow_url=\*::{archive}$"):
        build_manifest(f"zip://*.parquet::{archive}", tmp_path / "m", num_workers=0)
    read = Manifest.load(tmp_path / "m", allow_url=f"*::{archive}")
    assert [read.url(k) for k in range(2)] == [f"zip://{name}.parquet::file://{tmp_path}/x.zip" for name in "ab"]
    assert read.num_samples == 8


@pytest.mark.parametrize("url", ["https://me:geheim@host/a.tar", "https://host/a.tar?X-Amz-Signature=geheim"])
def test_credentials_in_urls_are_refused_and_not_shown(url, monkeypatch):
    monkeypatch.setattr("shardstream.storage.kind_of", lambda *_: "file")
    with pytest.raises(ManifestError, match="carries credentials") as caught:
        expand_shards(url)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("entry", ["{1..99999999999}.tar", "{1..9}" * 9 + ".tar", "{a,b}" * 40, "{0..9..99999999}" * 9])
def test_patterns_of_too_many_names_are_refused_at_once(entry, monkeypatch):
    monkeypatch.setattr("shardstream.storage.kind_of", lambda *_: None)
    monkeypatch.setattr("shardstream.index._expand.MOST_NAMES", 10_000)
    with pytest.raises(ManifestError, match="too many names"):
        expand_shards(f"https://host/{entry}")


def test_names_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.tar")).write_bytes(b"x")
    with pytest.raises(ManifestError, match=r"not UTF-8.*udcff"):
        expand_shards(tmp_path)


# --------------------------------------------------------------------------------------------------------- building


def test_a_manifest_of_parquet(tmp_path):
    for place, rows in enumerate([5, 0, 7]):
        labels = [[-100] * (k % 3) + [1] * (k % 2) for k in range(rows)]
        columns = {
            "id": pa.array(range(rows), pa.int64()),
            "tokens": pa.array([list(range(k)) for k in range(rows)], pa.list_(pa.int32())),
            "labels": pa.array(labels, pa.list_(pa.int32())),
        }
        parquet(tmp_path / "d" / f"{place}.parquet", columns, row_group_size=3)
    made = build_manifest(
        tmp_path / "d", tmp_path / "m", tokens_column="tokens", targets={"lm": "labels"}, num_workers=0
    )
    read = Manifest.load(tmp_path / "m")
    assert read.fingerprint == made.fingerprint
    assert read.urls == ["0.parquet", "1.parquet", "2.parquet"]
    assert read.root == str(tmp_path / "d")
    assert read.block_rows.tolist() == [3, 2, 3, 3, 1]
    assert read.shard_first_block.tolist() == [0, 2, 2, 5]
    assert [column.name for column in read.columns] == ["id", "tokens", "labels"]
    assert read.tokens_column == "tokens"
    assert read.metadata == {"targets": {"lm": "labels"}, "ignore_index": -100}
    assert read.num_bytes.tolist() == [Path(read.url(k)).stat().st_size for k in range(3)]
    lists = read.lists.read(2, ["token_lengths", "run_num_tokens", "targets.lm"])
    assert {name: values.tolist() for name, values in lists.items()} == {
        "token_lengths": [0, 1, 2, 3, 4, 5, 6],
        "run_num_tokens": [3, 12, 6],
        "targets.lm": [0, 1, 0, 1, 0, 1, 0],
    }
    assert len(read.lists.read(1, ["token_lengths"])["token_lengths"]) == 0


def test_the_order_given_makes_no_difference(tmp_path):
    """Case C42: the same manifest for the list a, b, c as for c, a, b, and for the folder."""
    paths = [parquet(tmp_path / name / "part.parquet", {"uid": [place]}) for place, name in enumerate("abc")]
    manifests = [build_manifest(entries) for entries in (paths, [paths[2], *paths[:2]], tmp_path)]
    assert {manifest.fingerprint for manifest in manifests} == {manifests[0].fingerprint}
    assert manifests[1].urls == ["a/part.parquet", "b/part.parquet", "c/part.parquet"]
    kept = build_manifest([paths[2], *paths[:2]], keep_order=True)
    assert kept.urls == ["c/part.parquet", "a/part.parquet", "b/part.parquet"]
    assert kept.fingerprint != manifests[0].fingerprint


def test_the_manifest_beside_its_shards_is_no_shard(tmp_path):
    parquet(tmp_path / "a.parquet")
    for name in ("all.parquet", "x.manifest.parquet"):
        first = build_manifest(tmp_path / "*.parquet", tmp_path / name)
        assert build_manifest(str(tmp_path), tmp_path / name).fingerprint == first.fingerprint
        (tmp_path / name).rename(tmp_path / f"{name}.kept")
    (tmp_path / "all.parquet.kept").rename(tmp_path / "old.parquet")
    with pytest.raises(ManifestError, match=r"a shardstream manifest, not a shard \[.*/old\.parquet"):
        build_manifest(tmp_path / "*.parquet")


def test_every_bad_shard_is_named_and_nothing_is_written(tmp_path):
    """Case C19."""
    folder = tmp_path / "d"
    good = Path(parquet(folder / "good-00000.parquet"))
    assert build_manifest(good).num_samples == 4
    (folder / "zero.parquet").write_bytes(b"")
    (folder / "cut.parquet").write_bytes(good.read_bytes()[: good.stat().st_size * 6 // 10])
    (folder / "page.parquet").write_text("<html>not found</html>")
    parquet(folder / "other.parquet", {"uid": ["text"] * 4})
    for workers in (0, 2):
        with pytest.raises(ManifestError, match="4 of 5 shards cannot be used") as caught:
            build_manifest(folder, tmp_path / "m", num_workers=workers)
        listed = str(caught.value).splitlines()[1:]
        assert len(listed) == 4
        for name, line in zip(("cut", "other", "page", "zero"), listed, strict=True):
            assert f"{folder}/{name}.parquet" in line
        assert not (tmp_path / "m").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_missing_shards_are_bad_shards(tmp_path):
    base = f"memory://{tmp_path.name}"
    with pytest.raises(ManifestError, match="3 of 3 shards cannot be used") as caught:
        build_manifest(base + "/{a,b,c}.parquet", num_workers=0)
    assert all(f"{base}/{name}.parquet" in str(caught.value) for name in "abc")


def test_a_reader_that_trips_names_the_shard(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet")
    monkeypatch.setattr(
        "shardstream.formats.parquet.ParquetFormat.index_shard", lambda *_: (_ for _ in ()).throw(RuntimeError("oops"))
    )
    with pytest.raises(ManifestError, match=r"a\.parquet.*RuntimeError: oops"):
        build_manifest(tmp_path, num_workers=0)


def test_no_samples_says_where_it_looked(tmp_path):
    for place in range(12):
        parquet(tmp_path / "d" / f"{place:02d}.parquet", {"uid": pa.array([], pa.int64())})
    with pytest.raises(ManifestError, match=r"no samples: found 0 samples in 12 shards: .*/00\.parquet.* and 2 more"):
        build_manifest(tmp_path / "d", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_parquet_and_tar_do_not_mix(tmp_path):
    parquet(tmp_path / "a.parquet")
    tar(tmp_path / "b.tar", [("x.txt", b"1")])
    with pytest.raises(ManifestError, match=r"formats cannot be mixed \[.*/b\.tar\]: expected parquet, found tar"):
        build_manifest(tmp_path)


@pytest.mark.parametrize("kind", [0, 3, "threads", "processes"])
def test_results_come_in_manifest_order(tmp_path, kind):
    order = list(range(30))
    random.Random(5).shuffle(order)
    for place in order:  # the first shards are the largest, so that they are done last
        parquet(tmp_path / f"{place:02d}.parquet", rows=(30 - place) * 50 + 1, row_group_size=7)
    expected = [(30 - place) * 50 + 1 for place in range(30)]
    if kind == "threads":
        with concurrent.futures.ThreadPoolExecutor(5) as executor:
            manifest = build_manifest(tmp_path, settings=IndexSettings(executor=executor))
            assert executor.submit(int, "5").result() == 5
    elif kind == "processes":
        with concurrent.futures.ProcessPoolExecutor(2) as executor:
            manifest = build_manifest(tmp_path, settings=IndexSettings(executor=executor))
    else:
        manifest = build_manifest(tmp_path, num_workers=kind)
    assert manifest.shard_num_samples.tolist() == expected
    assert manifest.fingerprint == build_manifest(tmp_path, num_workers=0).fingerprint


def test_progress_counts_up(tmp_path):
    for place in range(3):
        parquet(tmp_path / f"{place}.parquet", rows=place + 1)
    seen = []
    manifest = build_manifest(tmp_path, settings=IndexSettings(progress=seen.append), num_workers=0)
    assert [(step.num_done, step.num_shards, step.num_samples) for step in seen] == [(1, 3, 1), (2, 3, 3), (3, 3, 6)]
    assert seen[-1].num_bytes == manifest.num_bytes.sum()


def test_long_blocks_are_warned_of():
    manifest = Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=100, run_rows=1)
    assert "4 of 4 blocks are larger than 64 MiB" in advice(manifest)[0]
    assert "shard-000000.parquet" in advice(manifest)[0]
    assert advice(Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=100, run_rows=10)) == []


# ---------------------------------------------------------------------------------------------------------- schemas


def types_of(manifest):
    return {column.name: column.type for column in manifest.columns}


def test_columns_are_matched_by_name(tmp_path):
    """Case C20: the first shard's order counts."""
    parquet(tmp_path / "part-0.parquet", {"uid": [0], "text": ["t0"], "label": ["l0"]})
    parquet(tmp_path / "part-1.parquet", {"label": ["l1"], "uid": [1], "text": ["t1"]})
    manifest = build_manifest(tmp_path)
    assert list(types_of(manifest)) == ["uid", "text", "label"]
    assert pa.ipc.read_schema(pa.py_buffer(manifest.arrow_schema)).names == ["uid", "text", "label"]


@pytest.mark.parametrize("null_first", [True, False])
def test_a_column_of_nulls_takes_the_others_type(tmp_path, null_first):
    """Case C22, in both orders."""
    columns = [{"label": pa.nulls(2)}, {"label": ["a", None, "b"]}]
    for place, column in enumerate(columns if null_first else columns[::-1]):
        parquet(tmp_path / f"part-{place}.parquet", column)
    manifest = build_manifest(tmp_path)
    assert types_of(manifest) == {"label": "string"}
    assert manifest.columns[0].num_missing in (3, -1)
    assert pa.ipc.read_schema(pa.py_buffer(manifest.arrow_schema)).field("label").type == pa.string()


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.uint32(), pa.uint32()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.uint32(), None),
        (pa.int64(), pa.float64(), None),
        (pa.string(), pa.binary(), None),
        (pa.string(), pa.large_string(), pa.string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.string_view(), pa.string(), pa.string()),
        (pa.binary_view(), pa.large_binary(), pa.binary()),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int64())),
        (pa.list_view(pa.int32()), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.list_(pa.null()), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.list_(pa.int32(), 4), pa.list_(pa.int64(), 4), pa.list_(pa.int64(), 4)),
        (pa.list_(pa.int32(), 4), pa.list_(pa.int32(), 5), None),
        (pa.list_(pa.int32()), pa.int32(), None),
        (
            pa.struct({"a": pa.int8(), "b": pa.null()}),
            pa.struct({"b": pa.string(), "a": pa.int16()}),
            pa.struct({"a": pa.int16(), "b": pa.string()}),
        ),
        (pa.struct({"a": pa.int8()}), pa.struct({"b": pa.int8()}), None),
        (pa.timestamp("us"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.null(), pa.null(), pa.null()),
    ],
)
def test_types_unify_the_same_way_in_both_orders(one, other, together):
    for first, second in ((one, other), (other, one)):
        found = unify(whole_type(first), whole_type(second))
        if pa.types.is_struct(first) and together is not None:
            assert {field.name: field.type for field in found} == {field.name: field.type for field in together}
        else:
            assert found == together


def test_widened_shards_cast_without_loss(tmp_path):
    parquet(tmp_path / "0.parquet", {"x": pa.array([1], pa.int32()), "t": pa.array([[1]], pa.large_list(pa.int16()))})
    parquet(
        tmp_path / "1.parquet", {"x": pa.array([2**40], pa.int64()), "t": pa.array([[2**20]], pa.list_(pa.int32()))}
    )
    manifest = build_manifest(tmp_path)
    assert types_of(manifest)["x"] == "int64"
    schema = pa.ipc.read_schema(pa.py_buffer(manifest.arrow_schema))
    assert schema.field("t").type == pa.list_(pa.int32())
    assert [pq.read_table(manifest.url(k)).cast(schema).column("x").to_pylist() for k in range(2)] == [[1], [2**40]]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"uid": [1]}, ["no text"]),
        ({"uid": [1], "text": ["a"], "extra": [1]}, ["also extra"]),
        ({"uid": [1.5], "text": ["a"]}, ["'uid'", "expected int64", "found double"]),
        ({"uid": [1], "text": [5]}, ["'text'", "expected string", "found int64"]),
    ],
)
def test_a_shard_with_another_schema_is_named(tmp_path, columns, named):
    parquet(tmp_path / "0.parquet", {"uid": [1], "text": ["a"]})
    parquet(tmp_path / "1.parquet", columns)
    with pytest.raises(ManifestError) as caught:
        build_manifest(tmp_path)
    assert all(text in str(caught.value) for text in [*named, "1.parquet"])
    assert "1 of 2" in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- tar


def test_the_same_names_in_two_folders_are_two_shards(tmp_path):
    """Case C05: names and keys may repeat over shards; a member that comes twice inside one is an error."""
    for name in ("p", "q"):
        tar(tmp_path / name / "0.tar", [("img.jpg", name.encode()), ("img.txt", b"t")])
    manifest = build_manifest(tmp_path)
    assert manifest.urls == ["p/0.tar", "q/0.tar"]
    assert manifest.num_samples == 2
    assert [manifest.lists.read(k, ["sample_keys"])["sample_keys"] for k in range(2)] == [[b"img"], [b"img"]]
    tar(tmp_path / "dup.tar", [("base.jpg", b"1"), ("base.json", b"2"), ("base.jpg", b"3")])
    with pytest.raises(ManifestError, match=r"dup\.tar") as caught:
        build_manifest(tmp_path)
    assert "base.jpg" in str(caught.value)


def test_empty_tars(tmp_path):
    """Case C16: end blocks only are 0 samples; 0 bytes are an error that names the file; a field of 0 bytes is one."""
    tar(tmp_path / "a.tar", [("0001.txt", b"")])
    tar(tmp_path / "b.tar", [])
    tar(tmp_path / "c.tar", [("0002.txt", b"x"), ("0003.jpg", b"y")])
    manifest = build_manifest(tmp_path, tmp_path / "m")
    assert manifest.shard_num_samples.tolist() == [1, 0, 2]
    assert {column.name: column.num_missing for column in manifest.columns} == {"txt": 1, "jpg": 2}
    assert Manifest.load(tmp_path / "m").shard_num_samples.tolist() == [1, 0, 2]
    (tmp_path / "zero.tar").write_bytes(b"")
    with pytest.raises(ManifestError, match=r"zero\.tar"):
        build_manifest(tmp_path)


def test_warnings_of_shards_are_given_once(tmp_path):
    for place in range(12):
        path = Path(tar(tmp_path / f"{place:02d}.tar", [("a.txt", b"x")]))
        path.write_bytes(path.read_bytes()[:1024])
    with pytest.warns(ShardStreamWarning, match=r"end-of-archive.*00\.tar.* and 2 more") as caught:
        manifest = build_manifest(tmp_path)
    assert len(caught) == 1
    assert manifest.num_samples == 12


# ---------------------------------------------------------------------------------------------------------- updates


def test_update_reads_only_what_changed_and_appends(tmp_path):
    folder = tmp_path / "d"
    for name in "bdf":
        parquet(folder / f"{name}.parquet", {"uid": [1, 2], "t": [[1], [2, 3]]})
    old = build_manifest(folder, tmp_path / "old", tokens_column="t")
    parquet(folder / "a.parquet", {"uid": [5], "t": [[5]]})
    parquet(folder / "d.parquet", {"uid": [1, 2, 3], "t": [[], [1], [2]]})
    os.utime(folder / "d.parquet", (1, 1))
    damaged = (folder / "f.parquet").stat()
    (folder / "f.parquet").write_bytes(b"x" * damaged.st_size)  # would be found if it were read
    os.utime(folder / "f.parquet", ns=(damaged.st_atime_ns, damaged.st_mtime_ns))
    new = build_manifest(folder, tmp_path / "new", update=tmp_path / "old")
    assert new.urls == ["b.parquet", "d.parquet", "f.parquet", "a.parquet"]
    assert new.shard_num_samples.tolist() == [2, 3, 2, 1]
    assert new.tokens_column == "t"
    lengths = [new.lists.read(k, ["token_lengths"])["token_lengths"].tolist() for k in range(4)]
    assert lengths == [[1, 2], [0, 1, 1], [1, 2], [1]]
    assert new.digests[0] == old.digests[0]
    assert Manifest.load(tmp_path / "old").fingerprint == old.fingerprint
    again = build_manifest(folder, tmp_path / "again", update=new)
    assert again.fingerprint == new.fingerprint


def test_update_appends_so_that_sample_ids_stay(tmp_path):
    parquet(tmp_path / "m" / "b.parquet", rows=3)
    old = build_manifest(tmp_path / "m")
    parquet(tmp_path / "m" / "a.parquet", rows=2)
    parquet(tmp_path / "k.parquet", rows=2)  # the common root is another one now
    new = build_manifest([tmp_path / "k.parquet", tmp_path / "m"], update=old)
    assert [new.url(k) for k in range(3)] == [
        str(tmp_path / name) for name in ("m/b.parquet", "k.parquet", "m/a.parquet")
    ]
    assert new.columns[0].num_missing == 0


def test_update_with_other_settings_reads_all(tmp_path):
    parquet(tmp_path / "a.parquet", {"t": [[1], [2, 3]]})
    old = build_manifest(tmp_path)
    new = build_manifest(tmp_path, update=old, tokens_column="t")
    assert new.lists.read(0, ["token_lengths"])["token_lengths"].tolist() == [1, 2]


def test_a_vanished_shard_is_an_error_unless_allowed(tmp_path):
    paths = [parquet(tmp_path / f"{name}.parquet") for name in "abc"]
    old = build_manifest(paths)
    with pytest.raises(ManifestError, match=r"not named any more: found .*/a\.parquet; .*--allow-vanished"):
        build_manifest(paths[1:], update=old)
    new = build_manifest(paths[1:], update=old, settings=IndexSettings(allow_vanished=True))
    assert new.urls == ["b.parquet", "c.parquet"]


def test_update_counts_missing_fields(tmp_path):
    tar(tmp_path / "a.tar", [("1.txt", b"x"), ("2.jpg", b"x")])
    old = build_manifest(tmp_path)
    tar(tmp_path / "b.tar", [("1.txt", b"x"), ("2.cls", b"x")])
    new = build_manifest(tmp_path, update=old)
    fresh = build_manifest(tmp_path)
    missing = {"txt": 2, "jpg": 3, "cls": 3}
    assert {column.name: column.num_missing for column in new.columns} == missing
    assert {column.name: column.num_missing for column in fresh.columns} == missing


def test_a_moved_data_set_keeps_its_fingerprint(tmp_path):
    parquet(tmp_path / "one" / "a.parquet")
    first = build_manifest(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    os.utime(tmp_path / "two" / "a.parquet", (1, 1))
    second = build_manifest(tmp_path / "two")
    assert second.fingerprint == first.fingerprint
    assert second.version_tags != first.version_tags


def test_no_warnings_for_good_shards(tmp_path):
    parquet(tmp_path / "a.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.all(build_manifest(tmp_path).num_bytes > 0)


# --------------------------------------------------------------------------------------------------------------- s3


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a local S3 server: its URL and the options to reach it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    options = {"client_kwargs": {"endpoint_url": "http://{}:{}".format(*server.get_host_and_port())}}
    fsspec.filesystem("s3", **options).mkdir("shards")
    yield "s3://shards", options
    server.stop()


@pytest.mark.slow
def test_shards_and_manifest_in_s3(bucket, tmp_path):
    url, options = bucket
    for name in ("0[a].parquet", "1[a].parquet", "2a.parquet"):
        fsspec.filesystem("s3", **options).put_file(parquet(tmp_path / name), f"{url}/d/{name}")
    made = build_manifest(f"{url}/d/", f"{url}/d/m.manifest.parquet", storage_options=options, num_workers=0)
    for entry in (f"{url}/d", f"{url}/d/*.parquet", url + "/d/{0[a],1[a],2a}.parquet"):
        assert build_manifest(entry, storage_options=options, num_workers=0).fingerprint == made.fingerprint
    read = Manifest.load(f"{url}/d/m.manifest.parquet", storage_options=options)
    assert read.urls == ["0[a].parquet", "1[a].parquet", "2a.parquet"]
    assert read.root == f"{url}/d"
    assert len(set(read.version_tags)) == 1  # equal bytes have equal etags
    assert read.lists.read(2, ["footer"])["footer"][-4:] == b"PAR1"
    with pytest.raises(ManifestError, match="2 of 3 shards cannot be used") as caught:
        build_manifest(url + "/d/{2a,8,9}.parquet", storage_options=options, num_workers=0)
    assert all(f"{url}/d/{name}.parquet" in str(caught.value) for name in (8, 9))


@pytest.mark.parametrize("link", ["file", "folder", "hard"])
def test_one_file_under_two_names_is_said(tmp_path, link):
    """Case C05: what comes twice is never silent."""
    tar(tmp_path / "s" / "0.tar", [("a.txt", b"1")])
    if link == "folder":
        (tmp_path / "t").symlink_to(tmp_path / "s")
    elif link == "file":
        (tmp_path / "s" / "1.tar").symlink_to("0.tar")
    else:
        (tmp_path / "s" / "1.tar").hardlink_to(tmp_path / "s" / "0.tar")
    shards = [tmp_path / "s", tmp_path / "t"] if link == "folder" else tmp_path
    with pytest.warns(
        ShardStreamWarning, match=r"1 shards are linked .* more than once .*0\.tar is .*s/0\.tar|1\.tar is"
    ):
        assert build_manifest(shards, num_workers=0).num_samples == 2


def test_json_lines_without_a_byte_are_said(tmp_path):
    """Cases C16 and C19: a filter may leave nothing; so may a download that broke off."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b'{"x": 1}\n')
    with pytest.warns(ShardStreamWarning, match=r"empty \(0 bytes\): it counts 0 samples \[.*a\.jsonl\]"):
        assert build_manifest(tmp_path, num_workers=0).num_samples == 1


def test_a_store_that_tells_nothing_but_sizes_is_said_and_updates_read_its_shards(tmp_path):
    """Case C42: a shard that was rewritten at the same size must not be taken for the old one."""
    for number in range(2):
        parquet(tmp_path / f"{number}.parquet", pa.table({"x": [number]}))
    with served(tmp_path, tells_versions=False) as address:
        shards = [f"{address}/{number}.parquet" for number in range(2)]
        with pytest.warns(ShardStreamWarning, match=r"neither an etag nor .* of 2 shards.*0\.parquet, .*1\.parquet"):
            old = build_manifest(shards, tmp_path / "old", num_workers=0)
        parquet(tmp_path / "1.parquet", pa.table({"x": [7]}))
        with pytest.warns(ShardStreamWarning, match="neither an etag"):
            new = build_manifest(shards, num_workers=0, update=old)
    assert new.num_bytes.tolist() == old.num_bytes.tolist()
    assert [new.digests[shard] == old.digests[shard] for shard in range(2)] == [True, False]
