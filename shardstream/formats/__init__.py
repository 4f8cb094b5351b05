"""Formats: how a shard is indexed and how its blocks are read. A new format is one file and one line in ``_FORMATS``.

A format is stateless; what it must remember of a shard (keys, member offsets, a footer) it returns as lists of the
``ShardIndex``, which the manifest keeps and hands back with the ``Shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardstream.columns import Rows
from shardstream.errors import ManifestError
from shardstream.formats._plugins import plugin_format, plugin_suffixes
from shardstream.manifest import ColumnSchema, Manifest

if TYPE_CHECKING:
    from shardstream.ranges import ByteRange, Ranges

RUN_NUM_BYTES = 4 << 20  # a run is about this much, decoded

_FORMATS = {
    ".parquet": "shardstream.formats.parquet:ParquetFormat",
    ".pq": "shardstream.formats.parquet:ParquetFormat",
    ".tar": "shardstream.formats.tar:TarFormat",
    ".tar.gz": "shardstream.formats.tar:TarFormat",
    ".tgz": "shardstream.formats.tar:TarFormat",
    ".tar.zst": "shardstream.formats.tar:TarFormat",
    ".tar.zstd": "shardstream.formats.tar:TarFormat",
    **{
        kind + packed: "shardstream.formats.jsonl:JsonLinesFormat"
        for kind in (".jsonl", ".ndjson")
        for packed in ("", ".gz", ".zst", ".zstd")
    },
    **dict.fromkeys((".json.gz", ".json.zst", ".json.zstd"), "shardstream.formats.jsonl:JsonLinesFormat"),
    ".arrow": "shardstream.formats.arrow:ArrowFormat",
    **dict.fromkeys((".mds", ".mds.zst", ".mds.zstd"), "shardstream.formats.mds:MdsFormat"),
    **dict.fromkeys((".litdata", ".litdata.zst", ".bin"), "shardstream.formats.litdata:LitDataFormat"),
}
_ONLY_NAMED = frozenset({".bin"})  # folders are full of other things that end like this


@dataclass(frozen=True)
class IndexOptions:
    """What indexing looks at.

    Attributes:
        tokens_column: List column whose lengths are the token counts, or None.
        targets: Head name → column whose entries that are not ``ignore_index`` are counted per sample.
        ignore_index: The label that does not count.
        run_num_bytes: Decoded size of a run.
        pack: Sequence lengths for which sequences of whole documents, and of unpacked ones, are counted.
        tokens_dtype: Type of raw token bytes, in tars.
        checksum: Whether every byte is hashed, block by block.
    """

    tokens_column: str | None = None
    targets: Mapping[str, str] = field(default_factory=dict)
    ignore_index: int = -100
    run_num_bytes: int = RUN_NUM_BYTES
    pack: tuple[int, ...] = ()
    tokens_dtype: str | None = None
    checksum: bool = False


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """What indexing learned of one shard; one row of the manifest.

    Attributes:
        format: ``"parquet"``, ``"tar"``, ``"tar.gz"``, ``"tar.zst"``, ``"jsonl"``, ``"mds.zst"``, …
        num_bytes: Size of the file.
        version_tag: ``storage.version_tag`` of the file as it was read.
        digest: 32 hex digits: blake2b of what was read (Parquet footer, or the member table).
        block_rows: int32[b]; blocks without rows are left out.
        block_run_rows: int32[b].
        block_offset: int64[b], in the file.
        block_num_bytes: int64[b], in the file.
        columns: Sample schema of this shard.
        arrow_schema: Serialised Arrow schema (Parquet), or b"".
        lists: Per-shard lists by name (see ``manifest_file`` for the names).
        warnings: What the user should know (missing end blocks, blocks that can only be streamed).
    """

    format: str
    num_bytes: int
    version_tag: str
    digest: str
    block_rows: npt.NDArray[np.int32]
    block_run_rows: npt.NDArray[np.int32]
    block_offset: npt.NDArray[np.int64]
    block_num_bytes: npt.NDArray[np.int64]
    columns: tuple[ColumnSchema, ...]
    arrow_schema: bytes = b""
    lists: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Shard:
    """A shard as a format sees it when it reads: where it is, and what the manifest knows of it."""

    manifest: Manifest
    index: int
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    ranges: Ranges | None = None
    """Where byte ranges of it come from, and are asked for ahead; None to read each from storage as it is needed."""

    @property
    def is_local(self) -> bool:
        """Whether it is read by its path, without ranges."""
        from shardstream.storage import local_path

        is_path = local_path(self.url) is not None
        return is_path and not (self.ranges is not None and self.ranges.takes_local)

    @property
    def url(self) -> str:
        """Full location."""
        return self.manifest.url(self.index)

    def read_lists(self, *names: str) -> dict[str, Any]:
        """Returns the named per-shard lists."""
        if self.manifest.lists is None:
            raise ManifestError("this manifest has no per-shard lists", url=self.url, hint="index the shards again")
        return self.manifest.lists.read(self.index, names)


class Format(Protocol):
    """What a format must do. ``shardstream.testing.FormatTests`` checks it.

    One whose shards are indexed from their own bytes alone says ``is_self_contained = True``: such a shard may be
    indexed from a copy.
    """

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Reads what is needed to know every block of a shard.

        Raises:
            ManifestError: If the shard is broken or cannot be used, naming the shard and, where it applies, the member.
            ReadError: If storage failed.
        """
        ...

    def ranges_of(self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0) -> list[ByteRange]:
        """Returns what ``read_runs`` with the same arguments fetches first, so that it can be asked for ahead.

        Of a block of one run that is all; of one that is streamed, its beginning.

        Args:
            shard: The shard.
            block: Index of the block in the manifest.
            columns: Names of the columns wanted, or None for all.
            first_run: Run to begin with.
        """
        ...

    def read_runs(
        self, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0
    ) -> Generator[Rows, None, None]:
        """Yields the runs of a block in file order, beginning with run ``first_run``.

        Opened lazily: nothing is read before the first ``next``. Closing the generator closes every file.
        At most a run and what its decoding needs is held in memory.

        Args:
            shard: The shard.
            block: Index of the block in the manifest (not in the shard).
            columns: Names of the columns wanted, or None for all.
            first_run: Run to begin with; earlier ones are skipped as cheaply as the format can.

        Raises:
            ShardChangedError: If the file is not the one that was indexed.
            DecodeError: If the bytes cannot be decoded, or a wanted column is missing in a row.
            ReadError: If storage failed.
        """
        ...


