"""Merging: manifests of parts of a data set, indexed apart from each other, as the manifest of all of it."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardstream import storage
from shardstream.errors import ManifestError, ShardStreamWarning, shown_url
from shardstream.index._expand import check_names
from shardstream.index._places import advice_of_places
from shardstream.index._schemas import SchemaUnion
from shardstream.manifest import AllowUrl, Manifest
from shardstream.manifest_file import DatasetInfo, ManifestWriter, load_manifest, shard_row, write_manifest


def merge_manifests(
    parts: Sequence[Manifest | str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_url: AllowUrl = None,
    overwrite: bool = False,
) -> Manifest:
    """Makes one manifest of several, without a look at the shards: any scheduler can index the parts side by side.

    The order of samples is that of the parts as they are given, and within each that of its own. If the shards come in
    the same order, the fingerprint is that of indexing all of them at once.

    Args:
        parts: Manifests, or where they are.
        output: Where to write the merged one; None keeps it in memory.
        storage_options: Given to fsspec.
        allow_url: Shards elsewhere that are accepted when parts are loaded; see ``Manifest.load``.
        overwrite: Replace an existing manifest of another fingerprint.

    Returns:
        The manifest.

    Raises:
        ManifestError: If a part cannot be loaded, parts have other settings or columns, or a shard is in two of them.

    Example:
        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> from shardstream import build_manifest
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("a", "b"):
        ...     pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2, 3]}), f"{folder}/{name}.parquet")
        >>> merged = merge_manifests([build_manifest(f"{folder}/{name}.parquet") for name in ("a", "b")])
        >>> merged.num_samples, merged.fingerprint == build_manifest(folder).fingerprint
        (6, True)
    """
    if not parts:
        raise ManifestError("nothing to merge", hint="name the manifests of the parts")
    loaded = [
        part
        if isinstance(part, Manifest)
        else load_manifest(part, storage_options=storage_options, allow_url=allow_url)
        for part in parts
    ]
    names = [part.path or f"part {place}" for place, part in enumerate(loaded)]
    for name, part in zip(names, loaded, strict=True):
        _check_settings(loaded[0], part, name)
    urls = [part.url(shard) for part in loaded for shard in range(part.num_shards)]
    check_names(urls)
    root, below = storage.common_root(urls)
    union = SchemaUnion()
    for name, part in zip(names, loaded, strict=True):
        union.add_types_of(part if part.path else replace(part, path=name))
        union.count_kept(part, range(part.num_shards))

    def fill(writer: ManifestWriter) -> DatasetInfo:
        places = iter(below)
        for part in loaded:
            for shard in range(part.num_shards):
                writer.add(replace(shard_row(part, shard), url=next(places)))
        return DatasetInfo(root, union.columns, union.arrow_schema, loaded[0].tokens_column, loaded[0].metadata)

    merged = write_manifest(fill, output, overwrite=overwrite, storage_options=storage_options)
    for text in advice_of_places(merged):
        warnings.warn(text, ShardStreamWarning, stacklevel=2)
    return merged


def _check_settings(first: Manifest, part: Manifest, name: str) -> None:
    """What is known of every shard must be known of all."""
    expected, found = ({"tokens_column": one.tokens_column, **one.metadata} for one in (first, part))
    differ = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    if differ:
        raise ManifestError(
            "the part was indexed with other settings than the first one",
            url=shown_url(name),
            expected=", ".join(f"{key} {json.dumps(expected.get(key))}" for key in differ),
            found=", ".join(f"{key} {json.dumps(found.get(key))}" for key in differ),
            hint="index all parts with the same options",
        )
