"""Which samples go into which output shard: pure arithmetic, decided before anything is written.

A *part* is an output shard: consecutive positions of the output. Without a shuffle, position and sample id are the
same, and parts that cut a large block are written by one *task*, one after the other: the block is decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardstream.manifest import Int64Array, Manifest

_SNAP = 4  # a cut moves to the border of a block that is within a quarter of a part
_SMALL = 8  # a block of up to an eighth of a part may be decoded twice


@dataclass(frozen=True)
class Part:
    """An output shard: its index, and the positions ``first`` to ``end - 1``."""

    index: int
    first: int
    end: int


def cut_evenly(num_samples: int, num_parts: int) -> Int64Array:
    """Returns the ends of parts of equal numbers of samples, none of them empty: int64[parts].

    Example:
        >>> cut_evenly(10, 3).tolist(), cut_evenly(2, 3).tolist()
        ([3, 6, 10], [1, 2])
    """
    num_parts = max(1, min(num_parts, num_samples))
    return np.arange(1, num_parts + 1, dtype=np.int64) * num_samples // num_parts


def cut_by_bytes(manifest: Manifest, num_parts: int) -> Int64Array:
    """Returns the ends of parts of about equal numbers of input bytes: int64[parts], at borders of blocks if near.

    Args:
        manifest: The input.
        num_parts: How many are wanted; there are fewer if samples or borders do not allow for so many.

    Example:
        >>> from dataclasses import replace
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=4, rows_per_block=10)
        >>> sizes = np.array([100, 100, 100, 900])
        >>> cut_by_bytes(replace(manifest, block_num_bytes=sizes), 3).tolist()
        [30, 36, 40]
    """
    starts = manifest.block_start
    bytes_before = _bytes_before(manifest)
    total = int(bytes_before[-1])
    wanted = np.arange(1, num_parts) * (total / num_parts)
    cuts = np.round(np.interp(wanted, bytes_before, starts)).astype(np.int64)
    after = np.clip(np.searchsorted(bytes_before, wanted), 1, manifest.num_blocks)
    nearest = np.where(wanted - bytes_before[after - 1] < bytes_before[after] - wanted, after - 1, after)
    snaps = np.abs(bytes_before[nearest] - wanted) * _SNAP <= total / num_parts
    cuts = np.where(snaps, starts[nearest], cuts)
    ends = np.unique(np.append(cuts, manifest.num_samples))
    return ends[ends > 0]


def tasks_of(manifest: Manifest, ends: Int64Array) -> list[tuple[Part, ...]]:
    """Groups the parts of an output that keeps the order: those that share a large block are one task.

    Args:
        manifest: The input.
        ends: int64[parts], where each ends.

    Example:
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=10)
        >>> [[part.index for part in task] for task in tasks_of(manifest, np.array([5, 10, 20]))]
        [[0, 1], [2]]
    """
    starts, bytes_before = manifest.block_start, _bytes_before(manifest)
    most = bytes_before[-1] / len(ends) / _SMALL
    block = np.searchsorted(starts, ends, side="right") - 1
    is_border = starts[block] == ends
    num_bytes = np.append(np.diff(bytes_before), 0)[block]
    is_free = is_border | (num_bytes <= most)
    tasks: list[tuple[Part, ...]] = []
    current: list[Part] = []
    for part, free in zip(parts_of(ends), is_free.tolist(), strict=True):
        current.append(part)
        if free:
            tasks.append(tuple(current))
            current = []
    return [*tasks, tuple(current)] if current else tasks


def parts_of(ends: Sequence[int] | Int64Array) -> list[Part]:
    """Returns the parts with these ends.

    Example:
        >>> parts_of([3, 5])
        [Part(index=0, first=0, end=3), Part(index=1, first=3, end=5)]
    """
    numbers = np.asarray(ends).tolist()
    return [Part(index, first, end) for index, (first, end) in enumerate(zip([0, *numbers], numbers, strict=False))]


def cut_blocks_by_bytes(manifest: Manifest, num_bytes: float) -> list[tuple[int, int]]:
    """Groups whole blocks of about ``num_bytes`` in their files: first sample and end of each group.

    Example:
        >>> from dataclasses import replace
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=4, rows_per_block=10)
        >>> cut_blocks_by_bytes(replace(manifest, block_num_bytes=np.array([5, 5, 5, 50])), 10)
        [(0, 20), (20, 30), (30, 40)]
    """
    sizes = manifest.block_num_bytes.tolist()
    firsts, held = [0], 0
    for block, size in enumerate(sizes):
        if held and held + size > num_bytes:
            firsts.append(block)
            held = 0
        held += size
    ends = manifest.block_start[[*firsts[1:], manifest.num_blocks]].tolist()
    return list(zip(manifest.block_start[firsts].tolist(), ends, strict=True))


def bucket_ends(ends: Int64Array, num_buckets: int) -> Int64Array:
    """Returns the ends of buckets: each part cut into ``num_buckets`` of equal numbers of positions, none empty.

    Example:
        >>> bucket_ends(np.array([4, 5, 9]), 2).tolist()
        [2, 4, 5, 7, 9]
    """
    starts = np.concatenate([[0], ends[:-1]])
    shares = np.arange(1, num_buckets + 1)
    cuts = np.unique(starts[:, None] + (ends - starts)[:, None] * shares // num_buckets)
    return cuts[cuts > 0]


def _bytes_before(manifest: Manifest) -> Int64Array:
    """int64[B + 1]: bytes of the blocks before each, none of them counted as empty."""
    return np.concatenate([[0], np.cumsum(np.maximum(manifest.block_num_bytes, 1), dtype=np.int64)])
