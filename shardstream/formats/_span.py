"""A seekable file over the spans of an object that a decoder needs, fetched in few, large ranges."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

PIECE_NUM_BYTES = 8 << 20  # the largest range asked for at once
_LEAST_PIECE_NUM_BYTES = 1 << 20
_STREAMS_NUM_BYTES = 64 << 20  # what streams side by side hold together, as long as pieces do not get too small
_JOINED_GAP_NUM_BYTES = 1 << 17  # cheaper to read than to ask again

Span = tuple[int, int]


class RangeSource(Protocol):
    """Where ranges of an object come from; see ``Ranges``."""

    def read(self, start: int, end: int) -> bytes | memoryview: ...

    def ahead(self, start: int, end: int) -> None: ...

    def forget(self, start: int, end: int) -> None: ...


def joined(spans: Sequence[Span]) -> list[Span]:
    """Joins spans with small gaps between them.

    Example:
        >>> joined([(1000, 2000), (2004, 3000), (5_000_000, 6_000_000)])
        [(1000, 3000), (5000000, 6000000)]
    """
    made: list[Span] = []
    for start, end in sorted(spans):
        if made and start - made[-1][1] <= _JOINED_GAP_NUM_BYTES:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return made


def pieces(spans: Sequence[Span], num_streams: int = 1) -> list[Span]:
    """Cuts spans into the ranges that are asked for: all of a span if it is small.

    Args:
        spans: Apart from each other, in order.
        num_streams: How many places are read side by side: the more, the smaller the pieces.

    Example:
        >>> [end - start for start, end in pieces([(0, 100), (200, 200 + (20 << 20))])]
        [100, 6990507, 6990507, 6990506]
    """
    most = min(PIECE_NUM_BYTES, max(_LEAST_PIECE_NUM_BYTES, _STREAMS_NUM_BYTES // (num_streams + 1)))
    made: list[Span] = []
    for start, end in spans:
        step = -(-(end - start) // max(1, -(-(end - start) // most)))
        cuts = range(start, end, max(1, step))
        made += [(cut, min(cut + step, end)) for cut in cuts]
    return made


class SpanFile(io.RawIOBase):
    """A read-only file that fetches pieces of spans as they are needed and keeps the last few.

    Positions are those of the whole object, so that a decoder may use the offsets it knows. What lies outside the
    spans can be read as well, each time with a request of its own.

    Args:
        source: Where the bytes come from.
        spans: What is going to be read.
        num_bytes: Size of the object.
        num_streams: How many places are read side by side (columns of a row group); that many pieces are kept.
        is_streamed: Whether it is read little by little: then only the pieces after those that are read are asked for
            ahead, else all are from the beginning.

    Example:
        >>> class Numbers:
        ...     ahead = forget = lambda self, start, end: None
        ...     read = lambda self, start, end: bytes(range(start, end))
        >>> file = SpanFile(Numbers(), [(10, 20)], num_bytes=100)
        >>> file.seek(12), list(file.read(3))
        (12, [12, 13, 14])
    """

    def __init__(
        self,
        source: RangeSource,
        spans: Sequence[Span],
        *,
        num_bytes: int,
        num_streams: int = 1,
        is_streamed: bool = True,
    ) -> None:
        super().__init__()
        self._source, self._num_bytes, self._is_streamed = source, num_bytes, is_streamed
        self._pieces = pieces(spans, num_streams)
        self._starts = [start for start, _ in self._pieces]
        self._follows = {k + 1 for k, (one, other) in enumerate(pairwise(self._pieces)) if one[1] == other[0]}
        self._most_held = num_streams + 1 if is_streamed else len(self._pieces)
        self._held: dict[int, bytes | memoryview] = {}
        self._asked: set[int] = set()
        self._position = self._starts[0] if self._starts else 0
        if not is_streamed:
            for index in range(len(self._pieces)):
                self._ask(index)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def size(self) -> int:
        """Size of the whole object in bytes."""
        return self._num_bytes

    def readinto(self, target: Any) -> int:
        """Fills ``target`` as far as the object goes, never less: decoders take a short read for the end."""
        view = memoryview(target).cast("B")
        wanted = max(0, min(len(view), self._num_bytes - self._position))
        filled = 0
        while filled < wanted:
            part = self._at(self._position, wanted - filled)
            if not part:
                break
            view[filled : filled + len(part)] = part
            filled += len(part)
            self._position += len(part)
        return filled

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns the next bytes; with one copy where they lie in one piece, as nearly all do."""
        left = self._num_bytes - self._position
        if size is not None and 0 < size <= left:
            part = self._at(self._position, size)
            if len(part) == size:
                self._position += size
                return bytes(part)
        return super().read(-1 if size is None else size) or b""

    def close(self) -> None:
        """Drops what was fetched, and takes back what was asked for."""
        self._held.clear()
        while self._asked:
            self._source.forget(*self._pieces[self._asked.pop()])
        super().close()

    def _ask(self, index: int) -> None:
        if index not in self._asked and index not in self._held:
            self._asked.add(index)
            self._source.ahead(*self._pieces[index])

    def _at(self, position: int, num_bytes: int) -> memoryview:
        """What is at ``position``: at most ``num_bytes``, up to the end of the piece that holds it."""
        index = bisect_right(self._starts, position) - 1
        if index < 0 or position >= self._pieces[index][1]:
            following = self._starts[index + 1] if index + 1 < len(self._starts) else self._num_bytes
            return memoryview(self._source.read(position, min(position + num_bytes, following)))
        piece = self._held.pop(index, None)
        if piece is None:
            piece = self._source.read(*self._pieces[index])
            if index in self._asked:
                self._asked.remove(index)
                self._source.forget(*self._pieces[index])
            if self._is_streamed and index + 1 in self._follows:
                self._ask(index + 1)
        self._held[index] = piece  # at the end: the last one used
        while len(self._held) > self._most_held:
            del self._held[next(iter(self._held))]
        skipped = position - self._starts[index]
        return memoryview(piece)[skipped : skipped + num_bytes]
