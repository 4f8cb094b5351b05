"""Threads that read, and what becomes true when they have ended."""

from __future__ import annotations

import threading
import time


def readers():
    """Returns the threads of this process that read."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardstream-read")}


def soon(condition):
    """Returns whether something becomes true before long: what other threads do, and nobody waits for."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
