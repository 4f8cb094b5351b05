"""Asking for blocks of a remote store far ahead of decoding: as many requests under way as the store needs.

Gathers are prepared a few at a time, because what they decode takes memory. Of the few blocks that a gather opens, no
store gives its bandwidth: so the ranges of the blocks that later gathers will open are asked for as well, as they are
stored, up to a size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from shardstream.formats import Shard, format_of
from shardstream.layout import Layout, Planned, RunKey
from shardstream.ranges import ByteRange, Ranges

_MOST_GATHERS = 256  # a planned gather is itself some hundred kilobytes
_BlockKey = tuple[int, int]  # source and block


@dataclass
class _Block:
    """A block that is asked for."""

    gather: int
    """The number of the gather that opens it."""
    begun: Future[None] | None = None
    ranges: list[ByteRange] = field(default_factory=list)
    is_over: bool = False


class BlocksAhead:
    """Asks for the blocks of coming gathers.

    Args:
        layout: What the gathers are of.
        shard_of: Returns the shard of a run.
        ranges: Where to ask.
        look_ahead: Gathers whose runs are held.
        num_bytes: Bytes of blocks that are asked for before they are needed.
        keeps_returning: Whether runs that return at the end of the epoch are held until then.
    """

    def __init__(
        self,
        layout: Layout,
        shard_of: Callable[[RunKey], Shard],
        ranges: Ranges,
        look_ahead: int,
        num_bytes: int,
        *,
        keeps_returning: bool,
    ) -> None:
        self._layout, self._shard_of, self._ranges = layout, shard_of, ranges
        self._look_ahead, self._num_bytes, self._keeps_returning = look_ahead, num_bytes, keeps_returning
        self._kept: set[RunKey] = set()
        self._blocks: dict[_BlockKey, _Block] = {}
        self._last_used: dict[_BlockKey, int] = {}
        self._lock = Lock()

    def gathers(self, planned: Iterator[Planned]) -> Iterator[Planned]:
        """Yields the gathers, each after its blocks and those of later ones were asked for.

        How far it looks ahead grows from one gather to the next, so that the first one is not planned for long.
        """
        waiting: deque[tuple[Planned, int]] = deque()
        number, num_yielded, num_bytes_ahead, is_exhausted = 0, 0, 0, False
        while True:
            most = min(_MOST_GATHERS, 2 * num_yielded + 1)
            while not is_exhausted and (not waiting or (len(waiting) < most and num_bytes_ahead < self._num_bytes)):
                following = next(planned, None)
                if following is None:
                    is_exhausted = True
                    break
                num_bytes = self._ask(number, following)
                waiting.append((following, num_bytes))
                num_bytes_ahead += num_bytes
                number += 1
            if not waiting:
                return
            first, num_bytes = waiting.popleft()
            num_bytes_ahead -= num_bytes
            yield first
            num_yielded += 1
            self._drop_unused(num_yielded - self._look_ahead - 2)

    def wait(self, key: RunKey) -> None:
        """Waits until the ranges of a block that is about to be opened are asked for, if they are going to be."""
        block = self._blocks.get((key.source, key.block))
        if block is not None and block.begun is not None:
            block.begun.result()

    def opened(self, key: RunKey) -> None:
        """Lets go of a block: whoever reads it has what was asked for."""
        self._forget((key.source, key.block))

    def _ask(self, number: int, planned: Planned) -> int:
        """Asks for the blocks that a gather opens; returns their size."""
        num_bytes = 0
        for run in planned.keys:
            key = (run.source, run.block)
            is_held = self._last_used.get(key, -self._look_ahead - 2) >= number - self._look_ahead - 1
            self._last_used[key] = number
            if is_held or run in self._kept or key in self._blocks:
                continue
            block = _Block(number)
            with self._lock:
                self._blocks[key] = block
            block.begun = self._ranges.submit(partial(self._begin, run, block))
            num_bytes += int(self._layout.source(run)[0].block_num_bytes[run.block])
        if self._keeps_returning:
            self._kept.difference_update(planned.keys)
            self._kept.update(planned.returning)
        return num_bytes

    def _begin(self, run: RunKey, block: _Block) -> None:
        """Finds out which ranges a block begins with, and asks for them. In a thread: it may read a footer."""
        shard, columns = self._shard_of(run), self._layout.source(run)[1]
        try:
            wanted = format_of("." + shard.manifest.formats[shard.index]).ranges_of(shard, run.block, columns, run.run)
        except Exception:  # noqa: BLE001 - reading the block meets it again, and says where
            return
        with self._lock:
            if not block.is_over:
                block.ranges = wanted
                for range_ in wanted:
                    self._ranges.ahead(range_)

    def _drop_unused(self, before: int) -> None:
        """Forgets what was asked for and not opened, should a block have been held after all."""
        with self._lock:
            unused = [key for key, block in self._blocks.items() if block.gather <= before]
        for key in unused:
            self._forget(key)
        for key in [key for key, number in self._last_used.items() if number <= before]:
            del self._last_used[key]

    def _forget(self, key: _BlockKey) -> None:
        with self._lock:
            block = self._blocks.pop(key, None)
            if block is None:
                return
            block.is_over = True
        for range_ in block.ranges:
            self._ranges.forget(range_)
