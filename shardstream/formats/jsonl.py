"""JSON lines, plain, gzip and zstd: one object a line. Columns and their types are found when indexing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from shardstream import storage
from shardstream.columns import Rows
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import IndexOptions, Shard, ShardIndex
from shardstream.formats._arrow import column_of, is_number, is_number_list, rows_of
from shardstream.formats._block_bytes import block_ranges, bytes_of_runs, place_in_shard
from shardstream.formats._counts import RunLengths, num_valid_targets, run_lengths, token_counts
from shardstream.formats._decompress import Frame, Readable, ZstdStream, decompressed
from shardstream.formats._shards import DAMAGE, check_unchanged, naming_damage, remembered, run_bounds
from shardstream.formats._tar_blocks import TarBlocks, cut_blocks
from shardstream.formats.tar import NO_WAY_IN
from shardstream.manifest import ColumnSchema
from shardstream.ranges import ByteRange

_PIECE_NUM_BYTES = 4 << 20  # decoded, parsed at a time when indexing
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LARGEST_EXACT = 2**53  # whole numbers above it do not fit a float64
_LONG_NUMBER = re.compile(rb"[:,\[]\s*(-?\d{16,})\s*[,}\]]")
_INDENTED = re.compile(rb"[ \t\r]*\{")
_LISTS = ("member_offset", "member_num_bytes", "block_data_offset")


class JsonLinesFormat:
    r"""Reads JSON lines. Blank lines are no samples; a field that a line lacks is null there.

    Types are Arrow's: whole numbers are int64, numbers float64 where one is no whole number, text stays text (dates,
    too), objects are structs. A field that is a number here and text there is refused.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/a.jsonl"
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"x": 1}\n{"x": 2, "y": "b"}\n')
        >>> index = JsonLinesFormat().index_shard(path, IndexOptions(), {})
        >>> index.block_rows.tolist(), [(column.name, column.type) for column in index.columns]
        ([2], [('x', 'int64'), ('y', 'string')])
    """

    is_self_contained = True

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Reads the shard once, front to back, and finds lines, columns and types.

        Returns:
            One block per group of whole lines (see ``cut_blocks``: plain up to a run's size, compressed by frames).
            Lists: ``member_offset`` and ``member_num_bytes`` int64[num_runs], the lines of each run in the decoded
            stream; ``block_data_offset`` int64[b]; and the counts that are asked for, as of Parquet.

        Raises:
            ManifestError: If a line is no object or not UTF-8, types differ from line to line, a number is too large,
                the shard is cut, or lacks a column.
            ReadError: If storage failed.
        """
        if options.tokens_dtype is not None:
            raise ManifestError("tokens_dtype is for raw bytes in tars", url=url, found=options.tokens_dtype)
        format_name = _format_name(url)
        info = storage.stat(url, storage_options)
        scanned = _scan(url, format_name, info.num_bytes, storage_options, options)
        blocks = cut_blocks(scanned.starts, scanned.ends, scanned.frames, info.num_bytes, options.run_num_bytes)
        runs = _run_bounds(blocks)
        is_one_piece = scanned.frames is not None and len(scanned.frames) <= 1
        first = np.array([first for first, _ in runs], np.int64)
        last = np.array([end - 1 for _, end in runs], np.int64)
        return ShardIndex(
            format=format_name,
            num_bytes=info.num_bytes,
            version_tag=info.version_tag,
            digest=scanned.digest,
            block_rows=blocks.rows,
            block_run_rows=blocks.run_rows,
            block_offset=blocks.offset,
            block_num_bytes=blocks.num_bytes,
            columns=tuple(
                ColumnSchema(column.name, str(column.type), len(scanned.starts) - scanned.num_present[column.name])
                for column in scanned.schema
            ),
            arrow_schema=scanned.schema.serialize().to_pybytes(),
            lists={
                "member_offset": scanned.starts[first],
                "member_num_bytes": scanned.ends[last] - scanned.starts[first],
                "block_data_offset": blocks.data_offset,
                **_counts(url, scanned, runs, options),
            },
            warnings=_warnings(info.num_bytes, is_one_way=is_one_piece and bool(np.any(blocks.rows > blocks.run_rows))),
        )

    def ranges_of(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> list[ByteRange]:
        """Returns the block's bytes, cut; see ``Format.ranges_of``."""
        del columns  # the fields of a line lie together
        return block_ranges(shard, block, first_run, lambda: _digest_now(shard))

    def read_runs(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> Iterator[Rows]:
        """Yields the runs of a block in the manifest's schema; see ``Format.read_runs``."""
        with closing(self.read_tables(shard, block, columns, first_run)) as tables:
            for table in tables:
                yield rows_of(table)
                del table

    def read_tables(
        self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0
    ) -> Generator[pa.Table, None, None]:
        """Yields the same as Arrow has it."""
        if shard.is_local:
            check_unchanged(shard, lambda: _digest_now(shard))
        lines = remembered(shard, lambda: _lines(shard))
        schema = _wanted(shard, block, columns)
        place = place_in_shard(shard, block)
        bounds = run_bounds(shard, block)
        runs = slice(int(lines.first_run[place]) + first_run, int(lines.first_run[place]) + len(bounds))
        spans = list(zip(lines.starts[runs].tolist(), lines.ends[runs].tolist(), strict=True))
        data_offset = int(lines.block_data_offset[place])
        with naming_damage(shard.url, block):
            parts = bytes_of_runs(shard, block, spans, data_offset, lambda: _digest_now(shard))
            with closing(parts):
                for (first, end), data in zip(bounds[first_run:], parts, strict=True):
                    table = _table(data, schema)
                    _check_numbers(table, data.data)
                    if table.num_rows != end - first:
                        what, found = "a run has another number of lines", f"{table.num_rows} rows"
                        raise DecodeError(what, url=shard.url, block=block, expected=f"{end - first} rows", found=found)
                    yield table
                    del table, data


def _format_name(url: str) -> str:
    """``"jsonl"``, ``"jsonl.gz"`` or ``"jsonl.zst"``."""
    name = url.split("?", 1)[0].lower() if "://" in url else url.lower()
    if name.endswith(".gz"):
        return "jsonl.gz"
    return "jsonl.zst" if name.endswith((".zst", ".zstd")) else "jsonl"


# -------------------------------------------------------------------------------------------------- indexing


@dataclass
class _Scanned:
    """What reading a shard front to back found: n lines that are not blank."""

    frames: list[Frame] | None = None
    digest: str = ""
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    num_present: dict[str, int] = field(default_factory=dict)
    with_large: set[str] = field(default_factory=set)  # columns of whole numbers that a float64 would round
    starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    ends: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    documents: list[RunLengths] = field(default_factory=list)
    valid: dict[str, list[npt.NDArray[np.int32]]] = field(default_factory=dict)


class _Piece(NamedTuple):
    """Some whole lines: their bytes, where these begin in the decoded stream, and how many lines came before."""

    data: bytes
    offset: int
    num_lines_before: int


def _warnings(num_bytes: int, *, is_one_way: bool) -> tuple[str, ...]:
    if num_bytes == 0:  # of a shard that a filter left empty, or of one that was never written
        return ("the shard is empty (0 bytes): it counts 0 samples",)
    return (NO_WAY_IN,) if is_one_way else ()


def _scan(
    url: str, format_name: str, num_bytes: int, storage_options: Mapping[str, Any], options: IndexOptions
) -> _Scanned:
    scanned, hasher = _Scanned(), hashlib.blake2b(digest_size=16)
    starts, ends = [], []
    if num_bytes == 0 and format_name != "jsonl":
        raise ManifestError("the shard is empty (0 bytes)", url=url, hint="write it again, or leave it out")
    try:
        with storage.open_source(url, storage_options, num_bytes=num_bytes) as file:
            stream = decompressed(file, format_name)
            for piece in _pieces(stream):
                hasher.update(piece.data)
                first, end = _filled_lines(piece.data)
                if len(first):
                    _take_in(scanned, piece, first, url, options)
                starts.append(first + piece.offset)
                ends.append(end + piece.offset)
    except DAMAGE as error:
        found = f"{type(error).__name__}: {error}"
        raise ManifestError("the shard is cut or damaged", url=url, found=found, hint="fetch it again") from error
    if isinstance(stream, ZstdStream):
        scanned.frames = stream.frames
    elif format_name != "jsonl":
        scanned.frames = [Frame(0, 0)]
    scanned.digest = hasher.hexdigest()
    scanned.starts = np.concatenate([*starts, np.zeros(0, np.int64)])
    scanned.ends = np.concatenate([*ends, np.zeros(0, np.int64)])
    return scanned


def _pieces(stream: Readable) -> Iterator[_Piece]:
    """Cuts a stream into pieces of whole lines; the last line may lack its end."""
    held: list[bytes] = []
    offset, num_lines = 0, 0
    is_first = True
    while more := stream.read(_PIECE_NUM_BYTES):
        if is_first and more.startswith(_BYTE_ORDER_MARK):
            more, offset = more[len(_BYTE_ORDER_MARK) :], len(_BYTE_ORDER_MARK)
        is_first = False
        cut = more.rfind(b"\n") + 1
        if not cut:
            held.append(more)
            continue
        data = b"".join([*held, more[:cut]])
        held = [more[cut:]] if cut < len(more) else []
        yield _Piece(data, offset, num_lines)
        offset += len(data)
        num_lines += data.count(b"\n")
    if held:
        yield _Piece(b"".join(held), offset, num_lines)


def _filled_lines(data: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    r"""Where the lines begin and end that are not blank.

    Example:
        >>> [found.tolist() for found in _filled_lines(b"{}\n \r\n\n{ }")]
        [[0, 7], [2, 10]]
    """
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(letters == ord("\n"))
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    starts = np.concatenate([[0], ends[:-1] + 1])
    num_filled = np.concatenate([[0], np.cumsum(letters > ord(" "), dtype=np.int64)])
    is_filled = num_filled[ends] > num_filled[starts]
    return starts[is_filled].astype(np.int64), ends[is_filled].astype(np.int64)


def _take_in(scanned: _Scanned, piece: _Piece, starts: npt.NDArray[np.int64], url: str, options: IndexOptions) -> None:
    """Parses a piece, whose lines begin at ``starts``: its columns join the schema, what is counted is counted."""
    try:
        piece.data.decode()
        _check_beginnings(piece.data, starts)
        found = _table(np.frombuffer(piece.data, np.uint8), None)
        schema = pa.schema([column.with_type(_stable(column.type)) for column in found.schema])
        table = found if schema == found.schema else _table(np.frombuffer(piece.data, np.uint8), schema)
        if table.num_rows != len(starts):
            raise pa.ArrowInvalid(f"{table.num_rows} objects in {len(starts)} lines")
        scanned.schema = pa.unify_schemas([scanned.schema, schema], promote_options="permissive")
        _check_numbers(table, piece.data)
        scanned.with_large |= {
            name
            for name in table.column_names
            if pa.types.is_integer(table.column(name).type) and _largest(table.column(name)) > _LARGEST_EXACT
        }
        rounded = [name for name in scanned.with_large if pa.types.is_floating(scanned.schema.field(name).type)]
        if rounded:
            raise pa.ArrowInvalid(f"{sorted(rounded)} hold fractions and whole numbers too large to go with them")
    except (pa.ArrowException, ValueError) as error:
        raise _refusal(piece, url, error) from error
    for name in table.column_names:
        present = table.num_rows - table.column(name).null_count
        scanned.num_present[name] = scanned.num_present.get(name, 0) + present
    if options.tokens_column is not None:
        scanned.documents.append(run_lengths(column_of(_counted(table, options.tokens_column, url, only_lists=True))))
    for head, name in options.targets.items():
        column = column_of(_counted(table, name, url, only_lists=False))
        scanned.valid.setdefault(head, []).append(num_valid_targets(column, options.ignore_index))


def _check_beginnings(data: bytes, starts: npt.NDArray[np.int64]) -> None:
    """Refuses lines that are no objects where Arrow takes them: a null, an object over several lines."""
    letters = np.frombuffer(data, np.uint8)[starts]
    if not all(_INDENTED.match(data, start) for start in starts[letters != ord("{")].tolist()):
        raise pa.ArrowInvalid("a line is no JSON object")


def _table(data: npt.NDArray[np.uint8], schema: pa.Schema | None) -> pa.Table:
    """Parses whole lines, in these types; by Arrow's own choice without a schema."""
    if data[np.argmax(data > ord(" "))] != ord("{"):  # at a null, Arrow ends the process
        raise pa.ArrowInvalid("a line is no JSON object")
    how = pj.ParseOptions() if schema is None else pj.ParseOptions(schema, unexpected_field_behavior="ignore")
    reading = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
    table = pj.read_json(pa.BufferReader(pa.py_buffer(data)), read_options=reading, parse_options=how)
    return table if schema is None else table.select(schema.names)


def _stable(kind: pa.DataType) -> pa.DataType:
    """The type without guesses: what looks like a time is text."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_stable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_stable(part.type)) for part in kind])
    return kind


def _check_numbers(table: pa.Table, data: bytes | memoryview) -> None:
    """Whole numbers that Arrow would round to a float64 without a word."""
    columns = [table.column(name) for name in table.column_names]
    has_large = any(pa.types.is_floating(column.type) and _largest(column) >= _LARGEST_EXACT for column in columns)
    if has_large and (hit := _LONG_NUMBER.search(data)):
        raise pa.ArrowInvalid(f"the whole number {hit[1].decode()} does not fit; write it as text")


def _largest(column: pa.ChunkedArray) -> float:
    """The largest absolute value of a column of numbers."""
    ends = pc.min_max(column)
    return max((abs(end.as_py()) for end in ends.values() if end.is_valid), default=0)


def _refusal(piece: _Piece, url: str, error: Exception) -> ManifestError:
    """Names the first bad line, if one is bad by itself."""
    for number, line in enumerate(piece.data.split(b"\n"), piece.num_lines_before + 1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict):
                return ManifestError(f"line {number} is no JSON object", url=url, found=repr(line[:80]))
        except ValueError as reason:
            return ManifestError(f"line {number} is not JSON", url=url, found=f"{line[:80]!r} ({reason})")
    last = piece.num_lines_before + piece.data.count(b"\n")
    what = f"lines {piece.num_lines_before + 1} to {last} or those before do not fit together"
    return ManifestError(what, url=url, found=error, hint="give each field one type, and each line one object")


def _counted(table: pa.Table, name: str, url: str, *, only_lists: bool) -> pa.Array | pa.ChunkedArray:
    """A column that is counted; where no line has it, nulls."""
    if name not in table.column_names:
        return pa.nulls(table.num_rows, pa.list_(pa.int64()) if only_lists else pa.int64())
    column = table.column(name)
    kind = column.type
    is_empty_list = pa.types.is_list(kind) and pa.types.is_null(kind.value_type)
    if not (is_number_list(kind) or is_empty_list or pa.types.is_null(kind) or (is_number(kind) and not only_lists)):
        expected = "lists of numbers" if only_lists else "numbers or lists of numbers"
        raise ManifestError(f"column {name!r} cannot be counted", url=url, expected=expected, found=kind)
    return column


def _run_bounds(blocks: TarBlocks) -> list[tuple[int, int]]:
    """First line and end of every run of the shard."""
    first = np.concatenate([[0], np.cumsum(blocks.rows, dtype=np.int64)]).tolist()
    steps = blocks.run_rows.tolist()
    return [
        (row, min(row + step, end))
        for (begin, end), step in zip(pairwise(first), steps, strict=True)
        for row in range(begin, end, step)
    ]


def _counts(url: str, scanned: _Scanned, runs: Sequence[tuple[int, int]], options: IndexOptions) -> dict[str, Any]:
    """Token lengths and valid targets, cut as the runs are."""
    wanted = [*options.targets.values(), *([options.tokens_column] if options.tokens_column is not None else [])]
    for name in wanted:
        if len(scanned.starts) and name not in scanned.schema.names:
            raise ManifestError(f"no line has a field {name!r}", url=url, found=", ".join(scanned.schema.names))
    none = np.zeros(0, np.int32)
    counts: dict[str, Any] = {
        f"targets.{head}": np.concatenate([none, *scanned.valid.get(head, [])]) for head in options.targets
    }
    if options.tokens_column is not None:
        lengths = np.concatenate([none, *(part.lengths for part in scanned.documents)])
        is_document = np.concatenate([np.zeros(0, np.bool_), *(part.is_document for part in scanned.documents)])
        documents = [RunLengths(lengths[first:end], is_document[first:end]) for first, end in runs]
        counts |= token_counts(documents, options.pack)
    return counts


# -------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, eq=False)
class _Lines:
    """Where the runs of a shard are in the decoded stream."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    block_data_offset: npt.NDArray[np.int64]
    first_run: npt.NDArray[np.int64]


def _lines(shard: Shard) -> _Lines:
    lists = shard.read_lists(*_LISTS)
    begin, end = shard.manifest.shard_first_block[shard.index : shard.index + 2].tolist()
    rows, steps = (of[begin:end].astype(np.int64) for of in (shard.manifest.block_rows, shard.manifest.block_run_rows))
    first_run = np.concatenate([[0], np.cumsum(-(-rows // steps))])
    starts, num_bytes, data_offset = (np.asarray(lists[name]) for name in _LISTS)
    return _Lines(starts, starts + num_bytes, data_offset, first_run)


def _wanted(shard: Shard, block: int, columns: Sequence[str] | None) -> pa.Schema:
    """The schema of the columns that are read; a field that this shard lacks is null in every row."""
    schema = pa.ipc.read_schema(pa.py_buffer(shard.manifest.arrow_schema))
    for name in columns or ():
        if name not in schema.names:
            found = ", ".join(schema.names)
            raise DecodeError(f"no line has a field {name!r}", url=shard.url, block=block, found=found)
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def _digest_now(shard: Shard) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    num_bytes = storage.stat(shard.url, shard.storage_options).num_bytes
    try:
        with storage.open_source(shard.url, shard.storage_options, num_bytes=num_bytes) as file:
            for piece in _pieces(decompressed(file, shard.manifest.formats[shard.index])):
                hasher.update(piece.data)
    except DAMAGE as error:
        raise ManifestError("the shard is cut or damaged", url=shard.url, found=error) from error
    return hasher.hexdigest()
