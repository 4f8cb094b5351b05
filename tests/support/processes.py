"""Real processes that talk over gloo: started quickly, ended in any case, verdicts taken from a queue."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

# The fork server imports torch once and stays single-threaded, so that each rank starts in a fraction of a second.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "shardstream.torch"])


class RankError(AssertionError):
    """A rank failed, or did not end in time; the message holds the tracebacks."""


def run_ranks(
    function,
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 20.0,
    has_workers: bool = False,
) -> list:
    """Runs ``function(rank, *args)`` in ``world_size`` processes of one gloo group; returns what each returned.

    Gloo's teardown sometimes ends a process with a signal after everything went well, so only what came through the
    queue counts. Whatever happens, no process is left when this returns; ranks that start DataLoader workers
    (``has_workers``) must not be daemons, and workers end with the process that started them.
    """
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        common = (results, function, world_size, f"{folder}/store", group_timeout_s, args)
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, *common), daemon=not has_workers) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            outcomes = _collect(results, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                process.join()
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok]
    if failures or len(outcomes) < world_size:
        missing = sorted(set(range(world_size)) - set(outcomes))
        raise RankError("\n".join([*failures, f"no result from ranks {missing}"] if missing else failures))
    return [outcomes[rank][1] for rank in range(world_size)]


def _collect(results, processes, deadline: float) -> dict[int, tuple[bool, Any]]:
    outcomes: dict[int, tuple[bool, Any]] = {}
    while len(outcomes) < len(processes) and time.monotonic() < deadline:
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                deadline = min(deadline, time.monotonic() + 1.0)
            continue
        outcomes[rank] = (ok, pickle.loads(value))
        if not ok:  # the others may wait for it in a collective: give them time to say so themselves
            deadline = min(deadline, time.monotonic() + 5.0)
    return outcomes


def _rank(rank, results, function, world_size, store_path, group_timeout_s, args) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        Path(store_path).parent.mkdir(exist_ok=True)
        store = dist.FileStore(store_path, world_size)
        timeout = timedelta(seconds=group_timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        value = function(rank, *args)
        results.put((rank, True, pickle.dumps(value)))
        dist.barrier()  # nobody hangs up while others still talk
    except BaseException:  # noqa: BLE001 - whatever it was, the parent is told
        results.put((rank, False, pickle.dumps(traceback.format_exc())))
    finally:
        results.close()
        results.join_thread()
        if dist.is_initialized():
            dist.destroy_process_group()


def run_checks(checks, world_size: int, *args: Any, **options: Any) -> dict[str, list[str]]:
    """Runs ``check(rank, *args)`` one after the other in one group; returns what failed, by name: one text a rank.

    After a failure the ranks are no longer in step, so what comes after it is reported as not reached.
    """
    outcomes = run_ranks(_run_all, world_size, checks, args, **options)
    return {check.__name__: [outcome[check.__name__] for outcome in outcomes] for check in checks}


def _run_all(rank: int, checks, args) -> dict[str, str]:
    outcome = dict.fromkeys((check.__name__ for check in checks), "not reached")
    for check in checks:
        try:
            check(rank, *args)
        except BaseException:  # noqa: BLE001 - as above
            outcome[check.__name__] = traceback.format_exc()
            break
        outcome[check.__name__] = ""
    return outcome
