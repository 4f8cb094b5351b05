"""Locations: which text is a local path, which a chain of fsspec file systems, and what shards have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence

_CACHES = frozenset({"blockcache", "cached", "dir", "filecache", "simplecache"})
_CHAINED = _CACHES | {"libarchive", "reference", "tar", "zip"}


def local_path(url: str) -> str | None:
    """Returns the path of a local file (``/data/a.tar``, ``file:///data/a.tar``), or None for any other URL.

    Example:
        >>> local_path("file:///data/a.tar"), local_path("b.tar"), local_path("s3://bucket/b.tar")
        ('/data/a.tar', 'b.tar', None)
    """
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return url[len(scheme) :]
    return None if "://" in url or is_chain(url) else url


def is_chain(url: str) -> bool:
    """Whether the URL is a chain of fsspec file systems (``simplecache::s3://…``, ``zip://…::https://…``).

    Example:
        >>> is_chain("simplecache::s3://bucket/a.tar"), is_chain("a.tar::b.tar"), is_chain("s3://b/1.tar::s3://b/2.tar")
        (True, False, False)
    """
    first, separator, _ = url.partition("::")
    protocol, path, _ = first.partition("://")
    return bool(separator) and protocol in (_CHAINED if path else _CACHES)


def absolute(url: str) -> str:
    """Returns the one way to write a location: a local path absolute and without scheme, any other URL as it is.

    Example:
        >>> absolute("file:///data/x/../a.tar"), absolute("s3://bucket/a.tar")
        ('/data/a.tar', 's3://bucket/a.tar')
    """
    path = local_path(url)
    return url if path is None else os.path.abspath(path)  # noqa: PTH100 - resolve() would follow symbolic links


def folder_of(url: str) -> str:
    """Returns the folder that an absolute location lies in, without a slash at its end.

    Example:
        >>> folder_of("/data/a.tar"), folder_of("https://host/x/a.tar?part=1/2")
        ('/data', 'https://host/x')
    """
    path = url if local_path(url) is not None else url.split("?", 1)[0]
    return path.rpartition("/")[0]


def common_root(urls: Sequence[str]) -> tuple[str, list[str]]:
    """Splits absolute locations into the deepest folder that all are in, and their paths below it.

    Args:
        urls: Locations as ``absolute`` gives them.

    Returns:
        The folder without a slash at its end, and the paths; "" and the locations themselves where they share none.

    Example:
        >>> common_root(["s3://bucket/a/0.tar", "s3://bucket/ab/0.tar"])
        ('s3://bucket', ['a/0.tar', 'ab/0.tar'])
        >>> common_root(["/data/0.tar", "s3://bucket/0.tar"])
        ('', ['/data/0.tar', 's3://bucket/0.tar'])
    """
    folders = [folder_of(url) + "/" for url in urls]
    root = os.path.commonprefix(folders).rpartition("/")[0]  # noqa: RUF071 - by characters, then cut to whole names
    is_url = any(local_path(url) is None for url in urls)
    of_archive = any(is_chain(url) and "://" in url.partition("::")[0] for url in urls)  # the place is in front there
    if not root or of_archive or (is_url and not root.partition("://")[2]):
        return "", list(urls)
    return root, [url[len(root) + 1 :] for url in urls]


def path_below(url: str, folder: str) -> str | None:
    """Returns where an absolute location lies below a folder ("." for the folder itself), or None if it does not.

    Example:
        >>> path_below("/data/shards", "/data"), path_below("/data", "/data"), path_below("/database", "/data")
        ('shards', '.', None)
    """
    if url == folder:
        return "."
    return url[len(folder) + 1 :] if folder and url.startswith(folder + "/") else None
