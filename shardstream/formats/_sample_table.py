"""Shards that begin with a table of offsets and hold whole samples: what MDS and LitData have in common.

``uint32 n``, ``uint32[n + 1]`` offsets, perhaps more, then the samples. A sample begins with the sizes (uint32) of the
fields whose size varies; the values of all fields follow, without gaps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream import storage
from shardstream.columns import Column, Objects, Rows
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import IndexOptions, Shard, ShardIndex
from shardstream.formats._block_bytes import block_ranges, bytes_of_runs, place_in_shard, read_exactly
from shardstream.formats._counted import counted_columns, counts_of
from shardstream.formats._decompress import ForwardFile, Frame, decompressed
from shardstream.formats._sample_fields import Bytes, Field, Places, column_as, gathered
from shardstream.formats._shards import DAMAGE, check_unchanged, naming_damage, remembered, run_bounds
from shardstream.formats._tar_blocks import TarBlocks, cut_blocks
from shardstream.formats.tar import NO_WAY_IN
from shardstream.manifest import ColumnSchema
from shardstream.ranges import ByteRange

_LISTS = ("member_offset", "member_num_bytes", "block_data_offset", "footer")
_HEAD_NUM_BYTES = 1 << 20  # of a compressed shard, a request while its head is read


@dataclass(frozen=True)
class SampleFields:
    """What a sample consists of.

    Attributes:
        fields: In the order in which they are stored.
        has_sizes: Whether samples begin with sizes; a bare sample is one value.
        warnings: What the user should know of them.
    """

    fields: Sequence[Field]
    has_sizes: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return pa.schema({field.name: field.type for field in self.fields})


class Head(NamedTuple):
    """What stands before the samples."""

    offsets: npt.NDArray[np.int64]
    """int64[n + 1]: where each sample begins in the decoded shard, and where the last one ends."""
    config: bytes
    """What says which fields there are."""


class SampleTableFormat:
    """Base of such formats. Values are read as slices of the file."""

    name: ClassVar[str]

    def format_name(self, url: str) -> str:
        """Returns the format's name, with ".zst" where the shard is compressed as a whole."""
        raise NotImplementedError

    def config_of(self, stream: ForwardFile, offsets: Places, url: str, storage_options: Mapping[str, Any]) -> bytes:
        """Returns what says which fields there are.

        Args:
            stream: The decoded shard, behind the offsets; the first sample may be read as well.
            offsets: int64[n + 1], see ``Head``.
            url: The shard.
            storage_options: Given to fsspec.

        Raises:
            ManifestError: If it cannot be used.
        """
        raise NotImplementedError

    def fields_of(self, config: bytes, url: str) -> SampleFields:
        """Returns the fields that ``config_of`` found.

        Raises:
            ManifestError: If they cannot be read.
        """
        raise NotImplementedError

    def with_shapes(
        self, config: dict[str, Any], shaped: Sequence[str], stream: ForwardFile, offsets: Places, url: str
    ) -> bytes:
        """Returns a config as it is kept, with the types and shapes that the first sample shows.

        Args:
            config: What the shard says of its fields.
            shaped: Names of the fields whose arrays tell their type themselves.
            stream: As in ``config_of``.
            offsets: As in ``config_of``.
            url: The shard.
        """
        if shaped and len(offsets) > 1:
            stream.seek(int(offsets[0]))
            first = exactly(stream, int(offsets[1] - offsets[0]))
            config["shapes"] = _first_shapes(self.fields_of(json.dumps(config).encode(), url), first, shaped)
        return json.dumps(config, sort_keys=True).encode()

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Reads the head of a shard; all of it only if something is to be counted. See ``Format.index_shard``."""
        format_name = self.format_name(url)
        info = storage.stat(url, storage_options)
        with self._opened(url, format_name, info.num_bytes, storage_options) as stream:
            head = self._head(stream, url, info.num_bytes, format_name, storage_options)
        fields = self.fields_of(head.config, url)
        starts, ends = head.offsets[:-1], head.offsets[1:]
        is_plain = "." not in format_name
        frames = None if is_plain else [Frame(0, 0)]
        blocks = cut_blocks(starts, ends, frames, info.num_bytes, options.run_num_bytes)
        is_long = bool(np.any(blocks.rows > blocks.run_rows))
        counts = self._counts(url, head, fields, blocks, options, storage_options)
        return ShardIndex(
            format=format_name,
            num_bytes=info.num_bytes,
            version_tag=info.version_tag,
            digest=_digest(head, info.num_bytes),
            block_rows=blocks.rows,
            block_run_rows=blocks.run_rows,
            block_offset=blocks.offset,
            block_num_bytes=blocks.num_bytes,
            columns=tuple(ColumnSchema(field.name, str(field.type)) for field in fields.fields),
            arrow_schema=fields.schema.serialize().to_pybytes(),
            lists={
                "member_offset": starts,
                "member_num_bytes": ends - starts,
                "block_data_offset": blocks.data_offset,
                "footer": head.config,
                **counts,
            },
            warnings=(*fields.warnings, *[NO_WAY_IN] * (is_long and not is_plain)),
        )

    def ranges_of(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> list[ByteRange]:
        """Returns the block's bytes, cut; see ``Format.ranges_of``."""
        del columns  # the fields of a sample lie together
        return block_ranges(shard, block, first_run, lambda: self._digest_now(shard))

    def read_runs(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> Iterator[Rows]:
        """Yields the runs of a block; see ``Format.read_runs``."""
        if shard.is_local:
            check_unchanged(shard, lambda: self._digest_now(shard))
        table = remembered(shard, lambda: self._table(shard))
        wanted = _chosen(table, columns, shard, block)
        first_row = int(shard.manifest.block_start[block] - shard.manifest.first_sample[shard.index])
        bounds = [(first_row + first, first_row + end) for first, end in run_bounds(shard, block)][first_run:]
        spans = [(int(table.starts[first]), int(table.ends[end - 1])) for first, end in bounds]
        data_offset = int(table.block_data_offset[place_in_shard(shard, block)])
        with naming_damage(shard.url, block):
            runs = bytes_of_runs(shard, block, spans, data_offset, lambda: self._digest_now(shard))
            with closing(runs):
                for (first, end), (start, _), values in zip(bounds, spans, runs, strict=True):
                    places = table.starts[first:end] - start, table.ends[first:end] - start
                    with _naming_run(shard, block, first):
                        made = columns_of(table.fields, values, *places, wanted)
                    typed = {name: column_as(made[name], kind) for name, kind in wanted.items()}
                    yield Rows(end - first, typed, len(values))
                    del values, made, typed

    @contextmanager
    def _opened(
        self, url: str, format_name: str, num_bytes: int, storage_options: Mapping[str, Any]
    ) -> Iterator[ForwardFile]:
        """The decoded shard, to read its head."""
        if num_bytes == 0:
            raise ManifestError("the shard is empty (0 bytes)", url=url, hint="write it again, or leave it out")
        ahead = 0 if "." not in format_name else min(_HEAD_NUM_BYTES, num_bytes)
        try:
            with storage.open_source(url, storage_options, num_bytes=num_bytes, ahead_num_bytes=ahead) as file:
                yield ForwardFile(decompressed(file, format_name))
        except (*DAMAGE, ValueError) as error:
            found = f"{type(error).__name__}: {error}"
            hint = "fetch or write it again"
            raise ManifestError("the shard is cut or damaged", url=url, found=found, hint=hint) from error

    def _head(
        self, stream: ForwardFile, url: str, num_bytes: int, format_name: str, storage_options: Mapping[str, Any]
    ) -> Head:
        num_samples = int(np.frombuffer(exactly(stream, 4), "<u4")[0])
        if "." not in format_name and 4 * (num_samples + 2) > num_bytes:
            raise ValueError(f"{num_samples} samples do not fit into {num_bytes} bytes")
        offsets = np.frombuffer(exactly(stream, 4 * (num_samples + 1)), "<u4").astype(np.int64)
        if offsets[0] < stream.tell() or np.any(np.diff(offsets) < 0):
            raise ValueError("the offsets of its samples do not follow each other")
        if "." not in format_name and offsets[-1] > num_bytes:
            raise ValueError(f"its samples end at byte {offsets[-1]}, the file at {num_bytes}")
        return Head(offsets, self.config_of(stream, offsets, url, storage_options))

    def _digest_now(self, shard: Shard) -> str:
        num_bytes = storage.stat(shard.url, shard.storage_options).num_bytes
        format_name = shard.manifest.formats[shard.index]
        with self._opened(shard.url, format_name, num_bytes, shard.storage_options) as stream:
            head = self._head(stream, shard.url, num_bytes, format_name, shard.storage_options)
        return _digest(head, num_bytes)

    def _table(self, shard: Shard) -> _Table:
        lists = shard.read_lists(*_LISTS)
        starts = np.asarray(lists["member_offset"])
        return _Table(
            fields=self.fields_of(lists["footer"], shard.url),
            starts=starts,
            ends=starts + np.asarray(lists["member_num_bytes"]),
            block_data_offset=np.asarray(lists["block_data_offset"]),
        )

    def _counts(
        self,
        url: str,
        head: Head,
        fields: SampleFields,
        blocks: TarBlocks,
        options: IndexOptions,
        storage_options: Mapping[str, Any],
    ) -> dict[str, npt.NDArray[Any]]:
        names = counted_columns(url, fields.schema, options)
        if not names:
            return {}
        with storage.open_source(url, storage_options) as file, _naming_damaged_values(url):
            stream = ForwardFile(decompressed(file, self.format_name(url)))
            return counts_of(_runs(stream, head, fields, blocks, names), options)


@dataclass(frozen=True, eq=False)
class _Table:
    """What reading needs of a shard's head."""

    fields: SampleFields
    starts: Places
    ends: Places
    block_data_offset: Places


def columns_of(
    fields: SampleFields, values: Bytes, starts: Places, ends: Places, wanted: Mapping[str, Any] | Sequence[str]
) -> dict[str, Column]:
    """Makes columns of samples.

    Args:
        fields: What they consist of.
        values: uint8, the bytes they are in.
        starts: int64[n], where each begins.
        ends: int64[n], where each ends.
        wanted: Names of the columns to make.

    Returns:
        The columns.

    Raises:
        ValueError: If sizes do not add up, or a value cannot be decoded.
    """
    made: dict[str, Column] = {}
    if not fields.has_sizes:
        return {
            field.name: field.make(values, starts, ends - starts) for field in fields.fields if field.name in wanted
        }
    num_sizes = sum(field.num_bytes is None for field in fields.fields)
    sizes = gathered(values, starts, 4 * num_sizes).view("<u4").reshape(len(starts), num_sizes).astype(np.int64)
    begin, size_index = starts + 4 * num_sizes, 0
    for field in fields.fields:
        if field.num_bytes is None:
            lengths = sizes[:, size_index]
            size_index += 1
        else:
            lengths = np.full(len(starts), field.num_bytes, np.int64)
        if field.name in wanted:
            if np.any(begin + lengths > ends):
                raise ValueError(f"column {field.name!r} lies outside its sample")
            try:
                made[field.name] = field.make(values, begin, lengths)
            except ValueError as error:
                raise ValueError(f"column {field.name!r}: {error}") from error
        begin = begin + lengths
    if np.any(begin != ends):
        raise ValueError("the sizes of a sample's values do not add up to the sample's")
    return made


def _first_shapes(fields: SampleFields, first: bytes, names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Returns type and number of dimensions that arrays have in the first sample.

    Args:
        fields: What a sample consists of.
        first: The first sample.
        names: Columns of arrays.
    """
    values = np.frombuffer(first, np.uint8)
    columns = columns_of(fields, values, np.array([0]), np.array([len(first)]), names)
    found = {
        name: column.values[0] if isinstance(column, Objects) else column.values for name, column in columns.items()
    }
    return {name: (value.dtype.name, value.ndim) for name, value in found.items()}


def _runs(
    stream: ForwardFile, head: Head, fields: SampleFields, blocks: TarBlocks, names: Sequence[str]
) -> Iterator[dict[str, Column]]:
    """The wanted columns of all runs, from a shard read once."""
    first = 0
    for rows, step in zip(blocks.rows.tolist(), blocks.run_rows.tolist(), strict=True):
        for begin in range(first, first + rows, step):
            offsets = head.offsets[begin : min(begin + step, first + rows) + 1]
            stream.seek(int(offsets[0]))
            values = read_exactly(stream, int(offsets[-1] - offsets[0]))
            yield columns_of(fields, values, offsets[:-1] - offsets[0], offsets[1:] - offsets[0], names)
        first += rows


def _chosen(table: _Table, columns: Sequence[str] | None, shard: Shard, block: int) -> dict[str, pa.DataType]:
    """Wanted columns and the types that all shards share."""
    manifest = shard.manifest
    kinds = {field.name: field.type for field in table.fields.fields}
    shared = pa.ipc.read_schema(pa.py_buffer(manifest.arrow_schema)) if manifest.arrow_schema else table.fields.schema
    names = list(columns) if columns is not None else list(shared.names)
    for name in names:
        if name not in kinds:
            found = ", ".join(kinds)
            raise DecodeError(f"the shard has no column {name!r}", url=shard.url, block=block, found=found)
    return {name: shared.field(name).type if name in shared.names else kinds[name] for name in names}


def exactly(stream: ForwardFile, num_bytes: int) -> bytes:
    """Returns the next bytes; raises ``EOFError`` if the stream ends before."""
    found = stream.read(num_bytes)
    if len(found) < num_bytes:
        raise EOFError(f"it ends at byte {stream.tell()}")
    return found


def _digest(head: Head, num_bytes: int) -> str:
    """Of the layout: size, offsets and fields."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(num_bytes.to_bytes(8, "little") + head.offsets.astype("<i8").tobytes() + head.config)
    return hasher.hexdigest()


@contextmanager
def _naming_run(shard: Shard, block: int, first_row: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        hint = "compare the file with its source, or leave the column out with columns="
        raise DecodeError(str(error), url=shard.url, block=block, row=first_row, hint=hint) from error


@contextmanager
def _naming_damaged_values(url: str) -> Iterator[None]:
    try:
        yield
    except (*DAMAGE, ValueError) as error:
        raise ManifestError("the shard cannot be decoded", url=url, found=error) from error
