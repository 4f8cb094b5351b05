from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardstream.manifest import Manifest
from shardstream.prepare.parts import bucket_ends, cut_blocks_by_bytes, cut_by_bytes, cut_evenly, parts_of, tasks_of

sizes = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 10**6)), min_size=1, max_size=40)


def manifest_of(blocks):
    base = Manifest.synthetic(num_shards=1, blocks_per_shard=len(blocks), rows_per_block=1)
    rows, num_bytes = (np.array(column) for column in zip(*blocks, strict=True))
    return replace(base, block_rows=rows.astype(np.int32), block_num_bytes=num_bytes.astype(np.int64))


def assert_ends(ends, num_samples):
    assert ends[-1] == num_samples
    assert ends[0] > 0
    assert (np.diff(ends) > 0).all()


@given(sizes, st.integers(1, 60))
def test_parts_cover_every_sample_once_and_are_never_empty(blocks, num_parts):
    manifest = manifest_of(blocks)
    ends = cut_by_bytes(manifest, num_parts)
    assert_ends(ends, manifest.num_samples)
    assert len(ends) <= num_parts
    assert_ends(cut_evenly(manifest.num_samples, num_parts), manifest.num_samples)


@given(sizes, st.integers(1, 60))
def test_tasks_are_the_parts_in_order_and_a_cut_between_them_is_cheap(blocks, num_parts):
    manifest = manifest_of(blocks)
    ends = cut_by_bytes(manifest, num_parts)
    tasks = tasks_of(manifest, ends)
    assert [part for task in tasks for part in task] == parts_of(ends)
    total = np.maximum(manifest.block_num_bytes, 1).sum()
    for task in tasks[:-1]:
        block = int(np.searchsorted(manifest.block_start, task[-1].end, side="right")) - 1
        is_border = manifest.block_start[block] == task[-1].end
        assert is_border or max(1, manifest.block_num_bytes[block]) <= total / len(ends) / 8


@given(sizes, st.floats(1, 10**6))
def test_groups_of_blocks_are_all_blocks_in_order(blocks, num_bytes):
    manifest = manifest_of(blocks)
    groups = cut_blocks_by_bytes(manifest, num_bytes)
    assert [first for first, _ in groups] == [0, *(end for _, end in groups[:-1])]
    assert groups[-1][1] == manifest.num_samples
    assert all(end in manifest.block_start for _, end in groups)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 9))
def test_buckets_cut_parts_and_never_lie_across_two(rows, num_buckets):
    ends = np.cumsum(rows)
    cuts = bucket_ends(ends, num_buckets)
    assert_ends(cuts, ends[-1])
    assert np.isin(ends, cuts).all()
    assert len(cuts) <= num_buckets * len(rows)


def test_one_large_block_is_decoded_by_one_task():
    ends = cut_by_bytes(manifest_of([(1000, 10**6), (10, 100)]), 5)
    assert [len(task) for task in tasks_of(manifest_of([(1000, 10**6), (10, 100)]), ends)] == [5]
