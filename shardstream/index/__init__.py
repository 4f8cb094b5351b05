"""Indexing: from shards to a manifest. Shards are looked at in parallel, and written in manifest order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstream import storage
from shardstream.errors import ShardStreamWarning, shown_url
from shardstream.formats import RUN_NUM_BYTES
from shardstream.index._collect import Collected, IndexPlan, IndexProgress, index_options
from shardstream.index._expand import NUM_SHOWN, Shards, expand_shards, find_shards, same_files, some
from shardstream.index._look import look_at_all
from shardstream.index._merge import merge_manifests
from shardstream.index._places import advice_of_places
from shardstream.manifest import Manifest
from shardstream.manifest_file import DatasetInfo, ManifestWriter, load_manifest, write_manifest

__all__ = ["IndexProgress", "IndexSettings", "advice", "build_manifest", "expand_shards", "merge_manifests"]

LARGE_BLOCK_NUM_BYTES = 64 << 20


@dataclass(frozen=True)
class IndexSettings:
    """What is rarely changed about indexing.

    Attributes:
        ignore_index: The label that is no target. Default: the updated manifest's, or -100.
        executor: Any ``concurrent.futures.Executor``, used instead of processes of our own; it is left running.
        progress: Called after each shard.
        allow_vanished: With ``update``: leave out shards that are no longer named. Ids of samples after them change.
        pack: Sequence lengths for which sequences of documents are counted (``packing="whole"`` and ``"unpacked"``).
        tokens_dtype: In tars, where the tokens column is a field of raw little-endian numbers: their type.
        checksum: Hash every byte, block by block, so that ``verify_manifest`` can prove the content. A remote shard is
            copied to a temporary file and read there, so that it is fetched once. Default: as the updated manifest.
    """

    ignore_index: int | None = None
    executor: Executor | None = None
    progress: Callable[[IndexProgress], None] | None = None
    allow_vanished: bool = False
    pack: Sequence[int] | None = None
    tokens_dtype: str | None = None
    checksum: bool | None = None


def build_manifest(
    shards: Shards,
    output: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    keep_order: bool = False,
    tokens_column: str | None = None,
    targets: Mapping[str, str] | None = None,
    num_workers: int | None = None,
    update: Manifest | str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    settings: IndexSettings | None = None,
) -> Manifest:
    """Indexes shards: looks at every one, and writes down what streaming them needs.

    The order of samples comes from the shards' full paths, not from how they are listed. Processes are used for many
    or large shards; a script then must call this under ``if __name__ == "__main__":`` or with ``num_workers=0``.

    Args:
        shards: Paths, fsspec URLs, folders, glob and brace patterns, ``a::b`` lists, ``@file`` lists.
        output: Where to write the manifest; None keeps it in memory.
        storage_options: Given to fsspec. ``retry_timeout_s`` is ours: how long transient failures are retried.
        keep_order: Keep the shards in the order in which they are named.
        tokens_column: List column whose lengths are the token counts; in tars a field of raw numbers.
        targets: Head name → column whose entries that are not the ignore index are counted per sample.
        num_workers: Processes; 0 works in this one; default: by the number and size of shards.
        update: An older manifest. Only shards whose version tag changed are read; they keep their places, and new ones
            come after the old ones, so that sample ids stay. Its token column and targets are the default.
        overwrite: Replace an existing manifest of another fingerprint.
        settings: What is rarely changed.

    Returns:
        The manifest. What a user should know of the shards is given as ``ShardStreamWarning``.

    Raises:
        ManifestError: If shards are missing, bad or do not fit together: after all were looked at, naming every one;
            nothing is written then. Also if there are no samples at all.
        ReadError: If storage cannot be asked.

    Example:
        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> folder = tempfile.mkdtemp()
        >>> pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2, 3]}), folder + "/a.parquet")
        >>> manifest = build_manifest(folder, folder + "/manifest.parquet")
        >>> manifest.urls, manifest.num_samples
        (['a.parquet'], 3)
    """
    settings = settings or IndexSettings()
    options = dict(storage_options or {})
    old = update if update is None or isinstance(update, Manifest) else _old(update, options)
    files = [os.fspath(path) for path in (output, None if old is None else old.path) if path is not None]
    found = find_shards(shards, options, keep_order=keep_order, leave_out=[storage.absolute(file) for file in files])
    looked = index_options(
        old,
        tokens_column,
        targets,
        settings.ignore_index,
        settings.pack,
        settings.tokens_dtype,
        checksum=settings.checksum,
    )
    plan = IndexPlan.make(found.urls, old, looked, options, allow_vanished=settings.allow_vanished)
    collected = Collected(plan, found.num_samples)

    def fill(writer: ManifestWriter) -> DatasetInfo:
        for finding in look_at_all(plan.tasks, num_workers, settings.executor):
            collected.add(finding, writer)
            if settings.progress is not None:
                settings.progress(collected.progress)
        return collected.finish()

    manifest = write_manifest(fill, output, overwrite=overwrite, storage_options=options)
    for text in [
        *_grouped(collected.warnings),
        *same_files(found.urls),
        *_untold(manifest),
        *advice(manifest),
        *advice_of_places(manifest),
    ]:
        warnings.warn(text, ShardStreamWarning, stacklevel=2)
    return manifest


def _untold(manifest: Manifest) -> list[str]:
    """Shards of stores that say nothing of a file but its size."""
    sizes = manifest.num_bytes.tolist()
    tagged = zip(manifest.urls, manifest.version_tags, sizes, strict=True)
    untold = [url for url, tag, num_bytes in tagged if not storage.tells_versions(tag, num_bytes)]
    if not untold:
        return []
    text = (
        f"the store tells neither an etag nor a time of change of {len(untold)} shards: if one is replaced by another "
        "of the same size, reading does not notice (index with --checksum, and `shardstream verify` does) "
        f"[{some(untold)}]"
    )
    return [text]


def advice(manifest: Manifest) -> list[str]:
    """Returns what would make a data set cheaper to read, as sentences; nothing for a good one."""
    num_runs = -(-manifest.block_rows // np.maximum(manifest.block_run_rows, 1))
    sizes = np.maximum(manifest.block_num_bytes, (num_runs - 1) * np.int64(RUN_NUM_BYTES))
    large = np.flatnonzero(sizes > LARGE_BLOCK_NUM_BYTES)
    if not len(large):
        return []
    worst = int(large[np.argmax(sizes[large])])
    url = manifest.urls[manifest.shard_with(worst)]
    text = (
        f"{len(large)} of {manifest.num_blocks} blocks are larger than {LARGE_BLOCK_NUM_BYTES >> 20} MiB (the largest, "
        f"about {int(sizes[worst]) >> 20} MiB, is in {shown_url(url)}): a start in the middle of one decodes it from "
        "its beginning; `shardstream reshard` writes smaller row groups, and tars of zstd frames of a few MiB"
    )
    return [text]


def _old(path: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> Manifest:
    """An older manifest; wherever its shards are, only those are read that are named here as well."""
    return load_manifest(path, storage_options=storage_options, allow_url="*")


def _grouped(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Warnings of shards, each text once."""
    urls: dict[str, list[str]] = {}
    for text, url in texts:
        urls.setdefault(text.replace(url, "the shard"), []).append(url)
    grouped = [f"{text} [{some(shards)}]" for text, shards in urls.items()]
    return [
        *grouped[:NUM_SHOWN],
        *[f"and {len(grouped) - NUM_SHOWN} other warnings of shards"] * (len(grouped) > NUM_SHOWN),
    ]
