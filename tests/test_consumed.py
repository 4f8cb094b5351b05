"""The log of what was trained on: what is written, what a killed process leaves, what a reader refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shardstream.consumed import ConsumedLog, id_checksum, next_attempt, read_logs
from shardstream.errors import ReadError
from shardstream.permutation import mix64
from shardstream.plan import Plan
from tests.support.layouts import manifest_of

PATIENCE_S = 60


@pytest.fixture
def plan():
    return Plan.make(manifest_of([6, 4], [6, 4]), batch_size=2, world_size=2, seed=3)


def log_of(folder, plan, rank=0, attempt=0, **settings):
    return ConsumedLog(folder, rank, 2, attempt, plan.cursor(1, 4), plan, **settings)


def test_lines(tmp_path, plan):
    with log_of(tmp_path / "logs", plan, rank=1) as log:
        log.window(epoch=1, position=4, ids=np.array([7, 2]), num_padding=1, masked_ids=[5], targets={"lm": (9, 4)})
    path = tmp_path / "logs" / "rank-00001.attempt-0000.jsonl"
    start, window, end = map(json.loads, path.read_text().splitlines())
    assert start["kind"] == "start"
    assert (start["version"], start["attempt"], start["rank"], start["world_size"]) == (1, 0, 1, 2)
    assert start["cursor"] == plan.cursor(1, 4).state_dict()
    assert start["fingerprint"] == plan.manifest.fingerprint
    assert start["plan"]["batch_size"] == 2
    checksum = (int(mix64(np.array([8], np.uint64))[0]) + int(mix64(np.array([3], np.uint64))[0])) % 2**64
    assert window == {
        "kind": "window",
        "epoch": 1,
        "position": 4,
        "num_samples": 2,
        "num_padding": 1,
        "checksum": f"{checksum:016x}",
        "ids": [7, 2],
        "masked_ids": [5],
        "targets": {"lm": [9, 4]},
    }
    assert end == {"kind": "end"}
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_is_read_is_what_was_written(tmp_path, plan):
    with log_of(tmp_path, plan) as log:
        log.window(epoch=1, position=4, ids=[7, 2])
        log.window(epoch=1, position=8, ids=[1], num_padding=1)
    (read,), empty = read_logs(tmp_path)
    assert empty == []
    assert (read.attempt, read.rank, read.world_size, read.has_ended, read.is_cut) == (0, 0, 2, True, False)
    assert read.start == plan.cursor(1, 4)
    assert [(w.epoch, w.position, w.ids, w.num_padding) for w in read.windows] == [(1, 4, (7, 2), 0), (1, 8, (1,), 1)]
    again = read.plan(plan.manifest)
    assert again.cursor(0, 0) == plan.cursor(0, 0)
    assert (again.world_size, again.batch_size, again.accumulate) == (2, 2, 1)


def test_without_ids(tmp_path, plan):
    with log_of(tmp_path, plan, with_ids=False) as log:
        log.window(epoch=0, position=0, ids=[7, 2])
    window = read_logs(tmp_path)[0][0].windows[0]
    assert window.ids is None
    assert window.checksum == f"{id_checksum([2, 7]):016x}"
    assert window.num_samples == 2


def test_nothing_is_written_before_the_first_window(tmp_path, plan):
    log_of(tmp_path / "logs", plan).close()
    assert not (tmp_path / "logs").exists()
    assert next_attempt(tmp_path / "logs") == 0


def test_attempts_count_up_and_are_never_overwritten(tmp_path, plan):
    for attempt in (0, 1, 41):
        log_of(tmp_path, plan, attempt=attempt).end()
    (tmp_path / "notes.txt").write_text("not a log")
    assert next_attempt(tmp_path) == 42
    with pytest.raises(ReadError, match="a log of this rank and attempt exists"):
        log_of(tmp_path, plan, attempt=41).end()


def test_an_error_leaves_no_end(tmp_path, plan):
    def train():
        with log_of(tmp_path, plan) as log:
            log.window(epoch=0, position=0, ids=[1])
            raise RuntimeError("lost a node")

    with pytest.raises(RuntimeError):
        train()
    assert not read_logs(tmp_path)[0][0].has_ended


def test_checksums():
    assert id_checksum([]) == 0
    assert id_checksum([3, 4, 5]) == id_checksum([5, 3, 4])
    assert id_checksum([3, 4]) != id_checksum([3, 5])
    assert id_checksum([2**62]) != id_checksum([2**62 + 1])


def test_a_killed_writer_loses_at_most_its_last_line(tmp_path):
    script = """
