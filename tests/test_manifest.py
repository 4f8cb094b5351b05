"""The manifest as a value and as a file."""

from __future__ import annotations

import gc
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import ManifestError
from shardstream.manifest import ColumnSchema, Manifest
from shardstream.manifest_file import (
    LIST_TYPES,
    DatasetInfo,
    ManifestWriter,
    ParquetLists,
    ShardRow,
    shard_row,
    write_manifest,
)


def a_row(name="a.parquet", rows=(3, 2), run_rows=2, lists=None):
    return ShardRow(
        url=name,
        format="parquet",
        num_bytes=100,
        version_tag="100-1",
        digest="d" * 32,
        block_rows=np.array(rows, np.int32),
        block_run_rows=np.full(len(rows), run_rows, np.int32),
        block_offset=np.arange(len(rows), dtype=np.int64) * 10 + 4,
        block_num_bytes=np.full(len(rows), 10, np.int64),
        lists=lists or {},
    )


def written(path, rows, info=None, **settings):
    def fill(writer: ManifestWriter) -> DatasetInfo:
        for row in rows:
            writer.add(row)
        return info or DatasetInfo(root="/data")

    return write_manifest(fill, path, **settings)


INFO = DatasetInfo(
    root="/data",
    columns=(ColumnSchema("tokens", "list<item: int32>", 0), ColumnSchema("text", "string", -1)),
    arrow_schema=b"\x00\xffschema",
    tokens_column="tokens",
    metadata={"targets": {"lm": "labels"}, "ignore_index": -100},
)
TEXTS = ("urls", "formats", "version_tags", "digests")
NUMBERS = ("num_bytes", "shard_first_block", "block_rows", "block_run_rows", "block_offset", "block_num_bytes")
SETTINGS = ("columns", "arrow_schema", "tokens_column", "metadata", "root", "fingerprint")


def assert_same(one, other):
    for name in (*TEXTS, *SETTINGS):
        assert getattr(one, name) == getattr(other, name), name
    for name in NUMBERS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
        assert getattr(one, name).dtype == getattr(other, name).dtype, name


# --------------------------------------------------------------------------------------------------------- round trips


@given(
    st.lists(st.lists(st.integers(1, 10**6), max_size=4), min_size=1, max_size=30),
    st.integers(1, 1000),
)
@settings(max_examples=30)
def test_what_is_written_is_read_back(tmp_path_factory, shards, run_rows):
    path = tmp_path_factory.mktemp("m") / "m.parquet"
    rows = [a_row(f"é {k}#?.parquet", blocks, run_rows) for k, blocks in enumerate(shards)]
    made = written(path, rows, INFO)
    read = Manifest.load(path)
    assert_same(made, read)
    assert read.num_samples == sum(map(sum, shards))
    assert read.shard_num_samples.tolist() == [sum(blocks) for blocks in shards]
    assert read.path == made.path == str(path)
    assert [shard_row(read, k).num_samples for k in range(len(shards))] == [sum(blocks) for blocks in shards]


LISTS = {
    "run_num_tokens": np.array([5, 7, 1], np.int64),
    "run_num_documents": np.array([1, 2, 1], np.int64),
    "token_lengths": np.array([1, 2, 3, 4, 5], np.int32),
    "targets.lm": np.array([0, 2, 3, 4, 5], np.int32),
    "sample_keys": [b"a/1", b"a/2", b"", b"\xff", b"5"],
    "sample_num_members": np.array([1, 2, 1, 1, 1], np.int32),
    "member_field": ["jpg", "txt", "jpg", "seg.png", "jpg", "jpg"],
    "member_offset": np.arange(6, dtype=np.int64) * 2**40,
    "member_num_bytes": np.arange(6, dtype=np.int64),
    "block_data_offset": np.array([0, 2**40], np.int64),
    "frame_offsets": np.array([0, 100], np.int64),
    "frame_data_offsets": np.array([0, 1000], np.int64),
    "footer": b"\x00PAR1",
    "block_checksum": [b"\x00" * 16, b"\xff" * 16],
    "rest_checksum": b"\x80" * 16,
}


