"""Processes of our own: ended when the work fails, and only they."""

import multiprocessing
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
        for mine in set(multiprocessing.active_children()) - before - {other}:
            mine.join(20)
            assert mine.exitcode is not None
        assert other.is_alive()
    finally:
        other.kill()
        other.join(60)
