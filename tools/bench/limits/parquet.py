"""Parquet: decoding alone, and decoding with a shuffle inside each row group and one copy into batches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tools.bench.case import Case
from tools.bench.contract import collate_arrays
from tools.bench.measuring import Limit, Work


class ParquetLimit(Limit):
    """Reads T's files on ``num_threads`` threads, a file at a time. Option ``kind``: "decode" or "shuffle"."""

    package = "pyarrow"

    def work(self, case: Case) -> Work:
        """Reads every row group once."""
        pa.set_cpu_count(1)  # the threads are ours
        convert = _CONVERSIONS[case.options["kind"]]
        files = self.files("T", "parquet")
        with ThreadPoolExecutor(case.num_threads) as pool:
            done = list(pool.map(lambda path: _read_file(path, convert, case.batch_size), files))
        return Work(*(sum(column) for column in zip(*done, strict=True)))


def _read_file(path: Path, convert: Callable[[pa.Table, int], int], batch_size: int) -> Work:
    num_rows = num_bytes = 0
    with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["id", "tokens"], use_threads=False)
            num_rows += table.num_rows
            num_bytes += convert(table, batch_size)
    return Work(num_rows, num_bytes)


def _decoded(table: pa.Table, batch_size: int) -> int:
    del batch_size
    return int(table.nbytes)


def _shuffled(table: pa.Table, batch_size: int) -> int:
    """Cuts the row group's rows into batches, in a random order, with one copy."""
    tokens = table["tokens"].chunk(0)
    values, offsets = tokens.values.to_numpy(zero_copy_only=True), tokens.offsets.to_numpy()
    ids = table["id"].chunk(0).to_numpy()
    order = np.random.default_rng(0).permutation(len(ids))
    num_bytes = 0
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        batch = collate_arrays([(ids[row], values[offsets[row] : offsets[row + 1]]) for row in rows])
        num_bytes += batch["data"].numel() * 4
    return num_bytes


_CONVERSIONS: dict[str, Callable[[pa.Table, int], int]] = {"decode": _decoded, "shuffle": _shuffled}
