"""LitData chunks: which fields a sample has is told by the ``index.json`` beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from shardstream import storage
from shardstream.errors import ManifestError
from shardstream.formats import IndexOptions, ShardIndex
from shardstream.formats._decompress import ForwardFile
from shardstream.formats._sample_fields import Bytes, Field, Places, arrays, data, lists, numbers, text
from shardstream.formats._sample_table import SampleFields, SampleTableFormat
from shardstream.formats.arrow import ArrowFormat, is_embedded

INDEX_NAME = "index.json"
_ARROW_NAME = "litdata.arrow"  # ends as the format that reads it

# Numbers of types, as LitData counts them; complex ones and bfloat16 are left out, since numpy or Arrow have none.
_TENSORS = ["f4", "f4", "f8", "f8", "", "", "", "", "f2", "f2", "", "u1", "i1", "i2", "i2", "i4", "i4", "i8", "i8"]
_TENSORS += ["?", "u2"]
_ARRAYS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
_MEDIA = {
    "audio",
    "file",
    "graph",
    "image",
    "jpeg",
    "jpeg_array",
    "mesh",
    "nifti",
    "pdf",
    "pil",
    "tiff",
    "tifffile",
    "video",
}
_AS_BYTES = frozenset({"bytes", "json", "pickle"} | _MEDIA)


class LitDataFormat(SampleTableFormat):
    """Reads chunks of ``litdata.optimize``, plain or compressed as whole files; ``TokensLoader``'s as well.

    A sample that is a dict has its keys as columns, nested ones joined with dots; one that is a tuple or list "0", "1",
    …; a single value is the column "value".

    ==========================================  =========================================================
    LitData                                     column
    ==========================================  =========================================================
    int, float, bool                            numbers
    str, text                                   text
    one-dimensional tensors and arrays          lists of numbers
    other tensors and arrays                    numpy arrays
    bytes, images, files and other media        bytes, as they are stored
    json, pickle                                bytes, with a warning: nothing is ever unpickled
    ==========================================  =========================================================

    Samples with lists are stored as an Arrow table inside a chunk: they are read as ``ArrowFormat`` reads it.

    Refused, with what to do: encryption, ``compression_level`` "batch" and "sample", temporal arrays.
    """

    name: ClassVar[str] = "litdata"

    def format_name(self, url: str) -> str:
        """Returns ``"litdata"``, or ``"litdata.zst"`` where the name ends in ``.zstd.bin``."""
        return "litdata.zst" if url.split("?", 1)[0].lower().endswith((".zst.bin", ".zstd.bin")) else "litdata"

    def index_shard(self, url: str, options: IndexOptions, storage_options: Mapping[str, Any]) -> ShardIndex:
        """Reads the head of a chunk; see ``Format.index_shard``."""
        if self.format_name(url) == self.name and is_embedded(url, storage_options):
            index = replace(ArrowFormat().index_shard(url, options, storage_options), format=_ARROW_NAME)
            _check_listed(url, int(index.block_rows.sum()), storage_options)
            return index
        return super().index_shard(url, options, storage_options)

    def config_of(self, stream: ForwardFile, offsets: Places, url: str, storage_options: Mapping[str, Any]) -> bytes:
        """Returns what ``index.json`` says of the fields; checks what it says of this chunk."""
        index = _check_listed(url, len(offsets) - 1, storage_options)
        config = {"data_format": index["config"]["data_format"], "names": _names(index["config"], url)}
        config["is_bare"] = index["config"].get("item_loader") == "TokensLoader"
        kinds = zip(config["names"], config["data_format"], strict=True)
        shaped = [name for name, kind in kinds if kind in ("tensor", "numpy")]
        return self.with_shapes(config, shaped, stream, offsets, url)

    def fields_of(self, config: bytes, url: str) -> SampleFields:
        """Returns the columns; see the table above."""
        read = json.loads(config)
        kinds = dict(zip(read["names"], read["data_format"], strict=True))
        fields = [_field(name, kind, url, read.get("shapes", {}).get(name)) for name, kind in kinds.items()]
        warnings = [
            f"column {name!r} is stored as {kind}: its values come as bytes"
            + (", since unpickling may run any code" if kind == "pickle" else "")
            for name, kind in kinds.items()
            if kind in ("pickle", "json")
        ]
        return SampleFields(fields, has_sizes=not read["is_bare"], warnings=tuple(warnings))


def _check_listed(url: str, num_samples: int, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The ``index.json`` beside a chunk, which must list it with as many samples."""
    folder, _, name = url.split("?", 1)[0].rpartition("/")
    index = read_index(f"{folder}/{INDEX_NAME}" if folder else INDEX_NAME, storage_options)
    found = next((entry for entry in index["chunks"] if entry["filename"].rpartition("/")[2] == name), None)
    if found is None:
        raise ManifestError("the chunk is not in its index.json", url=url, hint="name the folder, not the file")
    if found["chunk_size"] != num_samples:
        what = "the chunk and its index.json have different numbers of samples"
        raise ManifestError(what, url=url, expected=found["chunk_size"], found=num_samples)
    return index


