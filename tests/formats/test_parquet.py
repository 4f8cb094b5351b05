from __future__ import annotations

import base64
import datetime as dt
import signal
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

from shardstream import storage
from shardstream.columns import tight
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import IndexOptions, Shard
from shardstream.formats._footer import parse_footer, read_footer
from shardstream.formats._row_groups import decoding_pool
from shardstream.formats.parquet import ParquetFormat
from tests.formats.conformance import FormatTests, Row, counts_of, indexed, manifest_of, python_rows, read_all


def sample_rows(num_rows: int, first_row: int = 0) -> list[Row]:
    """Rows of several kinds of values, of sizes that vary."""
    return [
        {
            "uid": row,
            "tokens": None if row % 7 == 3 else list(range(row, row + row % 11)),
            "text": f"row {row} é" * (row % 3),
            "vector": [row * 0.5, -1.0],
            "flag": row % 2 == 0,
        }
        for row in range(first_row, first_row + num_rows)
    ]


SCHEMA = pa.schema(
    {
        "uid": pa.int64(),
        "tokens": pa.list_(pa.int32()),
        "text": pa.string(),
        "vector": pa.list_(pa.float32(), 2),
        "flag": pa.bool_(),
    }
)


class TestParquet(FormatTests):
    suffix = ".parquet"
    projection = ("tokens", "uid")

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows = sample_rows(num_rows, first_row)
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, row_group_size=120)
        return rows


class TestLongRowGroups(TestParquet):
    """One row group of many runs: streamed."""

    def write_shard(self, path: Path, num_rows: int, first_row: int = 0) -> list[Row]:
        rows = sample_rows(num_rows, first_row)
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, data_page_size=512, compression="zstd")
        return rows

    def test_it_is_one_block_of_several_runs(self, url: str) -> None:
        self.write_shard(Path(url), 300)
        manifest = self.manifest(url)
        assert manifest.num_blocks == 1
        assert manifest.block_run_rows[0] < 100


def write(path: Path, columns: Any, **options: Any) -> str:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return str(path)


# ------------------------------------------------------------------------------------------------ the footer


def test_row_groups_without_rows_are_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = pa.schema({"x": pa.int64()})
    with pq.ParquetWriter(path, schema) as writer:
        for values in ([1, 2], [], [3]):
            writer.write_table(pa.table({"x": values}, schema=schema))
    manifest = indexed(path)
    assert manifest.block_rows.tolist() == [2, 1]
    assert [row["x"] for row in read_all(manifest)] == [1, 2, 3]


def test_shards_without_rows_between_full_ones(tmp_path: Path) -> None:  # C17
    urls = [write(tmp_path / f"{n}.parquet", {"uid": pa.array(range(n), pa.int64())}) for n in (7, 0, 5)]
    manifest = indexed(*urls)
    assert manifest.shard_num_samples.tolist() == [7, 0, 5]
    assert [row["uid"] for row in read_all(manifest)] == [*range(7), *range(5)]


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("zero", lambda good: b"", "empty"),
        ("cut", lambda good: good[: len(good) * 6 // 10], "cut"),
        ("page", lambda good: b"<html><body>403 Forbidden</body></html>\n", "not Parquet"),
        ("short", lambda good: b"PAR1", "cut"),
        ("locked", lambda good: good[:-4] + b"PARE", "encrypted"),
        ("long", lambda good: good[:-8] + b"\xff\xff\xff\x7fPAR1", "longer than the shard"),
        ("noise", lambda good: good[:-30] + b"\xff" * 22 + good[-8:], "footer"),
    ],
)
def test_files_that_are_not_parquet_are_refused_by_name(tmp_path: Path, name: str, make: Any, says: str) -> None:  # C19
    good = Path(write(tmp_path / "good.parquet", {"uid": [1, 2, 3, 4]})).read_bytes()
    path = tmp_path / f"{name}.parquet"
    path.write_bytes(make(good))
    with pytest.raises(ManifestError, match=rf"{says}.*{name}\.parquet"):
        indexed(path)


