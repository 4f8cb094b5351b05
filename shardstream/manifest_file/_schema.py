"""The columns of a manifest file and their types."""

from __future__ import annotations

import pyarrow as pa

from shardstream.errors import ManifestError

METADATA_KEY = b"shardstream"

COLUMNS = {
    "url": pa.string(),
    "format": pa.string(),
    "num_bytes": pa.int64(),
    "version_tag": pa.string(),
    "digest": pa.string(),
    "num_samples": pa.int64(),
    "block_rows": pa.list_(pa.int32()),
    "block_run_rows": pa.list_(pa.int32()),
    "block_offset": pa.list_(pa.int64()),
    "block_num_bytes": pa.list_(pa.int64()),
}

LIST_TYPES = {
    "run_num_tokens": pa.list_(pa.int64()),
    "run_num_documents": pa.list_(pa.int64()),
    "token_lengths": pa.list_(pa.int32()),
    "sample_keys": pa.list_(pa.binary()),
    "sample_num_members": pa.list_(pa.int32()),
    "member_field": pa.list_(pa.dictionary(pa.int32(), pa.string())),
    "member_offset": pa.list_(pa.int64()),
    "member_num_bytes": pa.list_(pa.int64()),
    "block_data_offset": pa.list_(pa.int64()),
    "frame_offsets": pa.list_(pa.int64()),
    "frame_data_offsets": pa.list_(pa.int64()),
    "footer": pa.binary(),
    "block_checksum": pa.list_(pa.binary()),
    "rest_checksum": pa.binary(),
}
_TARGETS = "targets."  # one list per head: valid targets of each sample
# One list per sequence length, with and without ends of documents: sequences of each run.
_SEQUENCES = ("sequences.", "parts.")  # of whole documents, of unpacked ones


def list_type(name: str) -> pa.DataType:
    """Returns the Arrow type of a per-shard list.

    Raises:
        ManifestError: If there is no list of that name.
    """
    if name.startswith(_TARGETS):
        return pa.list_(pa.int32())
    if name.startswith(_SEQUENCES):
        return pa.list_(pa.int64())
    if name not in LIST_TYPES:
        expected = ", ".join([*LIST_TYPES, _TARGETS + "<head>", *(kind + "<length>" for kind in _SEQUENCES)])
        raise ManifestError(f"a manifest has no list {name!r}", expected=expected)
    return LIST_TYPES[name]


def is_list_name(name: str) -> bool:
    """Whether a column of a manifest file is a per-shard list."""
    return name in LIST_TYPES or name.startswith((_TARGETS, *_SEQUENCES))
