"""Writers of output shards. They write to a binary file and are told nothing of where it is."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from shardstream.errors import DecodeError, PlanError
from shardstream.formats import RUN_NUM_BYTES
from shardstream.formats._tar_scan import splits_into
from shardstream.formats.tar import KEY_COLUMN

OUTPUT_FORMATS = ("parquet", "tar", "tar.zst")


@dataclass(frozen=True)
class Shape:
    """What output shards look like.

    Attributes:
        format: ``"parquet"``, ``"tar"`` or ``"tar.zst"``.
        block_num_bytes: Decoded size of a row group, or of a zstd frame.
        level: Level of zstd.
        key_column: For tars: the column that holds the keys; None takes ``__key__`` or, without one, the sample ids.
    """

    format: str = "parquet"
    block_num_bytes: int = RUN_NUM_BYTES
    level: int = 3
    key_column: str | None = None


class Writer(Protocol):
    """Writes the samples of one shard."""

    notes: dict[str, int]
    """What the user should know, and of how many samples it holds."""

    def write(self, table: pa.Table, sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Appends samples.

        Raises:
            DecodeError: If the format cannot hold them.
        """
        ...

    def close(self) -> None:
        """Writes what is left; the file stays the caller's to close."""
        ...

    def abandon(self) -> None:
        """Lets go of the file, which nobody will read."""
        ...


def writer_of(shape: Shape, schema: pa.Schema, file: BinaryIO) -> Writer:
    """Returns a writer of this shape.

    Raises:
        PlanError: If the format cannot hold these columns.
    """
    if shape.format == "parquet":
        return ParquetShardWriter(shape, schema, file)
    return TarShardWriter(shape, schema, file)


