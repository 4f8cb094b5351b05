"""Listings: what is at a location, what is below it, what matches a pattern. Never cached, in no promised order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from shardstream.storage._locations import local_path
from shardstream.storage._systems import Options, file_system, naming, retried

if TYPE_CHECKING:
    import fsspec


def kind_of(url: str, storage_options: Options | None = None) -> Literal["file", "directory"] | None:
    """Returns what is at a location, the name taken literally; None if nothing is.

    Raises:
        ReadError: If storage cannot be asked.
    """
    path = local_path(url)
    if path is not None:
        with naming(url):
            return "directory" if Path(path).is_dir() else "file" if os.path.lexists(path) else None

    def ask(fs: fsspec.AbstractFileSystem, inner: str, limits: dict[str, Any]) -> dict[str, Any] | None:
        fs.invalidate_cache()  # what was listed an hour ago says nothing of now
        try:
            return cast("dict[str, Any]", fs.info(inner, **limits))
        except FileNotFoundError as error:
            if error.__cause__ is None or getattr(error.__cause__, "status", 404) in (403, 404, 405):
                return None
            raise

    info = retried(url, storage_options, ask)
    return None if info is None else "directory" if info.get("type") == "directory" else "file"


def list_files(url: str, storage_options: Options | None = None) -> list[str]:
    """Returns every file below a folder, at any depth; hidden ones (``.name``) and what is in hidden folders left out.

    Raises:
        ReadError: If storage cannot be asked.
    """
    path = local_path(url)
    if path is not None:
        with naming(url):
            return _walk(path)
    folder = url.rstrip("/")
    names = _ask_names("find", folder, storage_options)
    _, inner = file_system(folder, storage_options)
    shown = [name for name in names if not any(part[:1] == "." for part in name.removeprefix(inner).split("/"))]
    return _urls(folder, storage_options, shown)


def list_matches(pattern: str, storage_options: Options | None = None) -> list[str]:
    """Returns every file and folder that a glob pattern matches (``*``, ``?``, ``[a-z]``, ``**`` for any depth).

    Raises:
        ReadError: If storage cannot be asked.
    """
    path = local_path(pattern)
    if path is not None:
        with naming(pattern):
            return glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob wants the fixed part split off first
    return _urls(pattern, storage_options, _ask_names("glob", pattern, storage_options))


def _ask_names(method: str, url: str, storage_options: Options | None) -> list[str]:
    def ask(fs: fsspec.AbstractFileSystem, inner: str, limits: dict[str, Any]) -> list[str]:
        fs.invalidate_cache()
        return list(getattr(fs, method)(inner, **limits))

    return retried(url, storage_options, ask)


def _urls(url: str, storage_options: Options | None, names: Iterable[str]) -> list[str]:
    """Puts names that a file system gave into the place that the asked path has in ``url`` (chains, hosts kept)."""
    _, inner = file_system(url, storage_options)
    place = url.find(inner, url.find("://") + 1)
    if place < 0:  # HTTP: names are URLs
        return list(names)
    return [url[:place] + name + url[place + len(inner) :] for name in names]


def _walk(folder: str) -> list[str]:
    """Files below a local folder; links are followed, each folder is entered once."""
    found, entered = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        entered.add(os.path.realpath(parent))
        folders[:] = [
            name for name in folders if name[0] != "." and os.path.realpath(Path(parent, name)) not in entered
        ]
        found += [str(Path(parent, name)) for name in names if name[0] != "."]
    return found
