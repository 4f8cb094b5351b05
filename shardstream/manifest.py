"""The manifest: what is known of every shard before a byte of data is read. A frozen value in columns.

Reading and writing the file is ``manifest_file``; making one from shards is ``index``.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardstream.errors import ManifestError

if TYPE_CHECKING:
    import os

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

AllowUrl: TypeAlias = "str | Iterable[str] | Callable[[str], bool] | None"

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class ColumnSchema:
    """One column of the samples (Parquet) or one field, by suffix (tar).

    Attributes:
        name: Column name, or the suffix of tar members (``"jpg"``, ``"seg.png"``).
        type: The unified Arrow type as text (``"list<element: int32>"``), or ``"bytes"`` for a tar field.
        num_missing: For tar: samples that lack the field. For Parquet: null rows as far as statistics tell, else -1.
    """

    name: str
    type: str
    num_missing: int = 0


class ShardLists(Protocol):
    """Per-shard lists that stay on disk (keys, member offsets, token lengths), read one shard at a time."""

    def read(self, shard: int, names: Sequence[str]) -> dict[str, Any]:
        """Returns for each name the list of this shard: a numpy array for numbers, a list for bytes and text."""
        ...

    def read_all(self, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Returns for each name the lists of all shards end to end, in manifest order; for lists of numbers."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Names of the lists that this manifest has."""
        ...


