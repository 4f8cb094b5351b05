"""Arrow IPC shards, streams and files, as Hugging Face ``datasets`` keeps them: a block is some record batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream import storage
from shardstream.columns import Column, Rows
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import IndexOptions, Shard, ShardIndex
from shardstream.formats._arrow import column_of, plain_type, rows_of
from shardstream.formats._block_bytes import block_span, bytes_of_runs
from shardstream.formats._counted import counted_columns, counts_of
from shardstream.formats._ipc import Message, Messages, embedded_span, scan_messages
from shardstream.formats._shards import (
    DAMAGE,
    ShardRanges,
    check_unchanged,
    naming_damage,
    remembered,
    run_bounds,
    run_rows_of,
)
from shardstream.formats._span import pieces
from shardstream.manifest import ColumnSchema
from shardstream.ranges import ByteRange

NO_END = "no end mark: was it cut between two record batches?"

_ALIGNMENT = 8
_EXPANSION = 3  # of compressed record batches; how much exactly is told by their bodies only


class ArrowFormat:
    """Reads Arrow IPC. Local shards are mapped: uncompressed columns are views of the file.

    Small record batches are joined into blocks of about a run; a large one is a block of several runs, and is read (or
    decompressed) as a whole.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/a.arrow"
        >>> table = pa.table({"x": [1, 2, 3]})
        >>> with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        ...     writer.write_table(table)
        >>> ArrowFormat().index_shard(path, IndexOptions(), {}).block_rows.tolist()
        [3]
    """

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Reads the metadata of all messages, and their bodies only if something is to be counted.

        Returns:
            One block per group of record batches. Lists: ``footer`` (the schema's message and where dictionaries are),
            and counts as of Parquet.

        Raises:
            ManifestError: If the shard is empty, cut, no Arrow IPC, or lacks a column.
            ReadError: If storage failed.
        """
        info = storage.stat(url, storage_options)
        messages = _scan(url, info.num_bytes, storage_options)
        known = _Known.of(messages)
        blocks = _blocks(messages, options.run_num_bytes)
        sizes = [_decoded_num_bytes(group) for group in blocks]
        rows = [sum(batch.num_rows for batch in group) for group in blocks]
        run_rows = [run_rows_of(n, size, options.run_num_bytes) for n, size in zip(rows, sizes, strict=True)]
        starts = np.array([group[0].start for group in blocks], np.int64)
        ends = np.array([group[-1].end for group in blocks], np.int64)
        schema = pa.schema([field.with_type(plain_type(field.type)).remove_metadata() for field in known.schema])
        doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if doubled:
            raise ManifestError("columns share a name", url=url, found=", ".join(doubled), hint="rename one")
        names = counted_columns(url, schema, options)
        counts: dict[str, Any] = {}
        if names:
            spans = zip(starts.tolist(), ends.tolist(), rows, run_rows, strict=True)
            counts = counts_of(_counted_runs(url, known, spans, names, storage_options), options)
        return ShardIndex(
            format="arrow",
            num_bytes=info.num_bytes,
            version_tag=info.version_tag,
            digest=_digest(messages, info.num_bytes),
            block_rows=np.array(rows, np.int32),
            block_run_rows=np.array(run_rows, np.int32),
            block_offset=starts,
            block_num_bytes=ends - starts,
            columns=tuple(ColumnSchema(field.name, str(field.type), -1) for field in schema),
            arrow_schema=schema.remove_metadata().serialize().to_pybytes(),
            lists={"footer": known.packed(), **counts},
            warnings=() if messages.has_end else (NO_END,),
        )

    def ranges_of(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> list[ByteRange]:
        """Returns the block's bytes, cut; see ``Format.ranges_of``."""
        del columns, first_run  # a record batch is read as a whole
        source = ShardRanges(shard, lambda: _digest_now(shard))
        return [source.range(start, end) for start, end in pieces([block_span(shard, block)])]

    def read_runs(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> Iterator[Rows]:
        """Yields the runs of a block, in the manifest's types; see ``Format.read_runs``."""
        if shard.is_local:
            check_unchanged(shard, lambda: _digest_now(shard))
        known = remembered(shard, lambda: _Known.unpacked(shard.read_lists("footer")["footer"]))
        shared = pa.ipc.read_schema(pa.py_buffer(shard.manifest.arrow_schema)) if shard.manifest.arrow_schema else None
        names = list(columns) if columns is not None else (shared or known.schema).names
        for name in names:
            if name not in known.schema.names:
                found = ", ".join(known.schema.names)
                raise DecodeError(f"the shard has no column {name!r}", url=shard.url, block=block, found=found)
        bounds = run_bounds(shard, block)
        with naming_damage(shard.url, block):
            start, end = block_span(shard, block)
            spans = [*known.dictionaries_before(start), (start, end)]
            parts = [_bytes(shard, block, *span) for span in spans]
            table = known.table(parts[:-1], parts[-1]).select(names)
            del parts
            if table.num_rows != bounds[-1][1]:
                expected, found = f"{bounds[-1][1]} rows", f"{table.num_rows} rows"
                raise DecodeError("a block is short", url=shard.url, block=block, expected=expected, found=found)
            for first, stop in bounds[first_run:]:
                yield rows_of(_as_shared(table.slice(first, stop - first), shared, shard.url, block))


def is_embedded(url: str, storage_options: Mapping[str, Any]) -> bool:
    """Returns whether a file is something else that ends with Arrow IPC, as some LitData chunks do.

    Raises:
        ReadError: If storage failed.
    """
    num_bytes = storage.stat(url, storage_options).num_bytes
    return embedded_span(lambda start, end: storage.read_range(url, start, end, storage_options), num_bytes) is not None


def _scan(url: str, num_bytes: int, storage_options: Mapping[str, Any]) -> Messages:
    if num_bytes == 0:
        raise ManifestError("the shard is empty (0 bytes)", url=url, hint="write it again, or leave it out")
    try:
        with storage.open_source(url, storage_options, num_bytes=num_bytes, ahead_num_bytes=0) as file:

            def read_at(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            messages = scan_messages(read_at, *(embedded_span(read_at, num_bytes) or (0, num_bytes)))
            pa.ipc.read_schema(pa.py_buffer(_framed(messages.schema)))
            return messages
    except (*DAMAGE, ValueError) as error:
        found, hint = f"{type(error).__name__}: {error}", "fetch or write it again"
        raise ManifestError("the shard is cut, damaged, or no Arrow IPC", url=url, found=found, hint=hint) from error


def _digest(messages: Messages, num_bytes: int) -> str:
    """Of the metadata of all messages, which says where each buffer begins and ends."""
    hasher = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=16)
    for message in (messages.schema, *messages.dictionaries, *messages.batches):
        hasher.update(message.start.to_bytes(8, "little") + message.metadata)
    return hasher.hexdigest()


def _digest_now(shard: Shard) -> str:
    num_bytes = storage.stat(shard.url, shard.storage_options).num_bytes
    return _digest(_scan(shard.url, num_bytes, shard.storage_options), num_bytes)


def _bytes(shard: Shard, block: int, start: int, end: int) -> npt.NDArray[np.uint8]:
    """Bytes of the shard: of a local one its mapping."""
    if shard.is_local:
        with closing(bytes_of_runs(shard, block, [(start, end)], start, lambda: _digest_now(shard))) as runs:
            return next(runs)
    ranges = ShardRanges(shard, lambda: _digest_now(shard))
    return np.frombuffer(b"".join(ranges.read(*piece) for piece in pieces([(start, end)])), np.uint8)


# --------------------------------------------------------------------------------------------------- blocks


def _blocks(messages: Messages, run_num_bytes: int) -> list[list[Message]]:
    """Consecutive record batches up to the size of a run; no dictionary comes between two of them."""
    blocks: list[list[Message]] = []
    for batch in messages.batches:
        if not batch.num_rows:
            continue
        last = blocks[-1] if blocks else []
        if last and last[-1].end == batch.start and _decoded_num_bytes([*last, batch]) <= run_num_bytes:
            last.append(batch)
        else:
            blocks.append([batch])
    return blocks


def _decoded_num_bytes(group: Sequence[Message]) -> int:
    return (group[-1].end - group[0].start) * (_EXPANSION if group[0].is_compressed else 1)


def _framed(message: Message) -> bytes:
    """A message without body, as a stream holds it."""
    return b"\xff\xff\xff\xff" + len(message.metadata).to_bytes(4, "little") + message.metadata


@dataclass(frozen=True)
class _Known:
    """What reading needs to know of a shard besides its blocks: the schema's message, and where dictionaries are."""

    head: bytes
    dictionaries: npt.NDArray[np.int64]
    """int64[d, 2]: first byte and end."""
    is_file: bool

    @classmethod
    def of(cls, messages: Messages) -> _Known:
        spans = np.array([(m.start, m.end) for m in messages.dictionaries], np.int64).reshape(-1, 2)
        return cls(_framed(messages.schema), spans, messages.is_file)

    @property
    def schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self.head))

    def packed(self) -> bytes:
        counts = np.array([self.is_file, len(self.dictionaries)], "<i8")
        return counts.tobytes() + self.dictionaries.astype("<i8").tobytes() + self.head

    @classmethod
    def unpacked(cls, footer: bytes) -> _Known:
        is_file, count = np.frombuffer(footer, "<i8", 2).tolist()
        spans = np.frombuffer(footer, "<i8", 2 * count, 16).reshape(count, 2)
        return cls(footer[16 + 16 * count :], spans, bool(is_file))

    def dictionaries_before(self, start: int) -> list[tuple[int, int]]:
        """Those that a block may need: in a file all, in a stream, where they may change, those before it."""
        return [(first, end) for first, end in self.dictionaries.tolist() if self.is_file or first < start]

    def table(self, dictionaries: Sequence[npt.NDArray[np.uint8]], block: npt.NDArray[np.uint8]) -> pa.Table:
        """The rows of a block; views of its bytes, where there are no dictionaries and nothing is compressed."""
        if dictionaries:
            whole = b"".join([self.head, *(part.tobytes() for part in dictionaries), block.tobytes()])
            return pa.ipc.open_stream(pa.py_buffer(whole)).read_all()
        if block.ctypes.data % _ALIGNMENT:  # of a chunk that something else precedes
            block = block.copy()
        source, schema, batches = pa.BufferReader(pa.py_buffer(block)), self.schema, []
        while source.tell() < len(block):
            batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(source), schema))
        return pa.Table.from_batches(batches, schema)


