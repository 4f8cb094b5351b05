"""The Parquet footer: how it is fetched and checked, and what it says about row groups."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardstream import storage
from shardstream.errors import ManifestError

_FIRST_TAIL_NUM_BYTES = 1 << 18  # one request for nearly every footer
_MARK = b"PAR1"
_ENCRYPTED_MARK = b"PARE"
_SIGNATURE_NUM_BYTES = 28  # follows the metadata of a footer that is readable in a file with encrypted columns
_MIN_NUM_BYTES = 12  # mark, footer length, mark
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}


def read_footer(url: str, num_bytes: int, storage_options: Mapping[str, Any]) -> bytes:
    """Reads the footer of a Parquet file: the Thrift metadata and the last 8 bytes.

    Args:
        url: The shard.
        num_bytes: Size of the file.
        storage_options: Given to fsspec.

    Raises:
        ManifestError: If the file is empty, cut, encrypted or not Parquet.
        ReadError: If storage failed.
    """
    if num_bytes == 0:
        raise ManifestError("the shard is empty (0 bytes)", url=url, hint="write it again, or leave it out")
    tail = storage.read_tail(url, _FIRST_TAIL_NUM_BYTES, storage_options, file_num_bytes=num_bytes)
    if tail[-4:] == _ENCRYPTED_MARK:
        raise _encrypted(url)
    if num_bytes < _MIN_NUM_BYTES or tail[-4:] != _MARK:
        _raise_no_footer(url, num_bytes, tail, storage_options)
    footer_num_bytes = int.from_bytes(tail[-8:-4], "little") + 8
    if footer_num_bytes > num_bytes - len(_MARK):
        what = "the footer is longer than the shard"
        raise ManifestError(what, url=url, expected=f"at most {num_bytes - 4} bytes", found=footer_num_bytes)
    if footer_num_bytes > len(tail):
        tail = storage.read_tail(url, footer_num_bytes, storage_options, file_num_bytes=num_bytes)
    return tail[-footer_num_bytes:]


def _raise_no_footer(url: str, num_bytes: int, tail: bytes, storage_options: Mapping[str, Any]) -> None:
    head = storage.read_range(url, 0, min(16, num_bytes), storage_options)
    if head[:4] == _MARK:
        what, hint = "the shard is cut: it begins as Parquet and has no footer", "fetch or write it again"
    else:
        what, hint = "the shard is not Parquet", "an error page saved under its name? fetch it again"
    raise ManifestError(what, url=url, expected="PAR1 at its end", found=f"{head!r} … {tail[-4:]!r}", hint=hint)


def footer_digest(footer: bytes) -> str:
    """Returns 32 hex digits: blake2b of the footer's bytes."""
    return hashlib.blake2b(footer, digest_size=16).hexdigest()


def parse_footer(footer: bytes, url: str) -> pq.FileMetaData:
    """Parses the bytes that ``read_footer`` returned.

    Raises:
        ManifestError: If they are damaged, or of a shard with encrypted columns.
    """
    try:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        # To look at an encrypted column's metadata would abort the process: pyarrow does not catch its own exception.
        if len(footer) - 8 - metadata.serialized_size == _SIGNATURE_NUM_BYTES:
            raise _encrypted(url)
        _check_chunks(metadata)  # also of what a manifest holds: its digest is by whoever wrote the manifest
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        raise ManifestError("the footer is damaged", url=url, found=error, hint="fetch or write it again") from error
    return metadata


class _NoData:
    """A file of which pyarrow can learn the size, and no more.

    Attributes:
        is_asked: Whether it began to read.
    """

    closed = is_asked = False

    def seek(self, position: int, whence: int = 0) -> int:
        del whence
        return position

    def tell(self) -> int:
        return 1 << 62

    def read(self, size: int = -1) -> bytes:
        del size
        self.is_asked = True  # and no error, of which pyarrow would make text first, and keep the traceback
        return b""

    def close(self) -> None:
        pass


