"""Writing a manifest file as a stream: what is held is one row group, and about 30 bytes a block."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardstream.errors import shown_url
from shardstream.manifest import MANIFEST_VERSION, ColumnSchema, Int32Array, Int64Array, Manifest
from shardstream.manifest_file._schema import COLUMNS, METADATA_KEY, list_type

_GROUP_SHARDS = 100
_GROUP_LENGTH = 1 << 18  # of the longest list (samples, members)
_GROUP_NUM_BYTES = 64 << 20  # of binary lists (keys, footers)


@dataclass(frozen=True, eq=False)
class ShardRow:
    """One row of the manifest file; attributes as in ``formats.ShardIndex``, ``url`` relative to the root."""

    url: str
    format: str
    num_bytes: int
    version_tag: str
    digest: str
    block_rows: Int32Array
    block_run_rows: Int32Array
    block_offset: Int64Array
    block_num_bytes: Int64Array
    lists: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Rows of the shard."""
        return int(self.block_rows.sum(dtype=np.int64))


@dataclass(frozen=True)
class DatasetInfo:
    """What a manifest says of all its shards together; attributes as in ``Manifest``."""

    root: str
    columns: tuple[ColumnSchema, ...] = ()
    arrow_schema: bytes = b""
    tokens_column: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ManifestWriter:
    """Writes shards one after another.

    Which lists there are is known only when the last shard was seen: a list that comes late is given to the row groups
    before it, as nulls, by copying them once.

    Args:
        sink: Binary file, empty, open for reading and writing. It stays open.

    Example:
        >>> import io
        >>> numbers = np.array([5], np.int64)
        >>> writer = ManifestWriter(io.BytesIO())
        >>> writer.add(ShardRow("a.tar", "tar", 9, "9-1", "d", numbers, numbers, numbers, numbers))
        >>> writer.finish(DatasetInfo(root="/data")).num_samples
        5
    """

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._rows: list[ShardRow] = []
        self._length = self._num_bytes = 0
        self._list_names: tuple[str, ...] = ()
        self._schema = pa.schema(COLUMNS)
        self._file: pq.ParquetWriter | None = None
        self._written: dict[str, list[Any]] = {name: [] for name in COLUMNS}

    def add(self, row: ShardRow) -> None:
        """Adds the next shard of the manifest's order.

        Raises:
            ManifestError: If it has a list that manifests do not know.
        """
        late = [name for name in row.lists if name not in self._list_names]
        if late:
            self._widen(late)
        lengths = [len(values) for name, values in row.lists.items() if pa.types.is_list(list_type(name))]
        self._length += max([len(row.block_rows), *lengths])
        self._num_bytes += _binary_num_bytes(row.lists)
        self._rows.append(row)
        for name in COLUMNS:
            self._written[name].append(getattr(row, name))
        full = self._length >= _GROUP_LENGTH or self._num_bytes >= _GROUP_NUM_BYTES
        if full or len(self._rows) >= _GROUP_SHARDS:
            self._flush()

    def finish(self, info: DatasetInfo, *, stored_root: str | None = None) -> Manifest:
        """Writes what is left and the metadata.

        Args:
            info: What holds for all shards.
            stored_root: The root relative to the manifest's own folder, if it is to be found from there.

        Returns:
            The manifest, without ``path`` and ``lists``.
        """
        self._flush()
        manifest = self._manifest(info)
        about = {
            "version": MANIFEST_VERSION,
            "root": shown_url(info.root) if stored_root is None else stored_root,
            "root_is_relative": stored_root is not None,
            "columns": [[column.name, column.type, column.num_missing] for column in info.columns],
            "arrow_schema": base64.b64encode(info.arrow_schema).decode(),
            "tokens_column": info.tokens_column,
            "metadata": dict(info.metadata),
            "fingerprint": manifest.fingerprint,
        }
        file = self._opened()
        file.add_key_value_metadata({METADATA_KEY: json.dumps(about).encode()})
        self.close()
        return manifest

    def close(self) -> None:
        """Ends the file, finished or not, as long as the sink is open."""
        if self._file is not None:
            self._file.close()

    def _manifest(self, info: DatasetInfo) -> Manifest:
        written = self._written
        num_blocks = [len(rows) for rows in written["block_rows"]]
        first_block = np.concatenate([[0], np.cumsum(num_blocks, dtype=np.int64)]).astype(np.int64)
        return Manifest(
            root=info.root,
            urls=written["url"],
            formats=written["format"],
            num_bytes=np.array(written["num_bytes"], np.int64),
            version_tags=written["version_tag"],
            digests=written["digest"],
            shard_first_block=first_block,
            block_rows=_joined(written["block_rows"], np.int32),
            block_run_rows=_joined(written["block_run_rows"], np.int32),
            block_offset=_joined(written["block_offset"], np.int64),
            block_num_bytes=_joined(written["block_num_bytes"], np.int64),
            columns=info.columns,
            arrow_schema=info.arrow_schema,
            tokens_column=info.tokens_column,
            metadata=dict(info.metadata),
        )

    def _opened(self) -> pq.ParquetWriter:
        if self._file is None:
            plain = ["format", "member_field.list.element"]  # a dictionary helps where few values repeat
            self._file = pq.ParquetWriter(self._sink, self._schema, compression="zstd", use_dictionary=plain)
        return self._file

    def _flush(self) -> None:
        if self._rows:
            arrays = [
                _array([_value(row, name) for row in self._rows], self._schema.field(name).type)
                for name in self._schema.names
            ]
            self._opened().write_table(pa.table(arrays, schema=self._schema), row_group_size=len(self._rows))
        self._rows, self._length, self._num_bytes = [], 0, 0

    def _widen(self, late: Sequence[str]) -> None:
        """Takes more lists into the schema; what is written already is copied with nulls for them."""
        self._list_names = (*self._list_names, *late)
        narrow, self._schema = self._schema, self._schema
        for name in late:
            self._schema = self._schema.append(pa.field(name, list_type(name)))
        if self._file is None:
            return
        self._file.close()
        self._file = None
        with tempfile.TemporaryFile() as copy:
            self._sink.seek(0)
            shutil.copyfileobj(self._sink, copy)
            self._sink.seek(0)
            self._sink.truncate()
            old = pq.ParquetFile(copy)
            for group in range(old.num_row_groups):
                table = old.read_row_group(group, columns=narrow.names)
                for name in late:
                    table = table.append_column(name, pa.nulls(len(table), list_type(name)))
                self._opened().write_table(table.cast(self._schema), row_group_size=len(table))


def _value(row: ShardRow, name: str) -> Any:
    return getattr(row, name) if name in COLUMNS else row.lists.get(name)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """One column of a row group; of lists, without a Python object per number."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    missing = np.array([value is None for value in values])
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    parts = [pa.array(value, kind.value_type) for value in values if value is not None]
    flat = pa.chunked_array(parts, kind.value_type).combine_chunks() if parts else pa.array([], kind.value_type)
    if isinstance(flat, pa.ChunkedArray):  # older pyarrow
        flat = flat.chunk(0)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=pa.array(missing))


def _binary_num_bytes(lists: Mapping[str, Any]) -> int:
    footer, keys = lists.get("footer"), lists.get("sample_keys")
    return len(footer or b"") + (sum(map(len, keys)) if keys is not None else 0)


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type) -> npt.NDArray[Any]:
    return np.concatenate([np.asarray(part, kind) for part in parts]) if parts else np.zeros(0, kind)