def assert_lists(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value, name)
            assert found[name].dtype == value.dtype, name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("in_memory", [True, False])
def test_every_list_is_read_back_by_shard(tmp_path, in_memory):
    assert {*LIST_TYPES, "targets.lm"} == set(LISTS)
    rows = [a_row(f"{k}.parquet", lists=LISTS if k % 3 else {}) for k in range(7)]
    manifest = written(None if in_memory else tmp_path / "m", rows)
    lists = pickle.loads(pickle.dumps(manifest.lists)) if in_memory else Manifest.load(tmp_path / "m").lists
    assert lists.names == set(LISTS)
    for shard in (1, 2, 4, 5, 1):
        assert_lists(lists.read(shard, sorted(LISTS)), LISTS)
    none = lists.read(3, sorted(LISTS))
    assert all(len(value) == 0 for value in none.values())
    assert_lists(lists.read(1, ["footer"]), {"footer": LISTS["footer"]})


def test_a_list_that_comes_late_is_missing_before(tmp_path):
    """The file has the columns that some shard has, though nothing of later shards is known when it is begun."""
    rows = [
        a_row(f"{k}", lists={"footer": bytes([k])} | ({"token_lengths": LISTS["token_lengths"]} if k == 249 else {}))
        for k in range(250)
    ]
    manifest = written(tmp_path / "m", rows)
    assert manifest.lists.names == {"footer", "token_lengths"}
    assert pq.ParquetFile(tmp_path / "m").metadata.num_row_groups == 3
    assert_lists(manifest.lists.read(249, ["token_lengths"]), {"token_lengths": LISTS["token_lengths"]})
    assert [manifest.lists.read(k, ["footer"])["footer"] for k in (0, 99, 100, 248)] == [b"\0", b"c", b"d", b"\xf8"]
    assert len(manifest.lists.read(99, ["token_lengths"])["token_lengths"]) == 0
    assert_same(manifest, replace(Manifest.load(tmp_path / "m")))


def test_row_groups_end_at_100_shards_or_many_samples(tmp_path):
    written(tmp_path / "few", [a_row(str(k)) for k in range(201)])
    groups = pq.ParquetFile(tmp_path / "few").metadata
    assert [groups.row_group(k).num_rows for k in range(groups.num_row_groups)] == [100, 100, 1]
    long = {"token_lengths": np.zeros(2**17, np.int32)}
    written(tmp_path / "long", [a_row(str(k), lists=long) for k in range(5)])
    groups = pq.ParquetFile(tmp_path / "long").metadata
    assert [groups.row_group(k).num_rows for k in range(groups.num_row_groups)] == [2, 2, 1]


def test_a_failure_behind_a_row_group_leaves_nothing_behind(tmp_path):
    """Neither a file, nor a writer that closes itself when the file it writes to is closed."""

    def fill(writer):
        for shard in range(130):
            writer.add(a_row(f"{shard:03d}.parquet"))
        raise ManifestError("the last shard is bad")

    for path in (tmp_path / "m.parquet", "memory://abandoned.manifest.parquet"):
        with pytest.raises(ManifestError, match="the last shard is bad"):
            write_manifest(fill, path)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_lists_hold_the_row_groups_used_last(tmp_path):
    rows = [a_row(str(k), lists={"token_lengths": np.full(5, k, np.int32)}) for k in range(600)]
    lists = written(tmp_path / "m", rows).lists
    held = []
    for shard in (0, 150, 299, 5, 300, 450, 599):
        assert lists.read(shard, ["token_lengths"])["token_lengths"].tolist() == [shard] * 5
        held.append(list(lists._open._groups))
    assert held[2:] == [[0, 1, 2], [1, 2, 0], [1, 2, 0, 3], [2, 0, 3, 4], [0, 3, 4, 5]]


def test_unknown_lists_are_refused(tmp_path):
    with pytest.raises(ManifestError, match=r"no list 'colour'.*token_lengths"):
        written(None, [a_row(lists={"colour": [1]})])
    manifest = written(tmp_path / "m", [a_row()])
    with pytest.raises(ManifestError, match=r"has no list 'token_lengths'.*--tokens-column"):
        manifest.lists.read(0, ["token_lengths"])