class PlainKeys(encryption.KmsClient):  # type: ignore[misc]
    """Keys that are not wrapped: enough to write an encrypted file."""

    def __init__(self, _: encryption.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files_are_refused_by_name(tmp_path: Path, *, plaintext_footer: bool) -> None:
    path = tmp_path / "locked.parquet"
    settings = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"columns": ["x"]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(PlainKeys)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    table = pa.table({"x": [1, 2], "y": [3, 4]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(ManifestError, match=r"encrypted.*locked\.parquet"):
        indexed(path)


def test_a_footer_that_points_outside_the_file_is_refused(tmp_path: Path) -> None:
    good = Path(write(tmp_path / "good.parquet", {"uid": list(range(1000))})).read_bytes()
    path = tmp_path / "gutted.parquet"
    footer_num_bytes = int.from_bytes(good[-8:-4], "little") + 8
    path.write_bytes(b"PAR1" + good[-footer_num_bytes:])
    with pytest.raises(ManifestError, match=r"outside.*gutted\.parquet"):
        indexed(path)


def test_equal_column_names_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(ManifestError, match=r"differ.*twice\.parquet"):
        indexed(write(tmp_path / "twice.parquet", table))


def test_reading_asks_for_no_footer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(tmp_path / "a.parquet", {"x": list(range(10))})
    manifest = indexed(url)

    def refuse(*args: object, **kwargs: object) -> bytes:
        raise AssertionError("the footer is in the manifest")

    monkeypatch.setattr(storage, "read_tail", refuse)
    assert len(read_all(manifest)) == 10


def test_a_remote_row_group_is_one_request_and_spares_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    rng = np.random.default_rng(0)
    table = pa.table({"small": list(range(100)), "large": [rng.bytes(10_000) for _ in range(100)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=50)
    fsspec.filesystem("memory").pipe_file("memory://one/a.parquet", sink.getvalue().to_pybytes())
    manifest = indexed("memory://one/a.parquet")
    ranges: list[int] = []
    read_versioned = storage.read_versioned

    def counted(url: str, start: int, end: int, *args: Any, **options: Any) -> tuple[bytes, str | None]:
        ranges.append(end - start)
        return read_versioned(url, start, end, *args, **options)

    monkeypatch.setattr(storage, "read_versioned", counted)
    assert [row["small"] for row in read_all(manifest, ["small"])] == list(range(100))
    assert len(ranges) == manifest.num_blocks == 2
    assert sum(ranges) < 10_000
    ranges.clear()
    assert len(read_all(manifest)) == 100
    assert ranges == manifest.block_num_bytes.tolist()


# ------------------------------------------------------------------------------------------------- schemas


def test_columns_are_matched_by_name(tmp_path: Path) -> None:  # C20
    a = write(tmp_path / "a.parquet", {"uid": [0, 1], "text": ["t0", "t1"], "label": ["l0", "l1"]})
    b = write(tmp_path / "b.parquet", {"label": ["l2", "l3"], "uid": [2, 3], "text": ["t2", "t3"]})
    rows = read_all(indexed(a, b))
    assert rows == [{"uid": n, "text": f"t{n}", "label": f"l{n}"} for n in range(4)]
    assert {tuple(row) for row in rows} == {("uid", "text", "label")}
    assert read_all(indexed(a, b), ["text", "uid"])[2] == {"text": "t2", "uid": 2}


@pytest.mark.parametrize("null_first", [True, False])
def test_a_column_of_nulls_takes_the_type_of_the_other_shards(tmp_path: Path, *, null_first: bool) -> None:  # C22
    a = write(tmp_path / "a.parquet", {"uid": [0, 1], "label": pa.nulls(2)})
    b = write(tmp_path / "b.parquet", {"uid": [2, 3, 4], "label": ["a", None, "b"]})
    urls = [a, b] if null_first else [b, a]
    indexes = [ParquetFormat().index_shard(url, IndexOptions(), {}) for url in urls]
    unified = pa.schema({"uid": pa.int64(), "label": pa.string()}).serialize().to_pybytes()
    rows = read_all(manifest_of(urls, indexes, unified))
    assert sorted((row["uid"], row["label"]) for row in rows) == [(0, None), (1, None), (2, "a"), (3, None), (4, "b")]


def test_narrow_integers_are_widened_and_wide_ones_never_cut(tmp_path: Path) -> None:
    urls = [
        write(tmp_path / "a.parquet", {"x": pa.array([[1, 2]], pa.list_(pa.int32()))}),
        write(tmp_path / "b.parquet", {"x": pa.array([[2**40]], pa.list_(pa.int64()))}),
    ]
    indexes = [ParquetFormat().index_shard(url, IndexOptions(), {}) for url in urls]
    wide = pa.schema({"x": pa.list_(pa.int64())}).serialize().to_pybytes()
    assert read_all(manifest_of(urls, indexes, wide)) == [{"x": [1, 2]}, {"x": [2**40]}]
    narrow = pa.schema({"x": pa.list_(pa.int32())}).serialize().to_pybytes()
    with pytest.raises(DecodeError, match=r"'x'.*b\.parquet"):
        read_all(manifest_of(urls, indexes, narrow))


def test_int96_instants_are_exact(tmp_path: Path) -> None:  # C25
    instants = [dt.datetime(1200, 1, 1, 0, 0, 59), dt.datetime(2000, 1, 1), dt.datetime(9999, 12, 31, 2)]  # noqa: DTZ001
    table = pa.table({"uid": [0, 1, 2], "ts": pa.array(instants, pa.timestamp("us"))})
    url = write(tmp_path / "a.parquet", table, use_deprecated_int96_timestamps=True, store_schema=False)
    manifest = indexed(url)
    assert [row["ts"] for row in read_all(manifest)] == instants
    assert manifest.columns[1].type == "timestamp[us]"
    assert read_all(manifest, ["uid"]) == [{"uid": 0}, {"uid": 1}, {"uid": 2}]


def test_null_rows_are_counted_from_statistics(tmp_path: Path) -> None:
    url = write(
        tmp_path / "a.parquet", {"x": [1, None, None], "y": ["a", "b", "c"], "z": [[1], None, []], "n": pa.nulls(3)}
    )
    assert [column.num_missing for column in indexed(url).columns] == [2, 0, -1, 3]


def test_names_with_dots_and_structs(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"a.b": [1, 2], "a": [{"b": 3, "c": [4]}, None]})
    manifest = indexed(url)
    assert read_all(manifest, ["a.b"]) == [{"a.b": 1}, {"a.b": 2}]
    assert read_all(manifest, ["a"]) == [{"a": {"b": 3, "c": [4]}}, {"a": None}]


def test_no_columns_are_rows_all_the_same(tmp_path: Path) -> None:
    manifest = indexed(write(tmp_path / "a.parquet", {"x": [1, 2, 3]}, row_group_size=2))
    assert read_all(manifest, []) == [{}, {}, {}]


# -------------------------------------------------------------------------------------------------- counts


def test_token_lengths_of_missing_and_empty_lists(tmp_path: Path) -> None:  # C28
    tokens = [[1, 2, 3], [], None, [4], [], [5, 6]]
    columns = {"uid": range(6), "tokens": pa.array(tokens, pa.list_(pa.int32()))}
    url = write(tmp_path / "a.parquet", columns, row_group_size=3)
    manifest = indexed(url, options=IndexOptions(tokens_column="tokens", targets={"lm": "tokens"}, ignore_index=4))
    assert [row["tokens"] for row in read_all(manifest)] == tokens
    assert counts_of(manifest, 0, "token_lengths", "run_num_tokens", "run_num_documents", "targets.lm") == {
        "token_lengths": [3, 0, 0, 1, 0, 2],
        "run_num_tokens": [3, 3],
        "run_num_documents": [2, 3],  # a row with an empty list is a document, one without a list is none
        "targets.lm": [3, 0, 0, 0, 0, 2],
    }


def test_fixed_size_lists_keep_their_nulls(tmp_path: Path) -> None:  # C28
    columns = {"uid": range(3), "pair": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int32(), 2))}
    manifest = indexed(write(tmp_path / "a.parquet", columns), options=IndexOptions(tokens_column="pair"))
    assert [row["pair"] for row in read_all(manifest)] == [[1, 2], None, [5, 6]]
    assert counts_of(manifest, 0, "token_lengths") == {"token_lengths": [2, 0, 2]}


def test_counts_are_per_run_where_a_row_group_has_several(tmp_path: Path) -> None:
    tokens = [list(range(row % 5)) for row in range(1000)]
    url = write(tmp_path / "a.parquet", {"tokens": pa.array(tokens, pa.large_list(pa.uint16()))})
    manifest = indexed(url, options=IndexOptions(tokens_column="tokens", run_num_bytes=1024))
    step = int(manifest.block_run_rows[0])
    assert step < 500
    runs = [tokens[first : first + step] for first in range(0, 1000, step)]
    counts = counts_of(manifest, 0, "run_num_tokens", "run_num_documents")
    assert counts["run_num_tokens"] == [sum(map(len, run)) for run in runs]
    assert counts["run_num_documents"] == list(map(len, runs))


def test_targets_of_numbers_and_of_lists_with_nulls(tmp_path: Path) -> None:
    columns = {"label": [3, -100, None, 0], "lists": [[1, None, -100], None, [], [-100, -100]]}
    url = write(tmp_path / "a.parquet", columns)
    manifest = indexed(url, options=IndexOptions(targets={"a": "label", "b": "lists"}))
    assert counts_of(manifest, 0, "targets.a", "targets.b") == {"targets.a": [1, 0, 0, 1], "targets.b": [1, 0, 0, 0]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (IndexOptions(tokens_column="nothere"), "nothere"),
        (IndexOptions(tokens_column="text"), "text"),
        (IndexOptions(tokens_column="number"), "number"),
        (IndexOptions(targets={"lm": "text"}), "text"),
    ],
)
def test_columns_that_cannot_be_counted_are_refused_by_name(tmp_path: Path, options: IndexOptions, says: str) -> None:
    url = write(tmp_path / "shard.parquet", {"text": ["a"], "number": [1]})
    with pytest.raises(ManifestError, match=rf"'{says}'.*shard\.parquet"):
        indexed(url, options=options)


# ---------------------------------------------------------------------------------------------------- runs


def test_run_sizes_follow_the_decoded_size_not_the_encoded(tmp_path: Path) -> None:
    """A million equal numbers are a few bytes in the file and 8 MB in memory."""
    manifest = indexed(write(tmp_path / "a.parquet", {"x": np.zeros(1 << 20, np.int64)}))
    assert manifest.block_run_rows[0] == 1 << 19


def test_damage_inside_a_row_group_is_an_error_that_names_shard_and_block(tmp_path: Path) -> None:
    url = write(tmp_path / "a.parquet", {"x": [b"abc" * row for row in range(100)]}, compression="zstd")
    manifest = indexed(url)
    shard = Shard(manifest, 0)
    assert python_rows(ParquetFormat().read_runs(shard, 0, None))
    data = bytearray(Path(url).read_bytes())
    start = int(manifest.block_offset[0])
    data[start : start + 200] = b"\xaa" * 200
    Path(url).write_bytes(data)
    with pytest.raises(DecodeError, match=r"a\.parquet, block 0"):
        list(ParquetFormat().read_runs(shard, 0, None))


def test_ctrl_c_is_not_lost_in_what_pyarrow_makes_of_an_exception(tmp_path, monkeypatch):
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")
    really = traceback.format_exception
    calls = []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        signal.raise_signal(signal.SIGINT)
        return really(*arguments, **options)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(traceback, "format_exception", interrupted)
    was_told = False
    try:
        ParquetFormat().index_shard(str(tmp_path / "a.parquet"), IndexOptions(), {})
    except KeyboardInterrupt:
        was_told = True
    monkeypatch.undo()
    assert was_told == bool(calls)  # an older pyarrow may make no text of it
    assert signal.getsignal(signal.SIGINT) is before
    assert ParquetFormat().index_shard(str(tmp_path / "a.parquet"), IndexOptions(), {}).block_rows.tolist() == [3]


def test_checking_a_footer_holds_nothing_of_those_who_ask(tmp_path):
    """A traceback that pyarrow kept held every caller's variables: of each shard the first block, as long as it ran."""
    table = pa.table({"x": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    footer = read_footer(str(tmp_path / "a.parquet"), (tmp_path / "a.parquet").stat().st_size, {})

    class Held:
        pass

    def ask() -> weakref.ref[Held]:
        held = Held()
        parse_footer(footer, "a.parquet")
        return weakref.ref(held)

    assert ask()() is None


@pytest.mark.parametrize(
    ("kind", "value", "num_bytes"),
    [
        (pa.list_(pa.int32()), list(range(100)), 400),
        (pa.large_list(pa.int16()), list(range(100)), 200),
        (pa.binary(), bytes(320), 320),
        (pa.list_(pa.float64(), 4), [0.5] * 4, 32),
    ],
)
def test_a_row_group_that_is_held_takes_no_more_memory_than_its_values(tmp_path, kind, value, num_bytes):
    """A decoder lets its memory grow, and cuts off the rest: such ends are not to lie between those that are held."""
    pq.write_table(pa.table({"x": pa.array([value] * 1000, kind)}), tmp_path / "a.parquet")
    shard = Shard(indexed(tmp_path / "a.parquet"), 0)
    before = decoding_pool().bytes_allocated()
    held = tight(next(ParquetFormat().read_runs(shard, 0, None)))
    assert decoding_pool().bytes_allocated() - before == 1000 * num_bytes
    assert held.columns["x"].values.nbytes == 1000 * num_bytes
