"""Tars: shuffled slices of a memory map with one copy into batches, and raw decompression of zstd frames."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from tools.bench.case import Case, Folders
from tools.bench.contract import collate_arrays
from tools.bench.data import tar_members
from tools.bench.measuring import Limit, Work
from tools.bench.workloads import workload

_MOST_SHARDS = 8  # enough for a rate; finding the members takes far longer than slicing them


class TarLimit(Limit):
    """Slices a mapped tar in a random order, its member table known; batches of the contract."""

    def __init__(self, folders: Folders) -> None:
        super().__init__(folders)
        self._tables: dict[Path, Sequence[tuple[int, int]]] = {}

    def work(self, case: Case) -> Work:
        """Reads the sample data of some shards once."""
        load = workload(case.workload)
        num_samples = num_bytes = 0
        for path in self.files(case.workload, "tar")[:_MOST_SHARDS]:
            if path not in self._tables:
                self._tables[path] = tar_members(path, load.suffix)
            table = self._tables[path]
            order = np.random.default_rng(0).permutation(len(table))
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                values = np.frombuffer(mapped, load.dtype)
                for begin in range(0, len(order), case.batch_size):
                    rows = order[begin : begin + case.batch_size].tolist()
                    num_bytes += _copied(values, [(row, *table[row]) for row in rows])
                    num_samples += len(rows)
                del values
        return Work(num_samples, num_bytes)


def _copied(values: npt.NDArray[Any], members: Sequence[tuple[int, int, int]]) -> int:
    size = values.itemsize
    batch = collate_arrays([(row, values[at // size : (at + length) // size]) for row, at, length in members])
    return batch["data"].numel() * size


class _Frames(NamedTuple):
    num_samples: int
    data: list[memoryview]


class ZstdLimit(Limit):
    """Decompresses the frames of T's ``.tar.zst`` files on ``num_threads`` threads, and does nothing with them."""

    package = "zstandard"

    @cached_property
    def _frames(self) -> _Frames:
        files = self.files("T", "tar.zst")
        offsets = np.load(self.folder("T", "memmap") / "offsets.npy", mmap_mode="r")
        shard_rows = (len(offsets) - 1) // len(files)
        chosen = files[:_MOST_SHARDS]
        frames = [frame for path in chosen for frame in _split_frames(path.read_bytes())]
        return _Frames(shard_rows * len(chosen), frames)

    def work(self, case: Case) -> Work:
        """Decompresses every frame once."""

        def decompress(frames: Sequence[memoryview]) -> int:
            decompressor = zstandard.ZstdDecompressor()
            return sum(len(decompressor.decompressobj().decompress(frame)) for frame in frames)

        shares = [self._frames.data[k :: case.num_threads] for k in range(case.num_threads)]
        with ThreadPoolExecutor(case.num_threads) as pool:
            return Work(self._frames.num_samples, sum(pool.map(decompress, shares)))


def _split_frames(data: bytes) -> list[memoryview]:
    """Finds the frames by decompressing once: where one ends, the next begins."""
    frames, rest = [], memoryview(data)
    while len(rest) > 0:
        frame = zstandard.ZstdDecompressor().decompressobj()
        frame.decompress(rest)
        end = len(rest) - len(frame.unused_data)
        frames.append(rest[:end])
        rest = rest[end:]
    return frames
