"""How much memory reading a plan takes, known before anything is read; and settings with which it fits a budget.

The figures are estimates from the manifest, of whole rows: reading few columns takes less. A reader is a process that
reads: a rank, or each of its workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil, gcd
from pathlib import Path
from typing import Any

import numpy as np

from shardstream.errors import PlanError
from shardstream.formats import RUN_NUM_BYTES
from shardstream.layout import Layout, RowsLayout
from shardstream.manifest import Manifest
from shardstream.mixture_layout import layout_of, manifests_of
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.plan import Plan
from shardstream.reading import Reading, is_remote

STREAM_NUM_BYTES = 13 << 20  # what an open stream of a block of many runs holds (measured)
REMOTE_STREAM_NUM_BYTES = 16 << 20  # and the pieces of it that were fetched
_EXPANSION = 4  # decoded to stored bytes, where nothing better is known
_STORED_AS_DECODED = ("arrow", "litdata", "mds", "tar")  # formats that are mapped where they are local
_GATHER_NUM_BYTES = 16 << 20
_LARGER_UNCOPIED = 4  # times are gathers of bytes that stay in their files: it costs no memory to plan so many at once
_ROWS_OF_LANE = 64
_LEAST_AHEAD_NUM_BYTES = 8 << 20
_GATHERS_COPIED = 3  # the next one, the one being consumed, and what a consumer still holds of the one before
_MOST_BLOCKS = 1 << 16  # looked at, evenly; sizes of the others are like theirs
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryNeed:
    """About how much memory a reader needs.

    Attributes:
        num_open_runs: Runs that it holds decoded.
        runs_num_bytes: Their bytes; none of a plain local tar, whose runs are pages of the file.
        num_streams: Of these runs, those whose block is decoded little by little.
        streams_num_bytes: What their open streams hold.
        kept_num_bytes: Runs kept from the beginning of an epoch to its end (``Reading.keeps_lane_ends``).
        gathers_num_bytes: Rows gathered and not yet trained on; as much as they may take, though bytes are not copied.
        ahead_num_bytes: Blocks of a remote store fetched and not yet decoded.
    """

    num_open_runs: int
    runs_num_bytes: int
    num_streams: int
    streams_num_bytes: int
    kept_num_bytes: int
    gathers_num_bytes: int
    ahead_num_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        decoded = self.runs_num_bytes + self.streams_num_bytes + self.kept_num_bytes
        return decoded + self.gathers_num_bytes + self.ahead_num_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return {**asdict(self), "num_bytes": self.num_bytes}

    def __str__(self) -> str:
        parts = [f"{self.num_open_runs:,} open runs {_mib(self.runs_num_bytes)}"]
        if self.num_streams:
            parts.append(f"{self.num_streams:,} streams {_mib(self.streams_num_bytes)}")
        if self.kept_num_bytes:
            parts.append(f"kept for lane ends {_mib(self.kept_num_bytes)}")
        parts.append(f"gathers {_mib(self.gathers_num_bytes)}")
        if self.ahead_num_bytes:
            parts.append(f"fetched ahead {_mib(self.ahead_num_bytes)}")
        return f"{_mib(self.num_bytes)} ({', '.join(parts)})"


def memory_need(plan: AnyPlan, reading: Reading | None = None, num_workers: int = 1) -> MemoryNeed | None:
    """Returns about how much memory a reader needs; None if the manifest knows no sizes.

    Args:
        plan: The plan.
        reading: Look-ahead and gathers; default: the default ones.
        num_workers: Processes of a rank that read.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=10, blocks_per_shard=100, rows_per_block=1000)
        >>> memory_need(Plan.make(manifest, batch_size=32)) is None
        True
        >>> sized = replace(manifest, root="/data", block_num_bytes=np.full(1000, 1_000_000))
        >>> print(memory_need(Plan.make(sized, batch_size=32)))
        329 MiB (49 open runs 187 MiB, kept for lane ends 119 MiB, gathers 24 MiB)
    """
    reading = reading or Reading()
    if not all(np.any(manifest.block_num_bytes) for manifest in manifests_of(plan)):
        return None
    row_num_bytes = layout_of(plan, None).row_num_bytes
    size = plan.batch_size * most_batches(plan, row_num_bytes, reading.gather_rows, num_workers)
    rows_held = size * (reading.look_ahead + 2)  # those ahead, the one being planned, and the one being consumed
    num_runs, runs_num_bytes, num_streams, streams_num_bytes, decoded_num_bytes = 0, 0, 0, 0, 0.0
    kept_num_bytes = 0
    for source in plan.plans if isinstance(plan, MixturePlan) else (plan,):
        runs = _runs_of(source.manifest)
        num_open = _open_runs(source, runs, rows_held, num_workers)
        if reading.keeps_lane_ends and num_workers == 1:
            kept_num_bytes += int(min(most_kept_runs(source), runs.num_all - num_open) * runs.num_bytes)
        streamed = ceil(num_open * runs.share_streamed)
        stream = STREAM_NUM_BYTES + REMOTE_STREAM_NUM_BYTES * is_remote(source.manifest)
        decoded_num_bytes = max(decoded_num_bytes, runs.row_num_bytes if source.packed is None else row_num_bytes)
        num_runs, num_streams = num_runs + num_open, num_streams + streamed
        runs_num_bytes += int(num_open * runs.num_bytes)
        streams_num_bytes += streamed * stream
    remote = any(is_remote(manifest) for manifest in manifests_of(plan))
    return MemoryNeed(
        num_open_runs=num_runs,
        runs_num_bytes=runs_num_bytes,
        num_streams=num_streams,
        streams_num_bytes=streams_num_bytes,
        kept_num_bytes=kept_num_bytes,
        gathers_num_bytes=int(_GATHERS_COPIED * size * decoded_num_bytes),
        ahead_num_bytes=reading.ahead_num_bytes if remote else 0,
    )


def most_kept_runs(plan: AnyPlan) -> int:
    """Returns how many runs stay for the end of the epoch at the most: those that two of a reader's lanes share.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=100, rows_per_block=1000)
        >>> most_kept_runs(Plan.make(manifest, batch_size=8, world_size=4, lanes=32))
        7
    """
    if isinstance(plan, MixturePlan):
        return sum(map(most_kept_runs, plan.plans))
    if isinstance(plan.shuffle, str) or plan.packed is not None or (plan.shuffle and plan.manifest.has_long_blocks):
        return 0
    return -(-plan.lanes // plan.world_size) - 1


def fitted(plan: AnyPlan, reading: Reading, num_workers: int = 1) -> Reading:
    """Returns settings with which reading fits its budget: the given ones, or with less ahead and smaller gathers.

    Args:
        plan: The plan.
        reading: What is asked for.
        num_workers: Processes of a rank that read.

    Raises:
        PlanError: If nothing fits; it says which plans would.
    """
    most = reading.memory_num_bytes or default_memory_num_bytes(num_workers)
    if num_workers > 1:  # each of them would keep nearly all of the rank's
        reading = replace(reading, keeps_lane_ends=False)
    need = None
    for smaller in _smaller(reading, plan.batch_size):
        need = memory_need(plan, smaller, num_workers)
        if need is None or need.num_bytes <= most:
            return smaller
    assert need is not None and smaller is not None  # noqa: S101, PT018 - there is always a smallest one
    hints = [f"{text}: {_mib(other.num_bytes)}" for text, other in _ways_out(plan, smaller, num_workers, most)]
    hints.append(f"or Reading(memory_num_bytes=) of at least {_mib(need.num_bytes)}")
    if need.num_streams:
        hints.append("blocks of many runs hold a stream each: write smaller row groups (`shardstream reshard`)")
    raise PlanError(
        "reading would take more memory than it may, even with the least look-ahead",
        expected=f"at most {_mib(most)} a process",
        found=need,
        hint="give " + "; ".join(hints),
    )


def gather_batches(plan: AnyPlan, layout: Layout, reading: Reading, num_workers: int) -> int:
    """Returns how many micro-batches ``layout`` gathers at once, at the most; see ``most_batches``.

    Args:
        plan: The plan.
        layout: What rows are.
        reading: What is wanted.
        num_workers: Processes of the rank that read.
    """
    row_num_bytes = layout.row_num_bytes
    if isinstance(layout, RowsLayout) and _stays_in_files(layout, reading):
        row_num_bytes = -(-row_num_bytes // _LARGER_UNCOPIED)
    return most_batches(plan, row_num_bytes, reading.gather_rows, num_workers)


def _stays_in_files(layout: RowsLayout, reading: Reading) -> bool:
    """Whether rows are bytes of mapped tars: until a batch is made of them, neither runs nor gathers hold any."""
    manifest = layout.plan.manifest
    is_mapped = set(manifest.formats) == {"tar"} and not is_remote(manifest) and not reading.takes_local
    return is_mapped and not layout.dtypes


def most_batches(plan: AnyPlan, row_num_bytes: int, most_rows: int, num_workers: int) -> int:
    """Returns how many micro-batches are gathered at once, at the most.

    A full gather visits every lane that this worker reads (they come round after ``cycle`` of its micro-batches), so
    that a run which the next gather does not need is not needed again. Only lanes that fit the global batch very badly
    are opened again for the sake of memory.

    Args:
        plan: The plan.
        row_num_bytes: About how many bytes a row takes.
        most_rows: Rows that are wanted at the most; workers share what one reader would gather.
        num_workers: Processes of the rank that read.
    """
    most = max(1, min(most_rows // num_workers, _GATHER_NUM_BYTES // row_num_bytes) // plan.batch_size)
    lanes = plan.lanes_in_turn
    common = gcd(lanes, plan.global_batch)
    num_windows, rows_of_lane = lanes // common, plan.global_batch // common  # until each lane was visited alike
    cycle = plan.accumulate * num_windows
    cycle //= gcd(cycle, num_workers)
    if cycle <= most:
        most = most // cycle * cycle
    elif num_windows == 1 or rows_of_lane <= _ROWS_OF_LANE:
        most = cycle
    return most


def default_memory_num_bytes(num_workers: int = 1) -> int:
    """Returns half of what this machine, or its container, has for each process that reads."""
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not there, or "max"
            num_bytes = min(num_bytes, int(Path(limit).read_text()))
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    num_readers = (int(num_ranks) if num_ranks.isdecimal() else 1) * num_workers
    return max(num_bytes // (2 * max(1, num_readers)), 256 * _MIB)


# ---------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Runs:
    """The runs of a manifest, by their share of rows.

    Attributes:
        num_bytes: What a run takes.
        num_rows: Rows of a run.
        row_num_bytes: What a row of it takes.
        num_all: How many there are.
        share_streamed: Part of them whose block is decoded little by little.
    """

    num_bytes: float
    num_rows: float
    row_num_bytes: float
    num_all: int
    share_streamed: float


def _runs_of(manifest: Manifest) -> _Runs:
    blocks = np.arange(0, manifest.num_blocks, max(1, manifest.num_blocks // _MOST_BLOCKS))
    rows, run_rows = manifest.block_rows[blocks], manifest.block_run_rows[blocks]
    formats = np.array(manifest.formats)[manifest.shard_of_block(blocks)]
    is_many = rows > run_rows
    is_plain = np.isin(formats, _STORED_AS_DECODED)
    expanded = manifest.block_num_bytes[blocks] * np.where(is_plain, 1, _EXPANSION)
    # Runs are cut to this size when a shard is indexed, and what is at most one and a half of it is not cut.
    sizes = np.where(is_many, RUN_NUM_BYTES, np.minimum(expanded, RUN_NUM_BYTES * 3 // 2)).astype(np.float64)
    weights = rows / rows.sum()
    row_num_bytes = float(sizes / np.minimum(rows, run_rows) @ weights)
    is_mapped = is_plain & (not is_remote(manifest))
    sizes[is_mapped] = 0
    num_runs = -(-manifest.block_rows.astype(np.int64) // manifest.block_run_rows)
    return _Runs(
        num_bytes=float(sizes @ weights),
        num_rows=float(np.minimum(rows, run_rows) @ weights),
        row_num_bytes=row_num_bytes,
        num_all=int(num_runs.sum()),
        share_streamed=float(weights[is_many & ~is_mapped].sum()),
    )


def _open_runs(plan: Plan, runs: _Runs, rows_held: int, num_workers: int) -> int:
    if isinstance(plan.shuffle, str):  # rows from everywhere: each from a run of its own
        return min(rows_held, runs.num_all)
    lanes = plan.lanes
    if lanes > plan.global_batch and lanes % (num_workers * plan.global_batch) == 0:
        lanes //= num_workers  # each worker has lanes of its own
    else:
        rows_held *= num_workers  # of the runs that it enters it takes as many rows as each other worker
    of_rank = -(-lanes // plan.world_size) + (lanes % plan.world_size != 0)
    entered = ceil(rows_held / runs.num_rows)  # runs that gathers ahead need while earlier ones are still in use
    return min(min(of_rank, plan.lanes) + entered, runs.num_all)


def _smaller(reading: Reading, batch_size: int) -> Iterator[Reading]:
    """What is asked for, then less and less."""
    yield reading
    reading = replace(reading, keeps_lane_ends=False)
    yield reading
    reading = replace(reading, ahead_num_bytes=min(reading.ahead_num_bytes, _LEAST_AHEAD_NUM_BYTES))
    yield reading
    for look_ahead in range(reading.look_ahead - 1, 0, -1):
        reading = replace(reading, look_ahead=look_ahead)
        yield reading
    while reading.gather_rows > batch_size:
        reading = replace(reading, gather_rows=max(batch_size, reading.gather_rows // 2))
        yield reading


def _ways_out(plan: AnyPlan, reading: Reading, num_workers: int, most: int) -> Iterator[tuple[str, MemoryNeed]]:
    """Plans that fit, the one that differs least of each kind."""
    if not isinstance(plan, Plan):
        return
    has_lanes = not isinstance(plan.shuffle, str)
    for kind in (_fewer_lanes(plan) if has_lanes else iter(()), _more_ranks(plan)):
        for text, other in kind:
            need = memory_need(other, reading, num_workers)
            if need is not None and need.num_bytes <= most:
                yield text, need
                break


def _fewer_lanes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    for lanes in range(plan.lanes - 1, plan.world_size - 1, -1):
        if plan.global_batch % lanes == 0:
            yield f"lanes={lanes}", replace(plan, lanes=lanes)


def _more_ranks(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same global batch on more ranks."""
    rows = plan.batch_size * plan.accumulate
    for factor in (factor for factor in range(2, rows + 1) if rows % factor == 0):
        common = gcd(plan.accumulate, factor)
        ranks, accumulate = plan.world_size * factor, plan.accumulate // common
        batch_size = plan.batch_size * common // factor
        yield f"{ranks} ranks", replace(plan, world_size=ranks, accumulate=accumulate, batch_size=batch_size)


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // _MIB):,} MiB"
