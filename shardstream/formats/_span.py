"""A seekable file over a span of a remote object, fetched in few, large ranges."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

PIECE_NUM_BYTES = 8 << 20  # the largest range asked for at once


class SpanFile(io.RawIOBase):
    """A read-only file that fetches pieces of a span as they are needed and keeps the last few.

    Positions are those of the whole object, so that a decoder may use the offsets it knows. What lies outside the
    span can be read as well, each time with a request of its own.

    Args:
        fetch: ``fetch(start, end)`` returns those bytes of the object.
        start: First byte of the span.
        end: End of the span.
        num_bytes: Size of the object.
        num_streams: How many places are read side by side (columns of a row group); that many pieces are kept.

    Example:
        >>> file = SpanFile(lambda start, end: bytes(range(start, end)), start=10, end=20, num_bytes=100)
        >>> file.seek(12), list(file.read(3))
        (12, [12, 13, 14])
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], *, start: int, end: int, num_bytes: int, num_streams: int = 1
    ) -> None:
        super().__init__()
        self._fetch, self._start, self._end, self._num_bytes = fetch, start, end, num_bytes
        self._max_pieces = num_streams + 1
        self._piece_num_bytes = min(PIECE_NUM_BYTES, max(1 << 20, 8 * PIECE_NUM_BYTES // self._max_pieces))
        self._pieces: dict[int, bytes] = {}
        self._position = start

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

    def close(self) -> None:
        """Drops what was fetched."""
        self._pieces.clear()
        super().close()

    def _at(self, position: int, num_bytes: int) -> memoryview:
        """What is at ``position``: at most ``num_bytes``, up to the end of the piece that holds it."""
        if not self._start <= position < self._end:
            end = self._start if position < self._start else self._num_bytes
            return memoryview(self._fetch(position, min(position + num_bytes, end)))
        index = (position - self._start) // self._piece_num_bytes
        piece_start = self._start + index * self._piece_num_bytes
        piece = self._pieces.pop(index, None)
        if piece is None:
            piece = self._fetch(piece_start, min(piece_start + self._piece_num_bytes, self._end))
        self._pieces[index] = piece  # at the end: the last one used
        while len(self._pieces) > self._max_pieces:
            del self._pieces[next(iter(self._pieces))]
        skipped = position - piece_start
        return memoryview(piece)[skipped : skipped + num_bytes]
