"""Visits: the stretches of a lane that lie in one block. Whoever reads of a visit opens its block once for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardstream.order import EpochOrder, lane_sizes
from shardstream.packing import PackedOrder
from shardstream.permutation import Int64Array


@dataclass(frozen=True, eq=False)
class Visits:
    """All visits of an epoch, lane by lane, in the order in which each lane reads them.

    A lane end cuts a block in two visits, and so does the phase at which a lane begins. Of packed sequences, a block's
    are those that begin in it.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> order = EpochOrder(Manifest.synthetic(num_shards=1, blocks_per_shard=4, rows_per_block=6), 0, 0, lanes=3)
        >>> visits = Visits(order)
        >>> len(visits.begin), visits.lane.tolist(), visits.num_rows.tolist()
        (6, [0, 0, 1, 1, 2, 2], [6, 2, 4, 4, 2, 6])
    """

    order: EpochOrder | PackedOrder

    @cached_property
    def _lane_begin(self) -> Int64Array:
        sizes = lane_sizes(self.order.num_positions, self.order.lanes)
        return np.cumsum(sizes) - sizes

    @cached_property
    def begin(self) -> Int64Array:
        """int64[num_visits]: where each begins, the lanes' turns laid end to end."""
        sizes, begin = lane_sizes(self.order.num_positions, self.order.lanes), self._lane_begin
        edges = np.concatenate((self.order.line_start[:-1], begin[sizes > 0]))
        lane = np.searchsorted(begin, edges, side="right") - 1
        turn = edges - begin[lane]
        if self.order.lane_cut.phases is not None:
            turn = (turn - self.order.lane_cut.phases[lane]) % sizes[lane]
        return np.unique(np.concatenate((begin[sizes > 0], begin[lane] + turn)))

    @cached_property
    def lane(self) -> Int64Array:
        """int64[num_visits]: the lane of each."""
        return np.searchsorted(self._lane_begin, self.begin, side="right") - 1

    @cached_property
    def num_rows(self) -> Int64Array:
        """int64[num_visits]: how many turns each takes."""
        return np.diff(self.begin, append=self.order.num_positions)

    @cached_property
    def first_turn(self) -> Int64Array:
        """int64[num_visits]: the turn of its lane with which each begins."""
        return self.begin - self._lane_begin[self.lane]

    def of_positions(self, positions: Int64Array) -> Int64Array:
        """Returns the visit to which each position belongs: int64[num_positions]."""
        turn, lane = np.divmod(positions, self.order.lanes)
        return np.searchsorted(self.begin, self._lane_begin[lane] + turn, side="right") - 1