@dataclass(frozen=True, eq=False)
class Manifest:
    """All shards and blocks of a data set, in manifest order. Immutable; about 24 bytes a block.

    S shards, B blocks (blocks without rows are not blocks). Make one with ``build_manifest`` or ``Manifest.load``.

    Attributes:
        root: Folder or URL that every ``urls`` entry is below, ending without a slash; "" if there is none.
        urls: Shard locations relative to ``root``.
        formats: Format name of each shard (``"parquet"``, ``"tar"``, ``"tar.gz"``, ``"tar.zst"``).
        num_bytes: int64[S], size of each shard file.
        version_tags: What tells a changed file without reading it: an etag, or size and modification time.
        digests: Hash of what indexing read of each shard (the Parquet footer, or the tar's member table).
        shard_first_block: int64[S + 1], index of each shard's first block; the last entry is B.
        block_rows: int32[B], rows of each block (at least 1).
        block_run_rows: int32[B], rows per run of each block.
        block_offset: int64[B], where the block's bytes begin in the file.
        block_num_bytes: int64[B], how many bytes of the file it takes.
        columns: The sample schema.
        arrow_schema: Serialised Arrow schema of the samples (Parquet), or b"".
        tokens_column: Column whose list lengths are the token counts, or None.
        path: Where this manifest was read from or written to, or None.
        lists: Access to the per-shard lists, or None.
        metadata: Further settings of indexing, as JSON-able values (``{"targets": {...}, "ignore_index": -100}``).

    Example:
        >>> manifest = Manifest.synthetic(num_shards=2, blocks_per_shard=3, rows_per_block=10)
        >>> manifest.num_samples, manifest.num_blocks, len(manifest.urls)
        (60, 6, 2)
        >>> manifest.shard_of_block(np.array([0, 2, 3])).tolist()
        [0, 0, 1]
    """

    root: str
    urls: Sequence[str]
    formats: Sequence[str]
    num_bytes: Int64Array
    version_tags: Sequence[str]
    digests: Sequence[str]
    shard_first_block: Int64Array
    block_rows: Int32Array
    block_run_rows: Int32Array
    block_offset: Int64Array
    block_num_bytes: Int64Array
    columns: tuple[ColumnSchema, ...] = ()
    arrow_schema: bytes = b""
    tokens_column: str | None = None
    path: str | None = None
    lists: ShardLists | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # not what was only derived

    # ------------------------------------------------------------------------------------------------ derived

    @property
    def num_shards(self) -> int:
        """Number of shards, those without samples included."""
        return len(self.urls)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, all of which have rows."""
        return len(self.block_rows)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return int(self.block_start[-1])

    @cached_property
    def block_start(self) -> Int64Array:
        """int64[B + 1]: sample id of each block's first row; the last entry is the number of samples."""
        start = np.zeros(self.num_blocks + 1, np.int64)
        np.cumsum(self.block_rows, out=start[1:])
        return start

    @cached_property
    def first_sample(self) -> Int64Array:
        """int64[S + 1]: sample id of each shard's first row; the last entry is the number of samples."""
        return self.block_start[self.shard_first_block]

    @property
    def shard_num_samples(self) -> Int64Array:
        """int64[S]: samples of each shard."""
        return np.diff(self.first_sample)

    @cached_property
    def has_long_blocks(self) -> bool:
        """Whether some block is cut into more than one run (then lanes have phases)."""
        return bool(np.any(self.block_rows > self.block_run_rows))

    def is_long(self, block: int) -> bool:
        """Whether a block is cut into more than one run, which are streamed."""
        return bool(self.block_rows[block] > self.block_run_rows[block])

    def shard_of_block(self, block: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Returns the shard of each block: int64, of the shape of ``block``."""
        return np.searchsorted(self.shard_first_block, block, side="right") - 1

    def shard_with(self, block: int) -> int:
        """Returns the shard of one block. Unlike numpy's search, it does not let go of the interpreter's lock."""
        return bisect_right(self.shard_first_block, block) - 1

    def url_of_block(self, block: int) -> str:
        """Returns the full location of the shard that a block is in; see ``url``."""
        return self.url(self.shard_with(block))

    def shard_of_sample(self, sample_id: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Returns the shard of each sample id: int64, of the shape of ``sample_id``."""
        return np.searchsorted(self.first_sample, sample_id, side="right") - 1

    def url(self, shard: int) -> str:
        """Returns the full location of a shard, credentials included: to open it, not to show it."""
        return f"{self.root}/{self.urls[shard]}" if self.root else self.urls[shard]

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the order's input: urls below the root, formats, digests, blocks and runs.

        No times and no locations: a data set that was moved keeps its fingerprint.
        """
        hasher = hashlib.blake2b(digest_size=16, person=b"manifest1")
        for texts in (self.urls, self.formats, self.digests):
            _hash_texts(hasher, texts)
        for numbers in (self.shard_first_block, self.block_rows, self.block_run_rows):
            hasher.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
        return hasher.hexdigest()

    def differences(self, before: Manifest, *, at_most: int = 10) -> list[str]:
        """Names the shards that differ from an earlier manifest: added, missing, changed, or in another place.

        Args:
            before: The earlier manifest.
            at_most: How many to name; the rest is counted.

        Returns:
            One text a shard; empty if the fingerprints are equal.
        """
        if before.fingerprint == self.fingerprint:
            return []
        old, new = ({m.urls[k]: (k, _shard_identity(m, k)) for k in range(m.num_shards)} for m in (before, self))
        texts = [f"{url} was added" for url in new if url not in old]
        texts += [f"{url} is missing" for url in old if url not in new]
        texts += [f"{url} has changed" for url in new if url in old and new[url][1] != old[url][1]]
        if not texts:
            texts = [
                f"{url} has moved from place {old[url][0]} to {new[url][0]}" for url in new if new[url] != old[url]
            ]
        texts = texts or ["the same shards, some of them another number of times"]
        return _cut(texts, at_most)

    @cached_property
    def shard_marks(self) -> tuple[str, ...]:
        """A mark of 8 hex digits a shard: of what the fingerprint takes of it, its url included."""
        return tuple(_shard_mark(self, shard) for shard in range(self.num_shards))

    def differences_by_marks(self, before: Sequence[str], *, at_most: int = 10) -> list[str]:
        """Names the shards that differ from an earlier manifest of which only ``shard_marks`` are left.

        Args:
            before: The earlier manifest's marks.
            at_most: How many to name; the rest is counted.

        Returns:
            Texts as ``differences`` gives them. A mark has no name: what is not here any more is counted only.
        """
        known = set(before)
        num_gone = len(known - set(self.shard_marks))
        news = "was added or has changed" if num_gone else "was added"
        texts = [f"{self.urls[k]} {news}" for k, mark in enumerate(self.shard_marks) if mark not in known]
        if num_gone > len(texts):
            texts.insert(0, f"{num_gone} of the {len(before)} shards are missing or have changed")
        return _cut(texts or ["the same shards in another order or another number of times"], at_most)

    # ------------------------------------------------------------------------------------------------ making

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        root: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_url: AllowUrl = None,
    ) -> Manifest:
        """Reads a manifest file.

        Shards must lie below the root: the one given here; else the one that the manifest names, if the manifest is a
        local file, or the root is below the manifest's own folder or on the host it was read from. A manifest that
        somebody else made is loaded with ``root``: then nothing elsewhere is read.

        Args:
            path: A local path or fsspec URL, as written by ``build_manifest`` or ``shardstream index``.
            root: Where the shards are now, if they were moved since.
            storage_options: Given to fsspec to open the manifest.
            allow_url: Shards elsewhere that are accepted: a pattern of full locations (``"s3://bucket/*"``; ``*`` is
                any text), several, or a callable of a full location.

        Returns:
            The manifest, its fingerprint checked against the file's.

        Raises:
            ManifestError: If it is missing, not a manifest, of a newer version, or damaged, or names a shard that is
                elsewhere.
        """
        from shardstream.manifest_file import load_manifest

        return load_manifest(path, root=root, storage_options=storage_options, allow_url=allow_url)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Writes this manifest to a file: to a temporary name first, then renamed.

        Args:
            path: A local path or fsspec URL.
            overwrite: Replace an existing manifest of another fingerprint. Without it that is an error, because
                running jobs and cursors refer to the one that is there.
            storage_options: Given to fsspec to write the manifest.

        Returns:
            The same manifest with ``path`` set.

        Raises:
            ManifestError: If another manifest is at ``path``.
        """
        from shardstream.manifest_file import save_manifest

        return save_manifest(self, path, overwrite=overwrite, storage_options=storage_options)

    @classmethod
    def synthetic(
        cls, *, num_shards: int, blocks_per_shard: int, rows_per_block: int, run_rows: int | None = None
    ) -> Manifest:
        """Makes a manifest of shards that do not exist, to plan and audit a job before its data exists.

        Args:
            num_shards: Number of shards.
            blocks_per_shard: Blocks of each.
            rows_per_block: Rows of each block.
            run_rows: Rows per run; by default a block is one run.

        Returns:
            The manifest. Its arrays of equal numbers take no memory.

        Raises:
            ManifestError: If a number is negative or, for rows, not in 1 .. 2^31 - 1.
        """
        rows_per_run = rows_per_block if run_rows is None else run_rows
        if num_shards < 0 or blocks_per_shard < 0 or not 1 <= rows_per_block < 1 << 31 or rows_per_run < 1:
            found = (num_shards, blocks_per_shard, rows_per_block, rows_per_run)
            raise ManifestError("sizes of a synthetic manifest must be positive, rows below 2^31", found=found)
        num_blocks = num_shards * blocks_per_shard
        return cls(
            root="synthetic://",
            urls=[f"shard-{k:06d}.parquet" for k in range(num_shards)],
            formats=["synthetic"] * num_shards,
            num_bytes=np.broadcast_to(np.int64(0), num_shards),
            version_tags=[""] * num_shards,
            digests=[""] * num_shards,
            shard_first_block=np.arange(num_shards + 1, dtype=np.int64) * blocks_per_shard,
            block_rows=np.broadcast_to(np.int32(rows_per_block), num_blocks),
            block_run_rows=np.broadcast_to(np.int32(min(rows_per_run, rows_per_block)), num_blocks),
            block_offset=np.broadcast_to(np.int64(0), num_blocks),
            block_num_bytes=np.broadcast_to(np.int64(0), num_blocks),
        )


def _shard_identity(manifest: Manifest, shard: int) -> tuple[object, ...]:
    blocks = slice(*manifest.shard_first_block[shard : shard + 2].tolist())
    rows, run_rows = manifest.block_rows[blocks].tolist(), manifest.block_run_rows[blocks].tolist()
    return (manifest.formats[shard], manifest.digests[shard], rows, run_rows)


def _shard_mark(manifest: Manifest, shard: int) -> str:
    hasher = hashlib.blake2b(digest_size=4, person=b"shard1")
    form, digest, *numbers = _shard_identity(manifest, shard)
    _hash_texts(hasher, (manifest.urls[shard], str(form), str(digest)))
    hasher.update(np.array(numbers, dtype="<i8").tobytes())
    return hasher.hexdigest()


def _cut(texts: list[str], at_most: int) -> list[str]:
    return texts[:at_most] + ([f"and {len(texts) - at_most} more"] if len(texts) > at_most else [])


def _hash_texts(hasher: hashlib.blake2b, texts: Iterable[str]) -> None:
    """Feeds texts so that no two lists look alike: their lengths, then their bytes."""
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    hasher.update(np.array([len(encoded), *map(len, encoded)], dtype="<i8").tobytes())
    hasher.update(b"".join(encoded))
