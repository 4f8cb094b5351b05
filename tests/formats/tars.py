"""Tars as tests write and read them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardstream.formats import IndexOptions, ShardIndex
from shardstream.formats.tar import TarFormat
from tests.formats.conformance import Row, indexed, read_all

Members = Iterable[tuple[str, bytes | None]]


def tar_bytes(members: Members, kind: int = tarfile.USTAR_FORMAT, *, has_end: bool = True, **options: Any) -> bytes:
    """A tar of these members (a folder where there is no data), 512-byte blocks and two of zeros."""
    file = io.BytesIO()
    with tarfile.TarFile(
        fileobj=file, mode="w", format=kind, encoding="utf-8", errors="surrogateescape", **options
    ) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            if kind == tarfile.PAX_FORMAT:
                info.pax_headers = {"comment": f"about {name[-8:]}"}
            archive.addfile(info, io.BytesIO(data or b""))
        end = archive.offset
    return file.getvalue()[:end] + b"\0" * 1024 * has_end


def payload(name: str, num_bytes: int) -> bytes:
    return np.random.default_rng(list(name.encode())).bytes(num_bytes)


def index_of(path: Path, data: bytes, **options: Any) -> ShardIndex:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return TarFormat().index_shard(str(path), IndexOptions(**options), {})


def rows_in(path: Path, data: bytes) -> list[Row]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return read_all(indexed(path))


def row(key: str, *, fields: Sequence[str] = ("jpg", "txt"), **values: bytes) -> Row:
    return {"__key__": key, **{name: values.get(name) for name in fields}}


def three_samples() -> tuple[bytes, int, list[Row]]:
    """A tar of three samples, where the third's first header begins, and the samples."""
    values = [{"jpg": payload(f"{n}", 1500 + n), "txt": b"t%d" % n} for n in range(3)]
    members = [(f"{n:04d}.{name}", value) for n, fields in enumerate(values) for name, value in fields.items()]
    two = tar_bytes(members[:4], has_end=False)
    return tar_bytes(members), len(two), [row(f"{n:04d}", **fields) for n, fields in enumerate(values)]
