"""Reading from an object store with 50 ms a request and 100 MB/s a connection."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tools.bench.adapters.shardstream_reader import ShardstreamReader
from tools.bench.case import Case
from tools.bench.measuring import MOST_S, Metrics, Subject
from tools.bench.range_server import RangeServer

if TYPE_CHECKING:
    from shardstream.torch import StreamingDataset

LATENCY_S, BYTES_PER_S = 0.05, 1e8


class Store(Subject):
    """Streams, and then reads blocks with as many threads but undecoded: what was reachable in the same seconds.

    The client is warmed up before: starting it is not the library's time.
    """

    package = "shardstream.torch"

    def measure(self, case: Case) -> Metrics:
        """Starts a store and reads from it. With ``stop_s`` 0 only the first batch is waited for."""
        from shardstream import storage

        with RangeServer(self.folders.data, LATENCY_S, BYTES_PER_S) as server:
            options = server.storage_options
            stop_s = float(case.options.get("stop_s", MOST_S))
            dataset = self._dataset(case, server)
            storage.stat(dataset.manifest.url(0), options)
            server.served()
            began = time.perf_counter()
            first_s, num_threads = _stream(dataset, began, stop_s)
            seconds = time.perf_counter() - began
            served, stats = server.served(), dataset.stats
            metrics = {"first_batch_s": first_s, "first_batch_requests": first_s / LATENCY_S}
            if stop_s > 0:
                needed = float(dataset.manifest.block_num_bytes.mean()) * stats.num_blocks_opened
                bytes_per_s = served.num_bytes / seconds
                metrics |= {
                    "samples_per_s": stats.num_samples / seconds,
                    "bytes_per_s": bytes_per_s,
                    "of_reachable": bytes_per_s / _reachable(dataset, server, num_threads, stop_s),
                    "num_read_threads": num_threads,
                    "requests_per_block": (served.num_gets + served.num_others) / stats.num_blocks_opened,
                    "bytes_read_ratio": served.num_bytes / needed,
                }
            return metrics

    def _dataset(self, case: Case, server: RangeServer) -> StreamingDataset:
        reading = {"storage_options": server.storage_options}
        options = {**case.options, "manifest": f"{case.workload}/store", "reading": reading}
        return ShardstreamReader(self.folders).dataset(replace(case, options=options))


def _stream(dataset: StreamingDataset, began: float, stop_s: float) -> tuple[float, int]:
    """Returns the time to the first batch, and how many threads were asking the store."""
    first_s, num_threads = 0.0, 0
    for _ in dataset:
        first_s = first_s or time.perf_counter() - began
        if not num_threads:
            num_threads = sum(thread.name.startswith("shardstream-read-range") for thread in threading.enumerate())
        if time.perf_counter() - began >= stop_s:
            break
    return first_s, num_threads


def _reachable(dataset: StreamingDataset, server: RangeServer, num_threads: int, stop_s: float) -> float:
    """Returns bytes per second of reading the same blocks and doing nothing with them."""
    from shardstream import storage

    manifest = dataset.manifest
    shards = manifest.shard_of_block(np.arange(manifest.num_blocks)).tolist()
    begins = manifest.block_offset.tolist()
    ends = (manifest.block_offset + manifest.block_num_bytes).tolist()
    began = time.perf_counter()

    def read(block: int) -> int:
        if time.perf_counter() - began > stop_s:
            return 0
        url = manifest.url(shards[block])
        return len(storage.read_range(url, begins[block], ends[block], server.storage_options))

    with ThreadPoolExecutor(max(1, num_threads)) as pool:
        num_bytes = sum(pool.map(read, range(manifest.num_blocks)))
    return num_bytes / (time.perf_counter() - began)
