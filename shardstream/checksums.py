"""Checksums of what a shard is made of: each block, and all that lies in no block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

ALGORITHM = "blake2b-16"
"""As a manifest names it: blake2b with digests of 16 bytes, keyed to this use."""

BLOCK_LIST, REST_LIST = "block_checksum", "rest_checksum"
"""Names of the manifest's lists: of each block, and of the rest of the file."""

_PART_NUM_BYTES = 1 << 20


@dataclass(frozen=True)
class Checksums:
    """What the bytes of a shard hash to.

    Attributes:
        blocks: 16 bytes for each block.
        rest: 16 bytes for all that is in no block, in the order of the file: headers, footers, padding.
    """

    blocks: list[bytes]
    rest: bytes


def new_hasher() -> hashlib.blake2b:
    """Returns a hasher for a block."""
    return hashlib.blake2b(digest_size=16, person=b"block1")


def checksums_of(file: BinaryIO, spans: Sequence[tuple[int, int]], num_bytes: int) -> Checksums:
    """Reads a file once, front to back, and hashes its blocks.

    Args:
        file: The shard, at its first byte.
        spans: First byte and end of each block; they may overlap (a zstd frame that holds the end of a sample).
        num_bytes: Size of the file.

    Raises:
        EOFError: If the file ends before.

    Example:
        >>> import io
        >>> made = checksums_of(io.BytesIO(b"head block tail"), [(5, 10)], 15)
        >>> made.blocks == [checksum(b"block")], made.rest == checksum(b"head  tail")
        (True, True)
    """
    blocks, rest = [new_hasher() for _ in spans], new_hasher()
    begins: dict[int, list[int]] = {}
    for block, (start, end) in enumerate(spans):
        if start < end:
            begins.setdefault(start, []).append(block)
    inside: list[int] = []
    for start, end in pairwise(sorted({0, num_bytes, *(place for span in spans for place in span)})):
        inside = [block for block in inside if spans[block][1] > start] + begins.get(start, [])
        hashers = [blocks[block] for block in inside] or [rest]
        for part in _parts(file, end - start):
            for hasher in hashers:
                hasher.update(part)
    return Checksums([hasher.digest() for hasher in blocks], rest.digest())


def checksum(*parts: bytes | memoryview) -> bytes:
    """Returns the checksum of a block in parts, end to end: 16 bytes."""
    hasher = new_hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _parts(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    left = num_bytes
    while left:
        part = file.read(min(left, _PART_NUM_BYTES))
        if not part:
            raise EOFError(f"the file ends {left} bytes early")
        left -= len(part)
        yield part
