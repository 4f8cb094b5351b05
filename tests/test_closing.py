from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from shardstream.closing import close_apart


def test_it_closes_though_the_caller_holds_a_lock_that_closing_needs():
    lock, closed = threading.Lock(), threading.Event()

    def close():
        with lock:
            closed.set()

    with lock:
        assert not close_apart(close, timeout_s=0.05)
        assert not closed.is_set()
    assert closed.wait(20)


def test_it_does_not_wait_where_it_must_not():
    release, closed = threading.Event(), threading.Event()
    assert not close_apart(lambda: (release.wait(20), closed.set()), timeout_s=0)
    release.set()
    assert closed.wait(20)


@pytest.mark.parametrize("what", ["_thread.start_new_thread", "threading.Thread.start"])
def test_it_closes_all_the_same_where_no_thread_can_begin(monkeypatch, what):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(what, none)
    closed = []
    assert close_apart(lambda: closed.append(1), timeout_s=20)
    assert closed


def test_a_process_ends_at_once_though_something_is_open_at_its_end():
    code = """
from shardstream.closing import close_apart
def numbers():
    try:
        yield 1
    finally:
        print(close_apart(lambda: None, timeout_s=60))
open_ = numbers()
next(open_)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert ended.stdout == "True\n", ended.stderr
