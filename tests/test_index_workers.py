"""Processes that index shards and die: the shard is named, and the others are indexed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream.errors import ManifestError
from shardstream.formats import IndexOptions, ShardIndex
from shardstream.index import IndexSettings, build_manifest
from shardstream.index._look import Fault, Look, look_at_all


@dataclass(frozen=True)
class Deadly:
    """Options that kill the process that they are sent to."""

    number: int = signal.SIGABRT

    def __reduce__(self):
        return _die, (self.number,)

    def __call__(self):
        _die(self.number)


def _die(number):
    os.kill(os.getpid(), number)


def tasks_of(folder, num_shards, deadly, options=None):
    path = folder / "good.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    tasks = [Look(f"{folder}/{place}.parquet", options or Deadly()) for place in range(num_shards)]
    return [task if place in deadly else Look(str(path), IndexOptions()) for place, task in enumerate(tasks)]


def check(findings, tasks, deadly):
    assert len(findings) == len(tasks)
    for place, finding in enumerate(findings):
        if place in deadly:
            assert isinstance(finding, Fault)
            assert "died" in finding.reason
            assert tasks[place].url in finding.reason
        else:
            assert isinstance(finding, ShardIndex)
            assert finding.block_rows.tolist() == [3]


@pytest.mark.rest
def test_shards_that_kill_their_process_are_named_and_the_others_indexed(tmp_path):
    deadly = {3}
    tasks = tasks_of(tmp_path, 13, deadly)  # the last ones come after those under way
    check(list(look_at_all(tasks, 2, None)), tasks, deadly)


@pytest.mark.rest
def test_an_executor_that_breaks_is_replaced(tmp_path):
    tasks = tasks_of(tmp_path, 4, {1}, Deadly(signal.SIGKILL))
    with ProcessPoolExecutor(2, get_context("spawn")) as executor:
        check(list(look_at_all(tasks, None, executor)), tasks, {1})


class Losing(Executor):
    """An executor of another make, with an error of its own for a worker that was lost."""

    def submit(self, function, task, /):
        future = Future()
        if isinstance(task.options, Deadly):
            future.set_exception(KeyError("worker lost"))
        else:
            future.set_result(function(task))
        return future


def test_an_executor_of_another_make_names_the_shard_it_lost(tmp_path):
    tasks = tasks_of(tmp_path, 3, {1})
    good, lost, other = look_at_all(tasks, None, Losing())
    assert isinstance(good, ShardIndex)
    assert isinstance(other, ShardIndex)
    assert "did not look at the shard" in lost.reason
    assert tasks[1].url in lost.reason


def test_processes_that_cannot_start_are_no_fault_of_a_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("shardstream.processes._start_worker", Deadly())
    with pytest.raises(ManifestError, match=r"cannot be started.*__main__"):
        list(look_at_all(tasks_of(tmp_path, 3, {}), 2, None))


@pytest.mark.rest
def test_no_damage_to_a_footer_ends_the_process(tmp_path):
    """pyarrow lets some errors of its own end the process: they are met where it catches them."""
    path = tmp_path / "good.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3], "tokens": [[1], [], None]}), path, write_page_index=True)
    good = path.read_bytes()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    tasks = []
    for place in range(footer, len(good) - 8):
        for number, value in enumerate({0x00, 0x11, 0x28, 0xFF} - {good[place]}):
            damaged = tmp_path / f"{place}-{number}.parquet"
            damaged.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
            tasks.append(Look(str(damaged), IndexOptions(tokens_column="tokens")))
    findings = list(look_at_all(tasks, 1, None))
    assert [f.reason for f in findings if isinstance(f, Fault) and "died" in f.reason] == []
    assert sum(isinstance(f, Fault) for f in findings) > len(findings) / 3


def test_row_counts_that_contradict_each_other_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    good = path.read_bytes()
    start = good.rindex(b"\x16\x06")  # Thrift: i64, 3
    for lie in (b"\x16\x08", b"\x16\x05"):
        path.write_bytes(good[:start] + lie + good[start + 2 :])
        with pytest.raises(ManifestError, match=r"rows|values"):
            build_manifest(tmp_path, settings=IndexSettings(), num_workers=0)
