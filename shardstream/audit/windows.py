"""What a plan deals out in one window, wherever it begins: the logs of a run are compared with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardstream.deal import Part
from shardstream.permutation import Int64Array
from shardstream.plan import Plan


@dataclass(frozen=True)
class ExpectedWindow:
    """The window that begins at a position of an epoch.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=5)
        >>> plan = Plan.make(manifest, batch_size=2, world_size=2, shuffle=False)
        >>> window = ExpectedWindow(plan, 0, 4)
        >>> window.ids(0).tolist(), window.num_padding(0), window.ids(1).tolist(), window.num_padding(1)
        ([4], 1, [], 2)
    """

    plan: Plan
    epoch: int
    position: int

    @cached_property
    def _parts(self) -> list[Part]:
        deal = self.plan.epoch(self.epoch, self.position).deal  # its first window is the one meant
        return [deal.part(0, rank) for rank in range(self.plan.world_size)]

    def has_rows(self, rank: int) -> bool:
        """Whether a rank reads anything of this window."""
        return len(self._parts[rank].positions) > 0

    def num_padding(self, rank: int) -> int:
        """Returns how many of a rank's rows only fill its micro-batches."""
        return int(self._parts[rank].is_padding.sum())

    def ids(self, rank: int) -> Int64Array:
        """Returns the ids of a rank's real samples."""
        part = self._parts[rank]
        return self._ids(part.positions[~part.is_padding])

    @cached_property
    def _positions(self) -> Int64Array:
        return np.concatenate([part.positions[~part.is_padding] for part in self._parts])

    def by_epoch(self) -> dict[int, list[int]]:
        """Returns the ids of all ranks by epoch: 0 for this one, 1 for the next."""
        ahead, ids = self._positions // self.plan.num_positions, self._ids(self._positions)
        return {k: ids[ahead == k].tolist() for k in sorted({0, *ahead.tolist()})}

    def ids_behind(self) -> Int64Array:
        """Returns the ids from this window's beginning to the end of the epoch that are not in it."""
        return self._ids(np.setdiff1d(np.arange(self.position, self.plan.num_positions), self._positions))

    def repeated_ids(self) -> list[int]:
        """Returns the ids that the tail repeats in this window, once for each time."""
        if self.plan.tail != "repeat":
            return []
        own = np.arange(self.position, min(self.position + self.plan.global_batch, self.plan.num_positions))
        again = Counter(self._positions.tolist()) - Counter(own.tolist())
        ids: list[int] = self._ids(np.array(list(again.elements()), np.int64)).tolist()
        return ids

    def _ids(self, positions: Int64Array) -> Int64Array:
        return self.plan.sample_ids(self.epoch, positions)