def _check_chunks(metadata: pq.FileMetaData) -> None:
    """Lets pyarrow look at every column chunk where it catches its own exceptions: when it begins to read.

    ``RowGroupMetaData.column`` of a damaged chunk ends the process ("terminate called ...") instead.

    Raises:
        OSError: If one is damaged.
    """
    groups = range(metadata.num_row_groups)
    if not groups or not metadata.num_columns:
        return
    nothing = _NoData()
    file = pq.ParquetFile(pa.PythonFile(nothing, mode="r"), metadata=metadata, pre_buffer=True)
    with _interrupts_after():
        try:
            next(file.iter_batches(1, row_groups=groups, use_threads=False))
        except (pa.ArrowException, OSError):
            if not nothing.is_asked:
                raise
    _check_types(metadata)


@contextlib.contextmanager
def _interrupts_after() -> Iterator[None]:
    """Keeps Ctrl-C until the block's end: one that comes while pyarrow is in its midst may be lost."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def _check_types(metadata: pq.FileMetaData) -> None:
    """The same for statistics, of which it is the column's type that must be right."""
    kinds = [metadata.schema.column(leaf).physical_type for leaf in range(metadata.num_columns)]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for leaf, kind in enumerate(kinds):
            if (found := group.column(leaf).physical_type) != kind:
                raise OSError(f"column {metadata.schema.column(leaf).path} is {kind}, its data {found}")


def _encrypted(url: str) -> ManifestError:
    return ManifestError("the shard is encrypted", url=url, hint="write it without encryption")


def row_group_spans(group: pq.RowGroupMetaData, columns: Sequence[str] | None = None) -> list[tuple[int, int]]:
    """Returns where the column chunks (leaves) of a row group are in the file: first byte and end of each.

    Args:
        group: The row group.
        columns: Only these columns, or None for all.
    """
    chunks = [group.column(place) for place in range(group.num_columns)]
    if columns is not None:
        inside = tuple(f"{name}." for name in columns)
        chunks = [c for c in chunks if c.path_in_schema in columns or c.path_in_schema.startswith(inside)]
    starts = [_chunk_start(chunk) for chunk in chunks]
    return [(start, start + chunk.total_compressed_size) for start, chunk in zip(starts, chunks, strict=True)]


def _chunk_start(chunk: pq.ColumnChunkMetaData) -> int:
    """First byte of a column chunk; some writers say 0 where there is no dictionary page."""
    return int(chunk.dictionary_page_offset or chunk.data_page_offset)


def decoded_num_bytes(group: pq.RowGroupMetaData) -> int:
    """Returns about how large a row group is in memory.

    The sizes in the footer are those of the encoded pages: of numbers, the count and width are better.
    """
    chunks = (group.column(place) for place in range(group.num_columns))
    return sum(max(c.total_uncompressed_size, c.num_values * _WIDTHS.get(c.physical_type, 1)) for c in chunks)


def num_missing(metadata: pq.FileMetaData, field: pa.Field) -> int:
    """Returns how many rows of a column are null, by its type and statistics; -1 if they do not tell."""
    if pa.types.is_null(field.type):
        return int(metadata.num_rows)
    places = [place for place in range(metadata.num_columns) if metadata.schema.column(place).path == field.name]
    if not places:
        return -1  # nested: its leaves count other things than rows
    total = 0
    for index in range(metadata.num_row_groups):
        statistics = metadata.row_group(index).column(places[0]).statistics
        if statistics is None or not statistics.has_null_count or statistics.null_count < 0:
            return -1
        total += statistics.null_count
    return total if total <= metadata.num_rows else -1


def check_row_counts(metadata: pq.FileMetaData, url: str) -> None:
    """Refuses a footer whose counts contradict each other, or are none that a manifest can hold.

    Raises:
        ManifestError: If they do.
    """
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    hint = "fetch or write it again"
    for place, group in enumerate(groups):
        if not 0 <= group.num_rows < 1 << 31:
            what = f"row group {place} has a number of rows that cannot be"
            raise ManifestError(what, url=url, expected="0 to 2^31 - 1", found=group.num_rows, hint=hint)
        num_values = [group.column(leaf).num_values for leaf in range(group.num_columns)]
        if (fewest := min(num_values, default=group.num_rows)) < group.num_rows:
            what = f"row group {place} has a column of fewer values than rows"
            raise ManifestError(what, url=url, expected=group.num_rows, found=fewest, hint=hint)
    if (num_rows := sum(group.num_rows for group in groups)) != metadata.num_rows:
        what = "the row groups have another number of rows together than the shard"
        raise ManifestError(what, url=url, expected=metadata.num_rows, found=num_rows, hint=hint)
