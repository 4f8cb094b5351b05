"""The manifest as a file: one Parquet file, one row per shard, written as a stream and read by column.

The columns are those of ``_schema``: a row's numbers, and per-shard lists, each only if some shard has it. The file's
key-value metadata holds one JSON text under ``shardstream``: version, root, schema, settings, fingerprint.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardstream import storage
from shardstream.errors import ManifestError, ReadError, shown_url
from shardstream.manifest import MANIFEST_VERSION, AllowUrl, ColumnSchema, Int64Array, Manifest
from shardstream.manifest_file._flat import column_numbers, has_nulls, list_lengths, list_values, typed
from shardstream.manifest_file._lists import ParquetLists
from shardstream.manifest_file._places import check_places, is_below, is_trusted_root
from shardstream.manifest_file._schema import COLUMNS, LIST_TYPES, METADATA_KEY, is_list_name
from shardstream.manifest_file._writer import DatasetInfo, ManifestWriter, ShardRow

__all__ = [
    "LIST_TYPES",
    "DatasetInfo",
    "ManifestWriter",
    "ParquetLists",
    "ShardRow",
    "is_manifest",
    "load_manifest",
    "save_manifest",
    "shard_row",
    "write_manifest",
]

Options = Mapping[str, Any]

_NO_MANIFEST = "check the path, or make one with `shardstream index`"

_ABOUT: dict[str, type | tuple[type, ...]] = {
    "root": str,
    "root_is_relative": bool,
    "columns": list,
    "arrow_schema": str,
    "tokens_column": (str, type(None)),
    "metadata": dict,
    "fingerprint": str,
}


def load_manifest(
    path: str | os.PathLike[str],
    root: str | None = None,
    *,
    storage_options: Options | None = None,
    allow_url: AllowUrl = None,
) -> Manifest:
    """Reads a manifest file: the columns that a ``Manifest`` holds; lists stay where they are.

    Args:
        path: A local path or fsspec URL.
        root: Where the shards are now, if they were moved since.
        storage_options: Given to fsspec.
        allow_url: Shards elsewhere that are accepted; see ``Manifest.load``.

    Returns:
        The manifest, checked against its own counts and fingerprint.

    Raises:
        ManifestError: If it is missing, not a manifest, of a newer version, or damaged, or names a shard that is
            elsewhere.
        ReadError: If storage failed.
    """
    url = storage.absolute(os.fspath(path))
    file, about = _opened(url, storage_options)
    try:
        table = file.read(columns=list(COLUMNS))
        if table.schema.names != list(COLUMNS) or any(table.column(name).null_count for name in COLUMNS):
            raise _damaged(url, expected=", ".join(COLUMNS), found=", ".join(table.schema.names))
        arrays = {name: typed(table.column(name), kind) for name, kind in COLUMNS.items()}
        texts = {name: arrays[name].to_pylist() for name, kind in COLUMNS.items() if kind == pa.string()}
        arrow_schema = base64.b64decode(about["arrow_schema"])
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8, or not base64
        raise _damaged(url, found=error) from error
    if missing := [name for name, column in arrays.items() if has_nulls(column)]:
        raise _damaged(url, expected="a value everywhere", found=f"nulls in {', '.join(missing)}")
    first_block = _first_block(url, arrays)
    manifest = Manifest(
        root=_root(url, about) if root is None else storage.absolute(root).rstrip("/"),
        urls=texts["url"],
        formats=texts["format"],
        num_bytes=column_numbers(arrays["num_bytes"]),
        version_tags=texts["version_tag"],
        digests=texts["digest"],
        shard_first_block=first_block,
        block_rows=list_values(arrays["block_rows"]),
        block_run_rows=list_values(arrays["block_run_rows"]),
        block_offset=list_values(arrays["block_offset"]),
        block_num_bytes=list_values(arrays["block_num_bytes"]),
        columns=tuple(ColumnSchema(*column) for column in about["columns"]),
        arrow_schema=arrow_schema,
        tokens_column=about["tokens_column"],
        path=url,
        lists=_lists_of(file, path=url, storage_options=storage_options),
        metadata=about["metadata"],
    )
    _check_counts(url, manifest, column_numbers(arrays["num_samples"]))
    if manifest.fingerprint != about["fingerprint"]:
        raise _damaged(url, expected=f"fingerprint {about['fingerprint']}", found=manifest.fingerprint)
    check_places(manifest, allow_url, is_trusted_root=root is not None or _may_name_root(url, about))
    return manifest


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a local file is a manifest, by what it says of itself, under whatever name."""
    name = storage.local_path(storage.absolute(os.fspath(path)))
    if name is None or not os.path.isfile(name):  # noqa: PTH113 - names that are not UTF-8 stay as they are
        return False
    try:
        return METADATA_KEY in (pq.read_metadata(name).metadata or {})
    except (pa.ArrowException, OSError, ValueError):
        return False