class ParquetShardWriter:
    """Parquet with row groups of about ``block_num_bytes`` decoded bytes.

    Example:
        >>> file = io.BytesIO()
        >>> table = pa.table({"x": np.arange(1000)})
        >>> writer = ParquetShardWriter(Shape(block_num_bytes=3000), table.schema, file)
        >>> writer.write(table, np.arange(1000))
        >>> writer.close()
        >>> groups = pq.ParquetFile(file).metadata
        >>> [groups.row_group(place).num_rows for place in range(groups.num_row_groups)]
        [375, 375, 250]
    """

    def __init__(self, shape: Shape, schema: pa.Schema, file: BinaryIO) -> None:
        self.notes: dict[str, int] = {}
        self._shape, self._schema = shape, schema
        self._held: list[pa.Table] = []
        self._num_held_bytes = 0
        try:
            self._writer = pq.ParquetWriter(file, schema, compression="zstd", compression_level=shape.level)
        except pa.ArrowException as error:
            raise PlanError("Parquet cannot hold these columns", found=error) from error

    def write(self, table: pa.Table, sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Appends samples; see ``Writer``."""
        del sample_ids
        while table.num_rows:
            row_num_bytes = max(table.nbytes, 1) / table.num_rows
            room = self._shape.block_num_bytes - self._num_held_bytes
            taken = table.slice(0, max(1, min(table.num_rows, round(room / row_num_bytes))))
            self._held.append(taken)
            self._num_held_bytes += taken.nbytes
            table = table.slice(taken.num_rows)
            if self._num_held_bytes + row_num_bytes / 2 >= self._shape.block_num_bytes:
                self._flush()

    def close(self) -> None:
        """Writes the last row group and the footer."""
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """Lets go of the file: pyarrow would write to it later."""
        self._held = []
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            group = pa.concat_tables(self._held).combine_chunks()
            self._writer.write_table(group, row_group_size=group.num_rows)
        self._held, self._num_held_bytes = [], 0


class TarShardWriter:
    """WebDataset's layout, plain or as zstd frames of whole samples; a column is a member, a null is none.

    Bytes are written as they are, text as UTF-8, all else as JSON. A key that came before in the same shard gets the
    sample's id as its ending, because a tar cannot hold it twice.

    Example:
        >>> file = io.BytesIO()
        >>> table = pa.table({"txt": ["a", "b"], "cls": [1, None]})
        >>> writer = TarShardWriter(Shape("tar"), table.schema, file)
        >>> writer.write(table, np.array([7, 8]))
        >>> writer.close()
        >>> tarfile.open(fileobj=io.BytesIO(file.getvalue())).getnames()
        ['000000000007.txt', '000000000007.cls', '000000000008.txt']
    """

    def __init__(self, shape: Shape, schema: pa.Schema, file: BinaryIO) -> None:
        self.notes: dict[str, int] = {}
        self._shape = shape
        self._key_column = key_column_of(shape, schema)
        self._fields = [name for name in schema.names if name != KEY_COLUMN]
        _check_fields(self._fields)
        self._keys: set[str] = set()
        self._frames = _Frames(file, shape.level) if shape.format == "tar.zst" else None
        # What else would be in a header depends on who writes it and when; two runs must write the same.
        target: Any = self._frames or file
        self._tar = tarfile.TarFile(
            fileobj=target, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        )

    def write(self, table: pa.Table, sample_ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Appends samples; see ``Writer``."""
        columns = {name: _member_values(name, table.column(name)) for name in self._fields}
        keys = table.column(self._key_column).to_pylist() if self._key_column is not None else None
        for row, sample_id in enumerate(sample_ids.tolist()):
            key = f"{sample_id:012d}" if keys is None else keys[row]
            self._write_sample(self._unique(key, sample_id), {name: values[row] for name, values in columns.items()})
            if self._frames is not None and self._frames.num_held_bytes >= self._shape.block_num_bytes:
                self._frames.end_frame()

    def close(self) -> None:
        """Writes the end mark."""
        self._tar.close()
        if self._frames is not None:
            self._frames.end_frame()

    def abandon(self) -> None:
        """Does nothing."""

    def _unique(self, key: object, sample_id: int) -> str:
        if not isinstance(key, str):
            what = f"sample {sample_id} has no text as its key"
            raise DecodeError(what, found=repr(key), hint="name another key column, or none")
        if key in self._keys:
            self.notes["keys_changed"] = self.notes.get("keys_changed", 0) + 1
            while key in self._keys:
                key = f"{key}-{sample_id}"
        self._keys.add(key)
        return key

    def _write_sample(self, key: str, values: Mapping[str, bytes | None]) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        if not present:
            raise DecodeError(f"sample {key!r} has no values, so a tar cannot hold it", hint="write Parquet")
        for name, value in present.items():
            info = tarfile.TarInfo(f"{key}.{name}")
            if splits_into(info.name) != (key, name.lower()):
                what = f"a tar cannot hold the key {key!r}"
                hint = "keys have no dot, and are not named as hidden files are; name another key column, or none"
                raise DecodeError(what, found=info.name, hint=hint)
            info.size = len(value)
            self._tar.addfile(info, io.BytesIO(value))


def key_column_of(shape: Shape, schema: pa.Schema) -> str | None:
    """Returns the column that keys of tar samples come from, or None if they are sample ids.

    Raises:
        PlanError: If there is no such column.
    """
    if shape.key_column is None:
        return KEY_COLUMN if KEY_COLUMN in schema.names else None
    if shape.key_column not in schema.names:
        raise PlanError(f"there is no column {shape.key_column!r} for keys", found=", ".join(schema.names))
    return shape.key_column


def _check_fields(names: list[str]) -> None:
    """Refuses columns whose names cannot be suffixes of members."""
    lower = [name.lower() for name in names]
    for name in names:
        if splits_into(f"0.{name.lower()}") != ("0", name.lower()) or lower.count(name.lower()) > 1:
            hint = "rename it, or write Parquet: suffixes are lower case, without slashes"
            raise PlanError(f"column {name!r} cannot be a field of a tar", found=", ".join(names), hint=hint)


def _member_values(name: str, column: pa.ChunkedArray) -> list[bytes | None]:
    """The bytes of a column's members."""
    of, kind = pa.types, column.type
    values = column.to_pylist()
    if of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind):
        return values  # type: ignore[no-any-return]
    if of.is_string(kind) or of.is_large_string(kind):
        return [None if value is None else value.encode() for value in values]
    try:
        return [None if value is None else json.dumps(value, default=_as_text).encode() for value in values]
    except (TypeError, ValueError) as error:
        hint = "leave it out, or write Parquet"
        raise DecodeError(f"column {name!r} cannot be written as JSON", found=error, hint=hint) from error


def _as_text(value: object) -> str:
    if isinstance(value, (bytes, bytearray)):
        raise TypeError("bytes inside lists or structs")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


class _Frames:
    """A file of zstd frames; a frame ends when it is told to."""

    def __init__(self, file: BinaryIO, level: int) -> None:
        self._file, self._compressor = file, zstandard.ZstdCompressor(level=level, write_checksum=True)
        self._held = io.BytesIO()
        self._num_before = 0

    @property
    def num_held_bytes(self) -> int:
        """Bytes of the frame so far, decoded."""
        return self._held.tell()

    def write(self, data: bytes) -> int:
        """Adds to the frame."""
        return self._held.write(data)

    def tell(self) -> int:
        """Returns how many bytes were written, decoded."""
        return self._num_before + self._held.tell()

    def end_frame(self) -> None:
        """Compresses and writes what is held."""
        if not self.num_held_bytes:
            return
        with closing(self._held) as held:
            self._num_before += held.tell()
            self._file.write(self._compressor.compress(held.getbuffer()))
        self._held = io.BytesIO()
