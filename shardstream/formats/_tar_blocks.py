"""Cutting the samples of a tar into blocks: what can be opened by itself, and in which runs it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardstream.formats._decompress import Frame
from shardstream.formats._shards import run_rows_of


@dataclass(frozen=True, eq=False)
class TarBlocks:
    """The b blocks of a tar.

    Attributes:
        rows: int32[b], samples of each block.
        run_rows: int32[b], samples per run.
        offset: int64[b], where the block's bytes begin in the file.
        num_bytes: int64[b], how many bytes of the file it takes.
        data_offset: int64[b], where in the decoded stream decoding begins.
    """

    rows: npt.NDArray[np.int32]
    run_rows: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    num_bytes: npt.NDArray[np.int64]
    data_offset: npt.NDArray[np.int64]


def cut_blocks(
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    frames: Sequence[Frame] | None,
    file_num_bytes: int,
    run_num_bytes: int,
) -> TarBlocks:
    """Groups samples into blocks.

    In a plain tar a block is whole samples up to ``run_num_bytes``, and one run. In a compressed one it begins at the
    first sample that begins in a frame, so that no frame is decoded for two blocks but for a sample across their
    border; small frames are joined up to ``run_num_bytes``, large ones are cut into runs. One frame is one block.

    Args:
        starts: int64[n], where each sample's first data byte is in the decoded stream.
        ends: int64[n], the end of its last.
        frames: The frames of the file, or None for a plain tar.
        file_num_bytes: Size of the file.
        run_num_bytes: Wanted decoded size of a run.

    Example:
        >>> starts = np.array([512, 2048, 4096])
        >>> ends = starts + 1000
        >>> cut_blocks(starts, ends, None, 6144, 3000).rows.tolist()
        [2, 1]
        >>> cut_blocks(starts, ends, [Frame(0, 0)], 900, 3000).rows.tolist()
        [3]
    """
    num_samples = len(starts)
    frame_data = np.array([frame.data_offset for frame in frames or ()], np.int64)
    frame_offset = np.array([*(frame.offset for frame in frames or ()), file_num_bytes], np.int64)
    frame_of_sample = np.searchsorted(frame_data, starts, side="right") - 1
    may_begin = np.diff(frame_of_sample, prepend=-1) > 0 if frames is not None else np.ones(num_samples, np.bool_)
    first = _first_samples(starts, ends, may_begin, run_num_bytes)
    end = np.append(first[1:], num_samples)[: len(first)]
    rows = (end - first).astype(np.int32)
    sample_start, sample_end = starts[first], ends[end - 1]
    if frames is None:
        offset, num_bytes, data_offset = sample_start, sample_end - sample_start, sample_start
    else:
        last_byte = np.maximum(sample_start, sample_end - 1)
        frame_end = np.searchsorted(frame_data, last_byte, side="right")
        offset, data_offset = frame_offset[frame_of_sample[first]], frame_data[frame_of_sample[first]]
        num_bytes = frame_offset[frame_end] - offset
    sizes = sample_end - sample_start
    run_rows = [run_rows_of(int(n), int(size), run_num_bytes) for n, size in zip(rows, sizes, strict=True)]
    return TarBlocks(rows, np.array(run_rows, np.int32), offset, num_bytes, data_offset)


def _first_samples(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], may_begin: npt.NDArray[np.bool_], run_num_bytes: int
) -> npt.NDArray[np.int64]:
    """First sample of each block: a sample that would make the block too large begins a new one where it may."""
    first: list[int] = [0] if len(starts) else []
    for sample in np.flatnonzero(may_begin)[1:].tolist():
        if ends[sample] - starts[first[-1]] > run_num_bytes:
            first.append(sample)
    return np.array(first, np.int64)