def save_manifest(
    manifest: Manifest,
    path: str | os.PathLike[str],
    overwrite: bool = False,  # noqa: FBT001, FBT002 - as Manifest.save
    *,
    storage_options: Options | None = None,
) -> Manifest:
    """Writes a manifest, with its lists, to a file that appears whole or not at all.

    Args:
        manifest: The manifest.
        path: A local path or fsspec URL.
        overwrite: Replace an existing manifest of another fingerprint.
        storage_options: Given to fsspec.

    Returns:
        The same manifest with ``path`` and ``lists`` of the new file.

    Raises:
        ManifestError: If another manifest, or something that is none, is at ``path``.
    """

    def fill(writer: ManifestWriter) -> DatasetInfo:
        for shard in range(manifest.num_shards):
            writer.add(shard_row(manifest, shard))
        return DatasetInfo(
            root=manifest.root,
            columns=manifest.columns,
            arrow_schema=manifest.arrow_schema,
            tokens_column=manifest.tokens_column,
            metadata=manifest.metadata,
        )

    return write_manifest(fill, path, overwrite=overwrite, storage_options=storage_options)


def write_manifest(
    fill: Callable[[ManifestWriter], DatasetInfo],
    path: str | os.PathLike[str] | None,
    *,
    overwrite: bool = False,
    storage_options: Options | None = None,
) -> Manifest:
    """Writes a manifest shard by shard, to a file or to memory.

    Args:
        fill: Adds all shards to the writer and returns what holds for all of them. If it raises, nothing is written.
        path: A local path or fsspec URL, or None to keep the manifest in memory.
        overwrite: Replace an existing manifest of another fingerprint.
        storage_options: Given to fsspec.

    Returns:
        The manifest.

    Raises:
        ManifestError: If another manifest, or something that is none, is at ``path``.
    """
    if path is None:
        memory = io.BytesIO()
        writer = ManifestWriter(memory)
        manifest = writer.finish(fill(writer))
        data = memory.getvalue()
        return replace(manifest, lists=_lists_of(pq.ParquetFile(pa.BufferReader(data)), data=data))
    url = storage.absolute(os.fspath(path))
    there = _fingerprint_at(url, storage_options)
    with storage.write_atomic(url, storage_options) as file, contextlib.closing(ManifestWriter(file)) as writer:
        info = fill(writer)
        manifest = writer.finish(info, stored_root=_stored_root(info.root, url))
        if there not in (None, manifest.fingerprint) and not overwrite:
            hint = (
                "manifests are never changed, because jobs and cursors refer to them: choose another name, or "
                "overwrite=True (--overwrite)"
            )
            what = "another manifest is there already"
            raise ManifestError(what, url=url, expected=f"fingerprint {manifest.fingerprint}", found=there, hint=hint)
        file.seek(0)
        names = frozenset(filter(is_list_name, pq.ParquetFile(file).schema_arrow.names))
    return replace(manifest, path=url, lists=ParquetLists(names, path=url, storage_options=storage_options))


def shard_row(manifest: Manifest, shard: int) -> ShardRow:
    """Returns all that a manifest knows of a shard, lists included."""
    blocks = slice(int(manifest.shard_first_block[shard]), int(manifest.shard_first_block[shard + 1]))
    lists = manifest.lists
    return ShardRow(
        url=manifest.urls[shard],
        format=manifest.formats[shard],
        num_bytes=int(manifest.num_bytes[shard]),
        version_tag=manifest.version_tags[shard],
        digest=manifest.digests[shard],
        block_rows=manifest.block_rows[blocks],
        block_run_rows=manifest.block_run_rows[blocks],
        block_offset=manifest.block_offset[blocks],
        block_num_bytes=manifest.block_num_bytes[blocks],
        lists={} if lists is None else lists.read(shard, sorted(lists.names)),
    )


# ---------------------------------------------------------------------------------------------------------------- root


def _stored_root(root: str, url: str) -> str | None:
    """The root as seen from the manifest's folder if it is there or below, so that the folder can be moved whole."""
    return storage.path_below(root, storage.folder_of(url)) if root else None


