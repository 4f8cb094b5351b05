"""What reading did so far: counters of one process, which workers send along with their data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple


class OpenedBlock(NamedTuple):
    """A block that was opened."""

    epoch: int
    source: int
    """Index of the manifest, in a mixture of several."""
    block: int


@dataclass
class ReadStats:
    """What reading did so far.

    Attributes:
        num_blocks_opened: How often a block was opened.
        num_blocks_needed: How many different blocks those are, counted anew in each epoch.
        num_runs_read: Runs decoded.
        num_samples: Samples handed out, padding included.
        num_bytes: Bytes of their columns.
        num_requests: Ranges read from storage by themselves (of remote shards).
        num_bytes_fetched: Their bytes.
        num_cache_hits: Ranges that the disk cache had.
        num_blocks_verified: Blocks whose bytes were compared with the manifest's checksums.

    Example:
        >>> stats = ReadStats()
        >>> stats.opened(OpenedBlock(0, 0, 7)), stats.opened(OpenedBlock(0, 0, 7))
        (None, None)
        >>> stats.num_blocks_opened, stats.num_blocks_needed, stats.amplification
        (2, 1, 2.0)
    """

    num_blocks_opened: int = 0
    num_blocks_needed: int = 0
    num_runs_read: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    num_requests: int = 0
    num_bytes_fetched: int = 0
    num_cache_hits: int = 0
    num_blocks_verified: int = 0
    _seen: dict[tuple[int, int], bytearray] = field(default_factory=dict, repr=False, compare=False)
    _untold: list[OpenedBlock] | None = field(default=None, repr=False, compare=False)

    @property
    def amplification(self) -> float | None:
        """How often a block was opened for each block that was needed; None before the first."""
        return self.num_blocks_opened / self.num_blocks_needed if self.num_blocks_needed else None

    def opened(self, block: OpenedBlock) -> None:
        """Counts a block that is opened."""
        self.num_blocks_opened += 1
        if self._untold is not None:
            self._untold.append(block)
        for old in [key for key in self._seen if key[0] < block.epoch - 1]:
            del self._seen[old]
        seen = self._seen.setdefault(block[:2], bytearray())  # one byte a block: a set of numbers would take 60
        if len(seen) <= block.block:
            seen.extend(bytes(block.block + 1 - len(seen)))
        self.num_blocks_needed += not seen[block.block]
        seen[block.block] = 1

    def told(self, before: ReadCounts | None = None) -> ReadCounts:
        """Returns what was counted since ``before``, or since the beginning. Only one caller can ask for blocks."""
        now = tuple(getattr(self, name) for name in _COUNTED)
        blocks, self._untold = tuple(self._untold or ()), []
        return ReadCounts(now, now if before is None else tuple(map(int.__sub__, now, before.total)), blocks)

    def add(self, counts: ReadCounts) -> None:
        """Adds what another process told: each of its ``ReadCounts`` once."""
        for name, number in zip(_COUNTED, counts.more, strict=True):
            setattr(self, name, getattr(self, name) + number)
        for block in counts.blocks:
            self.opened(block)


class ReadCounts(NamedTuple):
    """What one process told another: small, and made of plain numbers."""

    total: tuple[int, ...]
    more: tuple[int, ...]
    """What came since the last time."""
    blocks: tuple[OpenedBlock, ...]
    """Blocks opened since then."""


_COUNTED = tuple(
    entry.name
    for entry in fields(ReadStats)
    if not entry.name.startswith("_") and entry.name not in ("num_blocks_opened", "num_blocks_needed")
)