def test_saving_keeps_everything(tmp_path):
    first = written(tmp_path / "a", [a_row(str(k), lists=LISTS) for k in range(3)], INFO)
    second = Manifest.load(tmp_path / "a").save(tmp_path / "b")
    assert_same(first, Manifest.load(tmp_path / "b"))
    assert_lists(second.lists.read(2, sorted(LISTS)), LISTS)
    in_memory = written(None, [a_row(lists=LISTS)], INFO).save(tmp_path / "c")
    assert_lists(in_memory.lists.read(0, sorted(LISTS)), LISTS)


def test_a_synthetic_manifest_can_be_saved(tmp_path):
    made = Manifest.synthetic(num_shards=3, blocks_per_shard=2, rows_per_block=10, run_rows=4).save(tmp_path / "m")
    assert Manifest.load(tmp_path / "m").fingerprint == made.fingerprint
    assert Manifest.synthetic(num_shards=0, blocks_per_shard=0, rows_per_block=1).save(tmp_path / "e").num_samples == 0
    assert Manifest.load(tmp_path / "e").num_samples == 0


def test_manifests_in_an_object_store(tmp_path):
    path = f"memory://{tmp_path.name}/m.parquet"
    made = written(path, [a_row(str(k), lists=LISTS) for k in range(150)], INFO)
    read = Manifest.load(path)
    assert_same(made, read)
    assert_lists(pickle.loads(pickle.dumps(read.lists)).read(120, sorted(LISTS)), LISTS)


# ---------------------------------------------------------------------------------------------------------------- root


def test_a_folder_can_be_moved_as_a_whole(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for name, root in (("m", here), ("n", here / "shards" / "x"), ("o", tmp_path / "elsewhere")):
        written(here / name, [a_row()], DatasetInfo(root=str(root)))
    there = shutil.move(here, tmp_path / "there")
    assert Manifest.load(Path(there) / "m").url(0) == f"{there}/a.parquet"
    assert Manifest.load(Path(there) / "n").url(0) == f"{there}/shards/x/a.parquet"
    assert Manifest.load(Path(there) / "o").url(0) == f"{tmp_path}/elsewhere/a.parquet"


def test_the_root_can_be_given(tmp_path):
    made = written(tmp_path / "m", [a_row()])
    read = Manifest.load(tmp_path / "m", root="s3://bucket/moved/")
    assert read.url(0) == "s3://bucket/moved/a.parquet"
    assert read.fingerprint == made.fingerprint


def test_credentials_are_not_stored(tmp_path):
    written(tmp_path / "m", [a_row()], DatasetInfo(root="https://user:geheim@host/data"))
    assert b"geheim" not in (tmp_path / "m").read_bytes()
    assert Manifest.load(tmp_path / "m").root == "https://host/data"


# ----------------------------------------------------------------------------------------------------------- immutable


def test_another_manifest_is_not_replaced(tmp_path):
    path = tmp_path / "m"
    first = written(path, [a_row()])
    before = path.read_bytes()
    with pytest.raises(ManifestError, match=r"another manifest is there.*overwrite"):
        written(path, [a_row("b.parquet")])
    assert path.read_bytes() == before
    assert written(path, [a_row()]).fingerprint == first.fingerprint
    second = written(path, [a_row("b.parquet")], overwrite=True)
    assert Manifest.load(path).fingerprint == second.fingerprint != first.fingerprint
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("content", ["text", "parquet"])
def test_a_file_that_is_no_manifest_is_never_replaced(tmp_path, content):
    path = tmp_path / "data.parquet"
    if content == "text":
        path.write_text("precious")
    else:
        pq.write_table(pa.table({"x": [1]}), path)
    before = path.read_bytes()
    with pytest.raises(ManifestError, match="will not be replaced"):
        written(path, [a_row()], overwrite=True)
    assert path.read_bytes() == before


def test_fingerprints_know_layout_but_not_place_and_time():
    base = written(None, [a_row()])
    same = [replace(a_row(), version_tag="other", num_bytes=5, lists={"footer": b"x"})]
    assert written(None, same, DatasetInfo(root="s3://elsewhere")).fingerprint == base.fingerprint
    others = [
        a_row("b.parquet"),
        a_row(rows=(2, 3)),
        a_row(run_rows=3),
        replace(a_row(), digest="e" * 32),
        replace(a_row(), format="tar"),
    ]
    prints = {written(None, [row]).fingerprint for row in others}
    assert len(prints) == 5
    assert base.fingerprint not in prints


# ------------------------------------------------------------------------------------------------------------ bad files


def test_a_missing_manifest(tmp_path):
    for path in (tmp_path / "none", f"memory://{tmp_path.name}/none"):
        with pytest.raises(ManifestError, match=r"no manifest here .*none"):
            Manifest.load(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PAR1" + b"x" * 100 + b"PAR1"])
def test_a_file_that_is_not_parquet(tmp_path, content):
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ManifestError, match=r"not a manifest \[.*/m\].*shardstream index"):
        Manifest.load(tmp_path / "m")


def test_a_shard_instead_of_a_manifest(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "shard.parquet")
    with pytest.raises(ManifestError, match="a Parquet file, but not a manifest"):
        Manifest.load(tmp_path / "shard.parquet")


def test_every_cut_is_found(tmp_path):
    written(tmp_path / "m", [a_row(str(k), lists=LISTS) for k in range(3)])
    data = (tmp_path / "m").read_bytes()
    for end in range(0, len(data), 97):
        (tmp_path / "cut").write_bytes(data[:end])
        with pytest.raises(ManifestError, match="cut"):
            Manifest.load(tmp_path / "cut")


def changed(path, about=None, columns=None):
    """Writes the manifest again with other metadata or columns, as a tool that knows nothing of it would."""
    table = pq.read_table(path)
    for name, values in (columns or {}).items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, pa.array(values, table.schema.field(name).type))
    known = json.loads(pq.read_metadata(path).metadata[b"shardstream"])
    pq.write_table(table.replace_schema_metadata({"shardstream": json.dumps({**known, **(about or {})})}), path)


