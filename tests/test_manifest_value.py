"""The manifest as a value; its file is tested in test_manifest_file.py."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from shardstream.errors import ManifestError
from shardstream.manifest import Manifest
from tests.support.layouts import manifest_of

MANIFEST = dataclasses.replace(
    manifest_of([7, 9, 1, 14, 8], [4, 20, 1, 5, 3], [2, 0, 3]), digests=["aa", "bb", "cc"], version_tags=["1", "2", "3"]
)


def changed(**change):
    return dataclasses.replace(MANIFEST, **change)


# ------------------------------------------------------------------------------------------------ counts


def test_sample_ids_are_ordinals_in_manifest_order():
    assert (MANIFEST.num_shards, MANIFEST.num_blocks, MANIFEST.num_samples) == (3, 5, 39)
    assert MANIFEST.block_start.tolist() == [0, 7, 16, 17, 31, 39]
    assert MANIFEST.first_sample.tolist() == [0, 16, 16, 39]
    assert MANIFEST.shard_num_samples.tolist() == [16, 0, 23]
    assert MANIFEST.shard_of_block(np.arange(5)).tolist() == [0, 0, 2, 2, 2]
    assert MANIFEST.shard_of_sample(np.array([0, 15, 16, 38])).tolist() == [0, 0, 2, 2]
    assert all(array.dtype == np.int64 for array in (MANIFEST.block_start, MANIFEST.first_sample))


def test_counts_do_not_overflow():
    manifest = Manifest.synthetic(num_shards=4, blocks_per_shard=3, rows_per_block=2**31 - 1)
    assert manifest.num_samples == 12 * (2**31 - 1)
    assert manifest.shard_of_sample(np.array([manifest.num_samples - 1])).tolist() == [3]


def test_long_blocks_are_those_of_several_runs():
    assert MANIFEST.has_long_blocks
    assert not manifest_of([4, 5], [5, 5]).has_long_blocks
    assert not manifest_of([], [], [0]).has_long_blocks


def test_a_shards_location_is_below_the_root():
    assert changed(root="/data").url(2) == "/data/2.parquet"
    assert changed(root="").url(2) == "2.parquet"
    assert changed(root="s3://KEY:SECRET@bucket").url(0) == "s3://KEY:SECRET@bucket/0.parquet"


def test_a_manifest_pickles_without_what_was_derived():
    bare = len(pickle.dumps(MANIFEST))
    again = pickle.loads(pickle.dumps(MANIFEST))
    assert (MANIFEST.num_samples, MANIFEST.first_sample[-1], MANIFEST.has_long_blocks) == (39, 39, True)
    assert again.fingerprint == MANIFEST.fingerprint
    assert len(pickle.dumps(MANIFEST)) == bare
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.root = "x"


# ------------------------------------------------------------------------------------------------ synthetic


def test_a_synthetic_manifest_has_the_layout_that_was_asked_for():
    manifest = Manifest.synthetic(num_shards=3, blocks_per_shard=2, rows_per_block=10, run_rows=4)
    assert (manifest.num_shards, manifest.num_blocks, manifest.num_samples) == (3, 6, 60)
    assert manifest.shard_num_samples.tolist() == [20, 20, 20]
    assert set(manifest.block_run_rows.tolist()) == {4}
    assert manifest.has_long_blocks
    assert not Manifest.synthetic(num_shards=3, blocks_per_shard=2, rows_per_block=10).has_long_blocks
    assert len(set(manifest.urls)) == 3
    empty = Manifest.synthetic(num_shards=0, blocks_per_shard=2, rows_per_block=10)
    assert (empty.num_shards, empty.num_samples, empty.first_sample.tolist()) == (0, 0, [0])


def test_a_synthetic_manifest_of_any_size_takes_no_memory():
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=2**31, rows_per_block=1000)
    assert manifest.num_blocks == 2**31


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_shards": -1},
        {"blocks_per_shard": -1},
        {"rows_per_block": 0},
        {"rows_per_block": 2**31},
        {"run_rows": 0},
        {"run_rows": -3},
    ],
)
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ManifestError, match="sizes of a synthetic manifest"):
        Manifest.synthetic(**{"num_shards": 1, "blocks_per_shard": 1, "rows_per_block": 1, **sizes})


# ------------------------------------------------------------------------------------------------ fingerprint


def test_the_fingerprint_is_golden():
    """It is in every cursor: if it changed with a version of this library, no run could be resumed."""
    assert MANIFEST.fingerprint == "61d79289729d5d06addbf20f5523d94e"


@pytest.mark.parametrize(
    "change",
    [
        {"root": "s3://elsewhere"},
        {"version_tags": ["4", "5", "6"]},
        {"path": "/somewhere/m.parquet"},
        {"num_bytes": np.array([1, 2, 3])},
        {"block_offset": np.arange(5)},
        {"block_num_bytes": np.arange(5)},
        {"metadata": {"targets": {"lm": "labels"}}},
        {"urls": tuple(MANIFEST.urls), "digests": np.array(["aa", "bb", "cc"])},
        {"block_rows": MANIFEST.block_rows.astype(np.int64)},
        {"block_rows": np.repeat(MANIFEST.block_rows, 2)[::2]},
    ],
    ids="-".join,
)
def test_where_and_when_do_not_count(change):
    assert changed(**change).fingerprint == MANIFEST.fingerprint
    assert changed(**change).differences(MANIFEST) == []


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"digests": ["aa", "bb", "xx"]}, ["2.parquet has changed"]),
        ({"digests": ["aab", "b", "cc"]}, ["0.parquet has changed", "1.parquet has changed"]),
        ({"block_rows": np.array([7, 9, 1, 15, 8], np.int32)}, ["2.parquet has changed"]),
        ({"block_run_rows": np.array([4, 19, 1, 5, 3], np.int32)}, ["0.parquet has changed"]),
        ({"shard_first_block": np.array([0, 1, 2, 5])}, ["0.parquet has changed", "1.parquet has changed"]),
        ({"formats": ["tar", "parquet", "parquet"]}, ["0.parquet has changed"]),
        ({"urls": ["0.parquet", "1.parquet", "3.parquet"]}, ["3.parquet was added", "2.parquet is missing"]),
        ({"urls": ["0.parquet1", ".parquet", "2.parquet"]}, ["0.parquet1 was added", ".parquet was added"]),
    ],
)
def test_what_decides_the_order_counts_and_is_named(change, differences):
    other = changed(**change)
    assert other.fingerprint != MANIFEST.fingerprint
    assert other.differences(MANIFEST)[: len(differences)] == differences


def test_the_order_of_shards_counts():
    swapped = dataclasses.replace(
        manifest_of([7, 9, 1, 14, 8], [4, 20, 1, 5, 3], [0, 2, 3]),
        urls=["1.parquet", "0.parquet", "2.parquet"],
        digests=["bb", "aa", "cc"],
    )
    assert swapped.fingerprint != MANIFEST.fingerprint
    assert swapped.differences(MANIFEST) == [
        "1.parquet has moved from place 1 to 0",
        "0.parquet has moved from place 0 to 1",
    ]


def test_a_shard_that_is_there_more_often_counts():
    def times(*urls):
        return manifest_of([3] * len(urls), [3] * len(urls), [1] * len(urls)), list(urls)

    once, twice = (
        dataclasses.replace(manifest, urls=urls) for manifest, urls in (times("b", "a"), times("b", "b", "a"))
    )
    assert twice.differences(once) == ["b has moved from place 0 to 1", "a has moved from place 1 to 2"]
    mirrored = dataclasses.replace(times("b", "b", "a")[0], urls=["a", "b", "a"])
    assert twice.differences(mirrored) == ["the same shards, some of them another number of times"]


def test_many_differences_are_counted():
    before = Manifest.synthetic(num_shards=20, blocks_per_shard=1, rows_per_block=1)
    after = Manifest.synthetic(num_shards=32, blocks_per_shard=1, rows_per_block=1)
    texts = after.differences(before)
    assert len(texts) == 11
    assert texts[0] == "shard-000020.parquet was added"
    assert texts[-1] == "and 2 more"
    assert after.differences(before, at_most=12)[-1] == "shard-000031.parquet was added"


def test_marks_name_what_is_new_and_count_what_is_gone():
    marks = MANIFEST.shard_marks
    assert len(set(marks)) == 3
    assert changed(digests=["aa", "xx", "cc"]).differences_by_marks(marks) == ["1.parquet was added or has changed"]
    assert MANIFEST.differences_by_marks(marks[1:]) == ["0.parquet was added"]
    gone = ["1 of the 4 shards are missing or have changed"]
    assert MANIFEST.differences_by_marks([*marks, "01234567"]) == gone
    moved = ["the same shards in another order or another number of times"]
    assert MANIFEST.differences_by_marks(marks[::-1]) == moved
    many = Manifest.synthetic(num_shards=12, blocks_per_shard=1, rows_per_block=1)
    assert many.differences_by_marks(marks)[-1] == "and 2 more"


def test_names_that_are_not_utf8_are_hashed_too():
    odd = changed(urls=["0.parquet", "1.parquet", b"\xff.parquet".decode("utf-8", "surrogateescape")])
    assert len(odd.fingerprint) == 32
    assert odd.fingerprint != MANIFEST.fingerprint
