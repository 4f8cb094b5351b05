"""``Evaluation`` in one process: every sample once, the same bits for every way of cutting it up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import DesyncError, PlanError
from shardstream.manifest import Manifest
from shardstream.torch import Batch, Evaluation
from shardstream.torch.batch import Place
from shardstream.torch.evaluation_report import exact_sum
from shardstream.torch.spool import IDS_PER_PART, Layout, Spool

SMALL = Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=5)
LARGE = Manifest.synthetic(num_shards=1000, blocks_per_shard=1, rows_per_block=1000)


def evaluated(manifest, batches, **options):
    """Adds (ids, losses, counts) batch by batch; the loss is a metric as well."""
    evaluation = Evaluation(manifest, **options)
    for ids, losses, counts in batches:
        evaluation.add(ids, sums={"lm": losses}, counts={"lm": counts}, metrics={"loss": losses})
    return evaluation.result()


floats = st.floats(-1e300, 1e300) | st.floats(-10, 10)
tables = st.lists(st.tuples(floats, st.integers(0, 1 << 40)), min_size=20, max_size=20)


@given(tables, st.lists(st.lists(st.integers(0, 19), max_size=9), max_size=12), st.sampled_from([1, 1000, 1 << 20]))
def test_each_sample_counts_once_however_it_was_cut_up(table, cut, memory_num_bytes):
    """Spilled or not, in any batches, repeated or not: the correctly rounded sum over the samples that came."""
    batches = [(ids, [table[i][0] for i in ids], [table[i][1] for i in ids]) for ids in cut]
    report = evaluated(SMALL, batches, memory_num_bytes=memory_num_bytes)
    came = sorted({sample for ids in cut for sample in ids})
    assert report.num_samples == len(came)
    assert report.missing.num_ids == 20 - len(came)
    assert report.num_rows == sum(map(len, cut))
    if not batches:
        assert report.heads == report.metrics == {}
        return
    total = math.fsum(table[i][0] for i in came).hex()
    assert (report.heads["lm"].sum.hex(), report.metrics["loss"].sum.hex()) == (total, total)
    assert report.heads["lm"].count == sum(table[i][1] for i in came)
    assert report.metrics["loss"].count == len(came)


@pytest.mark.parametrize("memory_num_bytes", [1, 20_000, 1 << 30])
def test_ids_from_many_ranges(memory_num_bytes, tmp_path):
    """More samples than a range has ids; a spool that spills is the same as one that does not."""
    ids = np.random.default_rng(0).permutation(1_000_000)[:3000]
    evaluation = Evaluation(LARGE, memory_num_bytes=memory_num_bytes, directory=str(tmp_path))
    for part in np.split(ids, 30):
        evaluation.add(part, metrics={"x": np.sqrt(part)})
        assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left whatever happens
    assert (evaluation._spool.num_bytes_on_disk > 0) == (memory_num_bytes < 1 << 30)
    assert len(evaluation._spool.parts()) == 1_000_000 // IDS_PER_PART + 1
    report = evaluation.result()
    blocks = [math.fsum(np.sqrt(np.sort(ids[ids // IDS_PER_PART == part]))) for part in range(4)]
    assert report.metrics["x"].sum == math.fsum(blocks)
    assert report.missing.num_ids == 997_000
    missing = np.setdiff1d(np.arange(1000), ids)[:20].tolist()
    assert report.missing.shown == tuple((i, f"shard-{i // 1000:06d}.parquet:{i % 1000}") for i in missing)


def test_a_subset_may_be_what_is_expected():
    ids = [3, 700_000, 999_999]
    report = evaluated(LARGE, [([700_000, 3, 4], [1.0, 2.0, 64.0], [1, 1, 1])], expected_ids=ids)
    assert (report.num_samples, report.num_expected, report.is_complete) == (2, 3, False)
    assert report.missing.shown == ((999_999, "shard-000999.parquet:999"),)
    assert report.extra.shown == ((4, "shard-000000.parquet:4"),)
    assert report.heads["lm"].sum == 3.0  # what was not expected does not count
    whole = evaluated(LARGE, [(ids, [1.0, 2.0, 3.0], [1, 1, 1])], expected_ids=torch.tensor(ids))
    assert whole.is_complete


def test_ids_that_do_not_exist_are_extra():
    report = evaluated(SMALL, [([-1, 0, 20, 1 << 40], [1.0] * 4, [1] * 4)])
    nowhere = "not in the manifest"
    assert report.extra.shown == ((-1, nowhere), (20, nowhere), (1 << 40, nowhere))
    assert (report.num_samples, report.missing.num_ids) == (1, 19)


def test_only_the_first_twenty_are_named():
    report = evaluated(LARGE, [(range(1000, 1030), [1.0] * 30, [1] * 30)] * 2)
    assert report.duplicates.num_ids == 30
    assert report.duplicates.shown == tuple((1000 + k, f"shard-000001.parquet:{k}") for k in range(20))
    assert report.missing.num_ids == 999_970


def test_different_values_of_one_sample_are_refused():
    with pytest.raises(DesyncError) as refused:
        evaluated(SMALL, [([0, 7], [1.0, 2.5], [1, 3]), ([1, 7], [1.0, 2.5], [1, 4]), ([7, 0], [9.0, 1.5], [3, 1])])
    assert str(refused.value) == (
        "2 samples were evaluated more than once with different values: "
        "sum 'lm' of sample 0 (shard-000000.parquet:0) is 1.0 on rank 0 and 1.5 on rank 0; "
        "count 'lm' of sample 7 (shard-000000.parquet:7) is 3 on rank 0 and 4 on rank 0; "
        "put the model into eval(), compare the ranks' weights, or accept rounding with rtol="
    )
    many = list(range(20))
    with pytest.raises(DesyncError, match=r"20 samples were .*; and 15 more; put"):
        evaluated(SMALL, [(many, [1.0] * 20, [1] * 20), (many, [2.0] * 20, [1] * 20)])


def test_rounding_is_accepted_on_request_only():
    rounded = [([0], [1.0], [1]), ([0], [1.0 + 1e-12], [1])]
    with pytest.raises(DesyncError, match=r"1\.0 on rank 0 and 1\.000000000001 on rank 0"):
        evaluated(SMALL, rounded)
    assert evaluated(SMALL, rounded, rtol=1e-9).heads["lm"].sum == 1.0
    with pytest.raises(DesyncError, match="count 'lm'"):
        evaluated(SMALL, [([0], [1.0], [1]), ([0], [1.0], [2])], rtol=1.0)


def test_nan_and_infinity():
    nan, infinity = math.nan, math.inf
    other_nan = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]
    report = evaluated(SMALL, [([0, 1], [nan, -0.0], [1, 1]), ([0, 1], [other_nan, 0.0], [1, 1])])
    assert math.isnan(report.heads["lm"].sum)
    assert report.duplicates.num_ids == 2
    assert evaluated(SMALL, [([0, 1], [infinity, 1.0], [1, 1])]).heads["lm"].sum == infinity
    assert math.isnan(evaluated(SMALL, [([0, 1], [infinity, -infinity], [1, 1])]).heads["lm"].sum)
    assert exact_sum([1e308, 1e308]) == infinity
    assert math.isnan(evaluated(SMALL, [([0], [0.0], [0])]).heads["lm"].mean)


def test_values_on_any_device_and_of_any_type():
    evaluation = Evaluation(SMALL)
    losses = torch.tensor([1.5, 2.5], dtype=torch.bfloat16, requires_grad=True)
    evaluation.add(torch.tensor([1, 0]), sums={"lm": losses}, counts={"lm": np.array([3, 1], np.uint8)})
    evaluation.add([2], sums={"lm": [1]}, counts={"lm": [True]})
    evaluation.add([], sums={"lm": []}, counts={"lm": []})
    report = evaluation.result()
    assert (report.heads["lm"].sum, report.heads["lm"].count) == (5.0, 5)


def batch_of(ids, padding, counts):
    place = Place(position=0, cursor=None, window_index=0, micro_index=0, is_last_in_window=True)
    return Batch(
        {"x": torch.zeros(len(ids))},
        sample_ids=torch.tensor(ids),
        is_padding=torch.tensor(padding),
        valid_tokens={"lm": torch.tensor(counts), "aux": torch.tensor(counts)},
        place=place,
    )


def test_padding_rows_of_a_batch_are_left_out():
    evaluation = Evaluation(SMALL)
    losses = torch.tensor([1.0, 2.0, 100.0])
    evaluation.add_batch(batch_of([4, 5, 4], [False, False, True], [2, 0, 0]), sums={"lm": losses})
    report = evaluation.result()
    assert (report.heads["lm"].sum, report.heads["lm"].count) == (3.0, 2)
    assert (report.num_samples, report.num_rows, report.num_padding, report.duplicates.num_ids) == (2, 2, 1, 0)


def test_the_evaluation_audit():
    """Batches of 2 and 8 targets: the mean of their means weighs the second one's targets a quarter of the first's."""
    evaluation = Evaluation(SMALL, expected_ids=[0, 1, 2])
    evaluation.add([0], sums={"lm": [8.0]}, counts={"lm": [2]}, metrics={"correct": [True]})
    evaluation.add(
        [1, 2, 0],
        sums={"lm": [6.0, 2.0, 8.0]},
        counts={"lm": [6, 2, 0]},
        metrics={"correct": [False, False, True]},
        is_padding=[0, 0, 1],
    )
    report = evaluation.result()
    lm, correct = report.heads["lm"], report.metrics["correct"]
    assert (lm.sum, lm.count, lm.mean) == (16.0, 10, 1.6)
    assert lm.mean_of_batch_means == (8 / 2 + 8 / 8) / 2
    assert lm.mean_of_rank_means == 1.6
    assert (correct.mean, correct.mean_of_batch_means, correct.mean_of_rows) == (1 / 3, 0.5, 0.5)
    told = json.loads(json.dumps(report.to_dict()))
    assert told["heads"]["lm"]["off"]["mean_of_batch_means"] == pytest.approx(0.9)
    assert told["metrics"]["correct"]["off"]["mean_of_rows"] == pytest.approx(1 / 6)
    assert told["is_complete"] is True
    assert told["missing"] == {"num_ids": 0, "shown": []}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sums": {"lm": [1.0]}}, r"every head needs sums and counts: expected \['lm'\], found \[\]"),
        ({"sums": {"lm": [1.0]}, "counts": {"lm": [1.0]}}, "count 'lm' must be whole numbers: found float64"),
        ({"sums": {"lm": [1.0]}, "counts": {"lm": [-1]}}, "counts must not be negative"),
        ({"sums": {"lm": [1.0, 2.0]}, "counts": {"lm": [1]}}, r"sum 'lm' has the wrong shape: .*: \[1\], found \[2\]"),
        (
            {"metrics": {"x": [[1.0]]}},
            r"metric 'x' has the wrong shape: expected one number a sample: \[1\], found \[1, 1\]",
        ),
        (
            {"metrics": {"y": [1.0]}},
            r"heads and metrics must be the same all along: expected \[\] and \['x'\], found \[\] and \['y'\]",
        ),
        ({"metrics": {"x": [1.0]}, "is_padding": [0.5]}, "is_padding must be whole numbers"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    evaluation = Evaluation(SMALL)
    if "sums" not in given:
        evaluation.add([3], metrics={"x": [1.0]})
    with pytest.raises(PlanError, match=message):
        evaluation.add([0], **given)
    evaluation.add([0], metrics={"x": [1.0]})  # nothing of it was taken
    assert evaluation.result().num_rows == 1 + ("sums" not in given)


def test_the_result_is_asked_for_once():
    evaluation = Evaluation(SMALL)
    evaluation.result()
    with pytest.raises(PlanError, match="asked for before"):
        evaluation.result()
    with pytest.raises(PlanError, match="this evaluation is over"):
        evaluation.add([0], metrics={"x": [1.0]})


def test_the_disk_is_given_back_on_errors(tmp_path):
    evaluation = Evaluation(SMALL, memory_num_bytes=1, directory=str(tmp_path))
    evaluation.add([0], metrics={"x": [1.0]})
    evaluation.add([0], metrics={"x": [2.0]})
    file = evaluation._spool._file
    with pytest.raises(DesyncError):
        evaluation.result()
    assert file.closed


def test_a_spool_gives_rows_back_in_the_order_they_came():
    layout = Layout((), ("x",))
    spool = Spool(layout.num_words, memory_num_bytes=100)
    values = iter(range(100))
    for ids in ([5, 3], [5], [IDS_PER_PART, -1, 5], [3]):
        x = np.array([float(next(values)) for _ in ids])
        spool.add(layout.rows(np.array(ids), {("metric", "x"): x}))
    assert spool.parts() == [-1, 0, 1]
    rows = spool.read(0)
    assert rows[:, 0].tolist() == [5, 3, 5, 5, 3]
    assert layout.value(rows, "metric", "x").tolist() == [0.0, 1.0, 2.0, 5.0, 6.0]
    assert spool.read(7).shape == (0, layout.num_words)
    spool.close()
