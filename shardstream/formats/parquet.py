"""Parquet shards: a block is a row group; of a shard's footer the manifest keeps a copy, so reading needs none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardstream import storage
from shardstream.columns import Column, Dense, Rows
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import IndexOptions, Shard, ShardIndex
from shardstream.formats._arrow import column_of, plain_type, rows_of_arrays, without_list_views
from shardstream.formats._counted import counted_columns, counts_of
from shardstream.formats._footer import (
    check_row_counts,
    decoded_num_bytes,
    footer_digest,
    num_missing,
    parse_footer,
    read_footer,
    row_group_spans,
)
from shardstream.formats._row_groups import decoding_pool, opened
from shardstream.formats._shards import (
    DAMAGE,
    ShardRanges,
    StorageRanges,
    check_unchanged,
    naming_damage,
    remembered,
    run_bounds,
    run_rows_of,
)
from shardstream.formats._span import RangeSource, SpanFile, joined, pieces
from shardstream.manifest import ColumnSchema
from shardstream.ranges import ByteRange

_Table: TypeAlias = "pa.Table | pa.RecordBatch"
_Cast: TypeAlias = "Callable[[_Table], dict[str, pa.Array | pa.ChunkedArray]]"


class ParquetFormat:
    """Reads Parquet files, local or remote, whole row groups or run by run in bounded memory.

    Example:
        >>> import tempfile, pyarrow.parquet
        >>> path = tempfile.mkdtemp() + "/a.parquet"
        >>> pyarrow.parquet.write_table(pa.table({"x": [1, 2, 3]}), path, row_group_size=2)
        >>> ParquetFormat().index_shard(path, IndexOptions(), {}).block_rows.tolist()
        [2, 1]
    """

    is_self_contained = True

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Reads the footer and, if counts per sample are asked for, the columns they need.

        Returns:
            One block per row group that has rows. Lists: ``footer``; with ``tokens_column`` also ``token_lengths``
            int32[n] and the counts of runs (see ``token_counts``); with
            ``targets`` also ``targets.<head>`` int32[n].

        Raises:
            ManifestError: If the shard is empty, cut, encrypted, not Parquet, or lacks a column.
            ReadError: If storage failed.
        """
        info = storage.stat(url, storage_options)
        footer = read_footer(url, info.num_bytes, storage_options)
        metadata = parse_footer(footer, url)
        check_row_counts(metadata, url)
        schema = _schema(footer, metadata, url)
        groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
        groups = [group for group in groups if group.num_rows]
        spans = [_whole_span(row_group_spans(group)) for group in groups]
        if any(not 0 < start < end <= info.num_bytes - len(footer) for start, end in spans):
            raise ManifestError("the footer points outside the shard", url=url, hint="fetch or write it again")
        sizes = [decoded_num_bytes(group) for group in groups]
        run_rows = [
            run_rows_of(group.num_rows, size, options.run_num_bytes) for group, size in zip(groups, sizes, strict=True)
        ]
        block_rows = np.array([group.num_rows for group in groups], np.int32)
        block_run_rows = np.array(run_rows, np.int32)
        counted = _counted_runs(url, info.num_bytes, metadata, schema, run_rows, options, storage_options)
        return ShardIndex(
            format="parquet",
            num_bytes=info.num_bytes,
            version_tag=info.version_tag,
            digest=footer_digest(footer),
            block_rows=block_rows,
            block_run_rows=block_run_rows,
            block_offset=np.array([start for start, _ in spans], np.int64),
            block_num_bytes=np.array([end - start for start, end in spans], np.int64),
            columns=tuple(ColumnSchema(f.name, str(f.type), num_missing(metadata, f)) for f in schema),
            arrow_schema=schema.serialize().to_pybytes(),
            lists={"footer": footer, **counts_of(counted, options)},
        )

    def ranges_of(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> list[ByteRange]:
        """Returns the column chunks of a row group, cut and joined; see ``Format.ranges_of``."""
        del first_run  # a row group is decoded from its beginning
        known = remembered(shard, lambda: _known(shard))
        spans = row_group_spans(known.metadata.row_group(known.row_group(shard, block)), columns)
        wanted = joined(spans)
        ranges = pieces(wanted, len(spans))
        if shard.manifest.is_long(block):
            starts = {start for start, _ in wanted}
            ranges = [piece for piece in ranges if piece[0] in starts]
        source = ShardRanges(shard, lambda: _digest_now(shard))
        return [source.range(start, end) for start, end in ranges]

    def read_runs(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> Iterator[Rows]:
        """Yields the runs of a row group, cast to the manifest's schema; see ``Format.read_runs``."""
        with closing(self.decode_runs(shard, block, columns, first_run)) as runs:
            for rows_of_run in runs:
                yield rows_of_run()
                del rows_of_run

    def decode_runs(
        self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0
    ) -> Generator[Callable[[], Rows], None, None]:
        """Yields the runs as pyarrow decoded them; what is called makes them rows; see ``formats.decoded_runs``.

        A row group of one run is read at once, one of several is streamed page by page. Entering it at a later run
        decodes the earlier ones, because Parquet has no way around that.
        """
        is_long = shard.manifest.is_long(block)  # its stream holds its last run itself: a copy were one more
        allocate = None if is_long else partial(pa.allocate_buffer, memory_pool=decoding_pool())

        def rows_of_run(table: _Table, cast: _Cast) -> Rows:
            with naming_damage(shard.url, block):
                num_bytes = table.get_total_buffer_size()  # nbytes lets go of the interpreter's lock and waits for it
                return replace(rows_of_arrays(cast(table), table.num_rows, num_bytes), allocate=allocate)

        with closing(_decoded(shard, block, columns, first_run)) as runs:
            for run in runs:
                yield partial(rows_of_run, *run)
                del run

    def read_tables(
        self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0
    ) -> Generator[_Table, None, None]:
        """Yields the same as Arrow has it, to be written again: nothing is lost of types that numpy lacks."""
        with closing(_decoded(shard, block, columns, first_run)) as runs:
            for table, cast in runs:
                with naming_damage(shard.url, block):
                    arrays = cast(table)
                yield type(table).from_arrays([*arrays.values()], names=[*arrays]) if arrays else table.select([])
                del table, arrays


def _decoded(
    shard: Shard, block: int, columns: Sequence[str] | None, first_run: int
) -> Generator[tuple[_Table, _Cast], None, None]:
    """Yields the runs of a row group as the shard has them, and what casts them to what all shards share."""
    with naming_damage(shard.url, block):
        if shard.is_local:
            check_unchanged(shard, lambda: _digest_now(shard))
        known = remembered(shard, lambda: _known(shard))
        metadata, schema, group = known.metadata, known.schema, known.row_group(shard, block)
        is_streamed = shard.manifest.is_long(block)
        source = _source(shard, metadata, group, columns, is_streamed=is_streamed)
        with opened(source, metadata, is_streamed=is_streamed) as file:
            names = list(columns) if columns is not None else file.names if schema is None else schema.names
            _check_columns(shard, block, names, file.names)
            cast = partial(_cast, names=names, schema=schema, url=shard.url, block=block)
            tables = file.runs(group, names, int(shard.manifest.block_run_rows[block]))
            for run, (first, end) in enumerate(run_bounds(shard, block)):
                table = next(tables, None)
                if table is None or table.num_rows != end - first:
                    found = f"{0 if table is None else table.num_rows} rows"
                    raise DecodeError(
                        "a run is short", url=shard.url, block=block, expected=f"{end - first} rows", found=found
                    )
                if run >= first_run:
                    yield table, cast
                del table


def _schema(footer: bytes, metadata: pq.FileMetaData, url: str) -> pa.Schema:
    """The schema as rows show it, without the writer's notes."""
    try:
        file = pq.ParquetFile(pa.BufferReader(footer), metadata=metadata, coerce_int96_timestamp_unit="us")
        schema = file.schema_arrow
    except (*DAMAGE, ValueError) as error:  # ValueError: names that are not UTF-8
        raise ManifestError("the shard's schema cannot be read", url=url, found=error) from error
    doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if doubled:
        raise ManifestError("column names must differ", url=url, found=f"{doubled} more than once")
    return pa.schema([field.with_type(plain_type(field.type)).remove_metadata() for field in schema])


def _digest_now(shard: Shard) -> str:
    num_bytes = storage.stat(shard.url, shard.storage_options).num_bytes
    return footer_digest(read_footer(shard.url, num_bytes, shard.storage_options))


class _Known(NamedTuple):
    """What reading any block of a shard needs."""

    metadata: pq.FileMetaData
    schema: pa.Schema | None
    """What all shards are cast to."""
    with_rows: list[int]
    """The row groups that are blocks: those without rows are none."""

    def row_group(self, shard: Shard, block: int) -> int:
        """The row group of a block."""
        return self.with_rows[block - int(shard.manifest.shard_first_block[shard.index])]


def _known(shard: Shard) -> _Known:
    metadata, schema = _metadata(shard), shard.manifest.arrow_schema
    with_rows = [place for place in range(metadata.num_row_groups) if metadata.row_group(place).num_rows]
    return _Known(metadata, pa.ipc.read_schema(pa.py_buffer(schema)) if schema else None, with_rows)


def _metadata(shard: Shard) -> pq.FileMetaData:
    """The parsed footer, from the manifest where it has a copy."""
    lists = shard.manifest.lists
    footer = shard.read_lists("footer")["footer"] if lists is not None and "footer" in lists.names else b""
    if not footer:
        footer = read_footer(shard.url, int(shard.manifest.num_bytes[shard.index]), shard.storage_options)
    return parse_footer(footer, shard.url)


def _whole_span(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """From the first byte of all to the last one; nothing of a row group without columns."""
    return min((start for start, _ in spans), default=0), max((end for _, end in spans), default=0)


def _source(
    shard: Shard, metadata: pq.FileMetaData, group: int, columns: Sequence[str] | None, *, is_streamed: bool
) -> Callable[[], pa.NativeFile]:
    """What opens a shard to read one row group."""
    path = storage.local_path(shard.url)
    if path is not None and shard.is_local:
        return lambda: pa.OSFile(path, "rb", decoding_pool())
    ranges = ShardRanges(shard, lambda: _digest_now(shard))
    num_bytes = int(shard.manifest.num_bytes[shard.index])
    return lambda: _span_source(ranges, metadata.row_group(group), columns, num_bytes, is_streamed=is_streamed)


def _span_source(
    ranges: RangeSource,
    group: pq.RowGroupMetaData,
    columns: Sequence[str] | None,
    num_bytes: int,
    *,
    is_streamed: bool,
) -> pa.NativeFile:
    spans = row_group_spans(group, columns)
    file = SpanFile(ranges, joined(spans), num_bytes=num_bytes, num_streams=len(spans), is_streamed=is_streamed)
    return pa.PythonFile(file, mode="r")


def _check_columns(shard: Shard, block: int, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            found = ", ".join(known)
            raise DecodeError(f"the shard has no column {name!r}", url=shard.url, block=block, found=found)


def _cast(
    table: _Table, names: Sequence[str], schema: pa.Schema | None, url: str, block: int
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """The named columns, in that order, in the types that all shards share."""
    arrays = dict(zip(table.schema.names, table.columns, strict=True))
    cast = {}
    for name in names:
        array = arrays[name]
        kind = schema.field(name).type if schema is not None and name in schema.names else plain_type(array.type)
        try:
            cast[name] = array if array.type == kind else without_list_views(array).cast(kind)
        except pa.ArrowException as error:
            what = f"column {name!r} does not fit the manifest's type"
            raise DecodeError(what, url=url, block=block, expected=kind, found=f"{array.type} ({error})") from error
    return cast


# --------------------------------------------------------------------------------------------------- counts


def _counted_runs(
    url: str,
    num_bytes: int,
    metadata: pq.FileMetaData,
    schema: pa.Schema,
    run_rows: Sequence[int],
    options: IndexOptions,
    storage_options: Mapping[str, Any],
) -> Iterator[Mapping[str, Column]]:
    """The columns that counts need, run by run; nothing if none is needed."""
    names = counted_columns(url, schema, options)
    if not names:
        return
    groups = [place for place in range(metadata.num_row_groups) if metadata.row_group(place).num_rows]
    for group, step in zip(groups, run_rows, strict=True):
        if size := _size_of_all_lists(metadata.row_group(group), schema, options):
            num_rows = metadata.row_group(group).num_rows
            lists = np.broadcast_to(np.int8(0), (num_rows, size))  # only their shape is looked at
            yield from ({names[0]: Dense(lists[k : k + step])} for k in range(0, num_rows, step))
            continue
        try:
            with opened(_unindexed(url, metadata, group, names, num_bytes, storage_options), metadata) as file:
                for table in file.runs(group, names, step):
                    yield {name: column_of(table.column(name)) for name in names}
        except DAMAGE as error:
            raise ManifestError(f"row group {group} cannot be decoded", url=url, found=error) from error


def _size_of_all_lists(group: pq.RowGroupMetaData, schema: pa.Schema, options: IndexOptions) -> int:
    """How many tokens each row has, where the footer tells: lists of a fixed size, none of them null; else 0.

    Of other lists only a row group's total stands in the footer, and pyarrow has no way to their lengths but decoding.
    """
    name = options.tokens_column
    kind = None if name is None else schema.field(name).type
    if kind is None or options.targets or not pa.types.is_fixed_size_list(kind) or kind.list_size == 1:
        return 0  # of lists of one a null is as many values as a list
    chunks = [group.column(place) for place in range(group.num_columns)]
    num_values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.startswith(f"{name}."))
    return int(kind.list_size) if num_values == group.num_rows * kind.list_size else 0


def _unindexed(
    url: str,
    metadata: pq.FileMetaData,
    group: int,
    names: Sequence[str],
    num_bytes: int,
    storage_options: Mapping[str, Any],
) -> Callable[[], pa.NativeFile]:
    """What opens a shard that is in no manifest yet to read one row group."""
    path = storage.local_path(url)
    if path is not None:
        return lambda: pa.OSFile(path, "rb")
    ranges = StorageRanges(url, storage_options)
    return lambda: _span_source(ranges, metadata.row_group(group), names, num_bytes, is_streamed=True)
