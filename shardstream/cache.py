"""A disk cache of byte ranges, shared by all processes of a host that name the same folder.

There is no lock, no index and nothing to clean up: a range is one file that appears by a rename, and its name is a
digest of what it holds. Whoever finds a file that is cut or damaged reads the store again. Files are evicted by their
time of last use, and only files whose name and first bytes say that they were written here.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardstream.errors import PlanError, ShardStreamWarning

_MARK = b"shardstream range 1\n"
_CHECKSUM_NUM_BYTES = 16
_HEADER_NUM_BYTES = len(_MARK) + 8 + _CHECKSUM_NUM_BYTES
_NAME = re.compile(r"[0-9a-f]{32}\.range(\.[0-9a-f]{16}\.tmp)?")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_STALE_S = 600.0  # a temporary file of this age belongs to a process that is gone
_PAUSE_S = 60.0  # after a failed write: the disk is full, or not ours to write
_KEPT = 0.9  # evicting goes down to this part of the limit, so that it is not done for every file
_SCANS = 64  # the folder is looked through when this part of the limit was written


_warned_of: set[str] = set()  # folders; each pass of a process has a cache of its own


class _File(NamedTuple):
    used_at: float
    num_bytes: int
    path: Path
    is_stale: bool


class RangeCache:
    """Byte ranges in files of a folder, at most about ``num_bytes`` of them.

    Several processes may use a folder at once. The limit is of all files together; where n processes write, it may be
    exceeded by n / 64 for a moment. All failures of the disk are misses: a cache never stops a job.

    Args:
        folder: Where the files are; it is made if need be.
        num_bytes: Size at which the files not used for the longest time are deleted.

    Example:
        >>> import tempfile
        >>> cache = RangeCache(tempfile.mkdtemp(), 1 << 20)
        >>> key = RangeCache.key("s3://bucket/a.parquet", "etag", "0", "5")
        >>> cache.get(key), cache.put(key, b"bytes"), cache.get(key)
        (None, None, b'bytes')

    Raises:
        PlanError: If the limit is not positive.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        if num_bytes <= 0:
            raise PlanError("the cache's size must be positive", found=num_bytes)
        self._folder, self._num_bytes = Path(folder), num_bytes
        self._num_bytes_unseen = num_bytes  # written since the folder was looked through: it never was
        self._paused_until = 0.0

    @staticmethod
    def key(*parts: str) -> str:
        """Returns the name of a range: 32 hex digits, the same for equal parts only."""
        hasher = hashlib.blake2b(digest_size=16, person=b"range1")
        for part in parts:
            encoded = part.encode("utf-8", "surrogateescape")
            hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        return hasher.hexdigest()

    def get(self, key: str) -> bytes | None:
        """Returns the bytes of a range; None if they are not there, or not whole."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                header, data = file.read(_HEADER_NUM_BYTES), _read_all(file.fileno())
        except OSError:
            return None
        if header != _header(data):
            return None
        with suppress(OSError):  # evicted just now, or not ours to touch: only its age is wrong then
            os.utime(path)
        return data

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Keeps a range. Whatever fails, fails silently but for one warning."""
        if time.monotonic() < self._paused_until or len(data) > self._num_bytes:
            return
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            self._make_room(len(data) + _HEADER_NUM_BYTES)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write(temporary, _header(data), data)
                temporary.replace(path)
            except FileNotFoundError:
                return  # somebody emptied the cache just now
            except BaseException:
                _delete(temporary)
                raise
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE_S
            if str(self._folder) not in _warned_of:
                _warned_of.add(str(self._folder))
                warnings.warn(
                    f"the cache in {self._folder} cannot be written ({error}); data is read from the store instead",
                    ShardStreamWarning,
                    stacklevel=2,
                )

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.range"

    def _make_room(self, num_bytes: int) -> None:
        """Looks through the folder now and then, and deletes what was not used for the longest time."""
        self._num_bytes_unseen += num_bytes
        if self._num_bytes_unseen * _SCANS < self._num_bytes:
            return
        self._num_bytes_unseen = num_bytes
        files = sorted(self._files())
        held = sum(file.num_bytes for file in files) + num_bytes
        most = self._num_bytes if held <= self._num_bytes else int(self._num_bytes * _KEPT)
        for file in sorted(files, key=lambda file: not file.is_stale):
            if held <= most and not file.is_stale:
                break
            if _is_ours(file.path):
                _delete(file.path)
                held -= file.num_bytes

    def _files(self) -> Iterator[_File]:
        """What was written here: files of such names in folders of such names, links not followed."""
        now = time.time()
        for folder in _entries(str(self._folder)):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(folder.path):
                found = _NAME.fullmatch(entry.name)
                if found is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                    if not entry.is_file(follow_symlinks=False):
                        continue
                except OSError:
                    continue  # gone
                is_temporary = found[1] is not None
                if not is_temporary or now - status.st_mtime > _STALE_S:
                    yield _File(status.st_mtime, status.st_size, Path(entry.path), is_temporary)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    """Whether a file begins as we write them; one that has no bytes yet, or was cut in our mark, does so too."""
    try:
        with path.open("rb", buffering=0) as file:
            return _MARK.startswith(file.read(len(_MARK)))
    except OSError:
        return False


def _header(data: bytes | memoryview) -> bytes:
    checksum = hashlib.blake2b(data, digest_size=_CHECKSUM_NUM_BYTES).digest()
    return _MARK + len(data).to_bytes(8, "little") + checksum


def _read_all(number: int) -> bytes:
    left = os.fstat(number).st_size - _HEADER_NUM_BYTES
    parts = []
    while left > 0 and (part := os.read(number, left)):  # one call reads at most 2 GiB
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(path: Path, *parts: bytes | memoryview) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.write(number, view)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                view = view[written:]
    finally:
        os.close(number)


def _delete(path: Path) -> None:
    with suppress(OSError):  # another process was faster
        path.unlink()
