"""Compressed shards as forward-only streams that notice where they were cut, and that know their zstd frames."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

import zstandard

_INPUT_NUM_BYTES = 1 << 13  # compressed bytes fed at a time: what one step decodes to is 256 MiB at most
_MAX_WINDOW_NUM_BYTES = 1 << 31  # `zstd --long=31`
_MAX_RATIO = 2_000  # of a stream; gzip cannot do more than 1,032
_STEP_NUM_BYTES = 1 << 20
_ANY_NUM_BYTES = 64 << 20  # decoded bytes that are never too many
_FRAME_MARK = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MARKS = frozenset(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))


class Source(Protocol):
    """What a decoder needs of a file."""

    def read(self, size: int, /) -> bytes: ...


class Readable(Source, Protocol):
    """A decoded stream."""

    def readinto(self, target: memoryview, /) -> int: ...


@dataclass(frozen=True)
class Frame:
    """A zstd frame: where it begins in the file, and where what it holds begins in the decoded stream."""

    offset: int
    data_offset: int


class ZstdStream:
    """Decodes zstd frames one after the other; a cut frame is an error, skippable frames are skipped.

    Args:
        file: The compressed bytes, beginning with a frame.

    Example:
        >>> raw = zstandard.compress(b"ab") + zstandard.compress(b"cd")
        >>> stream = ZstdStream(io.BytesIO(raw))
        >>> stream.read(3), stream.read(3), [frame.data_offset for frame in stream.frames]
        (b'abc', b'd', [0, 2])
    """

    def __init__(self, file: Source) -> None:
        self.frames: list[Frame] = []
        self._file = file
        self._decoder: Any = None
        self._input = b""
        self._input_offset = 0  # of the first byte of _input, in the file
        self._output = b""
        self._taken = 0  # bytes of _output that were read
        self._output_num_bytes = 0  # decoded so far

    def read(self, size: int, /) -> bytes:
        """Returns ``size`` decoded bytes, fewer only at the end.

        Raises:
            EOFError: If the stream ends inside a frame.
            zstandard.ZstdError: If the bytes are not zstd.
        """
        parts = []
        while size > 0 and (self._taken < len(self._output) or self._decode()):
            part = self._output[self._taken : self._taken + size]
            self._taken += len(part)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, target: memoryview, /) -> int:
        """Fills ``target`` as far as the stream goes; see ``read``."""
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def _decode(self) -> bool:
        """Decodes some more; False at the end of the stream."""
        self._output, self._taken = b"", 0
        while not self._output:
            if self._decoder is None and not self._begin_frame():
                return False
            if not self._fill(1):
                raise EOFError("the zstd stream ends inside a frame")
            data, self._input = self._input, b""
            self._output = self._decoder.decompress(data)
            self._output_num_bytes += len(self._output)
            self._input_offset += len(data)
            check_ratio(self._output_num_bytes, self._input_offset)
            if self._decoder.eof:
                self._input = self._decoder.unused_data
                self._input_offset -= len(self._input)
                self._decoder = None
        return True

    def _begin_frame(self) -> bool:
        """Begins the next frame; False where there is none."""
        while self._fill(4):
            mark = self._input[:4]
            if mark in _SKIPPABLE_MARKS:
                self._skip()
                continue
            if mark != _FRAME_MARK:
                raise zstandard.ZstdError(f"no zstd frame begins at byte {self._input_offset}: found {mark!r}")
            self.frames.append(Frame(self._input_offset, self._output_num_bytes))
            self._decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NUM_BYTES).decompressobj()
            return True
        if self._input:
            raise EOFError("the zstd stream ends inside a frame's first bytes")
        return False

    def _skip(self) -> None:
        """Skips a skippable frame: mark, length, and that many bytes."""
        if not self._fill(8):
            raise EOFError("the zstd stream ends inside a skippable frame")
        left = 8 + int.from_bytes(self._input[4:8], "little")
        while left:
            if not self._fill(1):
                raise EOFError("the zstd stream ends inside a skippable frame")
            num_bytes = min(left, len(self._input))
            self._input = self._input[num_bytes:]
            self._input_offset += num_bytes
            left -= num_bytes

    def _fill(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` of input are there, read if need be."""
        while len(self._input) < num_bytes:
            more = self._file.read(_INPUT_NUM_BYTES)
            if not more:
                return False
            self._input += more
        return True


