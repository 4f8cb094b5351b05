"""Layouts: what the rows of a micro-batch are, in terms of runs that are read.

A layout says which runs a gather needs, what is made of a run once it is read, and how the gather's rows are made of
its runs. Here is the plain one, whose rows are rows of runs; packed sequences are another (``packed_layout``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardstream.columns import Rows, tight
from shardstream.errors import DecodeError
from shardstream.gathering import gather
from shardstream.grouping import stable_order
from shardstream.manifest import Manifest
from shardstream.order import EpochOrder
from shardstream.permutation import Int64Array
from shardstream.plan import Plan, PlannedBatch


class RunKey(NamedTuple):
    """What is held while gathers need it: a run, as its layout prepared it."""

    block: int
    """Index of the block in the manifest."""
    run: int
    """Index of the run in the block."""
    epoch: int = 0
    """Epoch it is prepared for, where that makes a difference."""
    source: int = 0
    """Index of the manifest, in a mixture of several."""


class Planned(NamedTuple):
    """A gather before it is read: some micro-batches that are made together."""

    batches: list[PlannedBatch]
    sample_ids: Int64Array
    """int64[n], of all their rows."""
    keys: list[RunKey]
    """In the order of first use."""
    make: Callable[[Sequence[Any]], Rows]
    """Makes the n rows of the runs of ``keys``, as the layout prepared them."""
    returning: frozenset[RunKey] = frozenset()
    """Of ``keys``, those that the same reader needs again at the end of the epoch."""


class Layout(Protocol):
    """What fetching must be told. A layout is a value; threads share it."""

    def source(self, key: RunKey) -> tuple[Manifest, Sequence[str] | None]:
        """Returns the manifest that a run is of, and the columns to read of it; None for all."""
        ...

    @property
    def row_num_bytes(self) -> int:
        """About how many bytes a row takes, at least 1."""
        ...

    def planned(self, batches: list[PlannedBatch]) -> Planned:
        """Plans one gather."""
        ...

    def prepared(self, key: RunKey, rows: Rows) -> Any:
        """Returns what is held of a run; called once, in a thread of the pool, when it has been read."""
        ...

    def undecodable(self, key: RunKey, error: DecodeError) -> Any:
        """Returns what stands for a run that cannot be decoded, where rows without it are wanted.

        Raises:
            DecodeError: The given one, where nothing does: rows that need the run cannot be made.
        """
        ...


@dataclass(frozen=True, eq=False)
class RowsLayout:
    """Rows as they are in the shards; columns of raw bytes in ``dtypes`` as lists of numbers."""

    plan: Plan
    columns: Sequence[str] | None = None
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)

    @property
    def row_num_bytes(self) -> int:
        """Mean compressed size of a row."""
        manifest = self.plan.manifest
        return max(1, int(manifest.block_num_bytes.sum()) // max(1, manifest.num_samples))

    def source(self, key: RunKey) -> tuple[Manifest, Sequence[str] | None]:  # noqa: ARG002 - there is only one
        """Returns the plan's manifest, and ``columns``."""
        return self.plan.manifest, self.columns

    def planned(self, batches: list[PlannedBatch]) -> Planned:
        """Finds block, run and row of each position."""
        parts = [self.plan.locate(epoch, positions) for epoch, positions in _by_epoch(batches)]
        block, run, row = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        manifest = self.plan.manifest
        num_runs = int(run.max(initial=0)) + 1
        codes, key_of_row = by_first_use(block * num_runs + run)
        keys = [RunKey(*divmod(code, num_runs)) for code in codes]
        row_in_run = row - run * manifest.block_run_rows[block]
        make = partial(
            gather,
            part_of_row=key_of_row,
            row_in_part=row_in_run,
            place_of_part=lambda part: {"url": manifest.url_of_block(keys[part].block), "block": keys[part].block},
            dtypes=self.dtypes,
        )
        returning = self._returning(batches, keys, key_of_row)
        return Planned(batches, manifest.block_start[block] + row, keys, make, returning)

    def prepared(self, key: RunKey, rows: Rows) -> Rows:  # noqa: ARG002 - other layouts need it
        """Returns the rows themselves, in no more memory than they need."""
        return tight(rows)

    def undecodable(self, key: RunKey, error: DecodeError) -> Rows:  # noqa: ARG002 - other layouts need it
        """Raises the error: nothing stands for rows."""
        raise error

    def _returning(
        self, batches: list[PlannedBatch], keys: Sequence[RunKey], key_of_row: Int64Array
    ) -> frozenset[RunKey]:
        """The runs in which a lane begins and the one before it ends, while the former is read, by a reader of both."""
        plan, epoch = self.plan, batches[0].epoch
        order = plan.order(epoch + int(batches[0].positions[0]) // plan.num_positions)
        shared = order.shared_blocks if isinstance(order, EpochOrder) else {}
        if not any(key.block in shared for key in keys):  # between the two ends of an epoch
            return frozenset()
        positions = np.concatenate([batch.positions + (batch.epoch - epoch) * plan.num_positions for batch in batches])
        ahead, place = np.divmod(positions, plan.num_positions)
        here = ahead == ahead[0]  # what is of the next epoch is another order's
        lane = place[here] % plan.lanes
        is_read, lane_of_key = np.zeros(plan.lanes, np.bool_), np.full(len(keys), -1)
        is_read[lane], lane_of_key[key_of_row[here]] = True, lane
        return frozenset(
            key
            for key, of_key in zip(keys, lane_of_key.tolist(), strict=True)
            if shared.get(key.block) == of_key and is_read[of_key - 1]
        )


def by_first_use(codes: Int64Array) -> tuple[list[int], Int64Array]:
    """Returns the distinct codes in the order of their first use, and which of them each row has: int64[n].

    Example:
        >>> codes, which = by_first_use(np.array([7, 3, 7]))
        >>> codes, which.tolist()
        ([7, 3], [0, 1, 0])
    """
    # Not np.unique, which imports numpy.ma: 12 ms, of the 50 that a first batch may take.
    by_code = stable_order(codes)
    is_first = np.ones(len(codes), np.bool_)
    is_first[1:] = np.diff(codes[by_code]) != 0
    first_use = by_code[is_first]
    by_use = np.argsort(first_use)
    place = np.empty_like(by_use)
    place[by_use] = np.arange(len(by_use))
    key_of_row = np.empty_like(by_code)
    key_of_row[by_code] = place[np.cumsum(is_first) - 1]
    return codes[first_use[by_use]].tolist(), key_of_row


def _by_epoch(batches: list[PlannedBatch]) -> Iterator[tuple[int, Int64Array]]:
    """Joins the positions of neighbours of one epoch, which can be located in one go."""
    for epoch, group in groupby(batches, key=attrgetter("epoch")):
        yield epoch, np.concatenate([batch.positions for batch in group])
