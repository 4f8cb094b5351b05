"""The bytes of blocks of whole samples: of a local plain file its mapping, of any other a stream, decoded if need be.

For formats whose samples lie one after the other in a stream that may be compressed: plain where the format's name has
no dot ("tar"), else compressed as its ending says ("tar.zst").
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream import storage
from shardstream.formats import Shard
from shardstream.formats._decompress import ForwardFile, check_ratio, decompressed_block
from shardstream.formats._file_region import FileRegion, open_file
from shardstream.formats._shards import ShardRanges
from shardstream.formats._span import Span, SpanFile, pieces
from shardstream.ranges import ByteRange

_STEP_NUM_BYTES = 1 << 17  # of a compressed block that is decoded little by little
_TAIL_NUM_BYTES = 1 << 16  # decoded behind a block's last run: padding, and the checksum of its frame


def place_in_shard(shard: Shard, block: int) -> int:
    """Returns the index of a block in its shard."""
    return block - int(shard.manifest.shard_first_block[shard.index])


def bytes_of_runs(
    shard: Shard,
    block: int,
    runs: Sequence[Span],
    data_offset: int,
    digest_now: Callable[[], str],
    *,
    data_end: int | None = None,
) -> Generator[npt.NDArray[np.uint8], None, None]:
    """Yields the decoded bytes of runs of a block.

    Args:
        shard: The shard.
        block: Index of the block in the manifest.
        runs: First byte and end of each wanted run in the decoded stream, in order.
        data_offset: Where in the decoded stream the block can be entered.
        digest_now: See ``check_unchanged``.
        data_end: Where in the decoded stream the shard's next block can be entered, if there is one.

    Raises:
        EOFError: If the shard ends before; other errors as ``DAMAGE`` lists them.
        ReadError: If storage failed.
    """
    path = _path_to_map(shard)
    if path is not None:
        for start, end in runs:
            yield _mapped(path, start, end)
        return
    if runs and not _is_plain(shard):  # what the manifest says is what memory is taken for
        check_ratio(runs[-1][1] - data_offset, int(shard.manifest.block_num_bytes[block]))
    if data_end is not None and len(runs) == 1 and _is_of_frames(shard, block, runs[0], data_end - data_offset):
        start, end = (at - data_offset for at in runs[0])
        yield _decoded(shard, block, data_end - data_offset, digest_now)[start:end]
        return
    with _block_stream(shard, block, data_offset, digest_now) as stream:
        for index, (start, end) in enumerate(runs):
            stream.seek(start)
            values = read_exactly(stream, end - start)
            if index == len(runs) - 1 and not _is_plain(shard):
                stream.read_into(memoryview(bytearray(_TAIL_NUM_BYTES)))
            yield values
            del values


def region_of(shard: Shard, block: int, values: npt.NDArray[np.uint8], start: int) -> FileRegion | None:
    """Returns the file that a run of ``bytes_of_runs`` is mapped from, to read from; None if it is not, or none may be.

    Args:
        shard: The shard.
        block: Index of the block in the manifest.
        values: The run.
        start: Its first byte in the decoded stream.

    Raises:
        OSError: If the file cannot be opened.
    """
    path = _path_to_map(shard)
    file = None if path is None else open_file(path)
    return None if file is None else FileRegion(values, file, start, shard.url, block)


def block_ranges(shard: Shard, block: int, first_run: int, digest_now: Callable[[], str]) -> list[ByteRange]:
    """Returns the ranges of a block that ``bytes_of_runs`` asks for first; see ``Format.ranges_of``."""
    manifest = shard.manifest
    ranges = pieces([block_span(shard, block)])
    if manifest.is_long(block):  # a plain shard is entered anywhere
        ranges = [] if first_run and _is_plain(shard) else ranges[:1]
    source = ShardRanges(shard, digest_now)
    return [source.range(start, end) for start, end in ranges]


def _path_to_map(shard: Shard) -> str | None:
    return storage.local_path(shard.url) if shard.is_local and _is_plain(shard) else None


def _is_plain(shard: Shard) -> bool:
    return "." not in shard.manifest.formats[shard.index]


def _mapped(path: str, start: int, end: int) -> npt.NDArray[np.uint8]:
    """Bytes of a local file as a view of its mapping, which lives as long as the view; the file is closed at once.

    Open runs are file pages then, which the system can drop and read again: thousands of lanes take no memory. Arrow
    asks the system to read them ahead.
    """
    with pa.memory_map(path) as file:
        file.seek(start)
        values = np.frombuffer(file.read_buffer(end - start), np.uint8)
    return _whole(values, end - start)


def read_exactly(stream: ForwardFile, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns the next bytes of a decoded stream.

    Raises:
        EOFError: If it ends before.
    """
    values = np.empty(num_bytes, np.uint8)
    return _whole(values[: stream.read_into(values.data)], num_bytes)


