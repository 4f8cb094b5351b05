from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.formats._span import PIECE_NUM_BYTES, SpanFile, joined, pieces

MIB = 1 << 20
OBJECT = np.random.default_rng(7).bytes(5 * MIB)


class Source:
    """An object that remembers what was fetched of it, and what was asked for ahead."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int]] = []
        self.asked: Counter[tuple[int, int]] = Counter()
        self.all_asked: list[tuple[int, int]] = []

    def read(self, start: int, end: int) -> bytes:
        self.fetched.append((start, end))
        return OBJECT[start:end]

    def ahead(self, start: int, end: int) -> None:
        self.asked[start, end] += 1
        self.all_asked.append((start, end))

    def forget(self, start: int, end: int) -> None:
        self.asked[start, end] -= 1


def opened(source: Source, start: int, end: int, num_streams: int, *, is_streamed: bool = True) -> SpanFile:
    spans = [(start, end)]
    return SpanFile(source, spans, num_bytes=len(OBJECT), num_streams=num_streams, is_streamed=is_streamed)


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
    with opened(Source(), start, end, num_streams=1000) as file:
        for position, num_bytes in reads:
            assert file.seek(position) == whole.seek(position)
            assert file.read(num_bytes) == whole.read(num_bytes)
            assert file.tell() == whole.tell()
        assert file.seek(-7, io.SEEK_END) == len(OBJECT) - 7
        assert file.read(100) == OBJECT[-7:]


def test_streams_side_by_side_fetch_every_piece_once() -> None:
    source = Source()
    with opened(source, 0, 4 * MIB, num_streams=100) as file:  # so many that a piece is 1 MiB
        for step in range(0, MIB, 1 << 16):
            for stream in range(4):
                file.seek(stream * MIB + step)
                assert file.read(1 << 16) == OBJECT[stream * MIB + step :][: 1 << 16]
    assert sorted(source.fetched) == [(stream * MIB, (stream + 1) * MIB) for stream in range(4)]


def test_a_small_span_is_one_request() -> None:
    source = Source()
    with opened(source, 100, 4 * MIB, num_streams=3) as file:
        file.seek(100)
        assert b"".join(file.read(MIB - 25) for _ in range(4)) == OBJECT[100 : 4 * MIB]
    assert source.fetched == [(100, 4 * MIB)]
    assert 4 * MIB < PIECE_NUM_BYTES


def test_what_is_streamed_asks_for_one_piece_ahead_and_takes_it_back_when_closed() -> None:
    source = Source()
    with opened(source, 0, 4 * MIB, num_streams=100) as file:
        file.read(10)
        assert source.all_asked == [(MIB, 2 * MIB)]
        file.seek(MIB)
        file.read(10)
        assert source.all_asked == [(MIB, 2 * MIB), (2 * MIB, 3 * MIB)]
        assert +source.asked == Counter({(2 * MIB, 3 * MIB): 1})
    assert not +source.asked


def test_what_is_read_at_once_asks_for_all_of_it_first() -> None:
    source = Source()
    with opened(source, 0, 4 * MIB, num_streams=100, is_streamed=False) as file:
        assert source.all_asked == [(k * MIB, (k + 1) * MIB) for k in range(4)]
        for position in (3 * MIB, 0, 2 * MIB, MIB, 3 * MIB + 7):
            file.seek(position)
            file.read(100)
    assert len(source.fetched) == 4, "each piece once, in any order"
    assert not +source.asked


@given(
    st.lists(st.tuples(st.integers(1, 1 << 27), st.integers(1, 40 << 20)), min_size=1, max_size=8), st.integers(1, 99)
)
def test_pieces_are_the_spans_in_order_and_none_is_large(gaps_and_sizes, num_streams) -> None:
    spans, at = [], 0
    for gap, size in gaps_and_sizes:
        spans.append((at + gap, at + gap + size))
        at += gap + size
    made = pieces(joined(spans), num_streams)
    assert joined(made) == joined(spans)
    assert all(0 < end - start <= PIECE_NUM_BYTES for start, end in made)
    assert all(one[1] <= other[0] for one, other in pairwise(made))
    assert len(made) <= len(spans) + sum(size for _, size in gaps_and_sizes) * (num_streams + 1) / (32 << 20) + at / MIB
