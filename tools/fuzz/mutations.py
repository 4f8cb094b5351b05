"""Structured damage: what breaks readers of binary and text formats, drawn by hypothesis so that it can be shrunk."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

_EDGES = [0, 1, -1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64]
_TOKENS = [
    *(b"", b"\0", b"\xff", b"\n", b'"', b"{", b"}", b"[", b"]", b",", b":", b"../", b"/", b"%", b"\\u0000", b"\\ud800"),
    *(
        b"null",
        b"true",
        b"1e999",
        b"-0",
        b"NaN",
        b"{}",
        b"[[[[[[[[",
        b"{1..9}",
        b"{a,b}",
        b"*",
        b"**",
        b"!!python/name:os",
    ),
    *(b"PAR1", b"ustar\0", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", b"\x1f\x8b\x08", b"GNU.sparse.size=9\n"),
]


def _numbers() -> list[bytes]:
    made = [str(edge).encode() for edge in _EDGES]
    for width in (2, 4, 8):
        made += [(edge % 2 ** (8 * width)).to_bytes(width, order) for edge in _EDGES for order in ("little", "big")]
    return [*made, b"77777777777\0", b"\x80\0\0\0\x7f\xff\xff\xff", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]


_PIECES = list(dict.fromkeys([*_TOKENS, *_numbers()]))


def damaged(corpus: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Returns inputs that are good ones with some damage.

    Args:
        corpus: Good inputs, and parts for others.
    """
    place = st.floats(0, 1, allow_nan=False)
    cut = st.tuples(st.just("cut"), place, place, st.just(b""))
    put = st.tuples(st.sampled_from(["over", "into"]), place, place, st.sampled_from(_PIECES) | st.binary(max_size=8))
    swap = st.tuples(st.just("over"), place, place, st.sampled_from(list(corpus)).map(lambda data: data[:700]))
    again = st.tuples(st.just("again"), place, place, st.just(b""))
    edits = st.lists(put | put | put | cut | swap | again, max_size=6)
    return st.builds(_edited, st.sampled_from(list(corpus)), edits)


def _edited(data: bytes, edits: Sequence[tuple[str, float, float, bytes]]) -> bytes:
    for kind, first, second, piece in edits:
        begin, end = sorted((int(first * len(data)), int(second * len(data))))
        if kind == "cut":
            data = data[:begin] + data[end:]
        elif kind == "over":
            data = data[:begin] + piece + data[begin + len(piece) :]
        elif kind == "into":
            data = data[:begin] + piece + data[begin:]
        elif len(data) < 1 << 16:
            data = data[:end] + data[begin:end] + data[end:]
    return data
