"""What the design says of each tail, written down a second time: the audit holds ``Deal`` to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardstream.deal import Deal
from shardstream.permutation import Int64Array


class ExpectedTail(NamedTuple):
    """What the last, partial window of an epoch must come to."""

    num_padding: int
    num_dropped: int
    num_repeated: int
    num_ahead: int


def expected_tail(deal: Deal) -> ExpectedTail:
    """Returns what the tail adds to and leaves out of the positions from ``deal.start`` on.

    Example:
        >>> expected_tail(Deal(num_positions=23, world_size=4, batch_size=2, tail="pad", lanes=4))
        ExpectedTail(num_padding=1, num_dropped=0, num_repeated=0, num_ahead=0)
        >>> expected_tail(Deal(num_positions=23, world_size=4, batch_size=2, tail="drop", lanes=4)).num_dropped
        7
    """
    global_batch = deal.world_size * deal.batch_size * deal.accumulate
    left = (deal.num_positions - deal.start) % global_batch
    if left == 0:
        return ExpectedTail(0, 0, 0, 0)
    by_tail = {
        "pad": ExpectedTail(-left % (deal.world_size * deal.batch_size), 0, 0, 0),
        "drop": ExpectedTail(0, left, 0, 0),
        "uneven": ExpectedTail(0, 0, 0, 0),
        "continue": ExpectedTail(0, 0, 0, global_batch - left),
        "repeat": ExpectedTail(0, 0, -left % deal.world_size, 0),
        "truncate": ExpectedTail(0, left % deal.world_size, 0, 0),
    }
    return by_tail[deal.tail]


def expected_reads(deal: Deal, first: int, last: int) -> Int64Array:
    """Returns how often each position ``first`` .. ``last - 1`` must be read as a real sample: int64[last - first].

    From N on (``tail="continue"``) they belong to the next epoch.
    """
    tail = expected_tail(deal)
    positions = np.arange(first, last)
    end = deal.num_positions - tail.num_dropped + tail.num_ahead
    reads = ((positions >= deal.start) & (positions < end)).astype(np.int64)
    every, more = divmod(tail.num_repeated, max(deal.num_positions, 1))
    return reads + (every + (positions < more)) * (positions < deal.num_positions)