import itertools, sys
from shardstream.consumed import ConsumedLog
from shardstream.manifest import Manifest
from shardstream.plan import Plan
plan = Plan.make(Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=10**6), batch_size=500)
log = ConsumedLog(sys.argv[1], 0, 1, 0, plan.cursor(), plan)
for k in itertools.count():
    log.window(epoch=k // 2000, position=k % 2000 * 500, ids=range(500))
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    path, deadline = tmp_path / "rank-00000.attempt-0000.jsonl", time.monotonic() + PATIENCE_S
    while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    (log,), _ = read_logs(tmp_path)
    assert not log.has_ended
    assert len(log.windows) > 10
    assert [w.position + w.epoch * 10**6 for w in log.windows] == [k * 500 for k in range(len(log.windows))]


def test_a_cut_last_line_is_allowed(tmp_path, plan):
    log = log_of(tmp_path, plan)
    log.window(epoch=0, position=0, ids=[1])
    log.window(epoch=0, position=4, ids=[2])
    log.close()
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    for num_bytes in range(len(whole) - 1, 0, -7):
        path.write_bytes(whole[:num_bytes])
        num_lines = whole[:num_bytes].count(b"\n")
        if num_lines:
            (read,), _ = read_logs(tmp_path)
            assert len(read.windows) == num_lines - 1
            assert read.is_cut == (whole[num_bytes - 1 : num_bytes] != b"\n")
        else:
            with pytest.raises(ReadError, match=r"no log of consumed samples.*found 1 cut"):
                read_logs(tmp_path)


def test_unknown_kinds_are_skipped(tmp_path, plan):
    log_of(tmp_path, plan).end()
    path = next(tmp_path.iterdir())
    path.write_text(path.read_text() + '{"kind": "collective", "name": "all_reduce"}\n')
    assert read_logs(tmp_path)[0][0].num_unknown == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], lines[1][:-9], lines[2]], r"a line of a log is damaged .*row 1"),
        (lambda lines: [lines[0], "[1]", lines[2]], "a line of a log is no JSON object"),
        (lambda lines: lines[1:], "a log does not begin with its start.*found window"),
        (lambda lines: [lines[0].replace('"version": 1,', '"version": 2,', 1)], "expected 1, found 2; upgrade"),
        (lambda lines: [lines[0].replace('"rank"', '"tank"', 1)], "not understood.*KeyError"),
        (lambda lines: [lines[0], '{"kind": "window", "epoch": 0}'], "not understood.*KeyError"),
    ],
)
def test_other_damage_is_an_error(tmp_path, plan, damage, message):
    with log_of(tmp_path, plan) as log:
        log.window(epoch=0, position=0, ids=[1])
    path = next(tmp_path.iterdir())
    path.write_text("".join(line + "\n" for line in damage(path.read_text().splitlines())))
    with pytest.raises(ReadError, match=message) as caught:
        read_logs(tmp_path)
    assert path.name in str(caught.value)


def test_no_logs(tmp_path):
    for folder, found in ((tmp_path, "none"), (tmp_path / "missing", "no such folder")):
        with pytest.raises(ReadError, match=f"no log of consumed samples.*found {found}; name the folder"):
            read_logs(folder)
