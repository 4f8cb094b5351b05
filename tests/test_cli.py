"""The commands index and inspect, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import COMMANDS, main
from shardstream.manifest import Manifest

PATIENCE_S = 60


def run(*arguments):
    """Runs the command in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="shardstream")


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for place in range(3):
        tokens = [[place] * k for k in range(5)]
        pq.write_table(pa.table({"tokens": tokens, "labels": tokens}), folder / f"{place}.parquet", row_group_size=2)
    return folder


# ---------------------------------------------------------------------------------------------------------------- index


def test_index_writes_a_manifest(shards, tmp_path):
    done = run("index", shards / "*.parquet", "-o", tmp_path / "m", "--tokens-column", "tokens")
    assert done.exit_code == 0, done.output
    manifest = Manifest.load(tmp_path / "m")
    assert manifest.num_samples == 15
    assert manifest.tokens_column == "tokens"
    assert "15 samples in 9 blocks of 3 shards" in done.stdout
    assert manifest.fingerprint in done.stdout
    assert done.stderr == ""


def test_index_as_json(shards, tmp_path):
    done = run("index", shards, "-o", tmp_path / "m", "--targets", "lm=labels", "--ignore-index", 1, "--json")
    manifest = Manifest.load(tmp_path / "m")
    assert json.loads(done.stdout) == {
        "manifest": str(tmp_path / "m"),
        "num_shards": 3,
        "num_blocks": 9,
        "num_samples": 15,
        "num_bytes": sum(path.stat().st_size for path in shards.iterdir()),
        "fingerprint": manifest.fingerprint,
        "warnings": [],
    }
    assert manifest.metadata == {"targets": {"lm": "labels"}, "ignore_index": 1}
    targets = [manifest.lists.read(shard, ["targets.lm"])["targets.lm"].tolist() for shard in range(3)]
    assert targets == [[0, 1, 2, 3, 4], [0] * 5, [0, 1, 2, 3, 4]]


def test_index_quietly(shards, tmp_path):
    done = run("index", shards, "-o", tmp_path / "m", "-q")
    assert (done.exit_code, done.output) == (0, "")


def test_index_keeps_the_order_and_takes_storage_options(shards, tmp_path):
    done = run(
        "index", *[shards / f"{k}.parquet" for k in (2, 0, 1)], "-o", tmp_path / "m", "--keep-order",
        "--storage-option", "retry_timeout_s=1.5", "--storage-option", 'x={"y": 1}',
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert Manifest.load(tmp_path / "m").urls == ["2.parquet", "0.parquet", "1.parquet"]


def test_index_updates(shards, tmp_path):
    assert run("index", shards, "-o", tmp_path / "old").exit_code == 0
    (shards / "1.parquet").rename(shards / "9.parquet")
    vanished = run("index", shards, "--update", tmp_path / "old", "-o", tmp_path / "new")
    assert vanished.exit_code == 1
    assert "1.parquet" in vanished.stderr
    assert not (tmp_path / "new").exists()
    done = run("index", shards, "--update", tmp_path / "old", "-o", tmp_path / "new", "--allow-vanished")
    assert done.exit_code == 0, done.output
    assert Manifest.load(tmp_path / "new").urls == ["0.parquet", "2.parquet", "9.parquet"]


def test_how_tokens_are_counted_needs_their_column(shards, tmp_path):
    for option in (("--pack", 4), ("--tokens-dtype", "uint16")):
        done = run("index", shards, "-o", tmp_path / "m", *option)
        assert done.exit_code == 2
        assert "--pack and --tokens-dtype need --tokens-column" in done.stderr
    assert run("index", shards, "-o", tmp_path / "m", "--tokens-column", "tokens").exit_code == 0
    assert run("index", shards, "-o", tmp_path / "n", "--update", tmp_path / "m", "--pack", 4).exit_code == 0


def test_another_manifest_needs_overwrite(shards, tmp_path):
    assert run("index", shards / "0.parquet", "-o", tmp_path / "m").exit_code == 0
    refused = run("index", shards, "-o", tmp_path / "m")
    assert refused.exit_code == 1
    assert "another manifest is there already" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert run("index", shards, "-o", tmp_path / "m", "--overwrite").exit_code == 0
    assert Manifest.load(tmp_path / "m").num_shards == 3


def test_a_fault_in_data_is_one_message_and_exit_1(shards, tmp_path):
    for name in ("bad.parquet", "worse.parquet"):
        (shards / name).write_bytes(b"no")
    done = run("index", shards, "-o", tmp_path / "m")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: 2 of 5 shards cannot be used:\n  - ")
    assert "bad.parquet" in done.stderr
    assert "worse.parquet" in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "m").exists()


