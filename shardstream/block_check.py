"""Checking blocks as they are read: that their bytes hash to what the manifest says, before anything is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock

from shardstream import storage
from shardstream.checksums import BLOCK_LIST, checksum
from shardstream.errors import PlanError, ShardChangedError
from shardstream.formats import Format, Shard
from shardstream.manifest import Manifest
from shardstream.ranges import ByteRange, Ranges
from shardstream.read_stats import ReadStats

_MOST_SHARDS = 64  # whose checksums are held
_MOST_TIMES_AGAIN = 3


class BlockCheck:
    """Compares blocks with the checksums of their manifests.

    Checked are blocks of which all bytes are read, at once: blocks of one run, read with all their columns. Of others
    not enough is at hand; ``ReadStats.num_blocks_verified`` tells how many were checked.

    Args:
        manifests: Of the blocks.
        stats: Is counted up.

    Raises:
        PlanError: If a manifest has no checksums.
    """

    def __init__(self, manifests: Sequence[Manifest], stats: ReadStats) -> None:
        for manifest in manifests:
            if manifest.lists is None or BLOCK_LIST not in manifest.lists.names:
                what, hint = "the manifest has no checksums to verify", "index with --checksum, or read without them"
                raise PlanError(what, url=manifest.path, hint=hint)
        self._stats, self._lock = stats, Lock()
        self._known = lru_cache(_MOST_SHARDS)(_checksums_of_shard)

    @contextmanager
    def checked(self, format_: Format, shard: Shard, block: int, columns: Sequence[str] | None) -> Iterator[None]:
        """Checks a block before what is inside reads it; its bytes are fetched once for both.

        Args:
            format_: Of the shard.
            shard: The shard.
            block: Index of the block in the manifest.
            columns: What will be read of it.

        Raises:
            ShardChangedError: If the block has other bytes, fetched again as well.
            ReadError: If storage failed.
        """
        ranges = self._whole_block(format_, shard, block, columns)
        if not ranges:
            yield
            return
        held = None if shard.is_local else shard.ranges
        if held is None:
            self._compare(shard, block, ranges, None)
            yield
            return
        for range_ in ranges:
            held.ahead(range_)
        try:
            self._compare(shard, block, ranges, held)
            yield
        finally:
            for range_ in ranges:
                held.forget(range_)

    def _whole_block(self, format_: Format, shard: Shard, block: int, columns: Sequence[str] | None) -> list[ByteRange]:
        """The ranges that will be read, if they are all of the block; else none."""
        manifest = shard.manifest
        if manifest.is_long(block):
            return []
        ranges = sorted(format_.ranges_of(shard, block, columns), key=lambda range_: range_.start)
        start = int(manifest.block_offset[block])
        ends = [start, *(range_.end for range_ in ranges)]
        is_whole = [range_.start for range_ in ranges] == ends[:-1]
        return ranges if is_whole and ends[-1] == start + int(manifest.block_num_bytes[block]) else []

    def _compare(self, shard: Shard, block: int, ranges: Sequence[ByteRange], held: Ranges | None) -> None:
        place = block - int(shard.manifest.shard_first_block[shard.index])
        expected = self._known(shard.manifest, shard.index)[place]
        if held is None:
            parts = (storage.read_range(r.url, r.start, r.end, r.storage_options) for r in ranges)
            found = checksum(*parts)
        else:
            found = checksum(*map(held.read, ranges))
            for _ in range(_MOST_TIMES_AGAIN):  # spoiled on its way, or in a cache before this one
                if found == expected:
                    break
                found = checksum(*map(held.read_again, ranges))
        if found != expected:
            hint = "`shardstream verify` names all that differ; restore them, or index again and start anew"
            raise ShardChangedError(
                "the block has other bytes than when it was indexed",
                url=shard.url,
                block=block,
                expected=expected.hex(),
                found=found.hex(),
                hint=hint,
            )
        with self._lock:
            self._stats.num_blocks_verified += 1


def _checksums_of_shard(manifest: Manifest, shard: int) -> list[bytes]:
    lists = manifest.lists
    assert lists is not None  # noqa: S101 - looked at when the check was made
    return list(lists.read(shard, (BLOCK_LIST,))[BLOCK_LIST])
