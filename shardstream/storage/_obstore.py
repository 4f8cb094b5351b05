"""Ranges of S3 objects through obstore, where it is installed: half of s3fs's processor time, mostly without its lock.

s3fs stays the one that knows: where a bucket is and how requests are signed is read off a request that it makes (and
does not send), and whatever fails here it asks for again, to say why. So this may give up at any doubt (docs/adr/0008).
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies

from shardstream.storage._systems import S3_CONFIG

if TYPE_CHECKING:
    import fsspec
    from obstore.store import ClientConfig, S3Config, S3Credential, S3Store

_AGAIN_S = 60.0  # between looks, and tries of what failed; credentials are renewed minutes before they expire
_MOST_FAILURES = 4  # in a row: then it pauses

# What is known to say the same to both, or to show in the request that is looked at.
_CLIENT_KWARGS = frozenset(
    {"region_name", "endpoint_url", "use_ssl", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
)
_CONFIG_KWARGS = frozenset({"connect_timeout", "read_timeout", "retries", "s3", "signature_version", "region_name"})
_HEADERS = frozenset(
    {"authorization", "user-agent", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256"}
    | {"x-amz-checksum-mode", "amz-sdk-invocation-id", "amz-sdk-request"}
)
_SIGNED = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d+/([^/]+)/s3/aws4_request,.*")
_PLAIN_KEY = re.compile(r"(?!.*//)(?!(.*/)?\.{1,2}(/|$))[\w.=+@, -][\w.=+@, /-]*(?<!/)", re.ASCII)
_VARIABLES = re.compile(r"AWS_(SERVER_SIDE_ENCRYPTION|SSE_.*)", re.IGNORECASE)  # obstore heeds them, and none undoes it

_threads_of: int | None = None  # the process that has obstore's threads: a fork takes its state along, but not them


@dataclass(frozen=True)
class _Place:
    """Where s3fs sends the requests of a bucket, and how it signs them."""

    url: str
    region: str
    credentials: Any = field(repr=False)
    """Key, secret and token; None where requests are not signed."""


class _Bucket:
    """The client of a bucket, made anew when its place or credentials have changed."""

    def __init__(self, fs: fsspec.AbstractFileSystem, name: str, limit_s: float) -> None:
        self._fs, self._name, self._limit_s = fs, name, limit_s
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._store: S3Store | None = None
        self._looked_at = self._paused_until = float("-inf")
        self._num_failures = 0

    def get(self, key: str, start: int, end: int) -> tuple[memoryview, str] | None:
        store = self._current()
        if store is None:
            return None
        try:
            found = _get(store, key, start, end)
        except Exception:  # noqa: BLE001 - s3fs finds out what it is
            found = None
        if found is not None:
            self._num_failures = 0
            return found
        self._num_failures += 1
        self._looked_at = float("-inf")  # is the bucket elsewhere, or are there other credentials?
        if self._num_failures >= _MOST_FAILURES:
            self._paused_until = time.monotonic() + _AGAIN_S
        return None

    def _current(self) -> S3Store | None:
        with self._lock:
            now = time.monotonic()
            if now >= self._paused_until and now >= self._looked_at + _AGAIN_S:
                self._looked_at = now
                try:
                    self._look()
                except Exception:  # noqa: BLE001 - s3fs finds out what it is
                    self._paused_until = time.monotonic() + _AGAIN_S
            return None if now < self._paused_until else self._store

    def _look(self) -> None:
        from fsspec.asyn import sync

        place = sync(self._fs.loop, _place, self._fs, self._name, timeout=self._limit_s)
        if place != self._place:
            self._store = None if place is None else _store(self._fs, self._name, place, self._limit_s)
            self._place = place


_buckets: dict[tuple[int, str, float], _Bucket] = {}


@cache
def is_installed() -> bool:
    """Whether obstore can be imported."""
    try:
        import obstore  # noqa: F401
    except ImportError:
        return False
    return True


def get_range(
    fs: fsspec.AbstractFileSystem, path: str, start: int, end: int, limit_s: float
) -> tuple[memoryview, str] | None:
    """Returns a range of an S3 object, as far as the object goes, and its etag; None if that takes s3fs.

    Args:
        fs: s3fs's file system.
        path: The object, as that one names it.
        start: First byte.
        end: End.
        limit_s: How long it may take.
    """
    global _threads_of  # noqa: PLW0603 - obstore has one set of threads a process
    is_main = threading.current_thread() is threading.main_thread()  # which would not hear Ctrl-C meanwhile
    bucket, key, version = fs.split_path(path)
    is_forked = _threads_of not in (None, os.getpid())
    if is_main or is_forked or version or not _PLAIN_KEY.fullmatch(key) or not is_installed():
        return None
    _threads_of = os.getpid()
    return _buckets.setdefault((id(fs), bucket, limit_s), _Bucket(fs, bucket, limit_s)).get(key, start, end)


def _get(store: S3Store, key: str, start: int, end: int) -> tuple[memoryview, str] | None:
    answer = store.get(key, options={"range": (start, end)})
    meta, (first, last) = answer.meta, answer.range
    etag = (meta["e_tag"] or "").strip('"')
    if not etag or (first, last) != (start, min(end, meta["size"])):
        return None
    data = memoryview(answer.bytes())
    return (data, etag) if len(data) == last - first else None


class _NotSentError(Exception):
    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


async def _place(fs: fsspec.AbstractFileSystem, bucket: str) -> _Place | None:
    """Looks at a request that s3fs makes; None if it has something that obstore is not known to do."""
    await fs.set_session()
    client = await fs.get_s3(bucket)
    ours = asyncio.current_task()

    def keep(request: Any, **_: Any) -> None:
        if asyncio.current_task() is ours:  # others read meanwhile
            raise _NotSentError(request)

    client.meta.events.register("before-send.s3.GetObject", keep)
    try:
        await fs._call_s3("get_object", Bucket=bucket, Key="x")  # noqa: SLF001 - as in _reads
    except _NotSentError as stopped:
        request = stopped.request
    else:
        return None
    finally:
        client.meta.events.unregister("before-send.s3.GetObject", keep)
    headers = {name.lower(): _text(value) for name, value in request.headers.items()}
    url = str(request.url).removesuffix("/x")
    if not headers.keys() <= _HEADERS or url == request.url or not _goes_alike(fs, url):
        return None
    if "authorization" not in headers:
        return _Place(url, "none", None)
    signed = _SIGNED.fullmatch(headers["authorization"])
    credentials = await client._request_signer._credentials.get_frozen_credentials()  # noqa: SLF001 - no other way to all
    if signed is None or credentials.access_key != signed[1]:
        return None
    return _Place(url, signed[2], credentials)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _goes_alike(fs: fsspec.AbstractFileSystem, url: str) -> bool:
    """Whether a connection of obstore's is known to be as s3fs's would be."""
    has_certificates = fs.session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE")
    return (
        fs.client_kwargs.keys() <= _CLIENT_KWARGS
        and {name for name, value in fs.config_kwargs.items() if value != S3_CONFIG.get(name)} <= _CONFIG_KWARGS
        and not getproxies().keys() - {"no"}
        and not (has_certificates and url.startswith("https:"))
        and not any(_VARIABLES.fullmatch(name) for name in os.environ)
    )


def _store(fs: fsspec.AbstractFileSystem, bucket: str, place: _Place, limit_s: float) -> S3Store:
    """A client of which the environment decides nothing: all that is read from there is said."""
    from obstore.store import S3Store

    def credentials() -> S3Credential:
        key, secret, token = place.credentials[:3]
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}

    config: S3Config = {
        "endpoint": place.url,
        "aws_endpoint_url_s3": place.url,
        "virtual_hosted_style_request": True,  # the place has the bucket's name, in whichever style
        "region": place.region,
        "skip_signature": place.credentials is None,
        "request_payer": False,
        "s3_express": False,
    }
    options: ClientConfig = {
        "allow_http": True,
        "timeout": timedelta(seconds=limit_s),
        "connect_timeout": timedelta(seconds=fs.config_kwargs["connect_timeout"]),
        "read_timeout": timedelta(seconds=fs.config_kwargs["read_timeout"]),
    }
    return S3Store(
        bucket,
        config=config,
        client_options=options,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},  # s3fs's requests are those that are repeated
        credential_provider=None if place.credentials is None else credentials,
    )