def _whole(values: npt.NDArray[np.uint8], num_bytes: int) -> npt.NDArray[np.uint8]:
    if len(values) < num_bytes:
        raise EOFError(f"{len(values)} of {num_bytes} bytes are there")
    return values


def block_span(shard: Shard, block: int) -> Span:
    """Returns the first byte and the end of a block in its file."""
    offset = int(shard.manifest.block_offset[block])
    return offset, offset + int(shard.manifest.block_num_bytes[block])


def _is_of_frames(shard: Shard, block: int, run: Span, num_bytes: int) -> bool:
    """Whether a block is zstd frames of its own, which hold a run and little else: ``num_bytes`` in all."""
    is_apart = block_span(shard, block)[1] == int(shard.manifest.block_offset[block + 1])
    is_zstd = shard.manifest.formats[shard.index].endswith(".zst")
    return is_zstd and is_apart and num_bytes <= 2 * (run[1] - run[0])


def _decoded(shard: Shard, block: int, num_bytes: int, digest_now: Callable[[], str]) -> npt.NDArray[np.uint8]:
    """All that a block's zstd frames hold, decoded in one go: a stream decodes into a window, and copies from there."""
    with _block_file(shard, block, digest_now) as file:
        data = file.read(int(shard.manifest.block_num_bytes[block]))
    # As bytes, whose memory is had without letting go of the interpreter's lock.
    return np.frombuffer(pa.Codec("zstd").decompress(data, num_bytes, asbytes=True), np.uint8)


@contextmanager
def _block_file(shard: Shard, block: int, digest_now: Callable[[], str]) -> Iterator[BinaryIO]:
    """The file of a block, where it begins."""
    manifest = shard.manifest
    if shard.is_local and not manifest.is_long(block):
        # At once, and not by a file object: for each step, the thread waits for the interpreter's lock.
        yield BytesIO(storage.read_local(shard.url, *block_span(shard, block)))
        return
    if shard.is_local:
        file = storage.open_source(shard.url)
    else:
        ranges, shard_num_bytes = ShardRanges(shard, digest_now), int(manifest.num_bytes[shard.index])
        spans, is_streamed = [block_span(shard, block)], manifest.is_long(block)
        span = SpanFile(ranges, spans, num_bytes=shard_num_bytes, is_streamed=is_streamed)
        file = cast("BinaryIO", span)
    with file:
        file.seek(int(manifest.block_offset[block]))
        yield file


@contextmanager
def _block_stream(shard: Shard, block: int, data_offset: int, digest_now: Callable[[], str]) -> Iterator[ForwardFile]:
    """The decoded bytes of a block, from where it can be entered."""
    manifest = shard.manifest
    num_bytes = int(manifest.block_num_bytes[block])
    # A block of one run is read at once: for each step, the thread waits for the interpreter's lock.
    step_num_bytes = _STEP_NUM_BYTES if manifest.is_long(block) else max(1, num_bytes)
    with _block_file(shard, block, digest_now) as file:
        stream = decompressed_block(file, manifest.formats[shard.index], num_bytes, step_num_bytes)
        yield ForwardFile(stream, position=data_offset)
