"""The order: (manifest, seed, epoch) fixes one global order of all samples. Pure arithmetic, vectorised.

position → lane → line index → block → run → row. Nothing of the size of the data is ever made (``shuffle="torch"``
excepted, which exists to agree with ``DistributedSampler``).
"""

from __future__ import annotations

import math
import operator
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardstream.errors import PlanError, ShardStreamWarning
from shardstream.grouping import stable_order
from shardstream.manifest import Manifest
from shardstream.permutation import Int64Array, full_positions, key64, keyed_permutation

Positions: TypeAlias = npt.NDArray[np.integer[Any]]
Shuffle: TypeAlias = bool | Literal["full", "torch"]
SHUFFLES: tuple[Shuffle, ...] = (True, False, "full", "torch")

_MOST_LANES = 4096
_FEWEST_LANES = 64
_KEPT_NUM_BYTES = 18 << 20  # of runs' permutations: 4,096 lanes of runs of 1,000 rows
_KEPT_RUN_NUM_BYTES = 300  # what a run takes besides its rows
_TORCH_SEEDS = range(-(1 << 63), 1 << 64)


class Located(NamedTuple):
    """Where positions lie: three int64 arrays of one length."""

    block: Int64Array
    """Index of the block in the manifest."""
    run: Int64Array
    """Index of the run in the block."""
    row: Int64Array
    """Row in the block."""


