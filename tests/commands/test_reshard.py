"""The commands reshard and tokenize, as a user runs them: wrong arguments, dry runs, Ctrl-C, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.manifest import Manifest

PATIENCE_S = 100


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="shardstream")


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for place in range(2):
        table = pa.table({"x": range(place * 50, place * 50 + 50), "text": [os.urandom(100).hex() for _ in range(50)]})
        pq.write_table(table, folder / f"{place}.parquet", row_group_size=10)
    return folder


def test_reshard_as_json_with_a_manifest_elsewhere(shards, tmp_path):
    small = ("--shard-size", "3KiB", "--workers", 0)
    done = run("reshard", shards, tmp_path / "out", *small, "-o", tmp_path / "m.parquet", "--column", "x", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    manifest = Manifest.load(tmp_path / "m.parquet")
    assert told["num_samples"] == manifest.num_samples == 100
    assert told["num_tokens"] is None
    assert told["warnings"] == []
    assert told["fingerprint"] == manifest.fingerprint
    assert [column.name for column in manifest.columns] == ["x"]
    again = run("reshard", shards, tmp_path / "out", *small, "-o", tmp_path / "m.parquet", "--column", "x")
    assert again.exit_code == 0, again.output
    assert f"{told['num_shards']} of which were whole already" in again.stdout


def test_a_manifest_may_have_any_name(shards, tmp_path):
    assert run("index", shards, "-o", tmp_path / "mine.parquet", "--workers", 0).exit_code == 0
    done = run("reshard", tmp_path / "mine.parquet", tmp_path / "out", "--workers", 0, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_samples"] == 100


def test_a_dry_run_writes_nothing(shards, tmp_path):
    done = run("reshard", shards, tmp_path / "out", "--dry-run", "--shuffle", "--workers", 0)
    assert done.exit_code == 0, done.output
    assert "nothing was" in done.stdout
    assert not (tmp_path / "out").exists()
    told = json.loads(run("reshard", shards, tmp_path / "out", "--dry-run", "--json", "--workers", 0).stdout)
    assert told["num_shards"] == 1
    assert told["schema"] == {"x": "int64", "text": "string"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["reshard"],
        ["reshard", "a.parquet"],
        ["reshard", "a.parquet", "out", "--format", "zip"],
        ["reshard", "a.parquet", "out", "--shard-size", "much"],
        ["reshard", "a.parquet", "out", "--shard-size", "0"],
        ["reshard", "a.parquet", "out", "--seed", "1"],
        ["reshard", "a.parquet", "out", "--spill-dir", "x"],
        ["tokenize", "a.parquet", "out"],
        ["tokenize", "a.parquet", "out", "--tokenizer", "nothere.json"],
        ["tokenize", "a.parquet", "out", "--tokenizer", __file__, "--dtype", "int8"],
    ],
)
def test_wrong_usage_is_exit_2(arguments):
    assert run(*arguments).exit_code == 2


def test_faults_are_exit_1_and_one_message(shards, tmp_path):
    for arguments, message in (
        (("reshard", tmp_path / "nothere", tmp_path / "out"), "no shards found"),
        (("reshard", shards, shards), "input folder"),
        (("reshard", shards, tmp_path), "not empty"),
        (("tokenize", shards, tmp_path / "out", "--tokenizer", __file__), "no tokenizer.json"),
    ):
        done = run(*arguments, "--workers", 0)
        assert done.exit_code == 1, done.output
        assert done.stderr.startswith("Error: ")
        assert message in done.stderr
        assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "more"),
    [(signal.SIGKILL, []), (signal.SIGINT, []), (signal.SIGKILL, ["--shuffle", "--memory", "256KiB"])],
)
def test_an_interrupted_command_goes_on(number, more, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for place in range(8):
        pq.write_table(pa.table({"x": [os.urandom(4096) for _ in range(250)]}), folder / f"{place}.parquet")
    command = [sys.executable, "-m", "shardstream", "reshard", str(folder), "OUT", "--shard-size", "100k", *more]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = run(*[str(whole) if word == "OUT" else word for word in command[3:]], "--workers", 0)
    assert done.exit_code == 0, done.output
    command[command.index("OUT")] = str(parts)
    process = subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        records = parts / ".shardstream" / "parts"
        while len(list(records.glob("*.json"))) < 5:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        _, error = process.communicate(timeout=PATIENCE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in error
    time.sleep(1)  # workers of a killed process end by themselves; the lock ended with it
    again = run(*command[3:], "--workers", 0, "--json")
    assert again.exit_code == 0, again.output
    assert 5 <= json.loads(again.stdout)["num_resumed"] < json.loads(again.stdout)["num_shards"]
    names = sorted(path.name for path in whole.glob("0*.parquet"))
    assert names == sorted(path.name for path in parts.glob("0*.parquet"))
    assert all((whole / name).read_bytes() == (parts / name).read_bytes() for name in names)
