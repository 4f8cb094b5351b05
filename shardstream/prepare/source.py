"""Samples of any format as Arrow tables, in the order of their manifest."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from shardstream.columns import Column, Dense, Rows, Slices, python_values
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import Shard, format_of
from shardstream.formats.tar import KEY_COLUMN
from shardstream.manifest import Manifest


def sample_schema(manifest: Manifest, columns: Sequence[str] | None = None) -> pa.Schema:
    """Returns the Arrow schema of a manifest's samples; of tars the key, and each field as bytes.

    Args:
        manifest: The manifest.
        columns: Names of the columns wanted, or None for all.

    Raises:
        ManifestError: If there is no such column.
    """
    if manifest.arrow_schema:
        schema = pa.ipc.read_schema(pa.py_buffer(manifest.arrow_schema))
    else:
        schema = pa.schema([(KEY_COLUMN, pa.string()), *((column.name, pa.binary()) for column in manifest.columns)])
    for name in columns or ():
        if name not in schema.names:
            raise ManifestError(f"there is no column {name!r}", found=", ".join(schema.names), hint="name one of these")
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def read_samples(
    manifest: Manifest,
    first: int,
    end: int,
    columns: Sequence[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[pa.Table]:
    """Yields the samples ``first`` to ``end - 1``, run by run: tables of at most a run each.

    A block that is entered in its middle decodes from its start.

    Args:
        manifest: The manifest.
        first: Sample id of the first one.
        end: Sample id after the last one.
        columns: Names of the columns wanted, or None for all.
        storage_options: Given to fsspec.

    Raises:
        ShardChangedError: If a shard is not the one that was indexed.
        ReadError: If storage failed, or data cannot be decoded.
    """
    schema = sample_schema(manifest, columns)
    starts = manifest.block_start
    block = int(np.searchsorted(starts, first, side="right")) - 1
    while block < manifest.num_blocks and (start := int(starts[block])) < end:
        shard = Shard(manifest, manifest.shard_with(block), storage_options or {})
        run_rows = int(manifest.block_run_rows[block])
        first_run = max(0, first - start) // run_rows
        row = start + first_run * run_rows
        last = min(end, int(starts[block + 1]))
        with closing(_runs(shard, block, columns, first_run, schema)) as runs:
            while row < last:
                table = next(runs)
                wanted = table.slice(max(0, first - row), min(last - row, table.num_rows) - max(0, first - row))
                row += table.num_rows
                del table
                yield wanted
        block += 1


def _runs(
    shard: Shard, block: int, columns: Sequence[str] | None, first_run: int, schema: pa.Schema
) -> Generator[pa.Table, None, None]:
    """The runs of a block, as Arrow itself reads them where the format can."""
    names = list(columns) if columns is not None else None
    shard_format = format_of("." + shard.manifest.formats[shard.index])  # a LitData chunk may be an Arrow table
    if hasattr(shard_format, "read_tables"):
        for table in shard_format.read_tables(shard, block, names, first_run):
            yield pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
        return
    for rows in shard_format.read_runs(shard, block, names, first_run):
        yield table_of(rows, schema, shard.url)


def table_of(rows: Rows, schema: pa.Schema, url: str = "") -> pa.Table:
    """Returns rows as an Arrow table of these types: the inverse of ``rows_of``.

    Raises:
        DecodeError: If values do not fit.

    Example:
        >>> from shardstream.columns import Objects
        >>> rows = Rows(2, {"x": Dense(np.array([1, 2])), "t": Objects(["a", None])})
        >>> table_of(rows, pa.schema([("t", pa.string()), ("x", pa.int8())])).to_pylist()
        [{'t': 'a', 'x': 1}, {'t': None, 'x': 2}]
    """
    arrays = []
    for column in schema:
        try:
            arrays.append(_array(column.name, rows.columns[column.name], column.type))
        except (pa.ArrowException, KeyError, TypeError) as error:
            what = f"column {column.name!r} does not fit its type"
            raise DecodeError(what, url=url, expected=column.type, found=f"{type(error).__name__}: {error}") from error
    return pa.table(arrays, schema=schema)


def _array(name: str, column: Column, kind: pa.DataType) -> pa.Array:
    if isinstance(column, Slices) and column.kind == "list":
        return _lists(column).cast(kind)
    if isinstance(column, Dense) and column.values.ndim == 1:
        return pa.array(column.values, mask=column.nulls).cast(kind)
    values = python_values(name, column)  # Arrow takes arrays of one dimension only
    return pa.array([v.tolist() if isinstance(v, np.ndarray) and v.ndim != 1 else v for v in values], kind)


def _lists(column: Slices) -> pa.Array:
    """Lists of numbers, laid end to end."""
    ends = np.cumsum(column.lengths, dtype=np.int64)
    offsets = np.concatenate([[0], ends])
    places = np.repeat(column.starts - offsets[:-1], column.lengths) + np.arange(int(offsets[-1]))
    values = pa.array(column.values[places])
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), values)
    if column.nulls is None:
        return lists
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=pa.array(column.nulls))
