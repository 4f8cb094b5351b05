"""Checking one shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, overload

from shardstream import storage
from shardstream.checksums import BLOCK_LIST, REST_LIST, Checksums, checksums_of
from shardstream.errors import ManifestError, ReadError, shown_url
from shardstream.formats import IndexOptions, format_of
from shardstream.manifest import Manifest

_MOST_NAMED = 16  # blocks of a shard


@dataclass(frozen=True)
class ShardFault:
    """What is wrong with a shard.

    Attributes:
        shard: Its index in the manifest.
        url: The shard, without credentials.
        kind: ``"missing"``, ``"unreadable"``, ``"size"``, ``"block"`` (other bytes in a block), ``"rest"`` (other bytes
            in no block: headers, footer, padding), or ``"layout"`` (what indexing read differs).
        block: Index of the block in the manifest; of a cut shard, the first one that is not whole; else None.
        expected: What the manifest says.
        found: What is there.
    """

    shard: int
    url: str
    kind: str
    block: int | None
    expected: str | None
    found: str

    def __str__(self) -> str:
        place = self.url if self.block is None else f"{self.url}, block {self.block}"
        what = {"block": "other bytes", "rest": "other bytes outside of blocks", "size": "another size"}
        expected = "" if self.expected is None else f"expected {self.expected}, "
        return f"{what.get(self.kind, self.kind)} [{place}]: {expected}found {self.found}"


@dataclass(frozen=True)
class Checked:
    """A shard that was read.

    Attributes:
        faults: What is wrong with it.
        num_bytes: Bytes that were compared.
        is_rewritten: Whether its version tag is another one than when it was indexed.
    """

    faults: tuple[ShardFault, ...]
    num_bytes: int
    is_rewritten: bool


@dataclass(frozen=True)
class Check:
    """One shard to check; travels to other processes.

    Attributes:
        shard: Its index in the manifest.
        url: Its location.
        num_bytes: Its size.
        version_tag: When it was indexed.
        digest: Of its layout.
        first_block: Index of its first block in the manifest.
        spans: First byte and end of each block.
        checksums: What its bytes hash to, or None if that is not known.
        storage_options: Given to fsspec.
    """

    shard: int
    url: str
    num_bytes: int
    version_tag: str
    digest: str
    first_block: int
    spans: Sequence[tuple[int, int]]
    checksums: Checksums | None
    storage_options: Mapping[str, Any] = field(repr=False)

    def find(self) -> Checked:
        """Reads the shard, once, and compares it."""
        try:
            info = storage.stat(self.url, self.storage_options)
            is_rewritten = info.version_tag != self.version_tag
            if info.num_bytes != self.num_bytes:
                return Checked((self._size(info.num_bytes),), 0, is_rewritten)
            faults = self._layout(is_rewritten=is_rewritten) if self.checksums is None else self._content()
        except ReadError as error:
            kind = "missing" if isinstance(error.__cause__, FileNotFoundError) else "unreadable"
            return Checked((self._fault(kind, None, None, str(error)),), 0, is_rewritten=False)
        num_bytes = 0 if self.checksums is None else self.num_bytes
        return Checked(tuple(faults), num_bytes, is_rewritten)

    def _content(self) -> list[ShardFault]:
        assert self.checksums is not None  # noqa: S101 - narrows the type
        try:
            with storage.open_source(self.url, self.storage_options, num_bytes=self.num_bytes) as file:
                found = checksums_of(file, self.spans, self.num_bytes)
        except EOFError:  # it was cut just now
            return [self._size(storage.stat(self.url, self.storage_options).num_bytes)]
        pairs = zip(self.checksums.blocks, found.blocks, strict=True)
        differ = [block for block, (expected, there) in enumerate(pairs) if expected != there]
        faults = [
            self._fault("block", block, self.checksums.blocks[block].hex(), found.blocks[block].hex())
            for block in islice(differ, _MOST_NAMED)
        ]
        if len(differ) > _MOST_NAMED:
            faults.append(self._fault("block", None, None, f"{len(differ) - _MOST_NAMED} more blocks of other bytes"))
        if found.rest != self.checksums.rest:
            faults.append(self._fault("rest", None, self.checksums.rest.hex(), found.rest.hex()))
        return faults

    def _layout(self, *, is_rewritten: bool) -> list[ShardFault]:
        """Without checksums: a shard that was not written again is believed, another one is indexed again."""
        if not is_rewritten:
            return []
        try:
            digest = format_of(self.url).index_shard(self.url, IndexOptions(), self.storage_options).digest
        except ManifestError as error:
            return [self._fault("layout", None, f"digest {self.digest}", str(error))]
        return [] if digest == self.digest else [self._fault("layout", None, self.digest, digest)]

    def _size(self, num_bytes: int) -> ShardFault:
        cut = next((block for block, (_, end) in enumerate(self.spans) if end > num_bytes), None)
        return self._fault("size", cut, f"{self.num_bytes} bytes", f"{num_bytes} bytes")

    def _fault(self, kind: str, block: int | None, expected: str | None, found: str) -> ShardFault:
        block = None if block is None else self.first_block + block
        return ShardFault(self.shard, shown_url(self.url), kind, block, expected, found)


class Checks(Sequence[Check]):
    """Checks of some shards, each made when it is asked for: checksums of a large manifest are not all in memory.

    Args:
        manifest: The manifest.
        shards: Indices of shards.
        has_checksums: Whether it knows checksums.
        storage_options: Given to fsspec.
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[int], *, has_checksums: bool, storage_options: Mapping[str, Any]
    ) -> None:
        self._manifest, self._shards = manifest, shards
        self._has_checksums, self._storage_options = has_checksums, storage_options

    def __len__(self) -> int:
        return len(self._shards)

    def __iter__(self) -> Iterator[Check]:
        return map(self._check, self._shards)

    @overload
    def __getitem__(self, place: int) -> Check: ...
    @overload
    def __getitem__(self, place: slice) -> Checks: ...
    def __getitem__(self, place: int | slice) -> Check | Checks:
        if isinstance(place, int):
            return self._check(self._shards[place])
        return Checks(
            self._manifest,
            self._shards[place],
            has_checksums=self._has_checksums,
            storage_options=self._storage_options,
        )

    def _check(self, shard: int) -> Check:
        manifest = self._manifest
        first, end = manifest.shard_first_block[shard : shard + 2].tolist()
        starts, sizes = manifest.block_offset[first:end].tolist(), manifest.block_num_bytes[first:end].tolist()
        checksums = None
        if self._has_checksums and manifest.lists is not None:
            lists = manifest.lists.read(shard, (BLOCK_LIST, REST_LIST))
            checksums = Checksums(lists[BLOCK_LIST], lists[REST_LIST])
        return Check(
            shard=shard,
            url=manifest.url(shard),
            num_bytes=int(manifest.num_bytes[shard]),
            version_tag=manifest.version_tags[shard],
            digest=manifest.digests[shard],
            first_block=first,
            spans=[(start, start + size) for start, size in zip(starts, sizes, strict=True)],
            checksums=checksums,
            storage_options=self._storage_options,
        )
