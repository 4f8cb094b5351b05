"""Tar shards in WebDataset's layout: plain, gzip and zstd. ``tarfile`` is asked when indexing, never when reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream import storage
from shardstream.columns import ByteSource, Column, Rows, Slices
from shardstream.errors import DecodeError, ManifestError
from shardstream.formats import IndexOptions, Shard, ShardIndex
from shardstream.formats._block_bytes import block_ranges, bytes_of_runs, place_in_shard, region_of
from shardstream.formats._counts import RunLengths, token_counts
from shardstream.formats._decompress import ForwardFile, Frame, ZstdStream, decompressed
from shardstream.formats._shards import (
    DAMAGE,
    check_unchanged,
    naming_damage,
    remembered,
    run_bounds,
)
from shardstream.formats._tar_blocks import TarBlocks, cut_blocks
from shardstream.formats._tar_scan import MAX_HEADER_NUM_BYTES, Findings, MemberTable, group_members, scan_members
from shardstream.manifest import ColumnSchema
from shardstream.ranges import ByteRange

KEY_COLUMN = "__key__"
NO_WAY_IN = (
    "compressed in one piece: a start in the middle decodes the shard from its beginning; written again as zstd frames "
    "of a few MiB it could be entered anywhere (`shardstream reshard` writes it so)"
)
_LARGE_NUM_BYTES = 1 << 14  # from here on, reading a value costs less than mapping its pages
_LISTS = ("sample_num_members", "member_field", "member_offset", "member_num_bytes", "block_data_offset")


class TarFormat:
    """Reads WebDataset tars. A sample is the members that share directory and base name up to its first dot.

    The rest of the base name, in lower case, is the field; values are bytes. ``__key__`` is the key. A leading ``./``
    is dropped. Members named ``._*``, ``.DS_Store`` or ``__*__``, at any depth, and names without a suffix are no
    samples (a warning tells how many). Links are refused, because they hold no data; garbage after the archive is
    refused, because a damaged header looks the same; a missing end mark is a warning.
    """

    is_self_contained = True

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Lists all members: of a local plain tar by its headers, of any other by reading it once, front to back.

        Returns:
            One block per group of samples (see ``cut_blocks``). Lists: ``sample_keys`` (bytes) and
            ``sample_num_members`` int32[n]; ``member_field`` (text), ``member_offset`` and ``member_num_bytes``
            int64[m], in the decoded stream; ``block_data_offset`` int64[b]; with ``tokens_column`` also the counts of
            runs (see ``token_counts``), from the sizes of members.

        Raises:
            ManifestError: If the shard is empty (0 bytes), cut or damaged, a member comes twice or is a link, tokens
                cannot be counted, or counts of targets are asked for, which tars do not have.
            ReadError: If storage failed.
        """
        if options.targets:
            raise ManifestError("targets are counted in Parquet columns", url=url, found="a tar shard")
        format_name = _format_name(url)
        info = storage.stat(url, storage_options)
        findings = Findings()
        table, frames = _scan(url, format_name, info.num_bytes, storage_options, findings)
        starts, ends = _sample_spans(table.num_members, table.offsets, table.num_bytes)
        blocks = cut_blocks(starts, ends, frames, info.num_bytes, options.run_num_bytes)
        if frames is not None and len(frames) <= 1 and np.any(blocks.rows > blocks.run_rows):
            findings.warnings.append(NO_WAY_IN)
        num_samples = Counter(table.fields)
        return ShardIndex(
            format=format_name,
            num_bytes=info.num_bytes,
            version_tag=info.version_tag,
            digest=table.digest,
            block_rows=blocks.rows,
            block_run_rows=blocks.run_rows,
            block_offset=blocks.offset,
            block_num_bytes=blocks.num_bytes,
            columns=tuple(
                ColumnSchema(name, "bytes", len(table.keys) - number) for name, number in sorted(num_samples.items())
            ),
            lists={
                "sample_keys": table.keys,
                "sample_num_members": table.num_members,
                "member_field": table.fields,
                "member_offset": table.offsets,
                "member_num_bytes": table.num_bytes,
                "block_data_offset": blocks.data_offset,
                **_count_tokens(url, table, blocks, options),
            },
            warnings=tuple(findings.warnings),
        )

    def ranges_of(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> list[ByteRange]:
        """Returns the block's bytes, cut; see ``Format.ranges_of``."""
        del columns  # the fields of a sample lie together
        return block_ranges(shard, block, first_run, lambda: _digest_now(shard))

    def read_runs(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> Iterator[Rows]:
        """Yields the runs of a block; see ``Format.read_runs``.

        All fields of a run are views of one array: of a local plain tar the mapped file, else the bytes read. Of large
        fields the former names a source, too, from which ``bytes`` are read without touching the mapping. A field
        that was named and that a sample lacks is an error; with ``columns=None`` it is null there.
        """
        if shard.is_local:
            check_unchanged(shard, lambda: _digest_now(shard))
        samples = remembered(shard, lambda: _samples(shard))
        first_row = int(shard.manifest.block_start[block] - shard.manifest.first_sample[shard.index])
        bounds = [(first_row + first, first_row + end) for first, end in run_bounds(shard, block)][first_run:]
        spans = [(int(samples.starts[first]), int(samples.ends[end - 1])) for first, end in bounds]
        place = place_in_shard(shard, block)
        offsets = samples.block_data_offset
        data_end = int(offsets[place + 1]) if place + 1 < len(offsets) else None
        has_large = bool(samples.large if columns is None else samples.large.intersection(columns))
        with naming_damage(shard.url, block):
            runs = bytes_of_runs(
                shard, block, spans, int(offsets[place]), lambda: _digest_now(shard), data_end=data_end
            )
            with closing(runs):
                for (first, end), (start, _), values in zip(bounds, spans, runs, strict=True):
                    source = region_of(shard, block, values, start) if has_large else None
                    yield _rows(shard, samples, first, end, columns, values, start, source)
                    del values, source


# -------------------------------------------------------------------------------------------------- indexing


def _format_name(url: str) -> str:
    """``"tar"``, ``"tar.gz"`` or ``"tar.zst"``."""
    name = url.split("?", 1)[0].lower() if "://" in url else url.lower()
    if name.endswith((".tar.gz", ".tgz")):
        return "tar.gz"
    return "tar.zst" if name.endswith((".tar.zst", ".tar.zstd")) else "tar"


def _scan(
    url: str, format_name: str, num_bytes: int, storage_options: Mapping[str, Any], findings: Findings
) -> tuple[MemberTable, list[Frame] | None]:
    """The member table and, of a compressed tar, its frames."""
    if num_bytes == 0:
        raise ManifestError("the shard is empty (0 bytes)", url=url, hint="write it again, or leave it out")
    try:
        with storage.open_source(url, storage_options, num_bytes=num_bytes) as file:
            stream = decompressed(file, format_name)
            seekable = file if format_name == "tar" and storage.local_path(url) is not None else None
            forward = ForwardFile(stream, seekable, max_read=MAX_HEADER_NUM_BYTES)
            table = group_members(scan_members(forward, url, findings), url)
    except DAMAGE as error:
        found = f"{type(error).__name__}: {error}"
        hint = "fetch or write it again"
        raise ManifestError("the shard is cut or damaged", url=url, found=found, hint=hint) from error
    if isinstance(stream, ZstdStream):
        return table, stream.frames
    return table, None if format_name == "tar" else [Frame(0, 0)]


def _digest_now(shard: Shard) -> str:
    format_name = shard.manifest.formats[shard.index]
    num_bytes = storage.stat(shard.url, shard.storage_options).num_bytes
    return _scan(shard.url, format_name, num_bytes, shard.storage_options, Findings())[0].digest


def _count_tokens(url: str, table: MemberTable, blocks: TarBlocks, options: IndexOptions) -> dict[str, Any]:
    """Tokens of each sample and run, if asked for: raw numbers are counted by the size of their member."""
    if options.tokens_column is None:
        return {}
    if options.tokens_dtype is None:
        hint = "say it with --tokens-dtype, such as uint16"
        raise ManifestError("tokens in tars are raw bytes, whose type must be said", url=url, hint=hint)
    itemsize = np.dtype(options.tokens_dtype).itemsize
    is_tokens = np.array([name == options.tokens_column for name in table.fields], np.bool_)
    if not is_tokens.any() and len(table.keys):
        found = ", ".join(sorted(set(table.fields)))
        raise ManifestError(f"no sample has a field {options.tokens_column!r}", url=url, found=found)
    sample = np.repeat(np.arange(len(table.keys)), table.num_members)[is_tokens]
    num_bytes = table.num_bytes[is_tokens]
    if np.any(num_bytes % itemsize):
        odd = int(np.argmax(num_bytes % itemsize != 0))
        key = table.keys[sample[odd]].decode("utf-8", "backslashreplace")
        what = f"the tokens of sample '{key}' are no {options.tokens_dtype}"
        expected = f"a multiple of {itemsize} bytes"
        raise ManifestError(what, url=url, row=int(sample[odd]), expected=expected, found=int(num_bytes[odd]))
    lengths, is_document = np.zeros(len(table.keys), np.int32), np.zeros(len(table.keys), np.bool_)
    lengths[sample], is_document[sample] = num_bytes // itemsize, True
    ends = np.cumsum(blocks.rows, dtype=np.int64)
    firsts = [
        first
        for begin, end, step in zip((ends - blocks.rows).tolist(), ends.tolist(), blocks.run_rows.tolist(), strict=True)
        for first in range(begin, end, step)
    ]
    bounds = zip(firsts, [*firsts[1:], len(table.keys)][: len(firsts)], strict=True)
    return token_counts([RunLengths(lengths[b:e], is_document[b:e]) for b, e in bounds], options.pack)


def _sample_spans(
    num_members: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First data byte and end of each sample in the decoded stream; its members lie between, in order."""
    after = np.cumsum(num_members, dtype=np.int64)
    return offsets[after - num_members], (offsets + num_bytes)[after - 1]


# --------------------------------------------------------------------------------------------------- reading


class _Field(NamedTuple):
    """Where a field's values lie in the decoded shard: an entry a sample."""

    starts: npt.NDArray[np.int64]
    """int64[n]; anywhere in the sample where it lacks the field."""
    lengths: npt.NDArray[np.int64]
    """int64[n]; 0 there."""
    nulls: npt.NDArray[np.bool_] | None
    """bool[n], True there; None if no sample lacks it."""


class _Keys(NamedTuple):
    """The keys of a shard's samples, one behind the other."""

    values: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    """int64[n + 1], the first one 0."""

    def slices(self, first: int, end: int) -> Slices:
        """Returns some of them as a column."""
        starts = self.ends[first:end]
        return Slices(self.values, starts, self.ends[first + 1 : end + 1] - starts, "text")


@dataclass(frozen=True, eq=False)
class _Samples:
    """What reading needs of a shard's member table. It is made for whole shards: a block takes slices of it."""

    first_member: npt.NDArray[np.int64]
    field_of_member: npt.NDArray[np.int32]
    fields: dict[str, int]
    offsets: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    block_data_offset: npt.NDArray[np.int64]
    _found: dict[str, _Field] = field(default_factory=dict)
    _keys: list[_Keys] = field(default_factory=list)

    @cached_property
    def large(self) -> frozenset[str]:
        """The fields whose values are read one by one where a file is mapped."""
        num_bytes = np.bincount(self.field_of_member, self.num_bytes, len(self.fields))
        num_members = np.bincount(self.field_of_member, minlength=len(self.fields))
        is_large = num_bytes >= _LARGE_NUM_BYTES * num_members
        return frozenset(name for name, code in self.fields.items() if is_large[code])

    def keys(self, shard: Shard) -> _Keys:
        """Returns the keys, read when they are asked for; of the shard that this is of."""
        if not self._keys:
            keys = shard.read_lists("sample_keys")["sample_keys"]
            ends = np.cumsum([0, *map(len, keys)], dtype=np.int64)
            self._keys.append(_Keys(np.frombuffer(b"".join(keys), np.uint8), ends))
        return self._keys[0]

    def field(self, name: str) -> _Field:
        """Returns where the values of a field lie, found once: in each step numpy lets go of the interpreter's lock."""
        found = self._found.get(name)
        if found is None:
            found = self._find(name)
            # Of fields that few samples have there may be thousands.
            if found.nulls is None or 2 * np.count_nonzero(found.nulls) <= len(found.nulls):
                self._found[name] = found
        return found

    def _find(self, name: str) -> _Field:
        num_samples = len(self.starts)
        chosen = np.flatnonzero(self.field_of_member == self.fields.get(name, -1))
        rows = np.searchsorted(self.first_member, chosen, side="right") - 1
        starts, lengths = self.starts.copy(), np.zeros(num_samples, np.int64)
        starts[rows], lengths[rows] = self.offsets[chosen], self.num_bytes[chosen]
        if len(rows) == num_samples:
            return _Field(starts, lengths, None)
        nulls = np.ones(num_samples, np.bool_)
        nulls[rows] = False
        return _Field(starts, lengths, nulls)


def _samples(shard: Shard) -> _Samples:
    lists = shard.read_lists(*_LISTS)
    names = lists["member_field"]
    fields = {name: code for code, name in enumerate(dict.fromkeys(names))}
    num_members, offsets, num_bytes = (np.asarray(lists[name]) for name in (_LISTS[0], *_LISTS[2:4]))
    starts, ends = _sample_spans(num_members, offsets, num_bytes)
    return _Samples(
        first_member=np.concatenate([[0], np.cumsum(num_members, dtype=np.int64)]),
        field_of_member=np.fromiter(map(fields.__getitem__, names), np.int32, len(names)),
        fields=fields,
        offsets=offsets,
        num_bytes=num_bytes,
        starts=starts,
        ends=ends,
        block_data_offset=np.asarray(lists["block_data_offset"]),
    )


def _rows(
    shard: Shard,
    samples: _Samples,
    first: int,
    end: int,
    columns: Sequence[str] | None,
    values: npt.NDArray[np.uint8],
    start: int,
    source: ByteSource | None,
) -> Rows:
    """The samples ``first`` to ``end`` of a shard, whose bytes from ``start`` on are ``values``, and of ``source``."""
    names = [KEY_COLUMN, *(column.name for column in shard.manifest.columns)] if columns is None else columns
    made: dict[str, Column] = {}
    for name in names:
        if name == KEY_COLUMN:
            made[name] = samples.keys(shard).slices(first, end)
            continue
        found = samples.field(name)
        nulls = None if found.nulls is None else found.nulls[first:end]
        if nulls is not None and not nulls.any():
            nulls = None
        if nulls is not None and columns is not None:
            _raise_missing(shard, samples, first + int(np.argmax(nulls)), name)
        starts, lengths = found.starts[first:end] - start, found.lengths[first:end]
        made[name] = Slices(values, starts, lengths, "bytes", nulls, source if name in samples.large else None)
    return Rows(end - first, made, len(values))


def _raise_missing(shard: Shard, samples: _Samples, row: int, name: str) -> None:
    keys = samples.keys(shard)
    key = keys.values[keys.ends[row] : keys.ends[row + 1]].tobytes().decode("utf-8", "backslashreplace")
    codes = samples.field_of_member[samples.first_member[row] : samples.first_member[row + 1]]
    names = list(samples.fields)
    raise DecodeError(
        f"sample '{key}' has no field {name!r}",
        url=shard.url,
        row=row,
        found=", ".join(names[code] for code in codes),
        hint="write it, or do not ask for it: with columns=None it is None where it is missing",
    )
