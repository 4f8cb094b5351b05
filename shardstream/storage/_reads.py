"""Reads: sizes and version tags, byte ranges, and files read front to back. Local paths go by ``os``."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from stat import S_ISDIR
from threading import Event
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from shardstream.errors import ReadError
from shardstream.storage import _obstore
from shardstream.storage._locations import local_path
from shardstream.storage._systems import (
    OF_ONE_REQUEST,
    Data,
    Options,
    RangeIgnoredError,
    ShortBodyError,
    WrongRangeError,
    naming,
    retried,
    status_of,
)

if TYPE_CHECKING:
    import fsspec

STREAM_NUM_BYTES = 8 << 20  # one request of a file that is read front to back

_TAG_KEYS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "checksum", "blob_id", "CRC")
_TIME_KEYS = ("mtime", "LastModified", "Last-Modified", "last_modified", "modified", "created")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_BEYOND_THE_END = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE


@dataclass(frozen=True)
class FileInfo:
    """What is known of a file without reading it.

    Attributes:
        num_bytes: Its size.
        version_tag: Differs when the file was changed: the etag, or size and modification time.
    """

    num_bytes: int
    version_tag: str


def stat(url: str, storage_options: Options | None = None) -> FileInfo:
    """Looks at a file without reading it (one request).

    Raises:
        ReadError: If it is missing, not a file, or cannot be reached.
    """
    path = local_path(url)
    if path is not None:
        with naming(url):
            status = Path(path).stat()
            if S_ISDIR(status.st_mode):
                raise IsADirectoryError(path)
        return FileInfo(status.st_size, f"{status.st_size}-{status.st_mtime_ns}")

    def ask(fs: fsspec.AbstractFileSystem, inner: str, limits: dict[str, Any]) -> dict[str, Any]:
        fs.invalidate_cache(inner)  # a listing of an hour ago knows nothing of what was written since
        return cast("dict[str, Any]", fs.info(inner, **limits))

    info = retried(url, storage_options, ask, attempt_share=OF_ONE_REQUEST)
    if info.get("type") == "directory":
        raise ReadError("this is a directory, not a file", url=url)
    if info.get("size") is None:
        raise ReadError("the server does not tell the size of this file", url=url, hint="serve it with Content-Length")
    return FileInfo(int(info["size"]), _version_tag(info))


def read_range(url: str, start: int, end: int, storage_options: Options | None = None) -> bytes:
    """Reads the bytes ``[start, end)`` of a file with one request.

    Raises:
        ReadError: If the file is missing, shorter than that, or cannot be reached within the deadline.
    """
    if end <= start:
        return b""
    is_local = local_path(url) is not None
    data = read_local(url, start, end) if is_local else read_versioned(url, start, end, storage_options)[0]
    return bytes(whole(data, url, start, end))


def read_versioned(
    url: str, start: int, end: int, storage_options: Options | None = None, *, given_up: Event | None = None
) -> tuple[Data, str | None]:
    """Reads a range as ``read_range`` does, and what the same answer tells of the file's version.

    Args:
        url: The file.
        start: First byte.
        end: End.
        storage_options: Given to fsspec.
        given_up: Set by whoever does not want it any more: then it is not tried again.

    Returns:
        The bytes, and the version tag as ``stat`` would return it; None where the store does not send one along. Where
        it does, they may be fewer: the file may be another one, and that is for the caller to say (see ``whole``).

    Raises:
        ReadError: If the file is missing or cannot be reached within the deadline, or is shorter and has no tag.
    """
    is_first = True

    def get(fs: fsspec.AbstractFileSystem, inner: str, limits: dict[str, Any]) -> tuple[Data, str | None]:
        nonlocal is_first
        kinds = {kind.__name__ for kind in type(fs).__mro__}  # by name: their packages need not be installed
        if is_first and "S3FileSystem" in kinds:
            is_first, began = False, time.monotonic()
            found = _obstore.get_range(fs, inner, start, end, limits["timeout"])
            if found is not None:
                return found
            limits = _left(limits, began)
        known = next((ask for kind, ask in _VERSIONED.items() if kind in kinds), None)
        if known is not None:
            from fsspec.asyn import sync

            return cast("tuple[bytes, str | None]", sync(fs.loop, known, fs, inner, start, end, **limits))
        data = fs.cat_file(inner, start=start, end=end, **limits)
        if len(data) < end - start:  # a body that broke off looks like this, so it is asked for again
            raise ShortBodyError(f"{len(data)} of {end - start} bytes came")
        return data, None

    if end <= start or local_path(url) is not None:
        return read_range(url, start, end, storage_options), None
    return retried(url, storage_options, get, attempt_share=OF_ONE_REQUEST, given_up=given_up)


def _left(limits: Mapping[str, Any], began: float) -> dict[str, Any]:
    """What is left of an attempt's time."""
    left_s = limits["timeout"] - (time.monotonic() - began)
    if left_s <= 0:
        raise TimeoutError(f"no whole answer within {limits['timeout']:.3g} s")
    return {**limits, "timeout": left_s}


