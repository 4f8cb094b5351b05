"""Processes of our own for many shards: they never see Ctrl-C, and none outlives the process that started it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any

_END_S = 10.0  # until processes that were terminated are gone, which takes milliseconds


@contextlib.contextmanager
def pool_of(
    num_workers: int, begin: Callable[..., None] | None = None, begin_args: tuple[Any, ...] = ()
) -> Iterator[ProcessPoolExecutor]:
    """Gives processes started afresh (spawn): right whatever threads and connections this process has.

    When the block is left by an error they are ended (SIGTERM), without waiting for what they do.

    Args:
        num_workers: How many.
        begin: Called first in each.
        begin_args: Its arguments.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (begin, begin_args))
    started = pool._processes  # noqa: SLF001 - what ends them all is Python 3.14's; other children are not ours to end
    try:
        yield pool
    except BaseException:
        processes = list(started.values())
        ending = getattr(pool, "_executor_manager_thread", None)  # the next line forgets it: nothing would wait for it
        pool.shutdown(wait=False, cancel_futures=True)  # first: its thread must not take what is ended for a crash
        for process in processes:
            process.terminate()  # a shard may take minutes, and nobody waits for it any more
        if ending not in (None, threading.current_thread()):  # the garbage collector closes a generator in any thread
            ending.join(_END_S)
        raise
    pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C: this one does, and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_worker(begin: Callable[..., None] | None, begin_args: tuple[Any, ...]) -> None:
    """Ends a worker whose parent was killed; by itself it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    if begin is not None:
        begin(*begin_args)
