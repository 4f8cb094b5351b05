"""MosaicML Streaming's MDS shards, raw or compressed with zstd: a shard says itself which columns it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from shardstream.columns import Column, Dense, Objects
from shardstream.errors import ManifestError
from shardstream.formats._decompress import ForwardFile
from shardstream.formats._sample_fields import (
    Bytes,
    Field,
    Places,
    arrays,
    data,
    gathered,
    numbers,
    objects,
    shifted_lists,
    text,
)
from shardstream.formats._sample_table import SampleFields, SampleTableFormat, exactly

_NUMBERS = {
    **{kind: np.dtype(kind).newbyteorder("<") for kind in ("uint8", "uint16", "uint32", "uint64")},
    **{kind: np.dtype(kind).newbyteorder("<") for kind in ("int8", "int16", "int32", "int64")},
    **{kind: np.dtype(kind).newbyteorder("<") for kind in ("float16", "float32", "float64")},
}
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32"}
_DTYPES |= {64: "uint64", 65: "int64", 66: "float64"}  # the byte that an array of any type begins with
_CONFIG = ("column_names", "column_encodings", "column_sizes")


class MdsFormat(SampleTableFormat):
    """Reads MDS shards. Files are slices: numbers become arrays at once, images and pickles stay bytes.

    ==================================  =================================================================
    MDS encoding                        column
    ==================================  =================================================================
    int, int8 … float64                 numbers
    ndarray:<dtype>:<shape>             numbers, ``[n, *shape]``
    ndarray:<dtype>, ndarray            lists of numbers; arrays of more dimensions as numpy arrays
    str, json, str_decimal              text, as it is stored
    bytes, pil, jpeg, png, jpeg_array   bytes, as they are stored
    list[pil], list[jpeg], list[png]    lists of bytes
    str_int, str_float                  numbers of 64 bits
    pkl                                 bytes, with a warning: nothing is ever unpickled
    ==================================  =================================================================
    """

    name: ClassVar[str] = "mds"

    def format_name(self, url: str) -> str:
        """Returns ``"mds"`` or ``"mds.zst"``."""
        return "mds.zst" if url.split("?", 1)[0].lower().endswith((".zst", ".zstd")) else "mds"

    def config_of(self, stream: ForwardFile, offsets: Places, url: str, storage_options: Mapping[str, Any]) -> bytes:
        """Returns the columns as the shard names them, and the types of arrays that differ from value to value."""
        del storage_options
        found = json.loads(exactly(stream, int(offsets[0]) - stream.tell()))
        config = {key: found[key] for key in _CONFIG}
        if len({len(names) for names in config.values()}) != 1:
            raise ManifestError("the shard's columns are inconsistent", url=url, found=config)
        names = zip(config["column_names"], config["column_encodings"], strict=True)
        shaped = [name for name, encoding in names if encoding.startswith("ndarray") and encoding.count(":") <= 1]
        return self.with_shapes(config, shaped, stream, offsets, url)

    def fields_of(self, config: bytes, url: str) -> SampleFields:
        """Returns the columns; see the table above."""
        read = json.loads(config)
        names, encodings, sizes = (read[key] for key in _CONFIG)
        fields = []
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            field = _field(name, encoding, url, read.get("shapes", {}).get(name))
            if field.num_bytes != size:
                what = f"column {name!r} is {encoding}, but its size is another"
                raise ManifestError(what, url=url, expected=field.num_bytes, found=size)
            fields.append(field)
        pickled = [name for name, encoding in zip(names, encodings, strict=True) if encoding == "pkl"]
        warnings = [
            f"column {name!r} is pickled: its values come as bytes, since unpickling may run any code"
            for name in pickled
        ]
        return SampleFields(fields, warnings=tuple(warnings))


def _spelled(parse: type[int | float]) -> Any:
    """Numbers written as text."""
    base = objects("", pa.string(), parse)  # int() and float() take bytes, too
    dtype = np.int64 if parse is int else np.float64

    def make(values: Bytes, starts: Places, lengths: Places) -> Column:
        column = base.make(values, starts, lengths)
        assert isinstance(column, Objects)  # noqa: S101 - what ``objects`` makes
        try:
            return Dense(np.array(column.values, dtype))
        except OverflowError as error:
            raise ValueError("a number does not fit 64 bits") from error

    return make


def _files(value: bytes) -> list[bytes]:
    """A list of files: four bytes for later, their number, their sizes, their bytes."""
    count = int.from_bytes(value[4:8], "little")
    sizes = np.frombuffer(value, "<u4", count, 8).astype(np.int64)
    ends = 8 + 4 * count + np.cumsum(sizes)
    if count and ends[-1] != len(value):
        raise ValueError("the sizes of a list's files do not add up")
    return [value[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


_FIELDS: Mapping[str, Callable[[str], Field]] = {
    **{kind: partial(numbers, dtype=dtype) for kind, dtype in _NUMBERS.items()},
    "int": partial(numbers, dtype=_NUMBERS["int64"]),
    **dict.fromkeys(("str", "json", "str_decimal"), text),
    **dict.fromkeys(("bytes", "pil", "jpeg", "png", "jpeg_array", "pkl"), data),
    "str_int": lambda name: Field(name, pa.int64(), _spelled(int)),
    "str_float": lambda name: Field(name, pa.float64(), _spelled(float)),
    **dict.fromkeys(
        ("list[pil]", "list[jpeg]", "list[png]"),
        partial(objects, arrow_type=pa.list_(pa.binary()), decode=_files),
    ),
}


def _field(name: str, encoding: str, url: str, shape: tuple[str, int] | None) -> Field:
    kind, _, form = encoding.partition(":")
    if kind == "ndarray":
        return _array_field(name, form, url, shape)
    if encoding not in _FIELDS:
        hint = "write it with another encoding"
        raise ManifestError(f"column {name!r} has an unknown encoding", url=url, found=encoding, hint=hint)
    return _FIELDS[encoding](name)


# ---------------------------------------------------------------------------------------------------- arrays


def _array_field(name: str, form: str, url: str, of_first: tuple[str, int] | None) -> Field:
    """``<dtype>:<shape>``, ``<dtype>`` or nothing: what is not said here is said by each value."""
    kind, _, shape = form.partition(":")
    if kind and kind not in _NUMBERS:
        raise ManifestError(f"column {name!r} has an unknown type", url=url, found=kind)
    if shape:
        return numbers(name, _NUMBERS[kind], [int(size) for size in shape.split(",")])
    known = _NUMBERS[kind] if kind else None

    def header(value: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        begin = 0 if known is not None else 1
        found = known if known is not None else _NUMBERS[_DTYPES[value[0]]]
        num_dims, size_num_bytes = value[begin] >> 2, 1 << (value[begin] & 3)
        sizes = np.frombuffer(value, f"<u{size_num_bytes}", num_dims, begin + 1)
        return found, tuple(sizes.tolist()), begin + 1 + num_dims * size_num_bytes

    return arrays(
        name, of_first or ((known.name, 1) if known is not None else None), header, partial(_flat, known=known)
    )


def _flat(values: Bytes, starts: Places, lengths: Places, known: np.dtype[Any] | None) -> Column | None:
    """All arrays at once, if they have one dimension and one type."""
    begin = 0 if known is not None else 1
    heads = gathered(values, starts, begin + 1)
    form = heads[:, begin]
    if np.any(form >> 2 != 1) or np.any(heads[:, 0] != heads[0, 0]) * begin:
        return None
    dtype = known if known is not None else _NUMBERS[_DTYPES[int(heads[0, 0])]]
    return shifted_lists(values, starts, lengths, begin + 1 + (1 << (form & 3).astype(np.int64)), dtype)
