"""``Evaluation`` over real gloo processes: the same bits for every number of ranks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from shardstream.errors import ShardStreamError
from shardstream.manifest import Manifest
from shardstream.torch import Evaluation, StreamingDataset, StreamingLoader
from tests.support.corpora import manifest_of_files, parquet_manifest
from tests.support.processes import run_ranks

pytestmark = pytest.mark.distributed

LARGE = {"num_shards": 1000, "blocks_per_shard": 1, "rows_per_block": 1000}


def exact(report):
    """What must have the same bits everywhere."""
    means = {**report.heads, **report.metrics}
    return {name: (mean.sum.hex(), mean.count, mean.mean.hex()) for name, mean in means.items()}, report.num_samples


def losses_of(uids):
    """A loss and a number of targets for each sample, whoever computes it."""
    return torch.sin(uids.double()) * 10.0 ** (uids % 30 - 15), uids % 5


def evaluate(rank, manifest, tail):
    dataset = StreamingDataset(manifest, batch_size=2, tail=tail, lanes=1, columns=["uid"])
    evaluation = Evaluation(manifest, memory_num_bytes=200)
    for batch in StreamingLoader(dataset):
        sums, counts = losses_of(batch["uid"])
        evaluation.add_batch(batch, sums={"lm": sums}, counts={"lm": counts}, metrics={"loss": sums})
    report = evaluation.result(timeout_s=20.0)
    return exact(report), report


def test_the_same_bits_for_every_number_of_ranks(tmp_path):
    manifest = parquet_manifest(tmp_path, [9, 0, 14])
    ((alone, _),) = run_ranks(evaluate, 1, manifest, "pad")
    assert alone[1] == 23
    for world_size in (2, 3, 4):
        for tail in ("pad", "uneven") if world_size != 3 else ("repeat", "pad"):
            found = run_ranks(evaluate, world_size, manifest, tail)
            assert [values for values, _ in found] == [alone] * world_size
            reports = [report for _, report in found]
            assert all(report == reports[0] for report in reports)
            assert reports[0].is_complete
            assert reports[0].world_size == world_size
            # 23 samples on 3 ranks: DistributedSampler's padding evaluates one of them twice
            assert reports[0].duplicates.num_ids == (1 if tail == "repeat" else 0)


@pytest.fixture
def case_c52(tmp_path):
    correct = [1, 1, 1, 0, 1, 1, 0, 1, 0, 1]
    table = pa.table({"uid": range(10), "correct": correct, "n_tok": range(1, 11)})
    pq.write_table(table, tmp_path / "part-00000.parquet")
    return manifest_of_files([tmp_path / "part-00000.parquet"])


def accuracy(rank, manifest, tail):
    dataset = StreamingDataset(manifest, batch_size=2, shuffle=False, tail=tail)
    evaluation = Evaluation(manifest)
    for batch in StreamingLoader(dataset):
        tokens = torch.where(batch.is_padding, 0, batch["n_tok"])
        evaluation.add_batch(
            batch, sums={"lm": tokens.double()}, counts={"lm": tokens}, metrics={"accuracy": batch["correct"]}
        )
    return evaluation.result(timeout_s=20.0)


@pytest.mark.parametrize(
    ("tail", "num_padding", "num_duplicates", "naive"),
    [("pad", 2, 0, 8 / 12), ("uneven", 0, 0, 0.7), ("repeat", 0, 2, 0.75)],
)
def test_case_c52_padded_samples_are_not_counted(case_c52, tail, num_padding, num_duplicates, naive):
    reports = run_ranks(accuracy, 3, case_c52, tail)
    assert reports[0].metrics["accuracy"].mean == 7 / 10
    assert reports[0].heads["lm"].count == 55
    assert (reports[0].num_samples, reports[0].num_padding) == (10, num_padding)
    assert reports[0].duplicates.num_ids == num_duplicates
    assert reports[0].metrics["accuracy"].mean_of_rows == pytest.approx(naive, abs=1e-12)
    assert reports[0].is_complete
    assert [report.to_dict() for report in reports[1:]] == [reports[0].to_dict()] * 2


def spread(rank, world_size):
    """Ids over many ranges; every third one on two ranks; the last rank has none if there are more than two."""
    ids = np.arange(0, 1_000_000, 333)
    holders = max(world_size - 1, 1) if world_size > 2 else world_size
    mine = ids[(ids % holders == rank) | ((ids % 3 == 0) & ((ids + 1) % holders == rank))]
    evaluation = Evaluation(Manifest.synthetic(**LARGE), expected_ids=ids, memory_num_bytes=5000)
    for part in np.array_split(np.random.default_rng(rank).permutation(mine), 7):
        if len(part):
            evaluation.add(part, sums={"lm": np.log1p(part)}, counts={"lm": part % 11}, metrics={"x": np.sqrt(part)})
    return exact(evaluation.result(timeout_s=20.0))


def test_many_ranges_of_ids_and_ranks_without_samples():
    (alone,) = run_ranks(spread, 1, 1)
    assert alone[1] == 3004
    for world_size in (2, 3, 4):
        assert run_ranks(spread, world_size, world_size) == [alone] * world_size


def outcome(evaluation, **options):
    try:
        return evaluation.result(**{"timeout_s": 20.0, **options}).num_samples
    except ShardStreamError as error:
        return f"{type(error).__name__}: {error}"


def disagreements(rank):
    """Every rank raises the same error, and the ranks can go on afterwards."""
    manifest = Manifest.synthetic(**LARGE)
    odd = rank == 1
    values, heads, expected, nothing, subset = (
        Evaluation(manifest, expected_ids=ids)
        for ids in ([7, 999_000], None, [0, 1, 2] if odd else [0, 1], None, [0, 1])
    )
    values.add([7, 999_000], metrics={"x": [1.0, 3.0 if odd else 2.0]})
    heads.add([0], metrics={"y" if odd else "x": [1.0]})
    expected.add([0], metrics={"x": [1.0]})
    group = dist.new_group([0, 2])
    found = [outcome(values), outcome(heads), outcome(expected), outcome(nothing)]
    if not odd:
        subset.add([rank // 2], metrics={"x": [1.0]})
        found.append(outcome(subset, group=group))
    return found


def test_ranks_that_disagree():
    first, second, third = run_ranks(disagreements, 3)
    assert first == third
    assert first[:4] == second
    assert first[0].startswith(
        "DesyncError: 1 samples were evaluated more than once with different values: metric 'x' of sample 999000 "
        "(shard-000999.parquet:0) is 2.0 on rank 0 and 3.0 on rank 1; put the model into eval()"
    )
    assert first[1] == (
        "DesyncError: ranks evaluated different heads and metrics: "
        "expected [[], ['x']] as on rank 0, found [[], ['y']] on rank 1"
    )
    assert first[2].startswith("DesyncError: ranks evaluated different expected_ids: expected ")
    assert first[3:] == [0, 2]


def gone(rank, when):
    """Rank 1 goes before it asks for the result, or when it should send its rows."""
    evaluation = Evaluation(Manifest.synthetic(**LARGE), expected_ids=[0, 1])
    evaluation.add([rank % 2], metrics={"x": [1.0]})
    if rank == 1 and when == "before":
        return None
    if rank == 1:
        evaluation._own = _fail
    try:
        return outcome(evaluation, timeout_s=2.0)
    except OSError:
        return None


def _fail(part):
    raise OSError("the disk is full")


def test_a_rank_that_never_asks_is_named_within_the_deadline():
    found = run_ranks(gone, 3, "before", timeout_s=40.0)
    assert found[1] is None
    for text in (found[0], found[2]):
        assert text.startswith(
            "TopologyError: 2 of 3 ranks came to Evaluation.result within 2 s: expected all of them; missing 1"
        )


def test_a_rank_that_fails_on_its_way_leaves_nobody_waiting():
    found = run_ranks(gone, 3, "on its way", timeout_s=40.0)
    assert found[1] is None
    assert found[0].startswith(
        "DesyncError: the evaluation could not be summed up: expected rank 1 to send rows within 2 s"
    )
    assert found[2].startswith("DesyncError: the evaluation could not be summed up: expected rank 0 to")
