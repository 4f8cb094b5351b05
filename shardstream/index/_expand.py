"""From what a user names to a list of shards: paths, folders, patterns, lists."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from braceexpand import braceexpand

from shardstream import storage
from shardstream.errors import ManifestError, shown_url
from shardstream.formats import is_shard_name
from shardstream.index._described import Described, describe, is_description

Shards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

NUM_SHOWN = 10  # names that a message lists at most

MOST_NAMES = 1_000_000  # that one pattern may make

_NUMBERS = re.compile(r"\{([-+]?\d{1,18})\.\.([-+]?\d{1,18})")
_GLOB = re.compile(r"[*?\[]")
_SECRET = re.compile(  # user:password@, or a signed query
    r"://[^/@\s]*:[^/@\s]*@|[?&][^=&]*(?:signature|sig|token|credential|password|secret)[^=&]*=", re.IGNORECASE
)
_MANIFEST_NAMES = (".manifest.parquet", "/manifest.parquet")


def expand_shards(
    shards: Shards,
    storage_options: dict[str, Any] | None = None,
    *,
    keep_order: bool = False,
    leave_out: Sequence[str] = (),
) -> list[str]:
    """Finds every shard that is meant; see ``find_shards``.

    Returns:
        Absolute locations, each once.

    Raises:
        ManifestError: If an entry finds nothing, a shard is named twice, or a URL carries credentials.
        ReadError: If storage cannot be asked.
    """
    return find_shards(shards, storage_options, keep_order=keep_order, leave_out=leave_out).urls


def find_shards(
    shards: Shards,
    storage_options: dict[str, Any] | None = None,
    *,
    keep_order: bool = False,
    leave_out: Sequence[str] = (),
) -> Described:
    """Finds every shard that is meant, and how many samples data sets say that theirs have.

    An entry may be a path or fsspec URL; a folder (every shard below it); a glob pattern; a brace pattern
    (``data-{000000..000099}.tar``, ``{train,val}/*.parquet``); several of these joined with ``::``; or ``@file``, a
    text file with one entry a line. A path that exists is never read as a pattern. Folders and glob patterns find
    what is named like a shard, manifests left out; a remote folder without a slash at its end is asked for first.

    A data set that describes itself is taken at its word: a folder, at any depth, with an MDS or LitData ``index.json``
    or the ``state.json`` of Hugging Face's ``save_to_disk`` is the shards that it names; such a file, or the JSON of
    a wids index, can be named as well.

    Args:
        shards: One entry or several.
        storage_options: Given to fsspec.
        keep_order: Keep the order of the entries. Otherwise shards are sorted by full path.
        leave_out: Locations that folders and patterns never find (the manifest that is to be written).

    Returns:
        The shards, each once.

    Raises:
        ManifestError: If an entry finds nothing, a shard is named twice, or a URL carries credentials.
        ReadError: If storage cannot be asked.
    """
    entries = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    finder = _Finder(storage_options, frozenset(leave_out))
    found = [shard for entry in entries for shard in finder.expand(os.fspath(entry))]
    if finder.missing or not found:
        missing = finder.missing or ["an empty list"]
        hint = "check the spelling, the current folder, what shards end in, and the storage options"
        raise ManifestError("no shards found", found=f"nothing at {some(missing)}", hint=hint)
    check_names(found)
    return Described(found if keep_order else sorted(found), finder.num_samples)


def some(names: Sequence[str]) -> str:
    """Returns at most ten names as text, credentials removed, and how many there are besides."""
    shown = ", ".join(shown_url(name) for name in names[:NUM_SHOWN])
    return shown + (f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else "")


@dataclass
class _Finder:
    storage_options: dict[str, Any] | None = field(repr=False)
    leave_out: frozenset[str]
    missing: list[str] = field(default_factory=list)
    num_samples: dict[str, int] = field(default_factory=dict)

    def expand(self, entry: str, *, in_file: bool = False) -> list[str]:
        if storage.local_path(entry) is not None and (there := self._at(entry)) is not None:
            return there
        if entry.startswith("@") and not in_file:
            with storage.open_source(entry[1:], self.storage_options) as file:
                lines = file.read().decode("utf-8", "surrogateescape").splitlines()
            return [shard for line in lines if line.strip() for shard in self.expand(line.strip(), in_file=True)]
        parts = _split(entry)
        if len(parts) > 1:
            return [shard for part in parts for shard in self.expand(part, in_file=in_file)]
        if "{" in entry and (there := self._at(entry)) is not None:
            return there
        return [shard for name in _braces(entry) for shard in self._one(name)]

    def _one(self, name: str) -> list[str]:
        """A name without braces."""
        _check_name(name)
        is_pattern = _GLOB.search(name) is not None
        if storage.local_path(name) is None and not is_pattern and is_shard_name(name):
            return [name]  # a list of 10,000 URLs costs no requests here: indexing will see whether they are there
        there = self._at(name)
        if there is None and is_pattern:
            matches = storage.list_matches(name, self.storage_options)
            there = self._shards({file for match in matches for file in _files_at(match)})
        if not there:
            self.missing.append(name)
        return there or []

    def _at(self, name: str) -> list[str] | None:
        """What is at a name taken literally: a shard, the shards of a folder, or None."""
        kind = "directory" if name.endswith("/") else storage.kind_of(name, self.storage_options)
        if kind == "directory":
            return self._shards(storage.list_files(name, self.storage_options)) or None
        if kind is None:
            return None
        there = self._described(storage.absolute(name)) if name.lower().endswith(".json") else None
        return [storage.absolute(name)] if there is None else there

    def _described(self, url: str, names: Collection[str] | None = None) -> list[str] | None:
        """The shards of a data set that this file describes, or None."""
        found = describe(url, self.storage_options, names)
        if found is None:
            return None
        self.num_samples.update(found.num_samples)
        return found.urls

    def _shards(self, names: Iterable[str]) -> list[str]:
        """Of listed names those that are shards, sorted."""
        listed = sorted(map(storage.absolute, names))
        shards: list[str] = []
        told: list[str] = []
        for place in sorted(filter(is_description, listed), key=lambda url: (url.count("/"), url)):
            if not any(place.startswith(folder) for folder in told):
                there = self._described(place, frozenset(listed))
                if there is not None:
                    told.append(storage.folder_of(place) + "/")
                    shards += there
        for name in listed:
            if any(name.startswith(folder) for folder in told):
                continue
            if is_shard_name(name) and not name.endswith(_MANIFEST_NAMES) and name not in self.leave_out:
                shards.append(name)
        return shards


def _files_at(match: str) -> list[str]:
    """What a match of a pattern stands for: of a local folder, all below it; ``**`` matches both it and them."""
    match = storage.absolute(match)
    is_folder = storage.local_path(match) is not None and storage.kind_of(match) == "directory"
    return [storage.absolute(file) for file in storage.list_files(match)] if is_folder else [match]


def _split(entry: str) -> list[str]:
    """The parts of an ``a::b`` list; a chain of fsspec file systems stays whole."""
    parts, chain = [], ""
    for piece in entry.split("::"):
        chain += piece
        if storage.is_chain(f"{piece}::"):
            chain += "::"
        elif chain:
            parts.append(chain)
            chain = ""
    return parts


def _braces(entry: str) -> list[str]:
    numbers = [sorted((int(one), int(other))) for one, other in _NUMBERS.findall(entry)]
    num_names = math.prod(end - begin + 1 for begin, end in numbers)
    try:
        names = (
            islice(braceexpand(entry), MOST_NAMES + 1) if "{" in entry and num_names <= MOST_NAMES else iter([entry])
        )
        expanded = list(names)
    except (ValueError, RecursionError):  # braces that do not match are part of the name
        return [entry]
    if max(num_names, len(expanded)) > MOST_NAMES:
        raise ManifestError("a pattern makes too many names", url=entry, expected=f"at most {MOST_NAMES:,}")
    return expanded


def check_names(shards: Sequence[str]) -> None:
    """Refuses shards that are named twice, and names that a manifest cannot hold.

    Raises:
        ManifestError: If there are some.
    """
    twice = [shard for shard, count in Counter(shards).items() if count > 1]
    if twice:
        raise ManifestError("shards are named more than once", found=some(twice), hint="name each once")
    for shard in shards:
        _check_name(shard)


def same_files(shards: Iterable[str]) -> list[str]:
    """Returns, as sentences, which local shards are one file under several names: through a link, or a linked folder.

    It is no error, for some repeat shards like this on purpose.
    """
    first: dict[tuple[int, int], str] = {}
    again: list[str] = []
    for shard in shards:
        path = storage.local_path(shard)
        if path is None:
            continue
        try:
            file = Path(path).stat()
        except OSError:
            continue  # indexing says what is wrong with it
        other = first.setdefault((file.st_dev, file.st_ino), shard) if file.st_ino else shard
        if other != shard:
            again.append(f"{shard} is {other}")
    if not again:
        return []
    return [f"{len(again)} shards are linked to others, so that samples come more than once in an epoch: {some(again)}"]


def _check_name(shard: str) -> None:
    if storage.local_path(shard) is None and _SECRET.search(shard):
        hint = "manifests hold no credentials: pass them as storage options, or set them in the environment"
        raise ManifestError("the URL of a shard carries credentials", url=shard, hint=hint)
    if not shard.isascii():
        try:
            shard.encode()
        except UnicodeEncodeError as error:
            raise ManifestError("the name of a shard is not UTF-8", url=shard, hint="rename it") from error
