"""What the orders of others cost: until a rank knows its first sample. Fake shards of 65,536 samples."""

from __future__ import annotations

import time
from abc import abstractmethod
from types import SimpleNamespace
from typing import Any

import numpy as np

from tools.bench.case import Case
from tools.bench.measuring import Metrics, Subject
from tools.bench.memory import PeakGrowth

_SHARD_ROWS = 65_536


class _Order(Subject):
    is_peer = True

    @abstractmethod
    def first_sample(self, num_samples: int, case: Case) -> int:
        """Makes the order and returns the first sample of rank 0."""

    def measure(self, case: Case) -> Metrics:
        """Measures once, in a process that did nothing before."""
        with PeakGrowth() as memory:
            began = time.perf_counter()
            self.first_sample(int(case.options["num_samples"]), case)
            seconds = time.perf_counter() - began
        return {"seconds": seconds, "growth_mb": memory.growth_mb}


class DistributedSamplerOrder(_Order):
    """A permutation of everything, on every rank."""

    package = "torch.utils.data"

    def first_sample(self, num_samples: int, case: Case) -> int:
        """Begins to iterate."""
        from torch.utils.data import Dataset, DistributedSampler

        class Sized(Dataset[int]):
            def __len__(self) -> int:
                return num_samples

        sampler: DistributedSampler[int] = DistributedSampler(
            Sized(), num_replicas=case.world_size, rank=case.rank, shuffle=True
        )
        return int(next(iter(sampler)))


class MdsOrder(_Order):
    """Partition and py1e shuffle, once a host."""

    package = "streaming"
    environment_name = "venv-mds"

    def first_sample(self, num_samples: int, case: Case) -> int:
        """Does what ``StreamingDataset.generate_work`` does for one stream."""
        from streaming.base.partition import get_partitions
        from streaming.base.shuffle import get_shuffle

        parts = get_partitions("relaxed", num_samples, 1, 1, case.world_size, 2, case.batch_size, 0, 1)
        shuffled = get_shuffle("py1e", _shards(num_samples), 1, 9176, 0, 1 << 22)
        return int(np.where(parts != -1, shuffled[parts], -1).flat[0])


class LitDataOrder(_Order):
    """Chunks to workers, then one chunk's items."""

    package = "litdata"

    def first_sample(self, num_samples: int, case: Case) -> int:
        """Does what a worker does at a normal start."""
        shuffle, chunks, intervals, num_chunks = _litdata_plan(num_samples, case)
        first = np.arange(intervals[0][0][1], intervals[0][0][2])
        return int(shuffle(first, num_chunks, 1, int(chunks[0][0]))[0])


class LitDataElastic(_Order):
    """The order as every worker rebuilds it when it resumes at another world size."""

    package = "litdata"

    def first_sample(self, num_samples: int, case: Case) -> int:
        """Does what ``StreamingDataset`` does for a state of another topology: half as many ranks."""
        from litdata.streaming.elastic import lockstep_stream_from_worker_seqs, restripe_items

        shuffle, chunks, intervals, num_chunks = _litdata_plan(num_samples, case)
        sequences = []
        for worker_chunks, worker_intervals in zip(chunks, intervals, strict=True):
            sequence: list[tuple[int, int]] = []
            for chunk, interval in zip(worker_chunks, worker_intervals, strict=True):
                items = shuffle(np.arange(interval[1], interval[2]), num_chunks, 1, int(chunk))
                sequence.extend((int(chunk), int(item)) for item in items)
            sequences.append(sequence)
        stream = lockstep_stream_from_worker_seqs(
            sequences, world_size=case.world_size, num_workers=2, batch_size=case.batch_size
        )
        restriped = restripe_items(
            stream,
            world_size=case.world_size // 2,
            num_workers=2,
            batch_size=case.batch_size,
            drop_first=num_samples // 2 // 128 * 128,
            drop_last=True,
            granularity="item",
        )
        return len(restriped)


class GrainOrder(_Order):
    """A permutation computed index by index."""

    package = "grain.python"

    def first_sample(self, num_samples: int, case: Case) -> int:
        """Asks for the first element."""
        import grain.python as grain

        return int(grain.MapDataset.range(num_samples).shuffle(seed=1)[case.rank :: case.world_size][0])


def _shards(num_samples: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    whole, rest = divmod(num_samples, _SHARD_ROWS)
    return np.array([_SHARD_ROWS] * whole + [rest] * (rest > 0), np.int64)


def _litdata_plan(num_samples: int, case: Case) -> tuple[Any, Any, Any, int]:
    from litdata.streaming.item_loader import Interval
    from litdata.streaming.shuffle import FullShuffle
    from litdata.utilities.env import _DistributedEnv

    ends = np.cumsum(_shards(num_samples)).tolist()
    intervals = [Interval(begin, begin, end, end) for begin, end in zip([0, *ends], ends, strict=False)]
    reader = SimpleNamespace(_config=None, _max_cache_size=0)
    cache = SimpleNamespace(_reader=reader, get_chunk_intervals=lambda: intervals)
    shuffle = FullShuffle(cache, 42, True, item_window=256)  # noqa: FBT003 - its own signature
    environment = _DistributedEnv(case.world_size, 0, 1)
    chunks, parts = shuffle.get_chunks_and_intervals_per_workers(environment, 2, case.batch_size, 1)
    return shuffle, chunks, parts, len(intervals)
