"""Tokenised data sets on disk, of every kind that packing reads; their tokens say where they come from."""

from __future__ import annotations

import io
import tarfile
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardstream.formats import IndexOptions, format_of
from shardstream.manifest_file import DatasetInfo, ShardRow, write_manifest

LISTS = {
    "list<int32>": pa.list_(pa.int32()),
    "list<uint16>": pa.list_(pa.uint16()),
    "large_list<int64>": pa.large_list(pa.int64()),
    "list<uint32>": pa.list_(pa.uint32()),
    **({"list_view<int32>": pa.list_view(pa.int32())} if hasattr(pa, "list_view") else {}),
}


def token_manifest(folder, lengths, kind="list<int32>", *, shards=3, row_group_size=5, run_num_bytes=60, pack=()):
    """Writes a document per length (None for none) and indexes them; runs are short, so that blocks have several.

    Token k of document d is (7 d + k) % 60000 + 1. In Parquet the column ``mask`` has one number a token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cuts = np.linspace(0, len(lengths), shards + 1).astype(int).tolist()
    urls = []
    for shard, (begin, end) in enumerate(pairwise(cuts)):
        documents = [None if lengths[k] is None else tokens_of(k, lengths[k]) for k in range(begin, end)]
        if kind.startswith("tar"):
            urls.append(folder / f"{shard}.tar")
            _write_tar(urls[-1], documents, begin, np.dtype(kind[4:-1]))
        else:
            urls.append(folder / f"{shard}.parquet")
            _write_parquet(urls[-1], documents, kind, row_group_size)
    is_tar = kind.startswith("tar")
    options = IndexOptions(
        "tokens", run_num_bytes=run_num_bytes, pack=tuple(pack), tokens_dtype=kind[4:-1] if is_tar else None
    )
    return indexed_files(urls, options)


def indexed_files(urls, options):
    """Indexes shards with any options, and keeps the manifest in memory, its lists as in a file."""
    indexes = [format_of(str(url)).index_shard(str(url), options, {}) for url in urls]

    def fill(writer):
        names = [field.name for field in fields(ShardRow) if field.name != "url"]
        for url, index in zip(urls, indexes, strict=True):
            writer.add(ShardRow(url=str(url), **{name: getattr(index, name) for name in names}))
        dtype = {"tokens_dtype": options.tokens_dtype} if options.tokens_dtype else {}
        return DatasetInfo("", indexes[0].columns, indexes[0].arrow_schema, options.tokens_column, dtype)

    return write_manifest(fill, None)


def tokens_of(document, num_tokens):
    return ((7 * document + np.arange(num_tokens)) % 60_000 + 1).tolist()


def mask_of(tokens):
    """Every third number is no target."""
    return [int(token % 3 > 0) for token in tokens]


def _write_parquet(path, documents, kind, row_group_size):
    if kind == "fixed-size list":
        size = next(len(document) for document in documents if document is not None)
        tokens = pa.array(documents, pa.list_(pa.int32(), size))
    else:
        tokens = pa.array(documents, LISTS[kind])
    masks = pa.array([None if document is None else mask_of(document) for document in documents], pa.list_(pa.int8()))
    pq.write_table(pa.table({"tokens": tokens, "mask": masks}), path, row_group_size=row_group_size)


def _write_tar(path, documents, first, dtype):
    with tarfile.open(path, "w") as tar:
        for k, document in enumerate(documents):
            members = {"txt": b"a document"}
            if document is not None:
                members["tokens"] = np.array(document, dtype.newbyteorder("<")).tobytes()
            for name, data in members.items():
                info = tarfile.TarInfo(f"{first + k:06d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