@pytest.mark.parametrize(
    ("about", "columns", "message"),
    [
        ({"version": 2}, {}, "newer shardstream.*expected version 1 at most, found 2; install a newer"),
        ({"version": None}, {}, "damaged"),
        ({"fingerprint": "0" * 32}, {}, "damaged.*fingerprint 000"),
        ({}, {"digest": ["x" * 32]}, "damaged.*fingerprint"),
        ({}, {"num_samples": [6]}, "damaged.*expected 6 samples in a.parquet, found blocks of 5"),
        ({}, {"block_rows": [[5, 0]]}, "damaged.*at least one row"),
        ({}, {"block_run_rows": [[2, 0]]}, "damaged.*at least one row"),
        ({}, {"block_offset": [[4]]}, "damaged.*as many"),
        ({}, {"block_rows": [None]}, "damaged"),
        ({}, {"url": [None]}, "damaged"),
    ],
)
def test_manifests_that_contradict_themselves(tmp_path, about, columns, message):
    path = tmp_path / "m"
    written(path, [a_row()])
    changed(path)
    assert Manifest.load(path).num_samples == 5
    changed(path, about, columns)
    with pytest.raises(ManifestError, match=message):
        Manifest.load(path)


def test_metadata_that_lacks_something(tmp_path):
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"shardstream": '{"version": 1}'}), tmp_path / "m")
    with pytest.raises(ManifestError, match=r"damaged.*no root"):
        Manifest.load(tmp_path / "m")
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"shardstream": "[]"}), tmp_path / "m")
    with pytest.raises(ManifestError, match="damaged"):
        Manifest.load(tmp_path / "m")


def test_lists_of_a_manifest_that_is_gone(tmp_path):
    manifest = written(tmp_path / "m", [a_row(lists=LISTS)])
    (tmp_path / "m").unlink()
    with pytest.raises(ManifestError, match=r"lists cannot be read \[.*/m\]"):
        manifest.lists.read(0, ["footer"])
    with pytest.raises(ManifestError):
        ParquetLists(frozenset(["footer"]), data=b"junk").read(0, ["footer"])
