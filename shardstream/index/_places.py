"""What to know of where the shards of a manifest are."""

from __future__ import annotations

from shardstream import storage
from shardstream.index._expand import some
from shardstream.manifest import Manifest


def advice_of_places(manifest: Manifest) -> list[str]:
    """Returns what to know of a manifest's shards that have no common root, as sentences; else nothing."""
    if manifest.root or manifest.path is None:
        return []
    chained = (f"*::{url.partition('::')[2]}" if storage.is_chain(url) else None for url in manifest.urls)
    patterns = (chain or f"{storage.folder_of(url)}/*" for url, chain in zip(manifest.urls, chained, strict=True))
    allow = some(list(dict.fromkeys(patterns)))
    return [f"the shards have no common folder: whoever loads the manifest must allow theirs, allow_url={allow}"]
