"""File systems, one per process, and the way to ask them: with retries, a deadline and errors that name the file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from shardstream.errors import ReadError, ShardStreamError, shown_url
from shardstream.storage._locations import is_chain

if TYPE_CHECKING:  # fsspec takes 80 ms to import, which local files need not wait for
    import fsspec
    from tenacity import RetryCallState

T = TypeVar("T")
Options = Mapping[str, Any]
Data: TypeAlias = bytes | memoryview

RETRY_TIMEOUT_S = 60.0  # how long transient failures are retried, unless storage_options["retry_timeout_s"] says else
OF_ONE_REQUEST = 0.5  # of that, for one attempt: a request whose bytes drip is dropped and made again
_LEAST_ATTEMPT_S = 1.0
_CONNECT_TIMEOUT_S, _STALL_TIMEOUT_S = 10.0, 20.0  # to get a connection, and from one piece of an answer to the next
_MOST_IGNORED_RANGES = 4  # one of many machines behind an address may do so; a server that always does is named at once

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_TRANSIENT_WORDS = ("Connection", "Timeout", "Payload", "Disconnected", "IncompleteRead")
_RETRIED_STATUSES = frozenset({408, 425, 429})

_CREDENTIALS_STATUSES = frozenset({401, 403})
S3_CONFIG = {
    "max_pool_connections": 64,  # botocore's 10 would be the limit of all reads
    "connect_timeout": _CONNECT_TIMEOUT_S,
    "read_timeout": _STALL_TIMEOUT_S,
    "retries": {"total_max_attempts": 1},  # ours have one deadline, heed Retry-After, and keep the last error
}

_EXTRAS = {  # protocol → extra of ours that installs its package
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure"),
    **dict.fromkeys(("http", "https"), "http"),
    "hf": "hf",
}

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
    import fsspec
    from fsspec.core import split_protocol, url_to_fs

    options = {key: value for key, value in (storage_options or {}).items() if key != "retry_timeout_s"}
    try:
        if is_chain(url):
            return cast("tuple[fsspec.AbstractFileSystem, str]", url_to_fs(url, **options))
        protocol = split_protocol(url)[0] or "file"
        kind = fsspec.get_filesystem_class(protocol)
        options = {**kind._get_kwargs_from_urls(url), **options}  # noqa: SLF001 - how fsspec itself finds host and user
        key = (os.getpid(), protocol, repr(sorted(options.items())))
        if key not in _file_systems:
            made = fsspec.filesystem(protocol, skip_instance_cache=True, **_with_defaults(protocol, options))
            if protocol in ("s3", "s3a"):
                made.retries = 1  # s3fs's own, inside ours
            _file_systems.setdefault(key, made)
        return _file_systems[key], str(kind._strip_protocol(url))  # noqa: SLF001 - url_to_fs does the same, at 20 times the cost
    except (ImportError, ValueError, TypeError) as error:
        hint = _missing_package(url) if isinstance(error, ImportError) else None
        found = shown_url(str(error))
        raise ReadError("cannot open this kind of location", url=url, found=found, hint=hint) from error


def _missing_package(url: str) -> str | None:
    """How to install what a location needs."""
    protocols = (link.partition("://")[0] for link in url.split("::"))
    extra = next((_EXTRAS[protocol] for protocol in protocols if protocol in _EXTRAS), None)
    return None if extra is None else f"pip install 'shardstream[{extra}]'"


def _with_defaults(protocol: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with limits of our own for what they do not say."""
    if protocol in ("s3", "s3a"):
        config = {**S3_CONFIG, **(options.get("config_kwargs") or {})}
        return {**options, "config_kwargs": deepcopy(config)}  # botocore writes into it
    if protocol in ("http", "https"):
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_STALL_TIMEOUT_S)
        return {**options, "client_kwargs": {"timeout": timeout, **(options.get("client_kwargs") or {})}}
    return options


class ShortBodyError(OSError):
    """Fewer bytes came than were asked for."""


class WrongRangeError(OSError):
    """Other bytes came than were asked for, or an answer that does not say which."""


class RangeIgnoredError(OSError):
    """The whole file was sent where a range was asked for."""


