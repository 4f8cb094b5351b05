from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shardstream.errors import ManifestError, ShardStreamWarning
from shardstream.formats import IndexOptions, Shard
from shardstream.formats.arrow import NO_END, ArrowFormat
from shardstream.index import build_manifest
from tests.formats.conformance import FormatTests, Row, counts_of, indexed, read_all
from tests.formats.test_parquet import SCHEMA, sample_rows

PEERS = Path(__file__).parent / "peers"


def write(path: Path, table: pa.Table, *, is_file: bool = False, rows: int | None = None, **options: Any) -> None:
    make = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=rows)


class TestArrowStream(FormatTests):
    """Small record batches, joined into blocks."""

    suffix = ".arrow"
    projection = ("tokens", "uid")
    is_file = False
    batch_rows: int | None = 7

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows = sample_rows(num_rows, first_row)
        write(path, pa.Table.from_pylist(rows, SCHEMA), is_file=self.is_file, rows=self.batch_rows)
        return rows

    def test_it_has_several_blocks(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        assert self.manifest(url).num_blocks > 3


class TestArrowFile(TestArrowStream):
    """Record batches of several runs, in the file format."""

    is_file = True
    batch_rows = 150

    def test_it_has_several_blocks(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        assert manifest.block_rows.tolist() == [150, 150]
        assert (manifest.block_run_rows < 150).all()


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_dictionaries_and_compression(is_file, compression, tmp_path):
    words = [f"w{row % 5}" for row in range(60)]
    column = pa.array(words).dictionary_encode()
    chunks = [column.slice(0, 30), column.slice(30)]
    path = tmp_path / "a.arrow"
    write(path, pa.table({"w": pa.chunked_array(chunks), "n": range(60)}), is_file=is_file, rows=10,
          compression=compression)  # fmt: skip
    manifest = indexed(path, options=IndexOptions(run_num_bytes=1000))
    assert manifest.num_blocks > 1
    assert read_all(manifest) == [{"w": word, "n": row} for row, word in enumerate(words)]


def test_a_dictionary_that_is_replaced_begins_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    first, second = (pa.array(words).dictionary_encode() for words in (["a", "b"], ["c", "d", "c"]))
    batches = [pa.record_batch({"w": column}) for column in (first, second)]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batches[0].schema) as out:
        for batch in batches:
            out.write_batch(batch)
    manifest = indexed(path)
    assert manifest.block_rows.tolist() == [2, 3]
    assert [row["w"] for row in read_all(manifest)] == ["a", "b", "c", "d", "c"]


def test_local_numbers_are_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, pa.table({"x": np.arange(100_000)}))
    manifest = indexed(path)
    before = pa.total_allocated_bytes()
    runs = list(ArrowFormat().read_runs(Shard(manifest, 0), 0, None))
    assert pa.total_allocated_bytes() - before < 10_000
    assert np.concatenate([run.columns["x"].values for run in runs]).tolist() == list(range(100_000))


def test_tokens_and_targets_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    tokens = [list(range(row % 9)) for row in range(200)]
    write(path, pa.table({"tokens": tokens}), rows=60)
    options = IndexOptions(tokens_column="tokens", targets={"lm": "tokens"}, ignore_index=3, run_num_bytes=1000)
    counts = counts_of(indexed(path, options=options), 0, "token_lengths", "targets.lm", "run_num_tokens")
    assert counts["token_lengths"] == list(map(len, tokens))
    assert counts["targets.lm"] == [sum(token != 3 for token in row) for row in tokens]
    assert sum(counts["run_num_tokens"]) == sum(map(len, tokens))


def test_types_are_those_of_all_shards(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", pa.table({"x": pa.array([1, 2], pa.int32()), "s": pa.array(["a", None])}))
    write(tmp_path / "b.arrow", pa.table({"x": pa.array([2**40]), "s": pa.array(["b"], pa.large_string())}))
    manifest = build_manifest(tmp_path, num_workers=0)
    assert [(column.name, column.type) for column in manifest.columns] == [("x", "int64"), ("s", "string")]
    assert read_all(manifest) == [{"x": 1, "s": "a"}, {"x": 2, "s": None}, {"x": 2**40, "s": "b"}]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: b"", "0 bytes"),
        (lambda raw: b"{}", "cut at byte 0"),
        (lambda raw: b"<html><body>403 Forbidden</body></html>", "cut"),
        (lambda raw: raw[:-200], "cut"),
        (lambda raw: raw[8:], "cut|no Arrow"),
        (lambda raw: b"ARROW1\0\0" + raw, "its end is missing"),
        (lambda raw: raw[:8] + bytes(200) + raw[208:], "no Arrow"),
    ],
)
def test_bad_shards_are_refused_by_name(change: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.arrow"
    write(path, pa.table({"x": range(100)}))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ManifestError, match=says) as raised:
        ArrowFormat().index_shard(str(path), IndexOptions(), {})
    assert "bad.arrow" in str(raised.value)


def test_a_stream_without_an_end_mark_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write(path, pa.table({"x": range(100)}))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.warns(ShardStreamWarning, match="was it cut between two record batches"):
        assert build_manifest(path, num_workers=0).num_samples == 100
    assert ArrowFormat().index_shard(str(path), IndexOptions(), {}).warnings == (NO_END,)


# ----------------------------------------------------------------------------------- what datasets itself wrote


def test_what_datasets_saved_is_read() -> None:
    manifest = build_manifest(PEERS / "datasets", num_workers=0)
    assert manifest.num_shards == 2
    assert read_all(manifest) == [
        {
            "uid": row,
            "text": "é" * (row % 4) if row != 5 else None,
            "tokens": list(range(row % 5)),
            "label": row % 2,
            "grid": [[float(row), 1.0], [2.0, 3.0]],
        }
        for row in range(12)
    ]
