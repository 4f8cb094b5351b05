"""Files of a ledger: parts that rotate, a total bound, what a killed process leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from shardstream.errors import PlanError, ReadError
from shardstream.ledger_file import RotatedLines, next_attempt, read_lines
from shardstream.rounds import RoundsLog, first_difference, read_rounds

HEADER = {"kind": "start"}


def written(folder, num_lines, **options):
    lines = RotatedLines(folder, 2, 0, HEADER, **options)
    for number in range(num_lines):
        lines.write({"kind": "number", "number": number})
    lines.close()
    return sorted(path.name for path in folder.iterdir())


def numbers(log):
    return [entry["number"] for entry in log.entries]


@pytest.mark.parametrize("rotate_num_bytes", [1, 60, 100, 1 << 20])
def test_parts_are_one_log(tmp_path, rotate_num_bytes):
    names = written(tmp_path, 20, rotate_num_bytes=rotate_num_bytes)
    assert names[0] == "rank-00002.attempt-0000.jsonl"
    assert len(names) == {1: 20, 60: 10, 100: 7, 1 << 20: 1}[rotate_num_bytes]
    assert all(json.loads((tmp_path / name).read_text().splitlines()[0]) == HEADER for name in names)
    (log,), empty = read_lines(tmp_path)
    assert (numbers(log), log.is_cut, log.num_dropped_parts, empty) == (list(range(20)), False, 0, [])
    assert (log.rank, log.attempt) == (2, 0)


@pytest.mark.parametrize("keep_num_bytes", [400, 1000])
def test_the_total_is_bounded(tmp_path, keep_num_bytes):
    lines = RotatedLines(tmp_path, 2, 0, HEADER, keep_num_bytes=keep_num_bytes)
    for number in range(100):
        lines.write({"kind": "number", "number": number})
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= keep_num_bytes + 60
    lines.close()
    (log,), _ = read_lines(tmp_path)
    assert log.num_dropped_parts > 0
    assert numbers(log) == list(range(numbers(log)[0], 100))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > keep_num_bytes / 2


def test_only_what_it_wrote_is_deleted(tmp_path):
    written(tmp_path, 20, rotate_num_bytes=50)
    written(tmp_path, 5, ledger="rounds")
    before = set(tmp_path.iterdir())
    lines = RotatedLines(tmp_path, 2, 1, HEADER, keep_num_bytes=200)
    for _ in range(50):
        lines.write({"kind": "number"})
    lines.close()
    assert before <= set(tmp_path.iterdir())


def test_ledgers_are_apart(tmp_path):
    written(tmp_path, 3, ledger="rounds")
    written(tmp_path, 2)
    assert [numbers(log) for log in read_lines(tmp_path)[0]] == [[0, 1]]
    assert [numbers(log) for log in read_lines(tmp_path, "rounds")[0]] == [[0, 1, 2]]
    assert next_attempt(tmp_path) == 1


def test_a_missing_part_is_an_error(tmp_path):
    written(tmp_path, 20, rotate_num_bytes=50)
    (tmp_path / "rank-00002.attempt-0000.part-0004.jsonl").unlink()
    with pytest.raises(ReadError, match=r"part of a log is missing.*part 4"):
        read_lines(tmp_path)


def test_only_the_last_part_may_be_cut(tmp_path):
    names = written(tmp_path, 20, rotate_num_bytes=50)
    last = tmp_path / names[-1]
    last.write_bytes(last.read_bytes()[:-5])
    (log,), _ = read_lines(tmp_path)
    assert log.is_cut
    assert numbers(log) == list(range(19))
    (tmp_path / "rank-00002.attempt-0000.part-0003.jsonl").write_bytes(b"")
    with pytest.raises(ReadError, match="missing or cut"):
        read_lines(tmp_path)


@pytest.mark.parametrize("bound", ["rotate_num_bytes", "keep_num_bytes"])
def test_bounds_are_positive(tmp_path, bound):
    with pytest.raises(PlanError, match=f"{bound} must be positive"):
        RotatedLines(tmp_path, 0, 0, HEADER, **{bound: 0})


def test_a_killed_process_loses_at_most_a_line(tmp_path):
    script = """
import itertools, sys
from shardstream.rounds import RoundsLog
log = RoundsLog(sys.argv[1], 0, 1, 0, rotate_num_bytes=20_000)
for number in itertools.count():
    log.round(number, ["backward of micro-batch 0, gradients are summed"] * 9, 1.5)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    (log,) = read_rounds(tmp_path)
    assert len(log.rounds) > 50
    assert list(log.rounds) == list(range(len(log.rounds)))
    assert not log.has_ended


def test_rounds_are_read_as_written(tmp_path):
    log = RoundsLog(tmp_path, 1, 2, 3)
    log.round(0, ["window", "backward"], 10.25)
    log.times(0, 128, [(10.0, "takes micro-batch 0"), (10.5, "parameters moved")])
    log.desync(0, "rank 0: a; rank 1: b", [["window", "backward"]])
    log.end()
    (read,) = read_rounds(tmp_path)
    assert (read.attempt, read.rank, read.world_size, read.has_ended) == (3, 1, 2, True)
    assert read.rounds == {0: ("window", "backward")}
    assert read.times == {(0, 128): ((10.0, "takes micro-batch 0"), (10.5, "parameters moved"))}
    assert read.desyncs == ("rank 0: a; rank 1: b",)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ({0: ["a"], 1: ["a"]}, None),
        ({0: ["a"], 1: ["b"]}, "rank 0: a; rank 1: b"),
        ({0: ["a", "b"], 1: ["a"]}, "after 'a', rank 0: b; rank 1: nothing more"),
        ({0: ["b"], 1: ["a"], 2: ["b"]}, "ranks 0, 2: b; rank 1: a"),
        ({0: ["a", "b", "c"], 1: ["a", "c", "b"]}, "after 'a', rank 0: b; rank 1: c"),
    ],
)
def test_first_difference(events, expected):
    assert first_difference(events) == expected


def test_a_line_that_is_nested_too_deep_is_damaged(tmp_path):
    name = written(tmp_path, 2)[0]
    path = tmp_path / name
    path.write_bytes(b'{"a":' * 100_000 + b"}\n" + path.read_bytes())
    with pytest.raises(ReadError, match="damaged"):
        read_lines(tmp_path)
