"""What planning costs with a synthetic manifest: nothing of the size of the samples may be made."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tools.bench.case import Case
from tools.bench.measuring import Metrics, Subject
from tools.bench.memory import PeakGrowth

BLOCK_ROWS, SHARD_BLOCKS = 1000, 100
_NUM_LOCATED = 10**6


class Growth(Subject):
    """Plan build, first micro-batch, resume in the middle of an epoch, and locating 10^6 positions in a row."""

    package = "shardstream.plan"

    def measure(self, case: Case) -> Metrics:
        """Measures each step once, in the order in which a job does them."""
        from shardstream.manifest import Manifest
        from shardstream.plan import Plan

        num_samples = int(case.options["num_samples"])
        metrics: Metrics = {}

        def timed(name: str, act: Callable[[], object]) -> None:
            began = time.perf_counter()
            act()
            metrics[name] = time.perf_counter() - began

        manifest = Manifest.synthetic(
            num_shards=num_samples // BLOCK_ROWS // SHARD_BLOCKS,
            blocks_per_shard=SHARD_BLOCKS,
            rows_per_block=BLOCK_ROWS,
        )
        with PeakGrowth() as memory:
            began = time.perf_counter()
            plan = Plan.make(manifest, batch_size=case.batch_size, world_size=case.world_size, seed=7)
            plan.locate(0, np.zeros(1, np.int64))
            metrics["plan_s"] = time.perf_counter() - began

            def first(position: int) -> None:
                cursor = plan.cursor(0, position)
                batch = next(plan.resume(cursor)[0].micro_batches(case.rank, cursor))
                plan.locate(0, batch.positions)

            middle = num_samples // 2 // plan.global_batch * plan.global_batch
            timed("first_micro_batch_s", lambda: first(0))
            timed("resume_s", lambda: first(middle))
        many = np.arange(min(_NUM_LOCATED, num_samples // 2)) + middle
        timed("locate_s", lambda: plan.locate(0, many))
        metrics["locate_s"] *= _NUM_LOCATED / len(many)
        return {**metrics, "seconds": metrics["plan_s"], "growth_mb": memory.growth_mb}
