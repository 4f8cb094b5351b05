"""Storage: all that touches a file system. fsspec opens everything; plain local paths take the short way by ``os``.

Everything is opened lazily and belongs to the process that opened it, so that any start method of worker processes
works: file systems are looked up by process id and never travel.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.core import split_protocol, url_to_fs

from shardstream.errors import ReadError, ShardStreamError, shown_url

T = TypeVar("T")
Options = Mapping[str, Any]

RETRY_TIMEOUT_S = 60.0  # how long transient failures are retried, unless storage_options["retry_timeout_s"] says else
STREAM_NUM_BYTES = 8 << 20  # one request of a file that is read front to back

CACHE_PROTOCOLS = frozenset({"blockcache", "cached", "dir", "filecache", "simplecache"})
CHAIN_PROTOCOLS = CACHE_PROTOCOLS | {"libarchive", "reference", "tar", "zip"}

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_TRANSIENT_WORDS = ("Connection", "Timeout", "Payload", "Disconnected", "IncompleteRead")
_RETRIED_STATUSES = frozenset({408, 425, 429})
_TAG_KEYS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "checksum")
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "created")


@dataclass(frozen=True)
class FileInfo:
    """What is known of a file without reading it.

    Attributes:
        num_bytes: Its size.
        version_tag: Differs when the file was changed: the etag, or size and modification time.
    """

    num_bytes: int
    version_tag: str


# ----------------------------------------------------------------------------------------------------------- locations


def local_path(url: str) -> str | None:
    """Returns the path of a local file (``/data/a.tar``, ``file:///data/a.tar``), or None for any other URL.

    Example:
        >>> local_path("file:///data/a.tar"), local_path("b.tar"), local_path("s3://bucket/b.tar")
        ('/data/a.tar', 'b.tar', None)
    """
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return url[len(scheme) :]
    if "://" in url or url.split("::", 1)[0] in CACHE_PROTOCOLS:
        return None
    return url


def is_chain(url: str) -> bool:
    """Whether the URL is a chain of fsspec file systems (``simplecache::s3://…``, ``zip://…::https://…``).

    Example:
        >>> is_chain("simplecache::s3://bucket/a.tar"), is_chain("a.tar::b.tar"), is_chain("s3://b/1.tar::s3://b/2.tar")
        (True, False, False)
    """
    first, separator, _ = url.partition("::")
    protocol, path, _ = first.partition("://")
    return bool(separator) and protocol in (CHAIN_PROTOCOLS if path else CACHE_PROTOCOLS)


_file_systems: dict[tuple[int, str, str], fsspec.AbstractFileSystem] = {}


def file_system(url: str, storage_options: Options | None = None) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of a URL and the path in it; made once per process and shared by its threads.

    Never one from before a fork: its connections and event loop are the parent's.

    Args:
        url: Any fsspec URL.
        storage_options: Given to fsspec; ``retry_timeout_s`` is ours and is left out.

    Raises:
        ReadError: If there is no such protocol, or its package is not installed.
    """
    options = {key: value for key, value in (storage_options or {}).items() if key != "retry_timeout_s"}
    try:
        if is_chain(url):
            return cast("tuple[fsspec.AbstractFileSystem, str]", url_to_fs(url, **options))
        protocol = split_protocol(url)[0] or "file"
        kind = fsspec.get_filesystem_class(protocol)
        options = {**kind._get_kwargs_from_urls(url), **options}  # noqa: SLF001 - how fsspec itself finds host and user
        key = (os.getpid(), protocol, repr(sorted(options.items())))
        if key not in _file_systems:
            _file_systems.setdefault(key, fsspec.filesystem(protocol, skip_instance_cache=True, **options))
        return _file_systems[key], str(kind._strip_protocol(url))  # noqa: SLF001 - url_to_fs does the same, at 20 times the cost
    except (ImportError, ValueError, TypeError) as error:
        raise ReadError("cannot open this kind of location", url=url, found=shown_url(str(error))) from error


# --------------------------------------------------------------------------------------------------------------- reads


def stat(url: str, storage_options: Options | None = None) -> FileInfo:
    """Looks at a file without reading it (one request).

    Raises:
        ReadError: If it is missing, not a file, or cannot be reached.
    """
    path = local_path(url)
    if path is not None:
        with _naming(url):
            status = Path(path).stat()
            if S_ISDIR(status.st_mode):
                raise IsADirectoryError(path)
        return FileInfo(status.st_size, f"{status.st_size}-{status.st_mtime_ns}")

    def ask(fs: fsspec.AbstractFileSystem, inner: str, limits: dict[str, Any]) -> dict[str, Any]:
        fs.invalidate_cache(inner)  # a listing of an hour ago knows nothing of what was written since
        return cast("dict[str, Any]", fs.info(inner, **limits))

    info = _retried(url, storage_options, ask)
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
    path = local_path(url)
    if path is not None:
        with _naming(url):
            data = _read_local(path, start, end - start)
        return _checked(data, url, start, end)

    def get(fs: fsspec.AbstractFileSystem, inner: str, limits: dict[str, Any]) -> bytes:
        data = fs.cat_file(inner, start=start, end=end, **limits)
        if len(data) < end - start:  # a body that broke off looks like this, so it is asked for again
            raise _ShortBodyError(f"{len(data)} of {end - start} bytes came")
        return cast("bytes", data)

    return _checked(_retried(url, storage_options, get), url, start, end)


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
        with _naming(url):
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


def _read_local(path: str, start: int, num_bytes: int) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(file, num_bytes, start)
        while len(data) < num_bytes and (more := os.pread(file, num_bytes - len(data), start + len(data))):
            data += more  # one call reads at most 2 GiB
        return data
    finally:
        os.close(file)


def _checked(data: bytes, url: str, start: int, end: int) -> bytes:
    if len(data) == end - start:
        return data
    hint = (
        "the file is cut" if len(data) < end - start else "the server ignores byte ranges; use one that supports them"
    )
    raise ReadError(f"bytes {start} to {end} cannot be read", url=url, expected=end - start, found=len(data), hint=hint)


# -------------------------------------------------------------------------------------------------------------- writes


@contextlib.contextmanager
def write_atomic(url: str, storage_options: Options | None = None) -> Iterator[BinaryIO]:
    """Gives a file to write (and read back); what was written appears under ``url`` when the block ends, or not at all.

    Locally it is written beside its place under a temporary name, synced and renamed. For an object store it is kept
    in a local temporary file and put with one call.

    Raises:
        ReadError: If it cannot be written.
    """
    path = local_path(url)
    if path is None:
        with tempfile.NamedTemporaryFile(prefix="shardstream-") as file:
            yield cast("BinaryIO", file)
            file.flush()
            _retried(url, storage_options, lambda fs, inner, limits: fs.put_file(file.name, inner, **limits), "write")
        return
    temporary = Path(path).absolute().with_name(f".shardstream-{secrets.token_hex(8)}.tmp")
    with _naming(url, "write"):  # the mode is that of any new file, as the user's umask has it
        number = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(number, "w+b") as file:
            yield cast("BinaryIO", file)
            file.flush()
            os.fsync(number)
        with _naming(url, "write"):
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(temporary.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


# ------------------------------------------------------------------------------------------------------------- retries


class _ShortBodyError(OSError):
    """Fewer bytes came than were asked for."""


def _retried(
    url: str,
    storage_options: Options | None,
    act: Callable[[fsspec.AbstractFileSystem, str, dict[str, Any]], T],
    verb: str = "read",
) -> T:
    """Returns ``act(file system, path, limits)``, tried again while it fails for a reason that may pass."""
    from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

    timeout_s = float((storage_options or {}).get("retry_timeout_s", RETRY_TIMEOUT_S))
    deadline = time.monotonic() + timeout_s

    def once() -> T:
        fs, inner = file_system(url, storage_options)
        # An async file system waits for ever unless told: fsspec takes the limit of one call as a keyword.
        limits = {"timeout": max(1.0, deadline - time.monotonic())} if getattr(fs, "async_impl", False) else {}
        return act(fs, inner, limits)

    with _naming(url, verb):
        return Retrying(
            stop=stop_after_delay(timeout_s),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )(once)


def _is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment. Goes by names where the packages may not be installed."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _is_transient(
            error.__cause__
        )  # fsspec's HTTP says "not found" of any failure, and keeps the reason here
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status in _RETRIED_STATUSES or status >= 500  # noqa: PLR2004 - HTTP: the server's fault
    if isinstance(error, (ShardStreamError, *_PERMANENT)):
        return False
    names = [kind.__name__ for kind in type(error).__mro__]
    return isinstance(error, OSError) or any(word in name for name in names for word in _TRANSIENT_WORDS)


@contextlib.contextmanager
def _naming(url: str, verb: str = "read") -> Iterator[None]:
    """Turns any failure inside into a ReadError that names the file and the last reason."""
    try:
        yield
    except ShardStreamError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {shown_url(str(error))}"
        hints = {FileNotFoundError: "check the path", PermissionError: "check the credentials or the file's mode"}
        hint = next((text for kind, text in hints.items() if isinstance(error, kind)), None)
        raise ReadError(f"cannot {verb} the file", url=url, found=found, hint=hint) from error


def _version_tag(info: Mapping[str, Any]) -> str:
    for key in _TAG_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    stamp = next((info[key] for key in _TIME_KEYS if info.get(key)), "")
    return f"{info['size']}-{stamp.isoformat() if hasattr(stamp, 'isoformat') else stamp}"
