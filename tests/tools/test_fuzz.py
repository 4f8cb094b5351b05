"""Fuzzing for a bounded time, and what it found before: readers raise the library's own errors, or nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.fuzz.mutations import damaged
from tools.fuzz.targets import CORPUS, TARGETS

REFUSED = {"tar": 1, "tar_gz": 1, "parquet": 1, "jsonl": 1, "shards": 3, "mixture": 2}  # links, and what is nowhere


def test_the_corpus_is_small_and_all_of_it_is_read():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in files) < 200_000


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_are_taken(name):
    taken = [TARGETS[name].try_one(data) for data in TARGETS[name].seeds()]
    assert taken.count(False) == REFUSED.get(name, 0)


@settings(max_examples=50)
@given(st.data())
def test_damage_is_drawn_from_good_inputs(data):
    corpus = [b"0123456789" * 20, b"abc"]
    assert isinstance(data.draw(damaged(corpus)), bytes)


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_a_short_run_of_every_target_finds_nothing(tmp_path):
    """Each in a process of its own, with bounded memory, the kept corpus first. `make fuzz` does it for longer."""
    command = [sys.executable, "-m", "tools.fuzz", "--seconds", "1", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {line.split(":")[0] for line in ran.stdout.splitlines()} == TARGETS.keys()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
