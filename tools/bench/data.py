"""Writes a workload's forms: Parquet, tar, ``.tar.zst``, a memory map, and the large blocks of the memory suite.

A form is written once; a file ``.complete`` in its folder says that it is there.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tools.bench.workloads import RawShard, Workload, label, raw_shard

FRAME_NUM_BYTES = 4 << 20
BIG_GROUP_ROWS = 1_000_000
BIG_TAR_NUM_BYTES = 2 << 30
MANY_SHARDS, MANY_BLOCKS = 10_000, 100
_MARK = ".complete"


def is_complete(folder: Path) -> bool:
    """Returns whether a form was written to its end."""
    return (folder / _MARK).exists()


def write_form(load: Workload, form: str, folder: Path) -> bool:
    """Writes one form of a workload into its folder, unless it is there.

    Returns:
        Whether it had to be written.
    """
    if is_complete(folder):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    if form == "memmap":
        _write_memmap(load, folder)
    else:
        for shard in range(load.num_shards):
            _SHARD_WRITERS[form](load, raw_shard(load, shard), folder / f"shard-{shard:05d}.{form}")
    (folder / _MARK).touch()
    return True


def _table(load: Workload, raw: RawShard) -> pa.Table:
    offsets = pa.array(raw.offsets.astype(np.int32))
    if load.name == "T":
        return pa.table({"id": raw.ids, "tokens": pa.ListArray.from_arrays(offsets, pa.array(raw.values))})
    buffers = [None, offsets.buffers()[1], pa.py_buffer(raw.values)]
    images = pa.BinaryArray.from_buffers(pa.binary(), len(raw.ids), buffers)
    return pa.table({"id": raw.ids, "image": images, "label": raw.ids % 1000})


def _write_parquet(load: Workload, raw: RawShard, path: Path) -> None:
    is_text = load.name == "T"
    compression = "zstd" if is_text else "none"  # random bytes do not shrink
    table = _table(load, raw)
    pq.write_table(table, path, row_group_size=load.group_rows, compression=compression, use_dictionary=is_text)


def _write_tar(load: Workload, raw: RawShard, path: Path) -> None:
    with path.open("wb") as file:
        _write_members(file, load, raw.samples(), lambda _: None)


def _write_tar_zst(load: Workload, raw: RawShard, path: Path) -> None:
    """Compresses whole samples into frames of about 4 MiB of tar, so that a reader can enter at any of them."""
    with path.open("wb") as file, zstandard.ZstdCompressor(3).stream_writer(file, closefd=False) as stream:
        frame_begin = 0

        def end_frame(position: int) -> None:
            nonlocal frame_begin
            if position - frame_begin >= FRAME_NUM_BYTES:
                stream.flush(zstandard.FLUSH_FRAME)
                frame_begin = position

        _write_members(stream, load, raw.samples(), end_frame)


def _write_members(
    file: IO[bytes] | zstandard.ZstdCompressionWriter,
    load: Workload,
    samples: Iterator[tuple[int, npt.NDArray[Any]]],
    after_sample: Callable[[int], None],
) -> None:
    """Writes a WebDataset tar: two members a sample; calls ``after_sample`` with the tar's length so far."""
    position = 0
    for sample_id, values in samples:
        about = json.dumps({"id": sample_id, "label": label(sample_id)}).encode()
        for suffix, payload in ((load.suffix, values.tobytes()), ("json", about)):
            info = tarfile.TarInfo(f"{sample_id:09d}.{suffix}")
            info.size = len(payload)
            member = info.tobuf(tarfile.USTAR_FORMAT) + payload + bytes(-len(payload) % tarfile.BLOCKSIZE)
            file.write(member)
            position += len(member)
        after_sample(position)
    file.write(bytes(2 * tarfile.BLOCKSIZE))


def _write_memmap(load: Workload, folder: Path) -> None:
    offsets, end = [np.zeros(1, np.int64)], 0
    with (folder / "flat.bin").open("wb") as file:
        for shard in range(load.num_shards):
            raw = raw_shard(load, shard)
            file.write(raw.values.tobytes())
            offsets.append(raw.offsets[1:] + end)
            end += int(raw.offsets[-1])
    np.save(folder / "offsets.npy", np.concatenate(offsets))


_SHARD_WRITERS: dict[str, Callable[[Workload, RawShard, Path], None]] = {
    "parquet": _write_parquet,
    "tar": _write_tar,
    "tar.zst": _write_tar_zst,
}
FORMS = ("parquet", "tar", "tar.zst", "memmap")


# ---------------------------------------------------------------------------------------------------- special layouts


def write_big_group(folder: Path, scale: float = 1.0) -> bool:
    """Writes one Parquet file with a single row group of 10^6 documents (1.2 GB)."""
    if is_complete(folder):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    num_rows = max(1000, round(BIG_GROUP_ROWS * scale))
    load = Workload("T", 1, num_rows, num_rows, np.int32, "tokens", "bin")
    _write_parquet(load, raw_shard(load, 0), folder / "shard-00000.parquet")
    (folder / _MARK).touch()
    return True


def write_big_frame(folder: Path, scale: float = 1.0) -> bool:
    """Writes one ``.tar.zst`` of 2 GB that is a single frame; nobody can enter it in the middle."""
    if is_complete(folder):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    num_samples = max(20, round(BIG_TAR_NUM_BYTES * scale / 50_000))
    load = Workload("I", num_samples // 20, 20, 20, np.uint8, "image", "jpg")

    def samples() -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for shard in range(load.num_shards):
            yield from raw_shard(load, shard).samples()

    with (folder / "shard-00000.tar.zst").open("wb") as file:
        compressor = zstandard.ZstdCompressor(1)
        with compressor.stream_writer(file, closefd=False) as stream:
            _write_members(stream, load, samples(), lambda _: None)
    (folder / _MARK).touch()
    return True


def write_tenfold(source: Path, folder: Path) -> None:
    """Gives every shard of a folder ten names in another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in sorted(source.glob("*.parquet")):
        for number in range(10):
            name = folder / f"{shard.stem}-{number}.parquet"
            if not name.exists():
                os.link(shard, name)


def write_many(folder: Path, scale: float = 1.0) -> bool:
    """Writes 10,000 names of one small Parquet file with 100 row groups: a manifest of 10^6 blocks, little data."""
    if is_complete(folder):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    load = Workload("T", 1, 10 * MANY_BLOCKS, 10, np.int32, "tokens", "bin")
    raw = raw_shard(load, 0)
    short = RawShard(raw.ids, np.arange(len(raw.ids) + 1) * 16, raw.values[: len(raw.ids) * 16])
    first = folder / "shard-00000.parquet"
    _write_parquet(load, short, first)
    for shard in range(1, max(4, round(MANY_SHARDS * scale))):
        name = folder / f"shard-{shard:05d}.parquet"
        if not name.exists():
            os.link(first, name)
    (folder / _MARK).touch()
    return True


def tar_members(path: Path, suffix: str) -> list[tuple[int, int]]:
    """Returns offset and length of the data of each member with a suffix; for the limits, which slice a tar."""
    with tarfile.open(path) as tar:
        return [(member.offset_data, member.size) for member in tar if member.name.endswith(f".{suffix}")]


def touch_pages(folder: Path) -> None:
    """Reads every file below a folder once, so that all repetitions find it in the page cache."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