def test_warnings_go_to_standard_error(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add(tmp_path / "x.txt", "x.txt")
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:1024])
    done = run("index", tmp_path / "a.tar", "-o", tmp_path / "m", "--json")
    assert done.exit_code == 0, done.output
    (warning,) = json.loads(done.stdout)["warnings"]
    assert "end-of-archive" in warning
    assert done.stderr == f"Warning: {warning}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["index"],
        ["index", "a.parquet"],
        ["index", "a.parquet", "-o", "m", "--targets", "lm"],
        ["index", "a.parquet", "-o", "m", "--targets", "lm=a", "--targets", "lm=b"],
        ["index", "a.parquet", "-o", "m", "--workers", "-1"],
        ["index", "a.parquet", "-o", "m", "--nope"],
        ["inspect"],
        ["nope"],
    ],
)
def test_wrong_usage_is_exit_2(arguments):
    assert run(*arguments).exit_code == 2


# -------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_as_json(shards, tmp_path):
    run("index", shards, "-o", tmp_path / "m", "--tokens-column", "tokens")
    done = run("inspect", tmp_path / "m", "--json", "--shards")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown["totals"]["num_samples"] == 15
    assert shown["totals"]["num_tokens"] == 30
    assert shown["totals"]["num_documents"] == 15
    assert shown["totals"]["num_without_tokens"] == 3
    assert shown["blocks"]["rows"] == {"min": 1, "median": 2, "max": 2}
    assert shown["formats"] == {"parquet": 3}
    assert shown["schema"][0]["name"] == "tokens"
    assert [shard["url"] for shard in shown["shards"]] == ["0.parquet", "1.parquet", "2.parquet"]
    assert sum(shard["num_samples"] for shard in shown["shards"]) == 15
    assert shown["warnings"] == []
    assert "shards" not in json.loads(run("inspect", tmp_path / "m", "--json").stdout)


def test_inspect_for_people(tmp_path):
    path = tmp_path / "odd[bold]name.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), path)
    run("index", path, "-o", tmp_path / "m")
    done = run("inspect", tmp_path / "m", "--shards")
    assert done.exit_code == 0, done.output
    text = "".join(done.stdout.split())
    assert "samples│2" in text
    assert "x│int64│0" in text
    assert "odd[bold]" in text


def test_inspect_warns_of_long_blocks(tmp_path):
    Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=100, run_rows=1).save(tmp_path / "m")
    done = run("inspect", tmp_path / "m")
    assert "Warning: 2 of 2 blocks are larger than 64 MiB" in " ".join(done.stdout.split())
    assert len(json.loads(run("inspect", tmp_path / "m", "--json").stdout)["warnings"]) == 1


def test_inspecting_what_is_no_manifest_is_exit_1(tmp_path):
    (tmp_path / "m").write_text("no")
    done = run("inspect", tmp_path / "m")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: this is not a manifest")


# ------------------------------------------------------------------------------------------------- the program itself


def start(*arguments, **options):
    command = [sys.executable, "-m", "shardstream", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_help_lists_every_command():
    done = start("--help")
    out, err = done.communicate(timeout=PATIENCE_S)
    assert (done.returncode, err) == (0, "")
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.fixture
def silent_server():
    """A shard that takes for ever: a server that accepts a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        yield server


def closed_by_peer(connection):
    """Waits until no process has the other end any more."""
    connection.settimeout(PATIENCE_S)
    while connection.recv(1 << 16):
        pass
    return True


@pytest.mark.parametrize(("num_workers", "num_shards"), [(0, 1), (1, 1), (1, 9)])
@pytest.mark.parametrize("to_group", [False, True])
def test_ctrl_c_ends_cleanly(silent_server, tmp_path, num_workers, num_shards, to_group):
    """By a signal to the program alone, and as a terminal does it, to all its processes; with more work to come."""
    port = silent_server.getsockname()[1]
    urls = [f"http://127.0.0.1:{port}/{shard}.parquet" for shard in range(num_shards)]
    started = start("index", *urls, "-o", tmp_path / "m", "--workers", num_workers, start_new_session=True)
    connection, _ = silent_server.accept()
    (os.killpg if to_group else os.kill)(started.pid, signal.SIGINT)
    out, err = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 130
    assert out == ""
    assert err.strip() == "Interrupted; nothing was written."
    assert list(tmp_path.iterdir()) == []
    assert closed_by_peer(connection)
    connection.close()


def test_workers_end_when_the_program_is_killed(silent_server, tmp_path):
    url = f"http://127.0.0.1:{silent_server.getsockname()[1]}/a.parquet"
    started = start("index", url, "-o", tmp_path / "m", "--workers", "1")
    connection, _ = silent_server.accept()
    started.kill()
    assert closed_by_peer(connection)
    connection.close()
    started.communicate(timeout=PATIENCE_S)
