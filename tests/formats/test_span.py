from __future__ import annotations

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.formats._span import PIECE_NUM_BYTES, SpanFile

MIB = 1 << 20
OBJECT = np.random.default_rng(7).bytes(5 * MIB)


class Ranges:
    """An object that remembers what was fetched of it."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []

    def __call__(self, start: int, end: int) -> bytes:
        self.fetched.append((start, end))
        return OBJECT[start:end]


def opened(ranges: Ranges, start: int, end: int, num_streams: int) -> SpanFile:
    return SpanFile(ranges, start=start, end=end, num_bytes=len(OBJECT), num_streams=num_streams)


@settings(max_examples=40)
@given(
    st.integers(0, 2 * MIB),
    st.integers(2 * MIB, 5 * MIB),
    st.lists(st.tuples(st.integers(0, 5 * MIB + 10), st.integers(0, 3 * MIB)), max_size=6),
)
def test_it_reads_as_the_object_does_inside_the_span_and_outside(
    start: int, end: int, reads: list[tuple[int, int]]
) -> None:
    whole = io.BytesIO(OBJECT)
    with opened(Ranges(), start, end, num_streams=1000) as file:
        for position, num_bytes in reads:
            assert file.seek(position) == whole.seek(position)
            assert file.read(num_bytes) == whole.read(num_bytes)
            assert file.tell() == whole.tell()
        assert file.seek(-7, io.SEEK_END) == len(OBJECT) - 7
        assert file.read(100) == OBJECT[-7:]


def test_streams_side_by_side_fetch_every_piece_once() -> None:
    ranges = Ranges()
    with opened(ranges, 0, 4 * MIB, num_streams=100) as file:  # so many that a piece is 1 MiB
        for step in range(0, MIB, 1 << 16):
            for stream in range(4):
                file.seek(stream * MIB + step)
                assert file.read(1 << 16) == OBJECT[stream * MIB + step :][: 1 << 16]
    assert sorted(ranges.fetched) == [(stream * MIB, (stream + 1) * MIB) for stream in range(4)]


def test_a_small_span_is_one_request() -> None:
    ranges = Ranges()
    with opened(ranges, 100, 4 * MIB, num_streams=3) as file:
        file.seek(100)
        assert b"".join(file.read(MIB - 25) for _ in range(4)) == OBJECT[100 : 4 * MIB]
    assert ranges.fetched == [(100, 4 * MIB)]
    assert 4 * MIB < PIECE_NUM_BYTES