async def _get_from_s3(fs: fsspec.AbstractFileSystem, path: str, start: int, end: int) -> tuple[bytes, str | None]:
    """What ``fs._cat_file`` does, which neither looks at which bytes came nor returns the etag."""
    bucket, key, version = fs.split_path(path)
    more = {"VersionId": version} if version else {}
    try:
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **more)  # noqa: SLF001
    except OSError as error:
        if status_of(error) == _BEYOND_THE_END:
            return b"", ""
        raise
    body = answer["Body"]
    try:
        num_bytes, _ = _expected(answer.get("ContentRange"), answer["ContentLength"], start, end)
        data = await body.read()
    finally:
        body.close()
    return _complete(data, num_bytes), answer.get("ETag", "").strip('"') or None


async def _get_from_http(fs: fsspec.AbstractFileSystem, url: str, start: int, end: int) -> tuple[bytes, str | None]:
    """What ``fs._cat_file`` does, which neither looks at which bytes came nor returns the etag."""
    options = dict(fs.kwargs)
    asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}  # of what is stored
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), headers={**options.pop("headers", {}), **asked}, **options) as answer:
        headers = answer.headers
        if answer.status == _BEYOND_THE_END:
            return b"", headers.get("ETag", "").strip('"')
        fs._raise_not_found_for_status(answer, url)  # noqa: SLF001
        content_range = headers.get("Content-Range") if answer.status == HTTPStatus.PARTIAL_CONTENT else None
        num_bytes, file_num_bytes = _expected(content_range, answer.content_length, start, end)
        data = _complete(await answer.read(), num_bytes)
        named = {name: headers.get(name) for name in ("ETag", "Last-Modified")}  # in any case, unlike in a plain dict
        is_known = bool(named["ETag"]) or file_num_bytes is not None
        return data, _version_tag({**named, "size": file_num_bytes}) if is_known else None


def _expected(content_range: str | None, content_length: int | None, start: int, end: int) -> tuple[int, int | None]:
    """How many bytes an answer must hold, and the size of the file, before its body is read.

    Raises:
        RangeIgnoredError: If it is the whole file.
        WrongRangeError: If it holds other bytes than ``[start, end)`` of the file.
    """
    if content_range is None:  # the whole file, which may be what was asked for
        if start or content_length is None or content_length > end:
            raise RangeIgnoredError(f"all of the file came instead of bytes {start} to {end}")
        return content_length, content_length
    found = _CONTENT_RANGE.fullmatch(content_range.strip())
    if found is None:
        raise WrongRangeError(f"an answer to bytes {start} to {end} says of itself: {content_range!r}")
    size = None if found[3] == "*" else int(found[3])
    wanted = (start, end if size is None else min(end, size))
    if (int(found[1]), int(found[2]) + 1) != wanted:
        raise WrongRangeError(f"bytes {found[1]} to {int(found[2]) + 1} came instead of {wanted[0]} to {wanted[1]}")
    return wanted[1] - wanted[0], size


def _complete(data: bytes, num_bytes: int) -> bytes:
    if len(data) != num_bytes:  # a body that broke off is asked for again
        raise ShortBodyError(f"{len(data)} of {num_bytes} bytes came")
    return data


_VERSIONED = {"S3FileSystem": _get_from_s3, "HTTPFileSystem": _get_from_http}


def read_tail(
    url: str, num_bytes: int, storage_options: Options | None = None, *, file_num_bytes: int | None = None
) -> bytes:
    """Reads the last ``num_bytes`` of a file, or all of a shorter one.

    Args:
        url: The file.
        num_bytes: How many at most.
        storage_options: Given to fsspec.
        file_num_bytes: Size of the file if it is known; saves a request.

    Raises:
        ReadError: If the file is missing or cannot be reached.
    """
    size = stat(url, storage_options).num_bytes if file_num_bytes is None else file_num_bytes
    return read_range(url, max(0, size - num_bytes), size, storage_options)