def retried(
    url: str,
    storage_options: Options | None,
    act: Callable[[fsspec.AbstractFileSystem, str, dict[str, Any]], T],
    verb: str = "read",
    *,
    attempt_share: float = 1.0,
    given_up: Event | None = None,
) -> T:
    """Returns ``act(file system, path, limits)``, tried again while it fails for a reason that may pass.

    Args:
        url: The file.
        storage_options: Given to fsspec; ``retry_timeout_s`` is the deadline.
        act: What to do.
        verb: What that is called in an error.
        attempt_share: The part of the deadline that one attempt may take: less than 1 where it is one request.
        given_up: Set by whoever does not want it any more: then the attempt under way is the last one.
    """
    from fsspec.exceptions import FSTimeoutError
    from tenacity import Retrying, retry_if_exception, sleep_using_event, stop_before_delay

    timeout_s = float((storage_options or {}).get("retry_timeout_s", RETRY_TIMEOUT_S))
    deadline = time.monotonic() + timeout_s
    ended = given_up or Event()

    def once() -> T:
        fs, inner = file_system(url, storage_options)
        # An async file system waits for ever unless told: fsspec takes the limit of one call as a keyword.
        left_s = min(deadline - time.monotonic(), timeout_s * attempt_share)
        limit_s = max(_LEAST_ATTEMPT_S, left_s)
        try:
            return act(fs, inner, {"timeout": limit_s} if getattr(fs, "async_impl", False) else {})
        except FSTimeoutError as error:  # which says nothing
            raise TimeoutError(f"no whole answer within {limit_s:.3g} s") from error

    with naming(url, verb):
        return Retrying(
            stop=lambda state: ended.is_set() or stop_before_delay(timeout_s)(state) or _ignores_ranges(state),
            sleep=sleep_using_event(ended),
            wait=_pause_s,
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )(once)


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that an error, or its cause, tells; None if none does."""
    for status in (getattr(error, "status", None), _answer_of(error).get("HTTPStatusCode")):
        if isinstance(status, int):
            return status
    return None if error.__cause__ is None else status_of(error.__cause__)


def _answer_of(error: BaseException) -> Mapping[str, Any]:
    """What botocore knows of an answer."""
    response = getattr(error, "response", None)
    return dict(response.get("ResponseMetadata") or {}) if isinstance(response, dict) else {}


def _retry_after_s(error: BaseException | None) -> float:
    """How long the server asks to be left alone: its Retry-After in seconds."""
    while error is not None:
        headers = getattr(error, "headers", None) or _answer_of(error).get("HTTPHeaders") or {}
        text = str(headers.get("Retry-After") or headers.get("retry-after") or "")
        if text.strip().isdigit():
            return float(text)
        error = error.__cause__
    return 0.0


def _pause_s(state: RetryCallState) -> float:
    """How long to wait before the next attempt: random, longer each time, and what the server asks for on top."""
    from tenacity import wait_random_exponential

    error = state.outcome.exception() if state.outcome is not None else None
    return wait_random_exponential(multiplier=0.1, max=5.0)(state) + _retry_after_s(error)


def _ignores_ranges(state: RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome is not None else None
    return isinstance(error, RangeIgnoredError) and state.attempt_number >= _MOST_IGNORED_RANGES


def _is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment. Goes by names where the packages may not be installed."""
    if isinstance(error, ShardStreamError):
        return False
    if isinstance(error, TimeoutError):  # S3's RequestTimeout has the status 400
        return True
    status = status_of(error)  # fsspec's HTTP says "not found" of any failure, and keeps the reason as its cause
    if status is not None:
        return status in _RETRIED_STATUSES or status >= 500  # noqa: PLR2004 - HTTP: the server's fault
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _is_transient(error.__cause__)
    if isinstance(error, _PERMANENT):
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
        raise ReadError(f"cannot {verb} the file", url=url, found=found, hint=_hint(error)) from error


def _hint(error: Exception) -> str | None:
    if isinstance(error, RangeIgnoredError):
        return "the server ignores byte ranges; use one that supports them"
    if isinstance(error, FileNotFoundError) and status_of(error) in (None, 404):
        return "check the path"
    if isinstance(error, PermissionError) or status_of(error) in _CREDENTIALS_STATUSES:
        return "check the credentials (have they expired?) or the file's mode"
    return None