def read_index(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a LitData ``index.json``; a file that did not change is read once a process.

    Raises:
        ManifestError: If it is not LitData's, or says that the chunks cannot be read.
        ReadError: If it is missing, or storage failed.
    """
    info = storage.stat(url, storage_options)
    tag, index = _last_read.get(url, ("", {}))
    if tag != info.version_tag:
        index = checked_index(storage.read_range(url, 0, info.num_bytes, storage_options), url)
        _last_read.clear()
        _last_read[url] = info.version_tag, index
    return index


_last_read: dict[str, tuple[str, dict[str, Any]]] = {}


def checked_index(raw: bytes, url: str) -> dict[str, Any]:
    """Returns the parsed index of chunks that can be read.

    Raises:
        ManifestError: If they cannot.
    """
    try:
        index: dict[str, Any] = json.loads(raw)
        config, _ = index["config"], [entry["filename"] for entry in index["chunks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError("this is not LitData's index.json", url=url, found=error) from error
    refused = {
        "they are encrypted": config.get("encryption"),
        f"they are compressed by {config.get('compression_level')}": config.get("compression_level"),
        f"they are compressed with {config.get('compression')}": not _is_zstd(config.get("compression")),
        f"they are made for {config.get('item_loader')}": config.get("item_loader", "PyTreeLoader")
        not in ("PyTreeLoader", "TokensLoader"),
    }
    why = next((text for text, is_so in refused.items() if is_so), None)
    if why is not None:
        hint = 'write them without encryption and without compression, or with compression_level="chunk"'
        raise ManifestError(f"the chunks cannot be read: {why}", url=url, hint=hint)
    return index


def _is_zstd(compression: str | None) -> bool:
    return compression is None or compression.partition(":")[0] == "zstd"


# -------------------------------------------------------------------------------------------------- fields


def _names(config: Mapping[str, Any], url: str) -> list[str]:
    """One name for each leaf of a sample, from the tree that LitData keeps."""
    num_fields = len(config["data_format"])
    try:
        spec = json.loads(config["data_spec"])[1] if config.get("data_spec") else None
        names = list(_leaves(spec, "")) if spec is not None else []
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError("the tree of a sample cannot be read", url=url, found=error) from error
    names = names if names != [""] else ["value"]
    if len(names) != num_fields or len(set(names)) != num_fields:
        names = [str(place) for place in range(num_fields)]
    return names


def _leaves(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    if spec["type"] is None:
        yield path
        return
    children = spec["children_spec"]
    keys = json.loads(spec["context"]) if spec["type"].endswith("dict") else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _field(name: str, kind: str, url: str, shape: Any) -> Field:
    base, _, number = kind.partition(":")
    plain = {"int": "<i8", "float": "<f8", "bool": "?"}
    if base in plain:
        return numbers(name, plain[base], is_sized=False)
    if base in ("str", "text"):
        return text(name)
    if base in ("no_header_tensor", "no_header_numpy"):
        return lists(name, _dtype(int(number), base, name, url))
    if base in ("tensor", "numpy"):
        header = _tensor_header if base == "tensor" else _array_header
        return arrays(name, shape, header, _none)
    if base in _AS_BYTES:
        return data(name)
    hint = "leave custom serializers out, or write their values as bytes"
    raise ManifestError(f"column {name!r} is stored in an unknown way", url=url, found=kind, hint=hint)


def _dtype(number: int, base: str, name: str, url: str) -> str:
    known = _TENSORS if base.endswith("tensor") else _ARRAYS
    code = known[number] if 0 <= number < len(known) else ""
    if not code:
        what = f"column {name!r} has numbers of a type that cannot be read"
        raise ManifestError(what, url=url, found=f"{base}:{number}", hint="write real numbers of up to 64 bits")
    return code if code == "?" else "<" + code


def _tensor_header(value: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    number, num_dims = np.frombuffer(value, ">u4", 2).tolist()
    shape = np.frombuffer(value, ">u4", num_dims, 8).tolist()
    return np.dtype(_dtype(number, "tensor", "", "")), tuple(shape), 8 + 4 * num_dims


def _array_header(value: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    number, num_dims = np.frombuffer(value, "<u4", 2).tolist()
    shape = np.frombuffer(value, "<u4", num_dims, 8).tolist()
    return np.dtype(_dtype(number, "numpy", "", "")), tuple(shape), 8 + 4 * num_dims


def _none(values: Bytes, starts: Places, lengths: Places) -> None:
    """Arrays of several dimensions are made one by one."""
    del values, starts, lengths
