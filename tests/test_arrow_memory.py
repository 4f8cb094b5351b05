"""Arrow arrays as numpy arrays: what pyarrow itself says of them, without pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.arrow_memory import nulls, number_dtype, numbers

TYPES = [pa.int8(), pa.uint16(), pa.int32(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_()]


@given(
    values=st.lists(st.one_of(st.none(), st.integers(0, 1)), max_size=40),
    kind=st.sampled_from(TYPES),
    begin=st.integers(0, 20),
    length=st.integers(0, 40),
)
def test_values_and_nulls_are_those_of_arrow(values, kind, begin, length):
    values = [None if value is None else np.float16(value) if pa.types.is_float16(kind) else value for value in values]
    if pa.types.is_boolean(kind):
        values = [None if value is None else bool(value) for value in values]
    array = pa.array(values, kind).slice(min(begin, len(values)), length)
    assert (numbers(array).dtype, number_dtype(kind)) == (array.type.to_pandas_dtype(), array.type.to_pandas_dtype())
    want = [value is None for value in array.to_pylist()]
    found = nulls(array)
    assert (found is None, [False] * len(array) if found is None else found.tolist()) == (not any(want), want)
    assert [v for v, is_null in zip(numbers(array).tolist(), want, strict=True) if not is_null] == [
        value for value in array.to_pylist() if value is not None
    ]


def test_a_column_of_nothing_is_all_null():
    assert nulls(pa.nulls(3)).tolist() == [True] * 3


@pytest.mark.slow
def test_reading_parquet_imports_neither_pandas_nor_compute(tmp_path):
    pytest.importorskip("pandas")
    code = f"""
import sys
import pyarrow as pa, pyarrow.parquet as pq
from shardstream import build_manifest
from shardstream.torch import StreamingDataset, Topology
import shardstream.index
pq.write_table(pa.table({{"x": [1, 2, 3], "t": [[1], [], [2, 3]]}}), {str(tmp_path / "a.parquet")!r})
build_manifest({str(tmp_path / "a.parquet")!r}, {str(tmp_path / "m.parquet")!r}, num_workers=0)
for name in [name for name in sys.modules if name.split(".")[0] in ("pandas",) or name == "pyarrow.compute"]:
    del sys.modules[name]
loaded = set(sys.modules)
next(iter(StreamingDataset({str(tmp_path / "m.parquet")!r}, batch_size=2, topology=Topology(0, 1))))
print([name for name in set(sys.modules) - loaded if name in ("pandas", "pyarrow.compute", "fsspec", "tenacity")])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.strip() == "[]"
