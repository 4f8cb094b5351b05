"""Dealing: which positions of the order each rank reads in each micro-batch. Pure arithmetic.

The global batch is the unit. A window holds the same positions however the global batch is written as
ranks x micro-batch x accumulation; how it is split among ranks is chosen for reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shardstream.errors import PlanError
from shardstream.permutation import Int64Array

Tail: TypeAlias = Literal["pad", "drop", "uneven", "continue", "repeat", "truncate"]
TAILS: tuple[str, ...] = get_args(Tail)
PARITY_TAILS = ("repeat", "truncate")

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class Part(NamedTuple):
    """What one rank reads of a window (or of a micro-batch)."""

    positions: Int64Array
    """int64[n]; from N on (``tail="continue"`` only) they belong to the next epoch: N + g is its position g."""
    is_padding: BoolArray
    """bool[n]: True where a row only fills the micro-batch and weighs nothing."""


def _pad(deal: Deal, positions: Int64Array) -> Part:
    """Weight 0, so any row will do: those of the same window, which are open anyway."""
    num_padding = -len(positions) % (deal.world_size * deal.batch_size)
    filled = np.concatenate((positions, positions[np.arange(num_padding) % len(positions)]))
    return Part(filled, np.arange(len(filled)) >= len(positions))


def _repeat(deal: Deal, positions: Int64Array) -> Part:
    num_repeated = -len(positions) % deal.world_size
    return _real(np.concatenate((positions, np.arange(num_repeated) % deal.num_positions)))


def _truncate(deal: Deal, positions: Int64Array) -> Part:
    return _real(positions[: len(positions) - len(positions) % deal.world_size])


def _continue(deal: Deal, positions: Int64Array) -> Part:
    return _real(positions[0] + np.arange(deal.global_batch))


def _real(positions: Int64Array) -> Part:
    return Part(positions, np.zeros(len(positions), np.bool_))


# What each tail makes of the last, partial window of an epoch. A new tail is one function and one line.
_TAILS: dict[str, Callable[[Deal, Int64Array], Part]] = {
    "pad": _pad,
    "drop": lambda _, positions: _real(positions[:0]),
    "continue": _continue,
    "uneven": lambda _, positions: _real(positions),
    "repeat": _repeat,
    "truncate": _truncate,
}


@dataclass(frozen=True)
class Deal:
    """How positions ``start`` .. ``num_positions - 1`` of an epoch are dealt to ranks, window by window.

    Attributes:
        num_positions: N, positions of an epoch.
        world_size: P, number of data-parallel ranks.
        batch_size: Samples of a micro-batch (one rank, one forward).
        accumulate: Micro-batches of a rank in a window.
        tail: What happens to the last, partial window of the epoch.
        lanes: Lanes of the order.
        start: Position where the first window begins.

    Raises:
        PlanError: If a number is not positive, or the tail does not go with the lanes.

    Example:
        >>> deal = Deal(num_positions=7, world_size=3, batch_size=1, accumulate=1, tail="repeat", lanes=1)
        >>> [deal.part(2, rank).positions.tolist() for rank in range(3)]
        [[6], [0], [1]]
        >>> deal.num_windows, deal.num_micro_batches(0)
        (3, 3)
    """

    num_positions: int
    world_size: int
    batch_size: int
    accumulate: int = 1
    tail: str = "pad"
    lanes: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "accumulate", "lanes"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1", found=getattr(self, name))
        if self.num_positions < 0:
            raise PlanError("num_positions must not be negative", found=self.num_positions)
        if self.tail not in TAILS:
            raise PlanError("unknown tail", expected=" or ".join(TAILS), found=repr(self.tail))
        if self.tail in PARITY_TAILS and self.lanes > 1:
            hint = "use shuffle=False or 'torch', or tail='pad' or 'drop'"
            raise PlanError(f"tail={self.tail!r} is DistributedSampler's and has one lane", found=self.lanes, hint=hint)
        if not 0 <= self.start <= self.num_positions:
            raise PlanError("the start lies outside the epoch", expected=f"0..{self.num_positions}", found=self.start)

    # ------------------------------------------------------------------------------------------------ counts

    @property
    def global_batch(self) -> int:
        """G: samples of one window over all ranks."""
        return self.world_size * self.batch_size * self.accumulate

    @property
    def num_whole_windows(self) -> int:
        """Windows that are full, up to the end of the epoch."""
        return (self.num_positions - self.start) // self.global_batch

    @property
    def num_left(self) -> int:
        """Positions of the last, partial window: 0 if there is none."""
        return (self.num_positions - self.start) % self.global_batch

    @property
    def num_windows(self) -> int:
        """Windows (optimizer steps) to the end of the epoch, the last, partial one included where it is not dropped."""
        return self.num_whole_windows + bool(len(self._tail.positions))

    def num_micro_batches(self, rank: int) -> int:
        """Returns the number of micro-batches of a rank up to the end of the epoch, over all its workers."""
        tail = len(self.part(self.num_whole_windows, rank).positions)
        return self.num_whole_windows * self.accumulate + -(-tail // self.batch_size)

    @property
    def num_padding(self) -> int:
        """Rows that only fill micro-batches, over all ranks."""
        return int(self._tail.is_padding.sum())

    @property
    def num_dropped(self) -> int:
        """Positions of this pass that no rank reads."""
        if self.tail not in ("drop", "truncate"):
            return 0
        return self.num_left - len(self._tail.positions)

    @property
    def num_repeated(self) -> int:
        """Positions that are read twice and counted as real (``tail="repeat"``)."""
        return len(self._tail.positions) - self.num_left if self.tail == "repeat" else 0

    # ------------------------------------------------------------------------------------------------ positions

    def window(self, window: int) -> Part:
        """Returns all positions of a window over all ranks, in the order in which they are dealt.

        Args:
            window: Index of the window, counted from ``start``.

        Returns:
            The positions and their padding flags; empty behind the last window.
        """
        if window < self.num_whole_windows:
            first = self.start + window * self.global_batch
            return self._dealt(_real(np.arange(first, first + self.global_batch)))
        return self._dealt(self._tail if window == self.num_whole_windows else _real(np.empty(0, np.int64)))

    def part(self, window: int, rank: int) -> Part:
        """Returns what a rank reads of a window, in order: its micro-batches are consecutive pieces of ``batch_size``.

        Args:
            window: Index of the window, counted from ``start``.
            rank: Data-parallel rank.

        Raises:
            PlanError: If there is no such rank.
        """
        if window < self.num_whole_windows:
            return _real(self.parts(rank, window, 1)[0])
        whole = self.window(window)
        share = self._share(len(whole.positions), rank)
        return Part(whole.positions[share], whole.is_padding[share])

    def parts(self, rank: int, first_window: int, num_windows: int) -> Int64Array:
        """Returns what a rank reads of several whole windows at once: int64[num_windows, batch_size * accumulate].

        Args:
            rank: Data-parallel rank.
            first_window: Index of the first of them, counted from ``start``.
            num_windows: How many, all of them whole.

        Raises:
            PlanError: If there is no such rank.
        """
        self._check_rank(rank)
        share = self.batch_size * self.accumulate
        windows = np.arange(first_window, first_window + num_windows, dtype=np.int64)
        first: Int64Array = self.start + windows[:, None] * self.global_batch
        if self.lanes == 1:
            return first + rank + self.world_size * np.arange(share)
        if self.global_batch % self.lanes == 0:
            # Each lane has G/L positions of every window, so the lane order is plain arithmetic.
            lane, turn = np.divmod(np.arange(rank * share, (rank + 1) * share), self.global_batch // self.lanes)
            dealt: Int64Array = first + (lane - first) % self.lanes + turn * self.lanes
            return dealt
        positions = first + np.arange(self.global_batch)
        by_lane = _lane_order(positions, self.lanes)
        return np.take_along_axis(positions, by_lane[:, rank * share : (rank + 1) * share], axis=1)

    @cached_property
    def _tail(self) -> Part:
        """The last, partial window: what its tail makes of the positions that are left."""
        left = np.arange(self.num_positions - self.num_left, self.num_positions)
        return _TAILS[self.tail](self, left) if self.num_left else _real(left)

    def _dealt(self, window: Part) -> Part:
        """Sorts a window by lane (stable: then by position), so that a rank stays on its own lanes."""
        if self.lanes == 1:
            return window
        by_lane = _lane_order(window.positions % max(self.num_positions, 1), self.lanes)
        return Part(window.positions[by_lane], window.is_padding[by_lane])

    def _check_rank(self, rank: int) -> None:
        """Another rank's rows, silently read twice, would be the alternative."""
        if not 0 <= rank < self.world_size:
            raise PlanError("no such rank", expected=f"0..{self.world_size - 1}", found=rank)

    def _share(self, num_rows: int, rank: int) -> slice:
        self._check_rank(rank)
        if self.lanes == 1:
            return slice(rank, None, self.world_size)
        share, more = divmod(num_rows, self.world_size)
        begin = share * rank + min(rank, more)
        return slice(begin, begin + share + (rank < more))

    def micro_batch(self, rank: int, index: int) -> MicroBatch:
        """Returns the ``index``-th micro-batch of a rank, counted from the start of this pass."""
        window, micro = divmod(index, self.accumulate)
        part = self.part(window, rank)
        begin, end = micro * self.batch_size, (micro + 1) * self.batch_size
        is_last = end >= len(part.positions)
        return MicroBatch(window, micro, part.positions[begin:end], part.is_padding[begin:end], is_last)


def _lane_order(positions: Int64Array, lanes: int) -> Int64Array:
    """The places of positions sorted by lane, along the last axis; those of one lane in their order."""
    lane = (positions % lanes).astype(np.min_scalar_type(lanes - 1))  # small numbers are sorted by radix
    return np.argsort(lane, axis=-1, kind="stable")


class MicroBatch(NamedTuple):
    """One micro-batch of one rank."""

    window: int
    """Index of the window, counted from the start of the pass."""
    micro: int
    """Index of the micro-batch in the window."""
    positions: Int64Array
    """int64[n]."""
    is_padding: BoolArray
    """bool[n]."""
    is_last: bool
    """Whether it is the rank's last one of the window."""
