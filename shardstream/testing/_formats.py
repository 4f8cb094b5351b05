"""What every format must do, as tests to subclass."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

import fsspec
import pytest

from shardstream.errors import DecodeError, ReadError, ShardChangedError
from shardstream.formats import IndexOptions, Shard, format_of
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.testing._rows import Row, indexed, python_rows, read_all


def _num_descriptors() -> int:
    """Files that this process has open; where the system does not tell, always the same."""
    folder = Path("/proc/self/fd")
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0


class FormatTests:
    """What a format must do. Subclass it in a test module, set ``suffix`` and ``projection``, write ``write_shard``.

    pytest collects the subclass (its name begins with ``Test``) and runs every test of this class on shards that
    ``write_shard`` wrote: rows come back exactly, at any run, in any order of columns, by threads and from a store; a
    copied file is the same shard, a changed, cut or missing one is an error that names it; nothing stays open.

    Further files that a shard needs (an index) may be written beside it; they are copied along.
    """

    suffix: ClassVar[str]
    """Ending of a shard's name."""

    options: ClassVar[IndexOptions] = IndexOptions(run_num_bytes=4096)
    """Small runs, so that a shard of 300 rows has several."""

    projection: ClassVar[tuple[str, str]]
    """Two columns that every row has, in another order than the shard's."""

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        """Writes a shard and returns its rows as reading gives them.

        Args:
            path: Where to write it; it ends in ``suffix``.
            num_rows: How many rows; 0 must be possible. They should take 20 to 200 bytes each.
            first_row: Number of the first row: other numbers, other values.
        """
        raise NotImplementedError

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        """Where the shard of a test is."""
        return str(tmp_path / f"shard{self.suffix}")

    def manifest(self, *urls: str | Path) -> Manifest:
        """Indexes shards with ``options``."""
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
        before = _num_descriptors()
        runs = format_of(url).read_runs(Shard(manifest, 0), 0, None)
        assert _num_descriptors() == before
        held = list(runs)
        assert _num_descriptors() == before
        assert python_rows(held)

    def test_closing_early_closes_the_file_and_leaves_the_rows_whole(self, url: str) -> None:
        rows = self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        before = _num_descriptors()
        runs = format_of(url).read_runs(Shard(manifest, 0), 0, None)
        first = next(runs)
        runs.close()
        assert _num_descriptors() == before
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
        with pytest.raises((ReadError, ShardChangedError), match=r"shard\."):
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
        folder, memory = f"memory://{uuid4().hex}", fsspec.filesystem("memory")
        for file in filter(Path.is_file, Path(url).parent.iterdir()):
            memory.pipe_file(f"{folder}/{file.name}", file.read_bytes())
        remote = f"{folder}/{Path(url).name}"
        local, manifest = self.manifest(url), self.manifest(remote)
        assert read_all(manifest) == rows
        assert read_all(manifest, self.projection) == read_all(local, self.projection)
        assert manifest.digests == local.digests
        assert manifest.block_rows.tolist() == local.block_rows.tolist()

    def test_ranges_that_are_asked_for_ahead_lie_in_the_shard(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        for block in range(manifest.num_blocks):
            for range_ in format_of(url).ranges_of(Shard(manifest, 0), block, None):
                assert 0 <= range_.start < range_.end <= int(manifest.num_bytes[0])
                assert range_.url == url

    def test_a_manifest_file_keeps_what_reading_needs(self, url: str, tmp_path: Path) -> None:
        rows = self.write_shard(Path(url), 300)
        path = tmp_path / "kept.manifest.parquet"
        build_manifest(url, path, num_workers=0)
        manifest = Manifest.load(path)
        assert type(format_of("." + manifest.formats[0])) is type(format_of(url))
        assert read_all(manifest) == rows
