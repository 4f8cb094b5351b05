"""What every format must do. The tests of a format subclass ``FormatTests`` and say how a shard of it is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import numpy as np
import pytest

from shardstream.columns import Column, Dense, Objects, Rows
from shardstream.errors import DecodeError, ReadError, ShardChangedError
from shardstream.formats import IndexOptions, Shard, ShardIndex, format_of
from shardstream.manifest import Manifest

Row = dict[str, Any]


class ListsInMemory:
    """The lists of shards as indexing returned them."""

    def __init__(self, indexes: Sequence[ShardIndex]) -> None:
        self._lists = [dict(index.lists) for index in indexes]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for lists in self._lists for name in lists)

    def read(self, shard: int, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._lists[shard][name] for name in names}


def manifest_of(urls: Sequence[str], indexes: Sequence[ShardIndex], arrow_schema: bytes | None = None) -> Manifest:
    """A manifest of these shards, without a file; the sample schema is that of the first."""
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
    """Indexes shards, each by the format of its name."""
    texts = [str(url) for url in urls]
    return manifest_of(texts, [format_of(url).index_shard(url, options or IndexOptions(), {}) for url in texts])


def python_values(column: Column) -> list[Any]:
    """One Python value a row."""
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
    """The rows of some runs as dicts."""
    rows: list[Row] = []
    for run in runs:
        columns = {name: python_values(column) for name, column in run.columns.items()}
        assert all(len(values) == run.num_rows for values in columns.values())
        rows += [{name: values[row] for name, values in columns.items()} for row in range(run.num_rows)]
    return rows


def read_all(manifest: Manifest, columns: Sequence[str] | None = None) -> list[Row]:
    """All rows of a manifest in manifest order."""
    rows: list[Row] = []
    for block in range(manifest.num_blocks):
        shard = Shard(manifest, int(manifest.shard_of_block(np.array(block))))
        rows += python_rows(format_of(shard.url).read_runs(shard, block, columns))
    return rows


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class FormatTests:
    """Subclass it, and set what these say."""

    suffix: str
    """Ending of a shard's name."""

    options = IndexOptions(run_num_bytes=4096)
    """Small runs, so that a shard of 300 rows has several."""

    projection: tuple[str, str]
    """Two columns that every row has, in another order than the shard's."""

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        """Writes a shard and returns its rows as reading gives them."""
        raise NotImplementedError

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / f"shard{self.suffix}")

    def manifest(self, *urls: str | Path) -> Manifest:
        return indexed(*urls, options=self.options)

    def test_all_rows_come_back_exactly(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        assert read_all(self.manifest(url)) == rows

    def test_counts_and_spans_are_right(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        assert manifest.num_samples == 300
        assert manifest.num_bytes[0] == Path(url).stat().st_size
        assert (manifest.block_offset >= 0).all()
        assert (manifest.block_offset + manifest.block_num_bytes <= manifest.num_bytes[0]).all()
        assert (manifest.block_run_rows >= 1).all()
        assert (manifest.block_run_rows <= manifest.block_rows).all()

    def test_runs_have_the_sizes_of_the_manifest(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        for block in range(manifest.num_blocks):
            rows, step = int(manifest.block_rows[block]), int(manifest.block_run_rows[block])
            runs = list(format_of(url).read_runs(Shard(manifest, 0), block, None))
            assert [run.num_rows for run in runs] == [min(step, rows - first) for first in range(0, rows, step)]
            assert all(run.num_bytes > 0 for run in runs)

    def test_reading_can_begin_at_any_run(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        for block in range(min(3, manifest.num_blocks)):
            shard = Shard(manifest, 0)
            runs = [python_rows([run]) for run in format_of(url).read_runs(shard, block, None)]
            for first in range(len(runs) + 1):
                later = format_of(url).read_runs(shard, block, None, first)
                assert [python_rows([run]) for run in later] == runs[first:]

    def test_indexing_twice_gives_the_same(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        assert self.manifest(url).fingerprint == self.manifest(url).fingerprint

    def test_only_wanted_columns_come_in_the_wanted_order(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        read = read_all(self.manifest(url), self.projection)
        assert read == [{name: row[name] for name in self.projection} for row in rows]
        assert list(read[0]) == list(self.projection)

    def test_an_unknown_column_is_an_error_that_names_shard_and_column(self, url: str) -> None:
        self.write_shard(Path(url), 10)
        with pytest.raises(DecodeError, match=r"nothere.*shard\."):
            read_all(self.manifest(url), ["nothere"])

    def test_a_shard_without_rows_has_no_blocks(self, url: str, tmp_path: Path) -> None:
        self.write_shard(Path(url), 0)
        second = tmp_path / f"second{self.suffix}"
        rows = self.write_shard(second, 5)
        manifest = self.manifest(url, second)
        assert manifest.shard_num_samples.tolist() == [0, 5]
        assert read_all(manifest) == rows

    def test_nothing_is_opened_before_the_first_run_and_all_is_closed_after_the_last(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        before = num_descriptors()
        runs = format_of(url).read_runs(Shard(manifest, 0), 0, None)
        assert num_descriptors() == before
        held = list(runs)
        assert num_descriptors() == before
        assert python_rows(held)

    def test_closing_early_closes_the_file_and_leaves_the_rows_whole(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        before = num_descriptors()
        runs = format_of(url).read_runs(Shard(manifest, 0), 0, None)
        first = next(runs)
        runs.close()  # type: ignore[attr-defined]
        assert num_descriptors() == before
        assert python_rows([first]) == rows[: first.num_rows]

    def test_a_copied_shard_is_the_same_shard(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        os.utime(url, ns=(1, 1))
        assert read_all(manifest) == rows

    def test_a_changed_shard_is_refused(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        self.write_shard(Path(url), 299, first_row=1000)
        with pytest.raises(ShardChangedError, match=r"shard\..*expected .* bytes, digest .*found .* bytes, digest"):
            read_all(manifest)

    def test_a_cut_shard_is_refused(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        os.truncate(url, Path(url).stat().st_size * 2 // 3)
        with pytest.raises(ShardChangedError, match=r"shard\."):
            read_all(manifest)

    def test_a_shard_cut_while_it_is_read_is_an_error(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        last = manifest.num_blocks - 1
        next(format_of(url).read_runs(Shard(manifest, 0), 0, None))
        os.truncate(url, int(manifest.block_offset[last]) + 10)
        with pytest.raises(ReadError, match=r"shard\."):
            list(format_of(url).read_runs(Shard(manifest, 0), last, None))

    def test_a_missing_shard_is_a_read_error(self, url: str) -> None:
        self.write_shard(Path(url), 10)
        manifest = self.manifest(url)
        Path(url).unlink()
        with pytest.raises(ReadError, match=r"shard\."):
            read_all(manifest)

    def test_threads_can_read_one_shard_at_once(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(read_all, [manifest] * 4)) == [rows] * 4

    def test_a_remote_shard_gives_the_same_rows(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        remote = f"memory://{uuid4().hex}/shard{self.suffix}"
        fsspec.filesystem("memory").pipe_file(remote, Path(url).read_bytes())
        local, manifest = self.manifest(url), self.manifest(remote)
        assert read_all(manifest) == rows
        assert read_all(manifest, self.projection) == read_all(local, self.projection)
        assert manifest.digests == local.digests
        assert manifest.block_rows.tolist() == local.block_rows.tolist()


def counts_of(manifest: Manifest, shard: int, *names: str) -> Mapping[str, list[Any]]:
    """Some lists of a shard as Python lists."""
    assert manifest.lists is not None
    return {name: values.tolist() for name, values in manifest.lists.read(shard, names).items()}