def open_source(
    url: str,
    storage_options: Options | None = None,
    *,
    num_bytes: int | None = None,
    ahead_num_bytes: int = STREAM_NUM_BYTES,
) -> BinaryIO:
    """Opens a file for reading; seekable. Of a remote file, read front to back, the next request is always under way.

    Every request is retried by itself, so a connection that breaks in the middle costs one request, not the file.

    Args:
        url: The file.
        storage_options: Given to fsspec.
        num_bytes: Size of a remote file if it is known; saves a request.
        ahead_num_bytes: Size of a request; 0 asks for exactly the bytes of each ``read`` (to read here and there).

    Returns:
        A binary file. Close it: that ends its thread.

    Raises:
        ReadError: If the file is missing or cannot be reached; from reads, too.
    """
    path = local_path(url)
    if path is not None:
        with naming(url):
            return Path(path).open("rb")
    size = stat(url, storage_options).num_bytes if num_bytes is None else num_bytes
    ranges = _RangeFile(url, storage_options, size, ahead_num_bytes)
    return cast("BinaryIO", io.BufferedReader(ranges, 1 << 16) if ahead_num_bytes else ranges)


class _RangeFile(io.RawIOBase):
    """A remote file as a file object: range requests, and in a row of adjacent ones the next is fetched meanwhile."""

    def __init__(self, url: str, storage_options: Options | None, num_bytes: int, ahead_num_bytes: int) -> None:
        super().__init__()
        self._url, self._options, self._num_bytes = url, storage_options, num_bytes
        self._ahead_num_bytes = ahead_num_bytes
        self._position = 0
        self._held, self._held_start = b"", 0
        self._next: tuple[int, Future[bytes]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        wanted = min(len(view), self._num_bytes - self._position)
        if wanted <= 0:
            return 0
        if not self._ahead_num_bytes:
            data = read_range(self._url, self._position, self._position + wanted, self._options)
        else:
            if not self._held_start <= self._position < self._held_start + len(self._held):
                self._hold(self._position)
            start = self._position - self._held_start
            data = self._held[start : start + wanted]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _hold(self, start: int) -> None:
        in_a_row = start == self._held_start + len(self._held)
        if self._next is not None and self._next[0] == start:
            self._held = self._next[1].result()
        else:
            self._held = self._fetch(start)
        self._held_start, self._next = start, None
        following = start + len(self._held)
        if in_a_row and following < self._num_bytes:
            self._thread = self._thread or ThreadPoolExecutor(1, "shardstream-ahead")
            self._next = (following, self._thread.submit(self._fetch, following))

    def _fetch(self, start: int) -> bytes:
        return read_range(self._url, start, min(start + self._ahead_num_bytes, self._num_bytes), self._options)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._held, self._next = b"", None
        super().close()


def read_local(url: str, start: int, end: int) -> bytes:
    """Returns the bytes ``[start, end)`` of a local file, fewer if it ends before.

    Raises:
        ReadError: If it is missing or cannot be read.
    """
    with naming(url):
        file = os.open(cast("str", local_path(url)), os.O_RDONLY)
        try:
            return read_at(file, start, end - start)
        finally:
            os.close(file)


def read_at(file: int, start: int, num_bytes: int) -> bytes:
    """Returns bytes of an open file, fewer if it ends before.

    Args:
        file: Its descriptor.
        start: First byte.
        num_bytes: How many.

    Raises:
        OSError: If it cannot be read.
    """
    data = os.pread(file, num_bytes, start)
    while len(data) < num_bytes and (more := os.pread(file, num_bytes - len(data), start + len(data))):
        data += more  # one call reads at most 2 GiB
    return data


def whole(data: Data, url: str, start: int, end: int) -> Data:
    """Returns the bytes of a range if they are as many as they should be.

    Raises:
        ReadError: If they are not.
    """
    if len(data) == end - start:
        return data
    hint = (
        "the file is cut" if len(data) < end - start else "the server ignores byte ranges; use one that supports them"
    )
    raise ReadError(f"bytes {start} to {end} cannot be read", url=url, expected=end - start, found=len(data), hint=hint)


def tells_versions(version_tag: str, num_bytes: int) -> bool:
    """Whether a version tag says more of a file than its size, so that it tells one of the same size.

    Example:
        >>> tells_versions(_version_tag({"size": 7}), 7), tells_versions(_version_tag({"size": 7, "mtime": 1}), 7)
        (False, True)
    """
    return version_tag != _version_tag({"size": num_bytes})


def _version_tag(info: Mapping[str, Any]) -> str:
    for key in _TAG_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    stamp = next((info[key] for key in _TIME_KEYS if info.get(key)), "")
    return f"{info['size']}-{stamp.isoformat() if hasattr(stamp, 'isoformat') else stamp}"
