"""Row groups of an opened Parquet file, decoded whole or run by run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow._parquet import ParquetReader  # pq.ParquetFile, which wraps it, takes no memory pool

_STREAM_NUM_BYTES = 1 << 20  # what pyarrow holds of each column while it streams a row group; 0 is all of it


class RowGroups:
    """Decodes row groups of a file into memory that goes back to the system when rows are dropped.

    Args:
        file: The shard.
        metadata: Its footer.
        is_streamed: Whether its row groups are of several runs.

    Example:
        >>> sink = pa.BufferOutputStream()
        >>> pq.write_table(pa.table({"x": [1, 2, 3], "y": [4, 5, 6]}), sink)
        >>> groups = RowGroups(pa.BufferReader(sink.getvalue()), pq.read_metadata(pa.BufferReader(sink.getvalue())))
        >>> [run.to_pydict() for run in groups.runs(0, ["y"], run_rows=2)]
        [{'y': [4, 5]}, {'y': [6]}]
    """

    def __init__(self, file: pa.NativeFile, metadata: pq.FileMetaData, *, is_streamed: bool = True) -> None:
        self._metadata = metadata
        self._reader = ParquetReader(decoding_pool())
        self._reader.open(
            file,
            metadata=metadata,
            pre_buffer=False,  # it would fetch whole column chunks and cancel the buffer size
            buffer_size=_STREAM_NUM_BYTES if is_streamed else 0,
            coerce_int96_timestamp_unit="us",  # nanoseconds wrap outside the years 1677 to 2262
        )
        self._column_of_leaf = [path[0] for path in self._reader.column_paths]

    @property
    def names(self) -> list[str]:
        """The file's columns, in its order."""
        return list(dict.fromkeys(self._column_of_leaf))

    def runs(self, group: int, names: Sequence[str], run_rows: int) -> Iterator[pa.Table | pa.RecordBatch]:
        """Yields the runs of a row group, its only one at once, several page by page.

        Args:
            group: Index of the row group.
            names: Columns of the file; they come in its order.
            run_rows: Rows of a run.
        """
        wanted = frozenset(names)
        leaves = [place for place, name in enumerate(self._column_of_leaf) if name in wanted]
        if run_rows >= self._metadata.row_group(group).num_rows:
            yield self._reader.read_row_group(group, column_indices=leaves, use_threads=False)
            return
        yield from self._reader.iter_batches(run_rows, row_groups=[group], column_indices=leaves, use_threads=False)


@contextmanager
def opened(
    source: Callable[[], pa.NativeFile], metadata: pq.FileMetaData, *, is_streamed: bool = True
) -> Iterator[RowGroups]:
    """Opens a shard; what is opened is closed at the end."""
    with source() as file:
        yield RowGroups(file, metadata, is_streamed=is_streamed)


def decoding_pool() -> pa.MemoryPool:
    """Returns where decoded columns are allocated: what the user chose for Arrow, else jemalloc where pyarrow has it.

    Arrow's own default, mimalloc, keeps what one thread decoded and another one dropped: 120 MB of 480 on workload T.
    """
    default = pa.default_memory_pool()
    is_chosen = "ARROW_DEFAULT_MEMORY_POOL" in os.environ or default.backend_name != "mimalloc"
    if is_chosen or "jemalloc" not in pa.supported_memory_backends():
        return default
    return pa.jemalloc_memory_pool()
