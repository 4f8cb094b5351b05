"""What ranks and workers are dealt, as columns: taken from ``Plan.micro_batches`` and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from shardstream.cursor import Cursor
from shardstream.deal import BoolArray, Deal
from shardstream.permutation import Int64Array
from shardstream.plan import EpochPlan, Plan, PlannedBatch


class DealtBatch(NamedTuple):
    """One micro-batch and who was given it."""

    rank: int
    worker: int
    batch: PlannedBatch


class Dealt(NamedTuple):
    """Micro-batches of any ranks and workers: one entry a micro-batch, and one a row of them."""

    rank: Int64Array
    """int64[num_micro_batches]."""
    worker: Int64Array
    """int64[num_micro_batches]."""
    batch_index: Int64Array
    """int64[num_micro_batches]: index among the rank's micro-batches."""
    window: Int64Array
    """int64[num_micro_batches]."""
    micro: Int64Array
    """int64[num_micro_batches]."""
    window_start: Int64Array
    """int64[num_micro_batches]: absolute position, that is epoch * N + position, where the window begins."""
    is_last_in_window: BoolArray
    """bool[num_micro_batches]."""
    num_rows: Int64Array
    """int64[num_micro_batches]."""
    positions: Int64Array
    """int64[num_rows in all]: absolute positions."""
    is_padding: BoolArray
    """bool[num_rows in all]."""

    @property
    def batch_of_row(self) -> Int64Array:
        """int64[num_rows in all]: which micro-batch each row belongs to."""
        return np.repeat(np.arange(len(self.rank)), self.num_rows)


def passes(plan: Plan, start: Cursor, num_epochs: int) -> Iterator[EpochPlan]:
    """Yields order and deal of each epoch that begins before ``start.epoch + num_epochs``.

    With ``tail="continue"`` an epoch's deal begins where the last window of the one before ended.
    """
    epoch, position = start.epoch, start.position
    while epoch < start.epoch + num_epochs:
        here = plan.epoch(epoch, position)
        yield here
        if plan.tail == "continue":
            end = position + here.deal.num_windows * plan.global_batch
            epoch, position = epoch + end // plan.num_positions, end % plan.num_positions
        else:
            epoch, position = epoch + 1, 0


def deal_out(plan: Plan, start: Cursor, num_epochs: int, num_readers: int) -> Iterator[DealtBatch]:
    """Yields every micro-batch of every rank and worker from ``start`` on, rank by rank and worker by worker.

    Args:
        plan: The plan.
        start: Where to begin.
        num_epochs: How many epochs, the first one from ``start`` on.
        num_readers: Workers of each rank; 1 where the main process reads.
    """
    end = start.epoch + num_epochs
    # A pass goes to the end of an epoch, or on and on.
    starts = [start] if plan.tail == "continue" else [start, *(plan.cursor(e) for e in range(start.epoch + 1, end))]
    for here in starts:
        for rank in range(plan.world_size):
            for worker in range(num_readers):
                batches = plan.micro_batches(rank, here, worker=worker, num_workers=num_readers)
                for batch in takewhile(lambda batch: batch.epoch < end, batches):
                    yield DealtBatch(rank, worker, batch)


def columns(plan: Plan, dealt: Iterator[DealtBatch] | list[DealtBatch]) -> Dealt:
    """Gathers micro-batches into columns."""
    numbers, positions, is_padding = [], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    for rank, worker, batch in dealt:
        first = batch.epoch * plan.num_positions
        numbers.append(
            (
                rank,
                worker,
                batch.batch_index,
                batch.window,
                batch.micro,
                first + batch.position,
                batch.is_last_in_window,
                len(batch.positions),
            )
        )
        positions.append(first + batch.positions)
        is_padding.append(batch.is_padding)
    ranks, workers, index, window, micro, window_start, is_last, num_rows = np.array(numbers, np.int64).reshape(-1, 8).T
    return Dealt(
        rank=ranks,
        worker=workers,
        batch_index=index,
        window=window,
        micro=micro,
        window_start=window_start,
        is_last_in_window=is_last.astype(np.bool_),
        num_rows=num_rows,
        positions=np.concatenate(positions),
        is_padding=np.concatenate(is_padding),
    )


class WindowRows(NamedTuple):
    """The rows of some windows over all ranks."""

    positions: Int64Array
    """int64[num_rows]; from N on they belong to the next epoch."""
    is_padding: BoolArray
    """bool[num_rows]."""
    rank: Int64Array
    """int64[num_rows]."""
    batch_index: Int64Array
    """int64[num_rows]: index among the rank's micro-batches."""
    window: Int64Array
    """int64[num_rows]."""


def window_rows(deal: Deal, begin: int, end: int) -> WindowRows:
    """Deals windows ``begin`` .. ``end - 1`` to all ranks at once; ``end`` may lie behind the last one."""
    none = np.empty(0, np.int64)
    made = [(0, none, none.astype(np.bool_), none, none)]
    num_whole = min(end, deal.num_whole_windows) - begin
    for rank in range(deal.world_size):
        if num_whole > 0:
            parts = deal.parts(rank, begin, num_whole)
            window = np.repeat(np.arange(begin, begin + num_whole), parts.shape[1])
            made.append((rank, parts.ravel(), np.zeros(parts.size, np.bool_), window, np.arange(parts.size)))
        if end > deal.num_whole_windows:
            part = deal.part(deal.num_whole_windows, rank)
            window = np.full(len(part.positions), deal.num_whole_windows)
            made.append((rank, part.positions, part.is_padding, window, np.arange(len(part.positions))))
    share = deal.batch_size * deal.accumulate
    ranks, positions, is_padding, windows, places = zip(*made, strict=True)
    window, place = np.concatenate(windows), np.concatenate(places)
    return WindowRows(
        positions=np.concatenate(positions),
        is_padding=np.concatenate(is_padding),
        rank=np.repeat(ranks, [len(each) for each in positions]),
        batch_index=window * deal.accumulate + place % share // deal.batch_size,
        window=window,
    )
