"""Before Python ends, the threads of gloo that have something to do may do it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardstream.torch import gloo_exit

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux: /proc")


def _busy_thread(name: str, seconds: float) -> threading.Thread:
    named = threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.set()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    named.wait()
    return thread


def test_waits_for_a_thread_of_gloo_that_runs():
    thread = _busy_thread("pt_gloo_runloop", 0.4)
    gloo_exit._wait()
    thread.join(0.05)
    assert not thread.is_alive()


def test_waits_for_no_other_thread():
    thread = _busy_thread("another", 1.5)
    gloo_exit._wait()
    assert thread.is_alive()
    thread.join()


def test_a_thread_that_never_rests_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr(gloo_exit, "_MOST_S", 0.1)
    thread = _busy_thread("pt_gloo_runloop", 1.0)
    gloo_exit._wait()
    assert thread.is_alive()
    thread.join()


def test_our_process_group_waits_at_exit():
    script = """
import os
from shardstream.torch import Topology, gloo_exit, init_process_group
gloo_exit._wait = lambda: print("waited", flush=True)
init_process_group("gloo", topology=Topology(0, 1), environ={})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "waited\n", done.stderr