def decompressed(file: BinaryIO, format_name: str) -> Readable:
    """Returns the decoded stream of a shard, which must be read front to back where it is compressed.

    Args:
        file: The file, at its first byte; it stays the caller's to close.
        format_name: Ending in ``".gz"`` (any number of gzip members, zero padding allowed), ``".zst"``, or plain.

    Example:
        >>> decompressed(io.BytesIO(gzip.compress(b"ab") + gzip.compress(b"cd")), "tar.gz").read(9)
        b'abcd'
    """
    if format_name.endswith(".gz"):
        return _GzipStream(fileobj=file, mode="rb")
    return ZstdStream(file) if format_name.endswith(".zst") else cast("Readable", file)


class _GzipStream(gzip.GzipFile):
    """Decodes into memory of its own first: therefore a little at a time."""

    def readinto(self, target: Any, /) -> int:
        return super().readinto(memoryview(target)[:_STEP_NUM_BYTES])


def check_ratio(decoded_num_bytes: int, num_bytes: int) -> None:
    """Refuses what decodes to so many times its size that it can only be meant to fill memory.

    Raises:
        ZstdError: If it does.

    Example:
        >>> check_ratio(1 << 30, 1 << 20)
    """
    if decoded_num_bytes > max(_ANY_NUM_BYTES, _MAX_RATIO * num_bytes):
        raise zstandard.ZstdError(f"it decodes to more than {_MAX_RATIO:,} times its size: a trap?")


def decompressed_block(file: BinaryIO, format_name: str, num_bytes: int, step_num_bytes: int) -> Readable:
    """Returns the decoded stream of a block, which begins with a frame; it writes into the memory it is given.

    Nobody asks it where frames begin, nor for more than the manifest says there is: so it need not look after either,
    and takes half the time of ``decompressed``. A cut frame is the end of the stream.

    Args:
        file: The file, at the block's first byte; it stays the caller's to close.
        format_name: See ``decompressed``; of gzip and plain shards the stream goes on behind the block.
        num_bytes: Size of the block in the file.
        step_num_bytes: How many compressed bytes are read at a time.

    Example:
        >>> raw = zstandard.compress(b"ab") + zstandard.compress(b"cd")
        >>> decompressed_block(io.BytesIO(raw), "tar.zst", len(raw), 1 << 20).readinto(memoryview(bytearray(9)))
        4
    """
    if not format_name.endswith(".zst"):
        return decompressed(file, format_name)
    decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_NUM_BYTES)
    part: Any = _Part(file, num_bytes)
    stream: Any = decoder.stream_reader(part, read_size=step_num_bytes, read_across_frames=True, closefd=False)
    return cast("Readable", stream)


class _Part:
    """The next bytes of a file, as far as a decoder may read."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


class ForwardFile:
    """A stream that can be told where it is and moved forwards: all that ``tarfile`` needs to list members.

    Args:
        stream: Where the bytes come from.
        seekable: The same object if it can seek, so that skipped data is not read.
        position: Where in the decoded stream it begins.
        max_read: What a single ``read`` may ask for; more is an error, before anything is read.

    Attributes:
        last: What the last ``read`` returned.
    """

    def __init__(
        self, stream: Readable, seekable: BinaryIO | None = None, position: int = 0, max_read: int | None = None
    ) -> None:
        self.last = b""
        self._max_read = max_read
        self._stream, self._seekable = stream, seekable
        self._position = position
        self._pushed_back = b""

    def tell(self) -> int:
        """Position in the decoded stream."""
        return self._position

    def read(self, size: int) -> bytes:
        """Returns ``size`` bytes, fewer only at the end.

        Raises:
            OSError: If that is more than may be asked for.
        """
        if self._max_read is not None and size > self._max_read:
            raise OSError(f"{size} bytes are asked for at once, more than {self._max_read}")
        data = self._pushed_back[:size]
        self._pushed_back = self._pushed_back[size:]
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        self._position += len(data)
        self.last = data
        return data

    def read_into(self, target: memoryview) -> int:
        """Fills ``target``; returns how many bytes it took, fewer only at the end."""
        filled = len(self._pushed_back[: len(target)])
        target[:filled], self._pushed_back = self._pushed_back[:filled], self._pushed_back[filled:]
        while filled < len(target) and (more := self._stream.readinto(target[filled:])):
            filled += more
        self._position += filled
        return filled

    def push_back(self) -> None:
        """Undoes the last ``read``."""
        self._pushed_back = self.last + self._pushed_back
        self._position -= len(self.last)

    def seek(self, position: int) -> int:
        """Moves forwards to ``position``, or to the end of a stream that ends before it."""
        if position < self._position:
            raise io.UnsupportedOperation("a stream does not go back")
        if self._seekable is not None:
            self._seekable.seek(position)
            self._pushed_back, self._position = b"", position
        while self._position < position:
            num_bytes = min(position - self._position, 1 << 20)
            if len(self.read(num_bytes)) < num_bytes:
                break
        return self._position
