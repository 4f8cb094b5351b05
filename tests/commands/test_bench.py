"""``shardstream bench`` measures a user's own data and says what limits it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.manifest import Manifest
from shardstream.torch.speed import StageSpeed, judged
from tests.support.corpora import parquet_manifest, tar_manifest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], prog_name="shardstream")


@pytest.fixture
def path(tmp_path):
    made = parquet_manifest(tmp_path, [300, 200], 50, tokens_column="tokens")
    return made.save(tmp_path / "m").path


def test_a_table_a_limit_and_advice(path):
    done = run(path, "--batch-size", 10, "--seconds", 0.5, "--num-threads", 2)
    assert done.exit_code == 0, done.output
    for stage in ("storage alone", "decoding, 1 thread", "decoding, 2 threads", "with rows gathered", "0 workers"):
        assert stage in done.stdout
    assert "\nLimit: " in done.stdout
    assert "larger row groups cost less to open" in done.stdout


def test_json_with_workers(path):
    options = ("--batch-size", 5, "--accumulate", 2, "--world-size", 2, "--lanes", 4, "--column", "tokens")
    done = run(path, *options, "--num-workers", 1, "--num-threads", 1, "--seconds", 0.6, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["settings"]["lanes"] == 4
    assert report["settings"]["columns"] == ["tokens"]
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert len(stages) == 5
    assert all(stage["samples_per_s"] > 0 and stage["bytes_per_s"] > 0 for stage in stages.values())
    assert stages["decoding, 1 thread"]["tokens_per_s"] == pytest.approx(
        2 * stages["decoding, 1 thread"]["samples_per_s"]
    )
    for workers in ("0 workers", "1 worker"):
        assert stages[f"the whole loader, {workers}"]["first_batch_s"] > 0
        assert stages[f"the whole loader, {workers}"]["read_amplification"] >= 1


def test_tars(tmp_path):
    manifest = tar_manifest(tmp_path, [20, 30]).save(tmp_path / "m")
    done = run(manifest.path, "--seconds", 0.3, "--no-shuffle", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["stages"][0]["tokens_per_s"] is None


def test_data_that_cannot_be_read_is_a_fault_in_data(path, tmp_path):
    (tmp_path / "part-00000.parquet").write_bytes(b"PAR1 no longer")
    done = run(path, "--seconds", 0.3)
    assert done.exit_code == 1
    assert "part-00000.parquet" in done.output


@pytest.mark.parametrize("options", [("--seconds", 0), ("--batch-size", 0), ("--num-workers", -1)])
def test_wrong_usage(path, options):
    assert run(path, *options).exit_code == 2


# ------------------------------------------------------------------------------------------------ what it says

STAGES = (
    "storage alone",
    "decoding, 1 thread",
    "decoding, 4 threads",
    "with rows gathered",
    "the whole loader, 0 workers",
)


@pytest.mark.parametrize(
    ("speeds", "limit", "advice"),
    [
        ((100, 300, 900, 95, 90), "storage", "cache_dir"),
        ((999, 300, 310, 290, 280), "decoding", "lighter compression"),
        ((999, 100, 310, 290, 280), "decoding", "more threads"),
        ((999, 300, 900, 200, 190), "gathering rows", "fewer lanes"),
        ((999, 300, 900, 600, 190), "making batches", "larger micro-batches"),
    ],
)
def test_the_slowest_stage_is_the_limit(speeds, limit, advice):
    stages = [StageSpeed(stage, speed, None, speed) for stage, speed in zip(STAGES, speeds, strict=True)]
    found, texts = judged(stages, sized(2 << 20), 4)
    assert found.startswith(limit)
    assert advice in " ".join(texts)


def sized(block_num_bytes):
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=10, rows_per_block=100)
    return replace(manifest, block_num_bytes=np.full(10, block_num_bytes, np.int64))


def test_the_layout_is_judged():
    stages = [StageSpeed(stage, 100.0, None, 1.0) for stage in STAGES]
    assert not any("blocks of" in text for text in judged(stages, sized(2 << 20), 4)[1])
    assert any("smaller row groups" in text for text in judged(stages, sized(100 << 20), 4)[1])
    stages[-1] = replace(stages[-1], read_amplification=1.5)
    assert any("opened 1.50 times" in text for text in judged(stages, sized(10_000), 4)[1])


@pytest.mark.parametrize(("with_workers", "text"), [(300.0, "workers: 3.0 times"), (50.0, "no workers: 2.0 times")])
def test_workers_are_judged(with_workers, text):
    stages = [StageSpeed(stage, 100.0, None, 1.0) for stage in STAGES]
    stages.append(StageSpeed("the whole loader, 2 workers", with_workers, None, 1.0))
    assert any(advice.startswith(text) for advice in judged(stages, sized(2 << 20), 4)[1])
