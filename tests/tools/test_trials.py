"""Kills at random, a cable that is cut, a soak: short ones of tools/chaos.py, tools/two_hosts.py and tools/soak.py."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.soak import Probe, flatness
from tools.training.launch import ROOT, call
from tools.training.metrics import Tail
from tools.trials.family import Family, shared_memory
from tools.trials.mishap import Mishap
from tools.trials.network import why_not

# ------------------------------------------------------------------------------------------------------------- mishaps


def test_a_seed_decides_the_mishaps_and_only_what_is_there_is_hit():
    def draw(seed, *, has_workers, is_starting):
        chance = random.Random(seed)
        return [Mishap.draw(chance, has_workers=has_workers, is_starting=is_starting) for _ in range(300)]

    all_of_them = draw(1, has_workers=True, is_starting=True)
    assert all_of_them == draw(1, has_workers=True, is_starting=True)
    assert len({mishap.kind for mishap in all_of_them}) == 9
    assert {mishap.moment for mishap in all_of_them} == {"start", "step", "checkpoint", "epoch"}
    assert {mishap.target for mishap in all_of_them if mishap.moment == "checkpoint"} == {"rank"}
    assert {mishap.target for mishap in draw(1, has_workers=False, is_starting=True)} == {"rank", "launcher"}
    assert "start" not in {mishap.moment for mishap in draw(1, has_workers=True, is_starting=False)}


def test_metrics_are_read_on_where_they_stopped(tmp_path):
    tail, path = Tail(tmp_path), tmp_path / "metrics.jsonl"
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert tail.read() == [{"step": 1}, {"step": 2}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.read() == [{"step": 3}]
    assert Tail(tmp_path, at_end=True).read() == []


def test_processes_that_lost_their_parent_are_still_known():
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as parent:
        family = Family(parent.pid)
        deadline = time.monotonic() + 30
        while len(family.alive()) < 2 and time.monotonic() < deadline:
            family.look()
        parent.kill()
        parent.wait()
        [child] = family.wait_for_end(0.2)
        assert child.pid != parent.pid
        family.kill()
        assert family.alive() == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory to look at")
def test_shared_memory_that_nobody_has_open_is_found():
    path = Path(f"/dev/shm/torch_{os.getpid()}_test")
    try:
        with path.open("wb"):
            assert str(path) not in shared_memory()
        assert str(path) in shared_memory()
    finally:
        path.unlink()


# --------------------------------------------------------------------------------------------------------------- soaks


def _probes(**last):
    grown = [{name: value * k / 40 for name, value in last.items()} for k in range(40)]
    return [Probe(k * 100, 200 + g.get("pss_mb", 0), 9 + int(g.get("threads", 0)), 9) for k, g in enumerate(grown)]


def test_what_grows_is_named():
    assert flatness(_probes())["violations"] == []
    assert flatness(_probes(pss_mb=2))["violations"] == []
    assert "memory grew from" in flatness(_probes(pss_mb=20))["violations"][0]
    assert flatness(_probes(threads=8))["violations"] == ["num_threads grew from 12 to 16"]


# -------------------------------------------------------------------------------------------------------- whole trials


def _report(script, tmp_path, *options):
    path = tmp_path / "report.json"
    call([ROOT / "tools" / script, *options, "--json", path], timeout_s=300)
    return json.loads(path.read_text())


@pytest.mark.rest
@pytest.mark.timeout(400)
def test_a_job_that_is_killed_again_and_again_loses_nothing(tmp_path):
    """With a world size that stays the same: losses are equal bit by bit."""
    options = ["--rounds", "3", "--seed", "5", "--fixed-world-size", "2", "--timeout-s", "30"]
    report = _report("chaos.py", tmp_path, *options)
    assert (report["rounds"], report["violations"], report["largest_difference"]) == (3, [], 0.0)
    assert report["num_losses"] >= report["num_steps"] > 0
    assert "world size of 4 or 6" in report["five_ranks_are_answered"]


@pytest.mark.rest
@pytest.mark.timeout(400)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_whose_cable_is_cut_go_on_with_one_and_with_two_again(tmp_path):
    report = _report("two_hosts.py", tmp_path, "--timeout-s", "8")
    assert report["violations"] == []
    assert report["world_sizes"] == [2, 1, 2]


@pytest.mark.rest
@pytest.mark.timeout(400)
def test_memory_threads_and_files_stay_as_they_are(tmp_path):
    report = _report("soak.py", tmp_path, "--micro-batches", "12000")
    assert (report["violations"], report["num_micro_batches"]) == ([], 12_000)