def _root(url: str, about: Mapping[str, Any]) -> str:
    if not about["root_is_relative"]:
        return str(about["root"])
    folder = storage.folder_of(url)
    return folder if about["root"] == "." else f"{folder}/{about['root']}"


def _may_name_root(url: str, about: Mapping[str, Any]) -> bool:
    root = str(about["root"])
    if about["root_is_relative"]:
        return is_below(root, is_path=storage.local_path(url) is not None)
    return is_trusted_root(root, url)


# ------------------------------------------------------------------------------------------------------------- reading


def _opened(url: str, storage_options: Options | None) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """Opens a manifest file and reads what it says of itself."""
    try:
        path = storage.local_path(url)
        source = path or storage.open_source(url, storage_options, ahead_num_bytes=0)
        file = pq.ParquetFile(source, pre_buffer=True)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ManifestError("there is no manifest here", url=url, hint=_NO_MANIFEST) from error
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ManifestError("there is no manifest here", url=url, hint=_NO_MANIFEST) from error
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        hint = "make one with `shardstream index`; if it was one, it is cut or damaged"
        raise ManifestError("this is not a manifest", url=url, found=error, hint=hint) from error
    text = (file.metadata.metadata or {}).get(METADATA_KEY)
    if text is None:
        hint = "make one with `shardstream index` and pass its output"
        raise ManifestError("this is a Parquet file, but not a manifest", url=url, hint=hint)
    about: dict[str, Any] = {}
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        about = dict(json.loads(text))
    version = about.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _damaged(url, found=f"version {version!r}")
    if version > MANIFEST_VERSION:
        what, expected = "the manifest was made by a newer shardstream", f"version {MANIFEST_VERSION} at most"
        hint = "install a newer shardstream, or index again with this one"
        raise ManifestError(what, url=url, expected=expected, found=version, hint=hint)
    if missing := [name for name in _ABOUT if name not in about]:
        raise _damaged(url, expected=", ".join(_ABOUT), found=f"no {', '.join(missing)}")
    _check_about(url, about)
    return file, about


def _check_about(url: str, about: Mapping[str, Any]) -> None:
    wrong = [name for name, kinds in _ABOUT.items() if not isinstance(about[name], kinds)]
    if wrong:
        raise _damaged(url, expected="values of the right types", found=f"{wrong[0]} {about[wrong[0]]!r}"[:200])
    for column in about["columns"]:
        kinds = [type(part) for part in column] if isinstance(column, list) else []
        if kinds != [str, str, int]:
            raise _damaged(url, expected="columns of a name, a type and a count", found=repr(column)[:200])


def _fingerprint_at(url: str, storage_options: Options | None) -> str | None:
    """The fingerprint of the manifest at ``url``; None if nothing is there."""
    if storage.kind_of(url, storage_options) is None:
        return None
    try:
        return str(_opened(url, storage_options)[1]["fingerprint"])
    except ManifestError as error:
        hint = "choose another name, or remove it yourself"
        what = "something that is no readable manifest is there, and will not be replaced"
        raise ManifestError(what, url=url, found=error, hint=hint) from error


def _lists_of(file: pq.ParquetFile, **where: Any) -> ParquetLists:
    return ParquetLists(frozenset(filter(is_list_name, file.schema_arrow.names)), **where)


def _first_block(url: str, arrays: Mapping[str, pa.ChunkedArray]) -> Int64Array:
    """int64[S + 1] from the lengths of the block lists, which must agree."""
    lists = [arrays[name] for name, kind in COLUMNS.items() if pa.types.is_list(kind)]
    lengths = [list_lengths(column) for column in lists]
    if any(not np.array_equal(lengths[0], others) for others in lengths):
        raise _damaged(url, expected="as many rows, runs, offsets and sizes as blocks", found="other counts")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[0], dtype=np.int64)])


def _check_counts(url: str, manifest: Manifest, num_samples: Int64Array) -> None:
    rows, run_rows = manifest.block_rows, manifest.block_run_rows
    if np.any(rows < 1) or np.any(run_rows < 1):
        raise _damaged(url, expected="blocks and runs of at least one row", found=min(rows.min(), run_rows.min()))
    differs = np.flatnonzero(manifest.shard_num_samples != num_samples)
    if len(differs):
        shard = int(differs[0])
        expected = f"{int(num_samples[shard])} samples in {shown_url(manifest.urls[shard])}"
        raise _damaged(url, expected=expected, found=f"blocks of {int(manifest.shard_num_samples[shard])}")


def _damaged(url: str, **facts: Any) -> ManifestError:
    return ManifestError("the manifest is damaged", url=url, hint="index again, or fetch it again", **facts)
