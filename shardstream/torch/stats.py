"""What a loader did so far: how much was handed out, and who waited for whom."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from shardstream.read_stats import ReadStats
from shardstream.torch.batch import Batch
from shardstream.torch.ragged import Ragged

_LOG = logging.getLogger("shardstream")


@dataclass(frozen=True)
class LoaderStats:
    """What a loader did on this rank since it was made, its workers included.

    Attributes:
        num_batches: Micro-batches handed out.
        num_samples: Their rows, padding included.
        num_masked: Samples of them that could not be decoded (``on_error="mask"``).
        num_tokens: Their tokens; None where no column of token lists is known, or a transform made something else.
        num_bytes: Bytes of columns that were read, those that are still ahead included.
        wait_s: Seconds in which the loop waited for data.
        held_s: Seconds in which it had a batch, and reading went on beside it.
        num_blocks_opened: How often blocks were opened.
        num_blocks_needed: How many different blocks those were, counted anew each epoch.
        read_amplification: The former by the latter; None before the first block.
        num_requests: Ranges read from a remote store.
        num_bytes_fetched: Their bytes.
        num_cache_hits: Ranges that the disk cache had instead.
        num_blocks_verified: Blocks whose bytes were compared with the manifest's checksums.
    """

    num_batches: int
    num_samples: int
    num_masked: int
    num_tokens: int | None
    num_bytes: int
    wait_s: float
    held_s: float
    num_blocks_opened: int
    num_blocks_needed: int
    read_amplification: float | None
    num_requests: int
    num_bytes_fetched: int
    num_cache_hits: int
    num_blocks_verified: int

    @property
    def wait_share(self) -> float:
        """Part of the time in which the loop waited: 0 if data is always there, 1 if it does nothing else."""
        return self.wait_s / (self.wait_s + self.held_s) if self.wait_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return {**asdict(self), "wait_share": self.wait_share}


class LoopClock:
    """Counts what a loop gets, and the time that goes by on either side. It is stopped between passes.

    Args:
        log_every_s: Seconds between two lines in the log ``shardstream``; None for none.
    """

    def __init__(self, log_every_s: float | None = None) -> None:
        self._tokens_column: str | None = None
        self._log_every_s = log_every_s
        self._num_batches = self._num_samples = self._num_masked = self._num_tokens = 0
        self._has_tokens = True  # of all batches so far
        self._wait_s = 0.0
        # Seconds of holding that are over, and since when the loop holds a batch: one value, because exporters ask for
        # it from threads of their own.
        self._held: tuple[float, float | None] = (0.0, None)
        self._logged_at: float | None = None
        self._before: LoaderStats | None = None

    def asked(self) -> float:
        """The loop asks for a batch. Returns the time, for ``gave``."""
        now = time.perf_counter()
        held_s, given_at = self._held
        if given_at is not None:
            self._held = (held_s + now - given_at, None)
        return now

    def gave(self, batch: Batch, asked_at: float, read: ReadStats) -> None:
        """The loop gets a batch."""
        now = time.perf_counter()
        self._held = (self._held[0], now)
        self._wait_s += now - asked_at
        self._num_batches += 1
        self._num_samples += len(batch)
        self._num_masked += len(batch.masked)
        if self._has_tokens:
            num_tokens = _num_tokens(batch, self._tokens_column)
            self._has_tokens = num_tokens is not None
            self._num_tokens += num_tokens or 0
        if self._log_every_s is not None:
            self._log(now, read)

    def begin_pass(self, tokens_column: str | None) -> None:
        """A pass begins; what the loop did since the last one is no holding of batches.

        Args:
            tokens_column: Column of token lists, or None if none is known.
        """
        self._held, self._tokens_column = (self._held[0], None), tokens_column

    def stats(self, read: ReadStats) -> LoaderStats:
        """Returns the figures up to now."""
        held_s, given_at = self._held
        held_now = 0.0 if given_at is None else time.perf_counter() - given_at
        return LoaderStats(
            num_batches=self._num_batches,
            num_samples=self._num_samples,
            num_masked=self._num_masked,
            num_tokens=self._num_tokens if self._has_tokens else None,
            num_bytes=read.num_bytes,
            wait_s=self._wait_s,
            held_s=held_s + held_now,
            num_blocks_opened=read.num_blocks_opened,
            num_blocks_needed=read.num_blocks_needed,
            read_amplification=read.amplification,
            num_requests=read.num_requests,
            num_bytes_fetched=read.num_bytes_fetched,
            num_cache_hits=read.num_cache_hits,
            num_blocks_verified=read.num_blocks_verified,
        )

    def _log(self, now: float, read: ReadStats) -> None:
        if self._logged_at is None:
            self._logged_at, self._before = now, self.stats(read)
        elif self._log_every_s is not None and now - self._logged_at >= self._log_every_s:
            stats = self.stats(read)
            assert self._before is not None  # noqa: S101 - set together with the time
            _LOG.info("%s", line_of(stats, self._before, now - self._logged_at))
            self._logged_at, self._before = now, stats


def line_of(stats: LoaderStats, before: LoaderStats, seconds: float) -> str:
    """Returns what happened between two looks at a loader as one line for people."""
    samples = stats.num_samples - before.num_samples
    parts = [f"{samples / seconds:,.0f} samples/s"]
    if stats.num_tokens is not None and before.num_tokens is not None:
        parts.append(f"{(stats.num_tokens - before.num_tokens) / seconds:,.0f} tokens/s")
    parts.append(f"{(stats.num_bytes - before.num_bytes) / seconds / 1e6:,.1f} MB/s")
    waited, held = stats.wait_s - before.wait_s, stats.held_s - before.held_s
    parts.append(f"waited {waited:.2f} s of {waited + held:.2f} s")
    if stats.read_amplification is not None:
        parts.append(f"{stats.num_blocks_opened:,} blocks opened, {stats.read_amplification:.2f} times each")
    if stats.num_masked:
        parts.append(f"{stats.num_masked:,} samples masked")
    if stats.num_cache_hits:
        parts.append(f"{stats.num_cache_hits:,} cache hits, {stats.num_requests:,} requests")
    return ", ".join(parts)


def _num_tokens(batch: Batch, column: str | None) -> int | None:
    value = batch._columns.get(column)  # type: ignore[arg-type]  # noqa: SLF001 - a look must not count as a touch
    if isinstance(value, Ragged):
        return len(value.values)
    if isinstance(value, Tensor) and value.ndim == 2 and column == "input_ids":  # noqa: PLR2004 - packed sequences
        return value.numel()
    return None
