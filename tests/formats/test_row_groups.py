"""Decoding row groups: which columns come, and in whose memory."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream.formats._row_groups import RowGroups, decoding_pool

_HAS_JEMALLOC = "jemalloc" in pa.supported_memory_backends()
TABLE = pa.table(
    {
        "a": pa.array([[1], None, [2, 3], []], pa.list_(pa.int64())),
        "a.x": [1, 2, 3, 4],
        "s": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, None, {"a": 4, "b": None}],
    }
)


def groups_of(table: pa.Table) -> RowGroups:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return RowGroups(pa.BufferReader(sink.getvalue()), pq.read_metadata(pa.BufferReader(sink.getvalue())))


@pytest.fixture
def no_choice(monkeypatch):
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)


@pytest.mark.parametrize("names", [["a"], ["a.x"], ["s"], ["s", "a"], ["a", "a.x", "s"]])
@pytest.mark.parametrize("run_rows", [1, 3, 4])
def test_the_named_columns_come_whole(names, run_rows):
    runs = [pa.Table.from_batches([r]) if isinstance(r, pa.RecordBatch) else r
            for r in groups_of(TABLE).runs(0, names, run_rows)]  # fmt: skip
    assert [len(run) for run in runs] == {1: [1, 1, 1, 1], 3: [3, 1], 4: [4]}[run_rows]
    assert pa.concat_tables(runs).select(names).to_pylist() == TABLE.select(names).to_pylist()
    assert set(runs[0].schema.names) == set(names)


def test_no_columns_are_rows_all_the_same():
    assert [run.num_rows for run in groups_of(TABLE).runs(0, [], 4)] == [4]


@pytest.mark.skipif(not _HAS_JEMALLOC, reason="this pyarrow has no jemalloc")
@pytest.mark.parametrize("run_rows", [500, 1000])
def test_what_is_decoded_is_not_kept_by_mimalloc(no_choice, run_rows):
    if pa.default_memory_pool().backend_name != "mimalloc":
        pytest.skip("mimalloc is not the default")
    groups = groups_of(pa.table({"x": range(1000)}))
    before = pa.jemalloc_memory_pool().bytes_allocated()
    run = next(groups.runs(0, ["x"], run_rows))
    assert pa.jemalloc_memory_pool().bytes_allocated() - before >= run.nbytes >= 8 * run_rows
    del run
    assert pa.jemalloc_memory_pool().bytes_allocated() == before


def test_a_pool_that_the_user_chose_is_used(monkeypatch):
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", pa.default_memory_pool().backend_name)
    assert decoding_pool().backend_name == pa.default_memory_pool().backend_name


def test_a_pool_that_the_process_was_given_is_used(no_choice, monkeypatch):
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        assert decoding_pool().backend_name == "system"
    finally:
        pa.set_memory_pool(before)


def test_without_jemalloc_arrow_chooses(no_choice, monkeypatch):
    monkeypatch.setattr(pa, "supported_memory_backends", lambda: ["mimalloc", "system"])
    assert decoding_pool().backend_name == pa.default_memory_pool().backend_name
