"""What every format does with a shard: cut blocks into runs, notice a changed file, name the place of an error."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import pyarrow as pa
import zstandard

from shardstream import storage
from shardstream.errors import DecodeError, ManifestError, ReadError, ShardChangedError, ShardStreamError
from shardstream.ranges import ByteRange, Ranges

if TYPE_CHECKING:
    from shardstream.formats import Shard
    from shardstream.manifest import Manifest

_T = TypeVar("_T")

DAMAGE = (pa.ArrowException, OSError, EOFError, zlib.error, zstandard.ZstdError)  # what decoders raise on bad bytes

_NONE_AHEAD = Ranges()
_MAX_REMEMBERED = 64  # shards a process keeps the tables of: about 1 MB each
_checked: WeakKeyDictionary[Manifest, dict[int, str]] = WeakKeyDictionary()  # shard → version tag that is right
_remembered: WeakKeyDictionary[Manifest, dict[int, Any]] = WeakKeyDictionary()


def run_rows_of(num_rows: int, num_bytes: int, run_num_bytes: int) -> int:
    """Returns the rows per run of a block: equal runs of at most about ``run_num_bytes``.

    A block of up to one and a half runs stays one run, because two opened halves cost more than they save.

    Args:
        num_rows: Rows of the block.
        num_bytes: Their decoded size.
        run_num_bytes: Wanted decoded size of a run.

    Example:
        >>> run_rows_of(100, 1000, 1000), run_rows_of(100, 1500, 1000), run_rows_of(100, 2500, 1000)
        (100, 100, 34)
    """
    if 2 * num_bytes <= 3 * run_num_bytes:
        return max(1, num_rows)
    num_runs = -(-num_bytes // run_num_bytes)
    return max(1, -(-num_rows // num_runs))


def run_bounds(shard: Shard, block: int) -> list[tuple[int, int]]:
    """Returns the first row and the end row of each run of a block, counted in the block.

    Args:
        shard: The shard.
        block: Index of the block in the manifest.
    """
    rows = int(shard.manifest.block_rows[block])
    step = int(shard.manifest.block_run_rows[block])
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def check_unchanged(shard: Shard, digest_now: Callable[[], str]) -> None:
    """Compares a shard with what was indexed: once a process, on its first block.

    Size and version tag are compared first; where they differ, what indexing read is read again and its digest
    decides, so that a copied or moved file is still the same shard. (Of Parquet that is a footer; a remote tar is read
    whole, so after moving tars to an object store it pays to index them again.)

    Args:
        shard: The shard.
        digest_now: Reads the digest of the file as it is now.

    Raises:
        ShardChangedError: If it is another file.
        ReadError: If storage failed.
    """
    checked = _checked.setdefault(shard.manifest, {})
    if shard.index in checked:
        return
    now = storage.stat(shard.url, shard.storage_options)
    num_bytes, tag = int(shard.manifest.num_bytes[shard.index]), shard.manifest.version_tags[shard.index]
    if (now.num_bytes, now.version_tag) != (num_bytes, tag):
        _check_digest(shard, now.num_bytes, digest_now)
    checked[shard.index] = now.version_tag


def check_version(shard: Shard, tag: str | None, digest_now: Callable[[], str]) -> None:
    """Compares the version tag that came along with data, at each read; where none came, once a process.

    Args:
        shard: The shard.
        tag: What the store said, or None.
        digest_now: See ``check_unchanged``.

    Raises:
        ShardChangedError: If it is another file.
        ReadError: If storage failed.
    """
    checked = _checked.setdefault(shard.manifest, {})
    if tag is None:
        check_unchanged(shard, digest_now)
    elif tag not in (shard.manifest.version_tags[shard.index], checked.get(shard.index)):
        _check_digest(shard, storage.stat(shard.url, shard.storage_options).num_bytes, digest_now)
        checked[shard.index] = tag


def _check_digest(shard: Shard, num_bytes_now: int, digest_now: Callable[[], str]) -> None:
    manifest, index = shard.manifest, shard.index
    was = f"{manifest.num_bytes[index]} bytes, digest {manifest.digests[index]}"
    hint = "put the indexed file back, or index again with --update and start from the new manifest"
    changed = "the shard is not the one that was indexed"
    try:
        digest = digest_now()
    except ManifestError as error:
        found = f"{num_bytes_now} bytes that cannot be indexed ({error})"
        raise ShardChangedError(changed, url=shard.url, expected=was, found=found, hint=hint) from error
    if digest != manifest.digests[index]:
        found = f"{num_bytes_now} bytes, digest {digest}"
        raise ShardChangedError(changed, url=shard.url, expected=was, found=found, hint=hint)


class ShardRanges:
    """Byte ranges of one shard; what comes from storage is checked to be of the version that was indexed.

    Args:
        shard: The shard.
        digest_now: See ``check_unchanged``.
    """

    def __init__(self, shard: Shard, digest_now: Callable[[], str]) -> None:
        manifest, index = shard.manifest, shard.index
        self._ranges, self._url, self._options = shard.ranges or _NONE_AHEAD, shard.url, shard.storage_options
        self._version = f"{manifest.version_tags[index]} {manifest.num_bytes[index]} {manifest.digests[index]}"
        self._check = partial(check_version, shard, digest_now=digest_now)

    def range(self, start: int, end: int) -> ByteRange:
        """Returns a range of the shard."""
        return ByteRange(self._url, self._version, start, end, self._check, self._options)

    def read(self, start: int, end: int) -> storage.Data:
        """Reads a range; see ``Ranges.read``."""
        return self._ranges.read(self.range(start, end))

    def ahead(self, start: int, end: int) -> None:
        """Asks for a range ahead; see ``Ranges.ahead``."""
        self._ranges.ahead(self.range(start, end))

    def forget(self, start: int, end: int) -> None:
        """Takes that back."""
        self._ranges.forget(self.range(start, end))


@dataclass(frozen=True)
class StorageRanges:
    """Byte ranges of a file as storage has them now, none of them ahead: for indexing."""

    url: str
    storage_options: Mapping[str, Any] = field(repr=False)

    def read(self, start: int, end: int) -> bytes:
        """Reads a range."""
        return storage.read_range(self.url, start, end, self.storage_options)

    def ahead(self, start: int, end: int) -> None:
        """Does nothing."""

    def forget(self, start: int, end: int) -> None:
        """Does nothing."""


def remembered(shard: Shard, make: Callable[[], _T]) -> _T:
    """Returns what ``make`` made of this shard, kept for the shards used last, so that a block costs no table.

    Threads may make the same value twice; either will do.

    Args:
        shard: The shard.
        make: Makes the value; it must depend on the shard only.
    """
    tables = _remembered.setdefault(shard.manifest, {})
    value = tables.pop(shard.index, None)
    made: _T = make() if value is None else value
    tables[shard.index] = made  # at the end: the last one used
    while len(tables) > _MAX_REMEMBERED:
        tables.pop(next(iter(tables)), None)
    return made


@contextmanager
def naming_damage(url: str, block: int) -> Iterator[None]:
    """Turns what decoders raise inside into a ``DecodeError``, and what a file system raises into a ``ReadError``.

    Args:
        url: The shard.
        block: The block that is read.
    """
    try:
        yield
    except ShardStreamError:
        raise
    except FileNotFoundError as error:
        raise ReadError("the shard is gone", url=url, block=block, hint="restore it, or index again") from error
    except (*DAMAGE, ValueError, OverflowError, MemoryError) as error:  # values that Python or this machine cannot hold
        if isinstance(error, OSError) and error.errno is not None:  # decoders raise OSError, too, but without a number
            what = f"the shard cannot be read ({type(error).__name__}: {error})"
            raise ReadError(what, url=url, block=block, hint="look at the file system that it is on") from error
        what = f"the block cannot be decoded ({type(error).__name__}: {error})"
        hint = "compare the file with its source; `shardstream index` reads its layout again"
        raise DecodeError(what, url=url, block=block, hint=hint) from error
