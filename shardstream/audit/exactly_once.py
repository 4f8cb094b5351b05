"""What a span of a run must have consumed, as a number of samples and a checksum of their ids: in O(1) memory.

A whole epoch is the ids 0 to N - 1 whatever the order was, so it is the manifest that proves it. The plan is asked only
for what an attempt that began inside an epoch did not see, for what the tail leaves out or repeats, and for what a
window takes from the next epoch. The work is cut in shares, one a rank; their sum over the ranks is the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardstream.audit.windows import ExpectedWindow
from shardstream.consumed import id_checksum
from shardstream.mixture_plan import MixturePlan, logged_ids
from shardstream.plan import Plan

_AT_ONCE = 1 << 18
_MASK = (1 << 64) - 1

Place = tuple[int, int]  # (epoch, position)


@dataclass(frozen=True)
class IdSum:
    """A number of samples and the checksum of their ids, modulo 2^64; they add up."""

    num_samples: int = 0
    checksum: int = 0

    def __add__(self, other: IdSum) -> IdSum:
        return IdSum(self.num_samples + other.num_samples, (self.checksum + other.checksum) & _MASK)

    def __neg__(self) -> IdSum:
        return IdSum(-self.num_samples, -self.checksum & _MASK)

    def times(self, factor: int) -> IdSum:
        """Returns the sum of ``factor`` of it."""
        return IdSum(self.num_samples * factor, (self.checksum * factor) & _MASK)

    @classmethod
    def of(cls, ids: object) -> IdSum:
        """Returns the sum of ids, given as integers of any shape."""
        numbers = np.asarray(ids, np.int64)
        return cls(numbers.size, id_checksum(numbers))


def expected_sum(plan: Plan, start: Place, last: Place, end: Place, share: tuple[int, int] = (0, 1)) -> IdSum:
    """Returns this share of what the windows from ``start`` to ``end`` consume, over all ranks.

    Args:
        plan: The plan.
        start: Epoch and position where the span begins.
        last: Where its last window begins.
        end: Where the window after it begins: in a later epoch than ``last``.
        share: (index, number of shares); the shares add up to the whole.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> plan = Plan.make(Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=5), batch_size=2)
        >>> expected_sum(plan, (0, 0), (0, 4), (1, 0)) == IdSum.of(range(5))
        True
    """
    total = IdSum()
    for ids in _pieces(plan.num_positions, share):
        total += IdSum.of(ids)
    total = total.times(end[0] - start[0])
    for (epoch, position), sign in ((start, -1), (end, 1)):
        for positions in _pieces(position, share):
            total += IdSum.of(plan.sample_ids(epoch, positions)).times(sign)
    if share[0] == 0:
        window = ExpectedWindow(plan, *last)
        if plan.tail in ("drop", "truncate"):
            total += -IdSum.of(window.ids_behind())
        total += IdSum.of(window.repeated_ids())
    return total


def expected_of_mixture(plan: MixturePlan, begin: int, end: int, share: tuple[int, int] = (0, 1)) -> IdSum:
    """Returns this share of what the windows of a mixture from ``begin`` to ``end`` consume, over all ranks.

    Args:
        plan: The plan.
        begin: Position where the first window begins.
        end: Position where the last one ends.
        share: (index, number of shares); the shares add up to the whole.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> from shardstream.mixing import Mixture
        >>> web = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=5)
        >>> plan = MixturePlan.make(Mixture({"web": (web, 1)}), batch_size=5)
        >>> expected_of_mixture(plan, 0, 10) == IdSum.of([*range(5), *range(5)])
        True
    """
    total = IdSum()
    for positions in _pieces(end - begin, share):
        total += IdSum.of(logged_ids(plan, begin + positions))
    return total


def _pieces(number: int, share: tuple[int, int]) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Yields this share of 0 to number - 1, some at a time."""
    index, num_shares = share
    begin, end = number * index // num_shares, number * (index + 1) // num_shares
    for first in range(begin, end, _AT_ONCE):
        yield np.arange(first, min(first + _AT_ONCE, end))
