"""How fast a data set can feed a job on this machine, stage by stage, and which stage is the limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from shardstream import storage
from shardstream.fetch import Reading, ReadStats, fetch
from shardstream.formats import Shard, format_of
from shardstream.layout import RowsLayout, RunKey
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from shardstream.reading import default_range_threads
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.loader import StreamingLoader
from shardstream.torch.topology import Topology

_PLANNED_ROWS = 1 << 14
_LARGE_BLOCK_NUM_BYTES = 64 << 20
_SMALL_BLOCK_NUM_BYTES = 128 << 10
_NEAR = 1.35  # a stage that is at most so much faster than the whole is a limit of it
_WORSE = 1.2


@dataclass(frozen=True)
class StageSpeed:
    """One stage, measured alone.

    Attributes:
        stage: What was measured.
        samples_per_s: Rows a second.
        tokens_per_s: Tokens a second; None where the manifest did not count any.
        bytes_per_s: Bytes a second: as they are stored where storage is read, else of columns in memory.
        first_batch_s: Seconds until the first batch; None where there is no batch.
        read_amplification: How often a block was opened; None where that was not measured.
    """

    stage: str
    samples_per_s: float
    tokens_per_s: float | None
    bytes_per_s: float
    first_batch_s: float | None = None
    read_amplification: float | None = None


@dataclass(frozen=True)
class SpeedReport:
    """What was measured.

    Attributes:
        stages: From storage to the whole loader.
        limit: The stage that limits the loader, in words.
        advice: What may make it faster.
        settings: What it was measured with.
    """

    stages: tuple[StageSpeed, ...]
    limit: str
    advice: tuple[str, ...]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class SpeedTest:
    """What is measured.

    Attributes:
        plan: The plan; rank 0 of it is read.
        columns: Columns to read; None for all.
        reading: Threads, storage options.
        num_workers: DataLoader workers to measure as well; 0 for none.
        seconds: For each stage, about.
    """

    plan: Plan
    columns: Sequence[str] | None = None
    reading: Reading = Reading()  # noqa: RUF009 - frozen
    num_workers: int = 0
    seconds: float = 3.0

    @property
    def num_threads(self) -> int:
        """Threads that decode."""
        return self.reading.num_threads or min(4, os.cpu_count() or 1)

    def run(self) -> SpeedReport:
        """Measures all stages.

        Raises:
            ShardStreamError: If data cannot be read.
        """
        stages = [self._storage(), self._decoding(1)]
        if self.num_threads > 1:
            stages.append(self._decoding(self.num_threads))
        stages += [self._gathering(), self._loader(0)]
        if self.num_workers:
            stages.append(self._loader(self.num_workers))
        settings = {
            "batch_size": self.plan.batch_size,
            "world_size": self.plan.world_size,
            "lanes": self.plan.lanes,
            "num_threads": self.num_threads,
            "num_cores": os.cpu_count(),
            "columns": None if self.columns is None else list(self.columns),
        }
        limit, advice = judged(tuple(stages), self.plan.manifest, self.num_threads)
        return SpeedReport(tuple(stages), limit, tuple(advice), settings)

    # ------------------------------------------------------------------------------------------------ stages

    def _storage(self) -> StageSpeed:
        manifest, options = self.plan.manifest, self.reading.storage_options

        def read(key: RunKey) -> int:
            shard = Shard(manifest, manifest.shard_with(key.block), options)
            ranges = format_of("." + manifest.formats[shard.index]).ranges_of(shard, key.block, self.columns)
            return sum(len(storage.read_range(shard.url, r.start, r.end, options)) for r in ranges)

        return self._of_blocks("storage alone", read, self._num_storage_threads)

    @property
    def _num_storage_threads(self) -> int:
        is_local = storage.local_path(self.plan.manifest.url(0)) is not None
        return self.num_threads if is_local else self.reading.num_range_threads or default_range_threads()

    def _decoding(self, num_threads: int) -> StageSpeed:
        manifest, options = self.plan.manifest, self.reading.storage_options

        def decode(key: RunKey) -> int:
            shard = Shard(manifest, manifest.shard_with(key.block), options)
            stream = format_of("." + manifest.formats[shard.index]).read_runs(shard, key.block, self.columns)
            return sum(rows.num_bytes for rows in stream)

        return self._of_blocks(f"decoding, {num_threads} thread{'s' * (num_threads > 1)}", decode, num_threads)

    def _of_blocks(self, stage: str, act: Callable[[RunKey], int], num_threads: int) -> StageSpeed:
        """Does something with whole blocks, in the order of first use, over and over if there are few."""
        block_rows = self.plan.manifest.block_rows
        began = time.perf_counter()

        def timed(key: RunKey) -> tuple[int, int]:
            is_over = time.perf_counter() - began > self.seconds
            return (0, 0) if is_over else (int(block_rows[key.block]), act(key))

        num_rows = num_bytes = 0
        with ThreadPoolExecutor(num_threads) as pool:
            while time.perf_counter() - began < self.seconds:
                keys = self._blocks()
                while group := list(islice(keys, 16 * num_threads)):
                    for rows, size in pool.map(timed, group):
                        num_rows, num_bytes = num_rows + rows, num_bytes + size
                    if time.perf_counter() - began > self.seconds:
                        break
        return self._speed(stage, num_rows, num_bytes, time.perf_counter() - began)

    def _blocks(self) -> Iterator[RunKey]:
        layout, seen = RowsLayout(self.plan), set()
        batches = self.plan.micro_batches(0, self.plan.cursor())
        while group := list(islice(batches, max(1, _PLANNED_ROWS // self.plan.batch_size))):
            for key in layout.planned(group).keys:
                if key.block not in seen:
                    seen.add(key.block)
                    yield key

    def _gathering(self) -> StageSpeed:
        plan, stats = self.plan, ReadStats()
        layout, batches = RowsLayout(plan, self.columns), plan.micro_batches(0, plan.cursor())
        began, num_rows = time.perf_counter(), 0
        gathers = fetch(plan, batches, layout=layout, reading=self.reading, stats=stats)
        for gathered in gathers:
            num_rows += len(gathered.sample_ids)
            if time.perf_counter() - began > self.seconds:
                break
        seconds = time.perf_counter() - began
        gathers.close()
        return self._speed("with rows gathered", num_rows, stats.num_bytes, seconds)

    def _loader(self, num_workers: int) -> StageSpeed:
        plan = self.plan
        dataset = StreamingDataset(
            plan.manifest,
            batch_size=plan.batch_size,
            accumulate=plan.accumulate,
            seed=plan.seed,
            shuffle=plan.shuffle,
            lanes=plan.lanes,
            tail=plan.tail,
            columns=self.columns,
            topology=Topology(0, plan.world_size),
            reading=self.reading,
        )
        loader = StreamingLoader(dataset, num_workers=num_workers, on_break="next")
        began, first_s, seconds = time.perf_counter(), None, 0.0
        while seconds < self.seconds:
            batches = iter(loader)
            for _ in batches:
                seconds = time.perf_counter() - began
                first_s = seconds if first_s is None else first_s
                if seconds > self.seconds:
                    break
            del batches
            seconds = time.perf_counter() - began if first_s is None else seconds
        stats = loader.stats()
        what = f"the whole loader, {num_workers} worker{'s' * (num_workers != 1)}"
        num_bytes = stats.num_bytes * stats.num_samples // max(1, dataset.stats.num_samples)  # not what is ahead
        speed = self._speed(what, stats.num_samples, num_bytes, seconds)
        return replace(speed, first_batch_s=first_s, read_amplification=stats.read_amplification)

    def _speed(self, stage: str, num_rows: int, num_bytes: int, seconds: float) -> StageSpeed:
        rows_per_s = num_rows / seconds
        tokens = _tokens_per_sample(self.plan.manifest)
        return StageSpeed(stage, rows_per_s, None if tokens is None else rows_per_s * tokens, num_bytes / seconds)


def _tokens_per_sample(manifest: Manifest) -> float | None:
    """Mean number of tokens, from the first shards."""
    if manifest.tokens_column is None or manifest.lists is None or "token_lengths" not in manifest.lists.names:
        return None
    lengths = [
        manifest.lists.read(shard, ["token_lengths"])["token_lengths"] for shard in range(manifest.num_shards)[:8]
    ]
    lengths = [part for part in lengths if len(part)]
    return float(np.concatenate(lengths).mean()) if sum(map(len, lengths)) else None


# ------------------------------------------------------------------------------------------------------- judging


def judged(stages: Sequence[StageSpeed], manifest: Manifest, num_threads: int) -> tuple[str, list[str]]:
    """Says which stage limits the loader, and what may help.

    Args:
        stages: As ``SpeedTest.run`` measured them.
        manifest: Of the data.
        num_threads: Threads that decoded.
    """
    by_name = {stage.stage: stage for stage in stages}
    first, gathered = stages[0], by_name["with rows gathered"]
    decoding = [stage for stage in stages if stage.stage.startswith("decoding")]
    loaders = [stage for stage in stages if stage.stage.startswith("the whole")]
    whole, advice = loaders[0], []
    if first.samples_per_s < _NEAR * whole.samples_per_s and first.samples_per_s <= decoding[-1].samples_per_s:
        limit = "storage"
        advice += [
            "read fewer bytes: columns=, or shards with stronger compression (zstd)",
            "Reading(cache_dir=) on a local disk, if the shards are in an object store or on a network's file system",
        ]
    elif decoding[-1].samples_per_s < _NEAR * whole.samples_per_s:
        limit = "decoding"
        if len(decoding) > 1 and decoding[-1].samples_per_s > _WORSE * decoding[0].samples_per_s:
            advice.append(f"more threads: {num_threads} decode faster than one, Reading(num_threads=) takes more")
        advice.append("read fewer bytes: columns=; or write shards with lighter compression (lz4, or none)")
    elif gathered.samples_per_s < _NEAR * whole.samples_per_s:
        limit = "gathering rows from open runs: memory traffic"
        advice.append("fewer lanes (lanes=), as many as a good mix needs: each is a run that is held open")
    else:
        limit = "making batches"
        advice.append("larger micro-batches, if samples are small: the cost is by the batch")
    return limit, [*advice, *_advice_of_layout(manifest, whole), *_advice_of_workers(loaders)]


def _advice_of_layout(manifest: Manifest, whole: StageSpeed) -> Iterator[str]:
    if whole.read_amplification is not None and whole.read_amplification > _WORSE:
        yield f"blocks are opened {whole.read_amplification:.2f} times: fewer lanes, or see `shardstream audit`"
    median = int(np.median(manifest.block_num_bytes))
    if median > _LARGE_BLOCK_NUM_BYTES:
        yield f"blocks of {median >> 20:,} MiB: smaller row groups start and resume faster"
    elif median < _SMALL_BLOCK_NUM_BYTES and manifest.num_blocks > 1:
        yield f"blocks of {max(1, median >> 10):,} KiB: larger row groups cost less to open (1 to 4 MiB)"


def _advice_of_workers(loaders: Sequence[StageSpeed]) -> Iterator[str]:
    if len(loaders) < 2:  # noqa: PLR2004 - without and with workers
        return
    alone, others = loaders[0].samples_per_s, loaders[1].samples_per_s
    if others > _WORSE * alone:
        yield f"workers: {others / alone:.1f} times as fast as without"
    elif alone > _WORSE * others:
        yield f"no workers: {alone / others:.1f} times as fast as with; they pay where a transform is heavy Python"
