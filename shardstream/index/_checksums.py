"""Indexing a shard and hashing all of it, with its bytes fetched once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from shardstream import storage
from shardstream.checksums import BLOCK_LIST, REST_LIST, checksums_of
from shardstream.errors import ManifestError, ShardStreamError, shown_url
from shardstream.formats import Format, IndexOptions, ShardIndex

_COPIED_NUM_BYTES = 1 << 20


def indexed_with_checksums(
    format_: Format, url: str, options: IndexOptions, storage_options: Mapping[str, Any]
) -> ShardIndex:
    """Returns what indexing learned of a shard, checksums of its blocks included.

    Args:
        format_: Of the shard.
        url: The shard.
        options: What indexing looks at.
        storage_options: Given to fsspec.

    Raises:
        ManifestError: As the format does, and if the shard changed meanwhile.
        ReadError: If storage failed.
    """
    before = storage.stat(url, storage_options)
    is_copied = storage.local_path(url) is None and getattr(format_, "is_self_contained", False)
    with _copy(url, storage_options, before.num_bytes) if is_copied else nullcontext(url) as place:
        found = _named(lambda: format_.index_shard(place, options, storage_options), place, url)
        starts, sizes = found.block_offset.tolist(), found.block_num_bytes.tolist()
        spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        try:
            with storage.open_source(place, storage_options, num_bytes=before.num_bytes) as file:
                made = checksums_of(file, spans, before.num_bytes)
        except EOFError as error:
            raise _changed(url, before.num_bytes, error) from error
    after = storage.stat(url, storage_options)
    if after != before or found.num_bytes != before.num_bytes:
        raise _changed(url, before.num_bytes, after.num_bytes)
    lists = {**found.lists, BLOCK_LIST: made.blocks, REST_LIST: made.rest}
    return replace(found, version_tag=before.version_tag, lists=lists)


def _changed(url: str, expected: object, found: object) -> ManifestError:
    what, hint = "the shard changed while it was indexed", "index when nobody writes to it"
    return ManifestError(what, url=url, expected=expected, found=found, hint=hint)


@contextmanager
def _copy(url: str, storage_options: Mapping[str, Any], num_bytes: int) -> Iterator[str]:
    """A local copy of a remote shard, deleted afterwards: its bytes are fetched once, however often they are read."""
    place = next((part for part in url.split("::") if "://" in part), url)  # of a chain, what is in the archive
    name = place.split("?", 1)[0].rsplit("/", 1)[-1]
    with tempfile.TemporaryDirectory(prefix="shardstream-") as folder:
        copy = Path(folder) / name
        with storage.open_source(url, storage_options, num_bytes=num_bytes) as source, copy.open("wb") as target:
            copyfileobj(source, target, _COPIED_NUM_BYTES)
        yield str(copy)


def _named(index: Callable[[], ShardIndex], place: str, url: str) -> ShardIndex:
    """What ``index`` returns; what it raises names the shard, not its copy."""
    try:
        return index()
    except ShardStreamError as error:
        raise type(error)(str(error).replace(place, shown_url(url))) from error
