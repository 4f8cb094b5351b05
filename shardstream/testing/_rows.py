"""Rows of shards as Python values, for tests of any format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardstream.columns import Column, Dense, Objects, Rows
from shardstream.formats import IndexOptions, Shard, ShardIndex, format_of
from shardstream.manifest import Manifest

Row: TypeAlias = dict[str, Any]


class ListsInMemory:
    """The lists of shards as indexing returned them; see ``manifest.ShardLists``.

    Args:
        indexes: What indexing returned, one per shard.
    """

    def __init__(self, indexes: Sequence[ShardIndex]) -> None:
        self._lists = [dict(index.lists) for index in indexes]

    @property
    def names(self) -> frozenset[str]:
        """Names of the lists that some shard has."""
        return frozenset(name for lists in self._lists for name in lists)

    def read(self, shard: int, names: Sequence[str]) -> dict[str, Any]:
        """Returns the named lists of a shard."""
        return {name: self._lists[shard][name] for name in names}

    def read_all(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Returns the named lists of all shards end to end."""
        return {name: np.concatenate([lists[name] for lists in self._lists]) for name in names}


def manifest_of(urls: Sequence[str], indexes: Sequence[ShardIndex], arrow_schema: bytes | None = None) -> Manifest:
    """Returns a manifest of shards, without a file; its Arrow schema is the first shard's, unless one is given."""
    columns = {column.name: column for index in indexes for column in index.columns}
    num_blocks = [len(index.block_rows) for index in indexes]

    def joined(name: str) -> Any:
        return np.concatenate([getattr(index, name) for index in indexes])

    return Manifest(
        root="",
        urls=list(urls),
        formats=[index.format for index in indexes],
        num_bytes=np.array([index.num_bytes for index in indexes], np.int64),
        version_tags=[index.version_tag for index in indexes],
        digests=[index.digest for index in indexes],
        shard_first_block=np.cumsum([0, *num_blocks], dtype=np.int64),
        block_rows=joined("block_rows"),
        block_run_rows=joined("block_run_rows"),
        block_offset=joined("block_offset"),
        block_num_bytes=joined("block_num_bytes"),
        columns=tuple(columns.values()),
        arrow_schema=_schema_of(indexes) if arrow_schema is None else arrow_schema,
        lists=ListsInMemory(indexes),
    )


def _schema_of(indexes: Sequence[ShardIndex]) -> bytes:
    """Of the first shard that has columns: an empty one may have none."""
    return next((index.arrow_schema for index in indexes if index.columns), indexes[0].arrow_schema)


def indexed(*urls: str | Path, options: IndexOptions | None = None) -> Manifest:
    """Indexes shards, each by the format of its name, and returns a manifest of them."""
    texts = [str(url) for url in urls]
    return manifest_of(texts, [format_of(url).index_shard(url, options or IndexOptions(), {}) for url in texts])


def python_values(column: Column) -> list[Any]:
    """Returns one Python value a row: numbers, text, bytes, lists; None where there is no value."""
    if isinstance(column, Objects):
        return list(column.values)
    nulls = [False] * len(column) if column.nulls is None else column.nulls.tolist()
    if isinstance(column, Dense):
        values = column.values.tolist()
    else:
        slices = zip(column.starts.tolist(), column.lengths.tolist(), strict=True)
        parts = [column.values[start : start + length] for start, length in slices]
        if column.kind == "list":
            values = [part.tolist() for part in parts]
        else:
            values = [part.tobytes() for part in parts]
            if column.kind == "text":
                values = [value.decode("utf-8", "surrogateescape") for value in values]
    return [None if is_null else value for value, is_null in zip(values, nulls, strict=True)]


def python_rows(runs: Iterable[Rows]) -> list[Row]:
    """Returns the rows of some runs as dicts."""
    rows: list[Row] = []
    for run in runs:
        columns = {name: python_values(column) for name, column in run.columns.items()}
        lengths = {name: len(values) for name, values in columns.items()}
        if any(length != run.num_rows for length in lengths.values()):
            raise AssertionError(f"columns of a run of {run.num_rows} rows have other lengths: {lengths}")
        rows += [{name: values[row] for name, values in columns.items()} for row in range(run.num_rows)]
    return rows


def read_all(manifest: Manifest, columns: Sequence[str] | None = None) -> list[Row]:
    """Returns all rows of a manifest, in its order."""
    rows: list[Row] = []
    for block in range(manifest.num_blocks):
        shard = Shard(manifest, manifest.shard_with(block))
        read_runs = format_of("." + manifest.formats[shard.index]).read_runs
        rows += python_rows(read_runs(shard, block, columns))
    return rows
