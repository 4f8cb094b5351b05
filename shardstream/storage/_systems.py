"""File systems, one per process, and the way to ask them: with retries, a deadline and errors that name the file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import fsspec
from fsspec.core import split_protocol, url_to_fs

from shardstream.errors import ReadError, ShardStreamError, shown_url
from shardstream.storage._locations import is_chain

T = TypeVar("T")
Options = Mapping[str, Any]

RETRY_TIMEOUT_S = 60.0  # how long transient failures are retried, unless storage_options["retry_timeout_s"] says else

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_TRANSIENT_WORDS = ("Connection", "Timeout", "Payload", "Disconnected", "IncompleteRead")
_RETRIED_STATUSES = frozenset({408, 425, 429})

_MOST_CONNECTIONS = {"config_kwargs": {"max_pool_connections": 64}}  # botocore's 10 would be the limit of all reads
_DEFAULTS: dict[str, dict[str, Any]] = {"s3": _MOST_CONNECTIONS, "s3a": _MOST_CONNECTIONS}

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
        options = {**_DEFAULTS.get(protocol, {}), **kind._get_kwargs_from_urls(url), **options}  # noqa: SLF001 - how fsspec itself finds host and user
        key = (os.getpid(), protocol, repr(sorted(options.items())))
        if key not in _file_systems:
            _file_systems.setdefault(key, fsspec.filesystem(protocol, skip_instance_cache=True, **options))
        return _file_systems[key], str(kind._strip_protocol(url))  # noqa: SLF001 - url_to_fs does the same, at 20 times the cost
    except (ImportError, ValueError, TypeError) as error:
        raise ReadError("cannot open this kind of location", url=url, found=shown_url(str(error))) from error


class ShortBodyError(OSError):
    """Fewer bytes came than were asked for."""


def retried(
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

    with naming(url, verb):
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
def naming(url: str, verb: str = "read") -> Iterator[None]:
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
