"""Engines: their names, what cannot be, and Ray and Dask for real, with workers that are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.errors import PlanError, ReadError
from shardstream.executors import executor_of, parse_engine
from shardstream.prepare import PrepareSettings, prepare
from shardstream.prepare.work import write_parts
from tests.support.frameworks import needs


@pytest.mark.parametrize("text", ["", "spark", "local:4", "Ray", "dask-yarn"])
def test_unknown_engines_are_refused(text):
    with pytest.raises(PlanError, match=r"unknown engine.*ray:ADDRESS"):
        parse_engine(text)
    done = CliRunner().invoke(main, ["index", "a.parquet", "-o", "m.parquet", "--engine", text])
    assert (done.exit_code, "unknown engine" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("engine", "num_workers", "says"),
    [("ray:auto", 2, "a cluster has the workers that it has"), ("dask", 0, "needs a worker at least")],
)
def test_numbers_of_workers_that_cannot_be(engine, num_workers, says):
    with pytest.raises(PlanError, match=says), executor_of(engine, num_workers):
        pass


@pytest.mark.parametrize(("engine", "module"), [("ray", "ray"), ("dask", "distributed")])
def test_an_engine_that_is_not_installed_says_how_to(engine, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PlanError, match=rf"not installed.*pip install 'shardstream\[{engine}\]'"), executor_of(engine):
        pass


class Losing(ThreadPoolExecutor):
    """An executor with an error of its own for a worker that was lost."""

    def submit(self, fn, /, *args, **kwargs):
        done = super().submit(fn, *args, **kwargs)
        lost = Future()
        lost.set_exception(KeyError("worker lost"))
        return lost if args[0] is write_parts and args[2][0].index == 1 else done


def test_what_a_lost_worker_left_is_done_by_the_next_run(tmp_path):
    pq.write_table(pa.table({"x": range(300)}), tmp_path / "a.parquet", row_group_size=50)
    options = {"shard_num_bytes": 500, "shuffle": True}
    with Losing(1) as executor, pytest.raises(ReadError, match=r"writing shards died.*worker lost.*stays done"):
        prepare([tmp_path / "a.parquet"], tmp_path / "out", settings=PrepareSettings(executor=executor, **options))
    done = prepare([tmp_path / "a.parquet"], tmp_path / "out", settings=PrepareSettings(num_workers=0, **options))
    assert done.num_resumed > 0
    assert done.manifest.num_samples == 300


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "engine", [pytest.param("ray", marks=needs("ray")), pytest.param("dask", marks=needs("distributed"))]
)
def test_killed_workers_lose_nothing(engine, tmp_path):
    with tempfile.TemporaryDirectory() as short:  # Ray's sockets lie there
        environ = {**os.environ, "RAY_TMPDIR": short, "TMPDIR": short, "RAY_raylet_start_wait_time_s": "120"}
        command = [sys.executable, "-m", "tests.support.engine_trial", engine, str(tmp_path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "good"