def _as_shared(table: pa.Table, shared: pa.Schema | None, url: str, block: int) -> pa.Table:
    """In the types that all shards share."""
    arrays = []
    for name, array in zip(table.schema.names, table.columns, strict=True):
        kind = shared.field(name).type if shared is not None and name in shared.names else plain_type(array.type)
        try:
            arrays.append(array if array.type == kind else array.cast(kind))
        except pa.ArrowException as error:
            what = f"column {name!r} does not fit the manifest's type"
            raise DecodeError(what, url=url, block=block, expected=kind, found=f"{array.type} ({error})") from error
    return pa.Table.from_arrays(arrays, names=table.schema.names) if arrays else table


def _counted_runs(
    url: str, known: _Known, blocks: Any, names: Sequence[str], storage_options: Mapping[str, Any]
) -> Iterator[dict[str, Column]]:
    """The counted columns of every run, from the file as storage has it now."""
    try:
        for start, end, rows, step in blocks:
            spans = [*known.dictionaries_before(start), (start, end)]
            parts = [np.frombuffer(storage.read_range(url, *span, storage_options), np.uint8) for span in spans]
            table = known.table(parts[:-1], parts[-1]).select(list(names))
            for first, stop in pairwise([*range(0, rows, step), rows]):
                run = table.slice(first, stop - first)
                yield {name: column_of(run.column(name)) for name in names}
    except DAMAGE as error:
        raise ManifestError("a record batch cannot be decoded", url=url, found=error) from error
