"""Where a manifest may say that its shards lie: what somebody else wrote must not make a job read what it likes."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from urllib.parse import unquote

from shardstream import storage
from shardstream.errors import ManifestError, shown_url
from shardstream.manifest import AllowUrl, Manifest

_UP = re.compile(r"(?:^|/)\.\.(?:/|$)")
_STAR_FREE = 3  # parts of a URL up to its host or bucket


def check_places(manifest: Manifest, allow_url: AllowUrl, *, is_trusted_root: bool) -> None:
    """Refuses shards that are not where they may be.

    Args:
        manifest: As it was read, with ``path``.
        allow_url: Locations that are accepted wherever they are; see ``Manifest.load``.
        is_trusted_root: Whether what is below the root may be read.

    Raises:
        ManifestError: If a shard is elsewhere.
    """
    strict = is_trusted_root and bool(manifest.root)
    is_path = storage.local_path(manifest.root) is not None
    for shard, url in enumerate(manifest.urls):
        if (strict and is_below(url, is_path=is_path)) or _is_allowed(manifest.url(shard), allow_url):
            continue
        what = "the manifest names a shard outside the folder that it may speak of"
        expected = f"a path below {shown_url(manifest.root)}" if strict else "a path below the manifest's own folder"
        hint = (
            "if you trust whoever made the manifest, allow it: allow_url= or --allow-url with a pattern of locations; "
            "if the shards are elsewhere now, say root="
        )
        raise ManifestError(what, url=manifest.path, expected=expected, found=manifest.url(shard), hint=hint)


def is_trusted_root(root: str, manifest_url: str) -> bool:
    """Whether a manifest may speak of an absolute root.

    One on a local disk may: it was made or put there by whoever runs the job. One that is read from elsewhere may name
    the host or bucket that it was read from.

    Example:
        >>> is_trusted_root("s3://bucket/data", "/home/me/a.manifest.parquet")
        True
        >>> is_trusted_root("s3://bucket/data", "s3://bucket/a.parquet"), is_trusted_root("/etc", "https://host/m")
        (True, False)
    """
    if storage.local_path(manifest_url) is not None or manifest_url.startswith("memory://"):
        return True
    hosts = [url.rpartition("::")[2].split("/")[:_STAR_FREE] for url in (root, manifest_url)]
    return hosts[0] == hosts[1] and not storage.is_chain(root)


def is_below(path: str, *, is_path: bool) -> bool:
    """Whether a location stays below whatever it is put behind.

    Args:
        path: What is put behind a root and a slash.
        is_path: Whether the root is a local path: there, percent signs are letters like any other.

    Example:
        >>> [is_below(path, is_path=True) for path in ("a/b..c.tar", "../a.tar", "/etc/a.tar", "s3://b/a.tar")]
        [True, False, False, False]
    """
    plain = path if is_path else unquote(path)
    return not (_UP.search(plain) or plain.startswith("/") or "://" in plain or storage.is_chain(plain))


def _is_allowed(url: str, allow_url: AllowUrl) -> bool:
    if allow_url is None:
        return False
    plain = _without_detours(url)
    if callable(allow_url):
        return bool(allow_url(plain))
    patterns: Iterable[str] = [allow_url] if isinstance(allow_url, str) else allow_url
    return any(fnmatchcase(plain, pattern) for pattern in patterns)


def _without_detours(url: str) -> str:
    """The location with ``..`` taken out, so that a pattern means what it says."""
    if storage.local_path(url) is not None:
        return storage.absolute(url)
    scheme, separator, rest = url.partition("://")
    return scheme + separator + posixpath.normpath(unquote(rest)) if _UP.search(unquote(rest)) else url
