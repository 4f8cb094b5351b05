"""Shuffle quality, labels and traces."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream.audit import Labels, audit, expected_classes, read_labels, shuffle_quality, trace, uniform_neighbours
from shardstream.errors import PlanError, ReadError
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from tests.support.layouts import manifest_of


def test_expected_classes_is_exact():
    sizes, drawn = [3, 1, 7, 2], 5
    exact = sum(1 - Fraction(comb(13 - n, drawn), comb(13, drawn)) for n in sizes)
    assert expected_classes(np.array(sizes), drawn) == pytest.approx(float(exact), rel=1e-12)
    assert expected_classes(np.array(sizes), 13) == expected_classes(np.array(sizes), 99) == 4.0


def test_uniform_neighbours_is_exact():
    groups = [0, 0, 0, 1, 1, 2]
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    exact = sum(groups[a] == groups[b] for a, b in pairs) / len(pairs)
    assert uniform_neighbours(np.array([3, 2, 1]), 6) == pytest.approx(exact)
    assert uniform_neighbours(np.array([1]), 1) == 0.0


def test_file_order_keeps_neighbours_together():
    plan = Plan.make(manifest_of([50, 30, 20], [50, 30, 20], [1, 2]), batch_size=5, world_size=2, shuffle=False)
    quality = shuffle_quality(plan)
    # 10 windows of 10: 90 neighbours meet, but for the shards' border, which lies between windows
    assert quality.neighbours == pytest.approx(90 / 98)
    assert quality.uniform_neighbours == pytest.approx(9 / 99)


def test_a_full_shuffle_is_near_uniform():
    plan = Plan.make(
        Manifest.synthetic(num_shards=5, blocks_per_shard=1, rows_per_block=2000), batch_size=100, shuffle="full"
    )
    labels = np.arange(10_000) // 100
    quality = audit(plan, labels=labels).quality
    assert quality.neighbours == pytest.approx(quality.uniform_neighbours, rel=0.3)
    assert quality.classes_per_global_batch == pytest.approx(quality.uniform_classes_per_global_batch, rel=0.02)
    assert quality.num_classes == 100


@pytest.mark.parametrize(("lanes", "classes"), [(64, 75), (2048, 888)])
def test_the_designs_example_of_class_sorted_images(lanes, classes):
    """1,000 classes of 1,280 images in order, blocks of 80, G = 2048: what lanes do for the classes in a batch."""
    manifest = Manifest.synthetic(num_shards=16, blocks_per_shard=1000, rows_per_block=80)
    plan = Plan.make(manifest, batch_size=256, world_size=8, lanes=lanes)
    labels = Labels.from_array(np.arange(1_280_000) // 1280, 1_280_000)
    quality = shuffle_quality(plan, labels=labels)
    assert quality.classes_per_global_batch == pytest.approx(classes, rel=0.06)
    assert quality.uniform_classes_per_global_batch == pytest.approx(872, abs=1.0)
    assert quality.num_windows < quality.num_windows_in_epoch


def test_classes_per_micro_batch():
    plan = Plan.make(manifest_of([4] * 8, [4] * 8), batch_size=4, world_size=2, shuffle=False)
    quality = shuffle_quality(plan, labels=Labels.from_array(np.arange(32) // 4, 32))
    assert quality.classes_per_global_batch == 2.0  # a window is two blocks of one class each
    assert quality.classes_per_micro_batch == 2.0  # and a rank has every other sample of it
    assert quality.uniform_classes_per_micro_batch == pytest.approx(8 * (1 - comb(28, 4) / comb(32, 4)))


def test_an_epoch_without_steps_has_no_quality():
    with pytest.warns(UserWarning, match="leaves no step"):
        plan = Plan.make(manifest_of([3], [3]), batch_size=4, tail="drop")
    assert audit(plan).quality is None


def test_labels_must_be_one_a_sample():
    with pytest.raises(PlanError, match="one label a sample"):
        audit(Plan.make(manifest_of([3], [3]), batch_size=1), labels=[1, 2])


@pytest.fixture
def manifest(tmp_path):
    for shard in range(2):
        columns = {
            "label": pa.array([shard, 5, None, 5]),
            "name": pa.array(["a", "b", f"c{shard}", None]),
            "tokens": pa.array([[1], [2, 3], [], [4]]),
        }
        pq.write_table(pa.table(columns), tmp_path / f"{shard}.parquet", row_group_size=3)
    return build_manifest(str(tmp_path / "*.parquet"), tmp_path / "m")


def test_labels_are_read_from_the_shards(manifest):
    labels = read_labels(manifest, "label")
    assert sorted(labels.class_sizes.tolist()) == [1, 1, 2, 4]  # two of their own, two null, four times 5
    assert labels.codes[[1, 3, 5, 7]].tolist() == [labels.codes[1]] * 4
    assert sorted(read_labels(manifest, "name").class_sizes.tolist()) == [1, 1, 2, 2, 2]


def test_columns_that_are_no_labels(manifest):
    with pytest.raises(PlanError, match="column 'tokens' holds lists"):
        read_labels(manifest, "tokens")
    with pytest.raises((PlanError, ReadError), match="nothing_here"):
        read_labels(manifest, "nothing_here")


# -------------------------------------------------------------------------------------------------------------- trace


@pytest.mark.parametrize("num_workers", [0, 3])
def test_trace_shows_every_sample(num_workers):
    plan = Plan.make(manifest_of([4, 7], [4, 7], [1, 0, 1]), batch_size=2, world_size=3, accumulate=1)
    rows = list(trace(plan, num_workers=num_workers, epochs=2))
    for epoch in (0, 1):
        real = [
            (sample, place)
            for row in rows
            if row.epoch == epoch
            for sample, place, padding in zip(row.ids, row.places, row.is_padding, strict=True)
            if not padding
        ]
        expected = [(k, f"0.parquet:{k}") for k in range(4)] + [(4 + k, f"2.parquet:{k}") for k in range(7)]
        assert sorted(real) == expected
    assert {row.worker for row in rows} == set(range(2 if num_workers else 1))
    assert [(row.epoch, row.step, row.micro, row.rank) for row in rows] == sorted(
        (row.epoch, row.step, row.micro, row.rank) for row in rows
    )
    assert sum(sum(row.is_padding) for row in rows) == 2


def test_trace_follows_continue_into_the_next_epoch():
    plan = Plan.make(manifest_of([5], [5]), batch_size=4, tail="continue", shuffle=False)
    assert [row.ids for row in trace(plan)] == [(0, 1, 2, 3), (4, 0, 1, 2)]


def test_trace_refuses_large_sets():
    plan = Plan.make(Manifest.synthetic(num_shards=1, blocks_per_shard=30, rows_per_block=1000), batch_size=10)
    with pytest.raises(PlanError, match="too many samples to trace"):
        list(trace(plan))
