"""The per-shard lists of a manifest, read from the file when a shard needs them."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardstream import storage
from shardstream.arrow_memory import numbers
from shardstream.errors import ManifestError
from shardstream.manifest_file._flat import list_values, typed
from shardstream.manifest_file._schema import list_type

_MOST_GROUPS = 4  # held: each is some MB


class ParquetLists:
    """Reads lists of single shards; of the file, the few row groups used last are held.

    Pickles without anything open, and opens the file again in another process.

    Args:
        names: Lists that the manifest has.
        path: Where the manifest is, or None.
        data: The whole file, if it is in memory only.
        storage_options: Given to fsspec.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        path: str | None = None,
        data: bytes | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._names, self._path, self._data, self._storage_options = names, path, data, storage_options
        self._open: _OpenFile | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the lists that this manifest has."""
        return self._names

    def read(self, shard: int, names: Sequence[str]) -> dict[str, Any]:
        """Returns the named lists of a shard.

        Args:
            shard: Index of the shard.
            names: Names of lists.

        Returns:
            For each name an array of numbers, a list of bytes or text, or (``footer``) bytes. A shard without the list
            has an empty one.

        Raises:
            ManifestError: If the manifest has no such list, or its file is gone or damaged.
            ReadError: If storage failed.
        """
        self._check(names)
        return self._opened().read(shard, names)

    def read_all(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Returns the named lists of all shards end to end, in manifest order: one pass over these columns.

        Args:
            names: Names of lists of numbers.

        Raises:
            ManifestError: If the manifest has no such list, or its file is gone or damaged.
            ReadError: If storage failed.
        """
        self._check(names)
        return self._opened().read_all(names)

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._names:
                hint = "index again; token counts need --tokens-column, counts of targets --targets"
                raise ManifestError(f"the manifest has no list {name!r}", url=self._path, hint=hint)

    def _opened(self) -> _OpenFile:
        # A file that was opened before a fork shares its lock with the parent: it is opened again.
        file = self._open
        if file is None or file.pid != os.getpid():
            file = self._open = _OpenFile(self._source(), self._path)
        return file

    def _source(self) -> Any:
        if self._path is None:
            return pa.BufferReader(self._data or b"")
        path = storage.local_path(self._path)
        return path or storage.open_source(self._path, self._storage_options, ahead_num_bytes=0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


class _OpenFile:
    """The file as this process opened it, and the columns of the row groups used last: lanes are in several at once."""

    def __init__(self, source: Any, url: str | None) -> None:
        self.pid = os.getpid()
        self._url = url
        self._lock = threading.Lock()
        try:
            self._file = pq.ParquetFile(source)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ManifestError("the manifest's lists cannot be read", url=url, found=error) from error
        groups = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._ends = np.cumsum(groups).tolist()
        self._groups: dict[int, dict[str, pa.Array]] = {}

    def read(self, shard: int, names: Sequence[str]) -> dict[str, Any]:
        group = bisect.bisect_right(self._ends, shard)
        row = shard - (self._ends[group - 1] if group else 0)
        with self._lock:
            held = self._groups[group] = self._groups.pop(group, {})  # at the end: the last one used
            while len(self._groups) > _MOST_GROUPS:
                del self._groups[next(iter(self._groups))]
            wanted = [name for name in names if name not in held]
            if wanted:
                held |= self._loaded(group, wanted)
            columns = [held[name] for name in names]
        try:
            return {name: _values(column, row) for name, column in zip(names, columns, strict=True)}
        except (pa.ArrowException, ValueError, LookupError) as error:  # a shard that is not there, text that is none
            raise ManifestError("the manifest's lists cannot be read", url=self._url, found=repr(error)) from error

    def read_all(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        try:
            with self._lock:
                table = self._file.read(columns=list(names), use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ManifestError("the manifest's lists cannot be read", url=self._url, found=error) from error
        return {name: list_values(typed(table.column(name), list_type(name))) for name in names}

    def _loaded(self, group: int, names: Sequence[str]) -> dict[str, pa.Array]:
        try:
            table = self._file.read_row_group(group, columns=list(names), use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ManifestError("the manifest's lists cannot be read", url=self._url, found=error) from error
        return {name: typed(table.column(name), list_type(name)).combine_chunks() for name in names}


def _values(column: pa.Array, row: int) -> Any:
    """The list in a row of a column, in numpy or Python terms."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    if not pa.types.is_list(column.type):
        return column[row].as_py() or b""
    start, end = column.offsets[row].as_py(), column.offsets[row + 1].as_py()
    values = column.values.slice(start, end - start)
    if pa.types.is_dictionary(values.type):
        texts = np.array(values.dictionary.to_pylist(), object)
        return texts[numbers(values.indices)].tolist()
    return values.to_pylist() if pa.types.is_binary(values.type) else numbers(values)