def decoded_runs(
    format_: Format, shard: Shard, block: int, columns: Sequence[str] | None, first_run: int = 0
) -> Generator[Rows | Callable[[], Rows], None, None]:
    """Yields the runs of a block: rows, or what makes rows of what was decoded when it is called, in any thread.

    For who has one thread to decode and another one for the rest. The latter comes from formats where that is worth
    it: they have a method ``decode_runs`` with the arguments of ``read_runs``, beside it.

    Raises:
        DecodeError: As ``Format.read_runs``; what is yielded, too.
        ReadError: As ``Format.read_runs``.
        ShardChangedError: As ``Format.read_runs``.
    """
    yield from getattr(format_, "decode_runs", format_.read_runs)(shard, block, columns, first_run)


def is_shard_name(url: str) -> bool:
    """Whether a name ends like that of a shard, of ours or of a plug-in's format.

    Example:
        >>> (
        ...     is_shard_name("a.TAR.zst"),
        ...     is_shard_name("zip://a.tar::s3://bucket/a.zip"),
        ...     is_shard_name("s3://bucket/_SUCCESS"),
        ... )
        (True, True, False)
    """
    return _suffix_of(url, (*_FORMATS.keys() - _ONLY_NAMED, *plugin_suffixes())) is not None


def format_of(url: str) -> Format:
    """Returns the format of a shard by its name's ending; of plug-ins only where none of ours has it.

    Raises:
        ManifestError: If no format has that ending, or the plug-in's that has it cannot be loaded.
    """
    suffix = _suffix_of(url, _FORMATS)
    if suffix is None:
        suffix = _suffix_of(url, plugin_suffixes())
        if suffix is not None:
            return plugin_format(suffix, url)
        expected = f"a name ending in {', '.join(sorted({*_FORMATS, *plugin_suffixes()}))}"
        raise ManifestError("no format is known for this shard", url=url, expected=expected)
    module, attribute = _FORMATS[suffix].split(":")
    made: Format = getattr(import_module(module), attribute)()
    return made


def _suffix_of(url: str, suffixes: Iterable[str]) -> str | None:
    place = next((part for part in url.split("::") if "://" in part), url)  # of a chain, what is in the archive
    name = place.split("?", 1)[0].lower() if "://" in place else place.lower()
    return next((suffix for suffix in sorted(suffixes, key=len, reverse=True) if name.endswith(suffix)), None)