def default_lanes(global_batch: int, num_blocks: int) -> int:
    """Chooses the number of lanes: the largest divisor of the global batch up to a quarter of the blocks.

    Not below 64 for want of blocks, and not above 4,096. L lanes mix L blocks in every global batch; more lanes than
    a quarter of the blocks would cut too many of them.

    Args:
        global_batch: Samples of one optimizer step over all ranks.
        num_blocks: Blocks of the manifest.

    Returns:
        The number of lanes, a divisor of ``global_batch``. Warns when it is under a quarter of it.

    Example:
        >>> default_lanes(64, 512), default_lanes(2048, 16384), default_lanes(7, 1000)
        (64, 2048, 7)
    """
    most = min(_MOST_LANES, max(_FEWEST_LANES, num_blocks // 4))
    lanes = max(d for d in _divisors(global_batch) if d <= most)
    if lanes < global_batch / 4:
        warnings.warn(
            f"{lanes} lanes mix only {lanes} blocks in a global batch of {global_batch}; choose a global batch with a "
            f"larger divisor up to {most}, or give lanes=",
            ShardStreamWarning,
            stacklevel=2,
        )
    return lanes


def _divisors(n: int) -> Iterator[int]:
    for d in range(1, math.isqrt(n) + 1):
        if n % d == 0:
            yield d
            yield n // d


def lane_sizes(num_positions: int, lanes: int) -> Int64Array:
    """Returns the number of positions of each lane: int64[lanes].

    Example:
        >>> lane_sizes(7, 3).tolist()
        [3, 2, 2]
    """
    share, more = divmod(num_positions, lanes)
    return share + (np.arange(lanes) < more).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Lanes:
    """The cut of a line of N places into L lanes that are read side by side.

    Attributes:
        num_positions: Length of the line.
        lanes: Number of lanes.
        phases: int64[lanes], how far each lane is turned; None for not at all.
    """

    num_positions: int
    lanes: int
    phases: Int64Array | None = None

    @classmethod
    def keyed(cls, num_positions: int, lanes: int, *, seed: int, epoch: int) -> Lanes:
        """Returns lanes whose phases are ``key64(seed, epoch, "phase", k) % n_k``."""
        sizes = lane_sizes(num_positions, lanes)
        phases = [key64(seed, epoch, "phase", k) % int(n) if n else 0 for k, n in enumerate(sizes)]
        return cls(num_positions, lanes, np.array(phases, np.int64))

    def line_index(self, positions: Positions) -> Int64Array:
        """Returns the place on the line of each position: int64, a bijection of 0..N-1.

        Example:
            >>> Lanes(7, 3).line_index(np.arange(7)).tolist()
            [0, 3, 5, 1, 4, 6, 2]
        """
        places: Int64Array = np.asarray(positions, np.int64)
        if self.lanes == 1 and self.phases is None:
            return places
        share, more = divmod(self.num_positions, self.lanes)
        turn, lane = np.divmod(places, self.lanes)
        if self.phases is not None:
            turn = (turn + self.phases[lane]) % (share + (lane < more))
        return lane * share + np.minimum(lane, more) + turn


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of one epoch: which sample stands at each position 0..N-1.

    Args:
        manifest: The data set.
        seed: The job's seed.
        epoch: The epoch; each has an order of its own.
        lanes: Blocks that are read side by side; ``default_lanes`` chooses well. ``"full"`` and ``"torch"`` have one.
        shuffle: True: blocks, and rows within runs. False: file order. ``"full"``: one bijection of all samples, for
            data with random access. ``"torch"``: exactly ``DistributedSampler``'s order; O(N).

    Raises:
        PlanError: If a setting is impossible.

    Example:
        >>> order = EpochOrder(
        ...     Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=3), seed=1, epoch=0, lanes=2
        ... )
        >>> shard, row = order.locate(np.arange(12))
        >>> sorted(zip(shard.tolist(), row.tolist())) == [(s, r) for s in range(2) for r in range(6)]
        True
    """

    manifest: Manifest
    seed: int
    epoch: int
    lanes: int = 1
    shuffle: Shuffle = True
    _permutations: _RunPermutations = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            seed, epoch = operator.index(self.seed), operator.index(self.epoch)
        except TypeError:
            found = f"{self.seed!r}, {self.epoch!r}"
            raise PlanError("seed and epoch must be whole numbers", found=found) from None
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "epoch", epoch)
        if self.shuffle not in SHUFFLES or not isinstance(self.shuffle, (bool, str)):
            raise PlanError("unknown shuffle", expected="True, False, 'full' or 'torch'", found=repr(self.shuffle))
        if self.lanes < 1:
            raise PlanError("lanes must be at least 1", found=self.lanes)
        if self.lanes > 1 and isinstance(self.shuffle, str):
            hint = "leave lanes out, or use shuffle=True"
            raise PlanError(f"shuffle={self.shuffle!r} has one lane", expected=1, found=self.lanes, hint=hint)
        if self.epoch < 0:
            raise PlanError("the epoch must not be negative", found=self.epoch)
        if self.shuffle == "torch" and seed + epoch not in _TORCH_SEEDS:
            raise PlanError("torch's generator takes 64 bits", expected="seed + epoch < 2^64", found=seed + epoch)
        object.__setattr__(self, "_permutations", _RunPermutations(self.seed, self.epoch))

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochOrder, (self.manifest, self.seed, self.epoch, self.lanes, self.shuffle)  # not what it remembers

    @property
    def num_positions(self) -> int:
        """N: the number of samples."""
        return self.manifest.num_samples

    def locate(self, positions: Positions) -> tuple[Int64Array, Int64Array]:
        """Returns (shard, row in the shard) of each position, both int64[num_positions].

        Args:
            positions: Integers in [0, N), in any order.

        Raises:
            PlanError: If a position lies outside the epoch.
        """
        ids = self.sample_ids(positions)
        shard = self.manifest.shard_of_sample(ids)
        return shard, ids - self.manifest.first_sample[shard]

    def sample_ids(self, positions: Positions) -> Int64Array:
        """Returns the sample id at each position: int64[num_positions]. Arguments and errors as in ``locate``."""
        if isinstance(self.shuffle, str):
            return self._full_ids(positions)
        block, _, row = self.rows(positions)
        return self.manifest.block_start[block] + row

    def rows(self, positions: Positions) -> Located:
        """Returns block, run and row in the block of each position, for those who read them; else as ``locate``."""
        manifest = self.manifest
        if isinstance(self.shuffle, str):
            ids = self._full_ids(positions)
            block = np.searchsorted(manifest.block_start, ids, side="right") - 1
            row = ids - manifest.block_start[block]
            return Located(block, row // manifest.block_run_rows[block], row)
        block, offset = self._line_rows(self.lane_cut.line_index(self._checked(positions)))
        run_rows = manifest.block_run_rows[block].astype(np.int64)
        run = offset // run_rows
        if self.shuffle:
            offset = self._shuffled(block, run, offset, run_rows)
        return Located(block, run, offset)

    def run_rows(self, block: int, run: int) -> Int64Array:
        """Returns the rows of a run in the order in which the line holds them: int64, counted from the run's first."""
        first_row = run * int(self.manifest.block_run_rows[block])
        num_rows = min(int(self.manifest.block_run_rows[block]), int(self.manifest.block_rows[block]) - first_row)
        if not self.shuffle:
            return np.arange(num_rows)
        return keyed_permutation(num_rows, key64(self.seed, self.epoch, "rows", block, run))

    # ------------------------------------------------------------------------------------------------ the line

    @cached_property
    def lane_cut(self) -> Lanes:
        """The lanes, with phases where a block has more than one run."""
        if self.shuffle is True and self.manifest.has_long_blocks:
            return Lanes.keyed(self.num_positions, self.lanes, seed=self.seed, epoch=self.epoch)
        return Lanes(self.num_positions, self.lanes)

    @cached_property
    def line_blocks(self) -> Int64Array:
        """int64[num_blocks]: the blocks in the order in which the line holds them."""
        num_blocks = self.manifest.num_blocks
        if self.shuffle is not True:
            return np.arange(num_blocks)
        return keyed_permutation(num_blocks, key64(self.seed, self.epoch, "blocks"))

    @cached_property
    def line_start(self) -> Int64Array:
        """int64[num_blocks + 1]: where on the line each block of ``line_blocks`` begins."""
        start = np.zeros(self.manifest.num_blocks + 1, np.int64)
        np.cumsum(self.manifest.block_rows[self.line_blocks], out=start[1:])
        return start

    @cached_property
    def shared_blocks(self) -> dict[int, int]:
        """Blocks that two lanes share: the block → the lane that begins in it; the one before it ends there.

        The lanes need it at the two ends of the epoch. Only where nothing turns the lanes, and without those blocks
        that more than two share.
        """
        lanes = self.lane_cut
        if lanes.lanes == 1 or lanes.phases is not None:
            return {}
        sizes = lane_sizes(lanes.num_positions, lanes.lanes)
        lane = np.flatnonzero(sizes)[1:]
        block, offset = self._line_rows((np.cumsum(sizes) - sizes)[lane])
        block, lane = block[offset > 0], lane[offset > 0]
        around = np.concatenate(([-1], block, [-1]))
        is_alone = (block != around[:-2]) & (block != around[2:])
        return dict(zip(block[is_alone].tolist(), lane[is_alone].tolist(), strict=True))

    def _checked(self, positions: Positions) -> Int64Array:
        places: Int64Array = np.asarray(positions, np.int64)
        if places.size and not (places.min() >= 0 and places.max() < self.num_positions):
            outside = places[(places < 0) | (places >= self.num_positions)]
            expected = f"0..{self.num_positions - 1}"
            raise PlanError("a position lies outside the epoch", expected=expected, found=int(outside.flat[0]))
        return places

    def _line_rows(self, line_index: Int64Array) -> tuple[Int64Array, Int64Array]:
        slot = np.searchsorted(self.line_start, line_index, side="right") - 1
        return self.line_blocks[slot], line_index - self.line_start[slot]

    def _shuffled(self, block: Int64Array, run: Int64Array, offset: Int64Array, run_rows: Int64Array) -> Int64Array:
        """Replaces offsets by rows, run by run: each run's rows stand in the order of its own permutation."""
        if len(block) == 0:
            return offset
        first_row = run * run_rows
        length = np.minimum(run_rows, self.manifest.block_rows[block] - first_row)
        by_run = stable_order(block * (run.max() + 1) + run)
        block_sorted, run_sorted = block[by_run], run[by_run]
        changes = (block_sorted[1:] != block_sorted[:-1]) | (run_sorted[1:] != run_sorted[:-1])
        starts = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(by_run)]))
        within = (offset - first_row)[by_run]
        rows = np.empty_like(within)
        heads = by_run[starts[:-1]]
        runs = zip(block[heads].tolist(), run[heads].tolist(), length[heads].tolist(), strict=True)
        bounds = starts.tolist()
        for (b, j, rows_in_run), begin, end in zip(runs, bounds, bounds[1:], strict=False):
            rows[begin:end] = self._permutations.of(b, j, rows_in_run)[within[begin:end]]
        result = np.empty_like(offset)
        result[by_run] = rows
        return result + first_row

    # ------------------------------------------------------------------------------------------------ without blocks

    def _full_ids(self, positions: Positions) -> Int64Array:
        places = self._checked(positions)
        if self.shuffle == "torch":
            return self._torch_permutation[places]
        return full_positions(places, self.num_positions, self.seed, self.epoch)

    @cached_property
    def _torch_permutation(self) -> Int64Array:
        import torch  # the one order that is torch's own

        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        permutation: Int64Array = torch.randperm(self.num_positions, generator=generator).numpy()
        return permutation


class _RunPermutations:
    """The permutations of recently used runs. A memo: what it returns depends on its arguments alone."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._kept: OrderedDict[tuple[int, int], npt.NDArray[np.int32]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # an order is a value, and threads share values

    def of(self, block: int, run: int, num_rows: int) -> npt.NDArray[np.int32]:
        with self._lock:
            kept = self._kept.get((block, run))
            if kept is not None:
                self._kept.move_to_end((block, run))
                return kept
            made = keyed_permutation(num_rows, key64(self._seed, self._epoch, "rows", block, run)).astype(np.int32)
            self._kept[block, run] = made
            self._num_bytes += made.nbytes + _KEPT_RUN_NUM_BYTES
            while self._num_bytes > _KEPT_NUM_BYTES and len(self._kept) > 1:
                self._num_bytes -= self._kept.popitem(last=False)[1].nbytes + _KEPT_RUN_NUM_BYTES
            return made
