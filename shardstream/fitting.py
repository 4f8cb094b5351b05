"""Whole documents into sequences of bounded length: best fit decreasing, and first fit to compare it with.

How many sequences a set of documents takes depends on their lengths alone, never on the order in which they come; so
it can be counted when a data set is indexed, whatever the shuffle of an epoch will be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from shardstream.permutation import Int64Array

TOKENS_DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")
"""Types that tokens are stored as where they are raw bytes."""


class Parts(NamedTuple):
    """Documents cut where they are too long for one sequence. One entry a part, documents in the order given."""

    document: Int64Array
    """int64[num_parts]: index of the document."""
    offset: Int64Array
    """int64[num_parts]: where in it the part begins."""
    length: Int64Array
    """int64[num_parts], tokens."""


def cut_documents(lengths: Int64Array, sequence_length: int) -> Parts:
    """Cuts documents of more than ``sequence_length + 1`` tokens; others stay whole, and empty ones have no part.

    A sequence has T inputs and T targets, which overlap: T + 1 tokens. The parts of a long document overlap by one
    token in the same way, so that each of its tokens but the first is a target once.

    Args:
        lengths: int64[num_documents], tokens of each.
        sequence_length: T.

    Example:
        >>> parts = cut_documents(np.array([5, 0, 9, 10]), 4)
        >>> list(zip(parts.document.tolist(), parts.offset.tolist(), parts.length.tolist()))
        [(0, 0, 5), (2, 0, 5), (2, 4, 5), (3, 0, 5), (3, 4, 5), (3, 8, 2)]
    """
    num_parts = np.where(lengths > 0, np.maximum(1, -(-(lengths - 1) // sequence_length)), 0)
    document = np.repeat(np.arange(len(lengths)), num_parts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    offset = within * sequence_length
    return Parts(document, offset, np.minimum(lengths[document] - offset, sequence_length + 1))


def best_fit(lengths: Int64Array, capacity: int) -> Int64Array:
    """Puts parts into sequences, longest first, each where it leaves the least room; into a new one if none has room.

    Where several sequences have the least room, the first opened one takes it.

    Args:
        lengths: int64[n], each 1 .. ``capacity``.
        capacity: Tokens of a sequence.

    Returns:
        int64[n], the sequence of each part, numbered from 0. Parts of one length are taken in the order given.

    Example:
        >>> best_fit(np.array([3, 6, 4, 2, 5]), 8).tolist()
        [1, 0, 2, 0, 1]
    """
    sequences = np.empty(len(lengths), np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    rooms: list[int] = []  # distinct, sorted
    with_room: dict[int, list[int]] = {}
    num_sequences = 0
    for place, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        index = bisect_left(rooms, length)
        if index == len(rooms):
            sequence, room = num_sequences, capacity
            num_sequences += 1
        else:
            room = rooms[index]
            sequence = heappop(with_room[room])
            if not with_room[room]:
                del rooms[index], with_room[room]
        sequences[place] = sequence
        if left := room - length:
            if left not in with_room:
                insort(rooms, left)
            heappush(with_room.setdefault(left, []), sequence)
    return sequences


def num_best_fit(lengths: Int64Array, sequence_length: int) -> int:
    """Returns how many sequences documents take, best fit decreasing, those too long for one being cut.

    Args:
        lengths: int64[num_documents], tokens of each; in any order.
        sequence_length: T.

    Example:
        >>> num_best_fit(np.array([3, 6, 4, 2, 5, 0]), 7)
        3
    """
    sequences = best_fit(cut_documents(lengths, sequence_length).length, sequence_length + 1)
    return int(sequences.max(initial=-1)) + 1


def num_first_fit(lengths: Int64Array, sequence_length: int) -> int:
    """Returns how many sequences first fit would take: each document, as it comes, into the first with room for it.

    Args:
        lengths: int64[num_documents], tokens of each, in the order in which they come.
        sequence_length: T.

    Example:
        >>> num_first_fit(np.array([3, 2, 6, 4, 5]), 7), num_best_fit(np.array([3, 2, 6, 4, 5]), 7)
        (4, 3)
    """
    parts = cut_documents(lengths, sequence_length).length
    rooms = np.full(len(parts), sequence_length + 1)
    num_sequences = 0
    for length in parts.tolist():
        first = int(np.argmax(rooms[: num_sequences + 1] >= length))
        rooms[first] -= length
        num_sequences = max(num_sequences, first + 1)
    return num_sequences


def num_unpacked(lengths: Int64Array, sequence_length: int) -> int:
    """Returns how many sequences documents take that share none with another, those too long for one being cut.

    Args:
        lengths: int64[num_documents], tokens of each; in any order.
        sequence_length: T.

    Example:
        >>> num_unpacked(np.array([3, 6, 4, 2, 5, 0, 9]), 7)
        7
    """
    return len(cut_documents(lengths, sequence_length).length)


def sequence_counts_name(sequence_length: int, *, has_eos: bool, mode: str = "whole") -> str:
    """Returns the name of the manifest's list of sequences per run, of whole documents or of unpacked ones.

    Example:
        >>> sequence_counts_name(2048, has_eos=True), sequence_counts_name(2048, has_eos=False, mode="unpacked")
        ('sequences.2048+eos', 'parts.2048')
    """
    kind = "sequences" if mode == "whole" else "parts"
    return f"{kind}.{sequence_length}{'+eos' if has_eos else ''}"
