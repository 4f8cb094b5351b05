"""Processes of our own: ended when the work fails, and only they."""

import multiprocessing
import threading
import time

import pytest

from shardstream.processes import pool_of


def fail_beside(other):
    """Starts another process while a pool of ours works, and fails."""
    with pool_of(1) as pool:
        ours = pool.submit(time.sleep, 60)
        other.start()
        while not ours.running():
            time.sleep(0.01)
        raise ValueError("it failed")


@pytest.mark.slow
def test_what_others_start_meanwhile_is_not_ended():
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    before = set(multiprocessing.active_children())  # other tests' pools
    try:
        with pytest.raises(ValueError, match="it failed"):
            fail_beside(other)
        assert set(multiprocessing.active_children()) - before == {other}
    finally:
        other.kill()
        other.join(60)


def fail_with_much_to_do():
    with pool_of(2) as pool:
        for _ in range(9):
            pool.submit(time.sleep, 60)
        raise ValueError("it failed")


def test_nothing_of_a_pool_is_left_when_the_work_failed():
    processes, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    with pytest.raises(ValueError, match="it failed"):
        fail_with_much_to_do()
    assert set(threading.enumerate()) <= threads
    assert set(multiprocessing.active_children()) <= processes
