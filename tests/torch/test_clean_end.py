"""A job that is interrupted ends: within seconds, with its own traceback, and with no thread or process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.support.corpora import parquet_manifest, with_runs

_JOB = """
import sys, threading, time
from shardstream.manifest import Manifest
from shardstream.torch import StreamingDataset, StreamingLoader, Topology

def transform(sample):
    if {fails} and sample["__id__"] == 37:
        raise ValueError("a picture without colours")
    return sample

if __name__ == "__main__":
    dataset = StreamingDataset({path!r}, batch_size=2, topology=Topology(0, 1), transform=transform)
    loader = StreamingLoader(dataset, num_workers={num_workers}, on_break="next")
    print("begun", flush=True)
    try:
        while True:
            for number, batch in enumerate(loader):
                if number == 3:
                    print("batches", flush=True)
                time.sleep(0.02)
    finally:
        del loader
        print("left", [t.name for t in threading.enumerate() if t.name.startswith("shardstream")], flush=True)
"""


@pytest.fixture
def start(tmp_path):
    path = with_runs(parquet_manifest(tmp_path, [100, 100], 20), 5).save(tmp_path / "m").path
    started = []

    def begin(num_workers, *, fails=False):
        script = tmp_path / "job.py"
        script.write_text(textwrap.dedent(_JOB.format(path=path, num_workers=num_workers, fails=fails)))
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the group that Ctrl-C reaches, as from a terminal
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=30)


def until(process, line):
    for text in process.stdout:
        if text.startswith(line):
            return
    pytest.fail(f"{line!r} was not printed: {process.stderr.read()}")


def gone(children):
    _, alive = psutil.wait_procs(children, timeout=20)
    return not alive


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("when", ["at once", "on its way"])
def test_interrupted(start, num_workers, when):
    process = start(num_workers)
    until(process, "begun" if when == "at once" else "batches")
    if when == "at once":
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)

    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 1, 130), err
    assert "KeyboardInterrupt" in err
    assert "left []" in out, out
    assert gone(children)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_interpreter_alone_is_interrupted(start, num_workers):
    """As a launcher does it: workers are told by their parent's end."""
    process = start(num_workers)
    until(process, "batches")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= num_workers
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert "left []" in out
    assert gone(children)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_that_fails_names_its_sample(start, num_workers):
    process = start(num_workers, fails=True)
    children = psutil.Process(process.pid).children(recursive=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "transform failed for sample 37: ValueError: a picture without colours" in err
    assert "part-00000.parquet, row 37" in err
    assert "left []" in out, out
    assert gone(children)


_KILLED_BEFORE_ITS_WORKERS_ARE_READY = """
import os, signal, sys, time
from pathlib import Path
from shardstream.torch import StreamingDataset, StreamingLoader, Topology

def late(worker):
    Path({folder!r}, str(os.getpid())).touch()
    while os.getppid() == parent:
        time.sleep(0.01)

parent = os.getpid()
if __name__ == "__main__":
    dataset = StreamingDataset({path!r}, batch_size=2, topology=Topology(0, 1))
    batches = iter(StreamingLoader(dataset, num_workers=2, worker_init_fn=late))
    while len(os.listdir({folder!r})) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_their_parent_was_killed_before_they_were_ready(tmp_path):
    """Found by tools/chaos.py: torch's watchdog took init for the parent, and the worker waited for ever."""
    path = with_runs(parquet_manifest(tmp_path, [100], 20), 5).save(tmp_path / "m").path
    folder, script = tmp_path / "workers", tmp_path / "job.py"
    folder.mkdir()
    script.write_text(_KILLED_BEFORE_ITS_WORKERS_ARE_READY.format(folder=str(folder), path=path))
    killed = subprocess.run([sys.executable, str(script)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    workers = [psutil.Process(int(each.name)) for each in folder.iterdir() if psutil.pid_exists(int(each.name))]
    try:
        assert gone(workers)
    finally:
        for worker in workers:
            if worker.is_running():
                worker.kill()
