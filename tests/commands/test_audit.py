"""``shardstream audit`` as a user runs it."""

from __future__ import annotations

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.consumed import ConsumedLog
from shardstream.index import build_manifest
from shardstream.plan import Plan


def run(*arguments):
    return CliRunner().invoke(main, ["audit", *map(str, arguments)], prog_name="shardstream")


@pytest.fixture
def manifest(tmp_path):
    for shard in range(3):
        table = pa.table({"label": [shard] * 10, "tokens": [[row] for row in range(10)]})
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=4)
    return build_manifest(str(tmp_path / "*.parquet"), tmp_path / "m")


def test_a_sound_plan(manifest):
    done = run(manifest.path, "--world-size", 4, "--batch-size", 2, "--num-workers", 2, "--epochs", 2)
    assert done.exit_code == 0, done.output
    assert "Verdict: every promise holds: exactly once, disjoint, equal steps" in done.stdout
    assert "Reading: each of 9 blocks is opened" in done.stdout
    assert "num_workers=0" in done.stdout  # what would lower it
    assert "uniform shuffle" in done.stdout
    assert "Memory: a reader needs about " in done.stdout


def test_json(manifest):
    done = run(manifest.path, "--world-size", 4, "--batch-size", 2, "--label", "label", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["holds"] is True
    assert report["violations"] == []
    assert report["settings"]["global_batch"] == 8
    assert [rank["num_samples"] + rank["num_padding"] for rank in report["ranks"]] == [8] * 4
    assert report["epochs"][0]["num_padding"] == 2
    assert report["quality"]["num_classes"] == 3
    assert report["quality"]["classes_per_global_batch"] > 2
    assert report["reading"]["open_num_bytes"] > 0
    assert report["memory"]["num_open_runs"] > 0


@pytest.mark.parametrize("shuffle", ["true", "false", "full", "torch"])
def test_every_shuffle(manifest, shuffle):
    done = run(manifest.path, "--shuffle", shuffle, "--batch-size", 4, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["settings"]["shuffle"] == {"true": True, "false": False}.get(shuffle, shuffle)


def test_trace(manifest):
    options = (manifest.path, "--world-size", 2, "--batch-size", 4, "--shuffle", "false", "--trace")
    rows = json.loads(run(*options, "--json").stdout)["trace"]
    assert rows[0] == {
        "epoch": 0,
        "step": 0,
        "rank": 0,
        "worker": 0,
        "micro": 0,
        "ids": [0, 2, 4, 6],
        "places": ["0.parquet:0", "0.parquet:2", "0.parquet:4", "0.parquet:6"],
        "is_padding": [False] * 4,
    }
    shown = run(*options).stdout
    assert "0 2 4 6" in shown
    assert "25 27 29" in shown
    assert "(24)" in shown or "(25)" in shown  # padding in parentheses


def test_synthetic(tmp_path):
    done = run("--synthetic", "1000x10x1000", "--world-size", 8, "--batch-size", 16, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["settings"]["num_samples"] == 10**7
    assert "bijection by construction" in report["proofs"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either MANIFEST or --synthetic"),
        (("m", "--synthetic", "1x1x1"), "give either MANIFEST or --synthetic"),
        (("--synthetic", "1x1"), "not of the form SHARDSxBLOCKSxROWS"),
        (("--synthetic", "1x0x1"), "not of the form SHARDSxBLOCKSxROWS"),
        (("--synthetic", "1x1x9", "--label", "x"), "--label reads shards"),
        (("--synthetic", "1x1x9", "--world-size", "0"), "0 is not in the range"),
        (("--synthetic", "1x1x9", "--batch-size", "0"), "0 is not in the range"),
        (("--synthetic", "1x1x9", "--tail", "wrap"), "'wrap' is not one of"),
    ],
)
def test_wrong_usage(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--global-batch", 30, "--world-size", 8, "--batch-size", 2),
            "a global batch of 30 is not a multiple of 8 ranks",
        ),
        (("--tail", "repeat", "--lanes", 2), "has one lane"),
        (("--consumed", "no/such/folder"), "no log of consumed samples"),
        (("--label", "nothing_here"), "nothing_here"),
    ],
)
def test_faults(manifest, arguments, message):
    done = run(manifest.path, *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_a_missing_manifest(tmp_path):
    done = run(tmp_path / "none")
    assert done.exit_code == 1
    assert "there is no manifest here" in done.stderr
    assert "check the path, or make one with `shardstream index`" in done.stderr


def consume(folder, manifest, *, forget=None):
    plan = Plan.make(manifest, batch_size=4, world_size=2)
    for rank in range(2):
        with ConsumedLog(folder, rank, 2, 0, plan.cursor(), plan) as log:
            for batch in plan.micro_batches(rank, plan.cursor()):
                ids = plan.sample_ids(0, batch.positions[~batch.is_padding])
                ids = ids[ids != forget]
                log.window(epoch=0, position=batch.position, ids=ids, num_padding=int(batch.is_padding.sum()))


def test_consumed(manifest, tmp_path):
    consume(tmp_path / "logs", manifest)
    done = run(manifest.path, "--consumed", tmp_path / "logs")
    assert done.exit_code == 0, done.output
    assert "Verdict: each sample was trained on exactly once in epoch(s) 0" in done.stdout


def test_consumed_with_a_sample_missing(manifest, tmp_path):
    consume(tmp_path / "logs", manifest, forget=23)
    done = run(manifest.path, "--consumed", tmp_path / "logs")
    assert done.exit_code == 1
    assert "Violation: epoch 0: 1 missing: 23 (2.parquet:3)" in done.stdout
    assert "Verdict: 1 violation(s)" in done.stdout
    report = json.loads(run(manifest.path, "--consumed", tmp_path / "logs", "--json").stdout)
    assert (report["holds"], report["epochs"][0]["missing"]) == (False, ["23 (2.parquet:3)"])


def test_consumed_names_keys_of_tar_samples(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for key in ("cat/001", "cat/002", "dog/001"):
            member = tarfile.TarInfo(f"{key}.txt")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    manifest = build_manifest(str(tmp_path / "a.tar"), tmp_path / "m")
    consume(tmp_path / "logs", manifest, forget=2)
    done = run(manifest.path, "--consumed", tmp_path / "logs")
    assert "1 missing: 2 (a.tar:2, key dog/001)" in done.stdout
