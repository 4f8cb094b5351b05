"""The plan: everything that ranks must agree on, as one frozen value. It joins the order with the dealing.

A plan walks epoch by epoch: ``plan.epoch(e, start)`` has the order and the deal of one, ``plan.micro_batches`` yields
what one rank's worker reads, in order, with the cursor that is right once a batch was trained on.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from shardstream.batching import resolve_accumulate
from shardstream.cursor import Cursor, warn_of_batch_change, way_out
from shardstream.deal import PARITY_TAILS, BoolArray, Deal
from shardstream.errors import CursorError, PlanError, ShardStreamWarning, shown_url
from shardstream.manifest import Manifest
from shardstream.order import EpochOrder, Located, Shuffle, default_lanes
from shardstream.packing import Packed, PackedOrder, Packing
from shardstream.permutation import Int64Array

_DEALT_AT_ONCE = 4096  # samples of a rank
_MOST_MARKS = 64  # of shards in a cursor, which is to be about 1 KB

_Order: TypeAlias = EpochOrder | PackedOrder


class PlannedBatch(NamedTuple):
    """One micro-batch of one rank, before its data is read."""

    batch_index: int
    """Index among the rank's micro-batches, counted from the start of the pass."""
    epoch: int
    position: int
    """Position in the epoch where its window begins."""
    window: int
    """Index of its window, counted from the start of the pass."""
    micro: int
    """Index in the window."""
    positions: Int64Array
    """int64[n]; from N on they belong to the next epoch."""
    is_padding: BoolArray
    """bool[n]."""
    is_last_in_window: bool
    is_last_in_epoch: bool
    """Whether the rank has no further micro-batch in this epoch."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Order, batch and tail of a job; the same on every rank. Make one with ``Plan.make``, which fills in defaults.

    Attributes:
        manifest: The data set.
        seed: The job's seed.
        world_size: Number of data-parallel ranks.
        batch_size: Samples of a micro-batch.
        accumulate: Micro-batches of a rank in a window.
        lanes: Lanes of the order.
        shuffle: How the order is shuffled.
        tail: What happens to the last, partial window of an epoch.
        packed: The data set as packed sequences, which are then what positions, batches and lanes count; or None.
    """

    manifest: Manifest
    seed: int
    world_size: int
    batch_size: int
    accumulate: int
    lanes: int
    shuffle: Shuffle
    tail: str
    packed: Packed | None = None

    @classmethod
    def make(
        cls,
        manifest: Manifest,
        *,
        batch_size: int,
        world_size: int = 1,
        global_batch: int | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        lanes: int | None = None,
        shuffle: Shuffle = True,
        tail: str = "pad",
        packing: Packing | Packed | None = None,
    ) -> Plan:
        """Returns a plan with the defaults of the design, everything checked.

        Raises:
            PlanError: If settings do not fit together, or there are no samples.

        Example:
            >>> plan = Plan.make(
            ...     Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=6), batch_size=2, world_size=3
            ... )
            >>> plan.global_batch, plan.lanes, plan.epoch(0).deal.num_windows
            (6, 6, 4)
        """
        try:
            seed = operator.index(seed)
        except TypeError:
            raise PlanError("the seed must be a whole number", found=repr(seed)) from None
        accumulate = resolve_accumulate(
            world_size=world_size, batch_size=batch_size, global_batch=global_batch, accumulate=accumulate
        )
        if manifest.num_samples == 0:
            urls = [shown_url(manifest.url(shard)) for shard in range(min(manifest.num_shards, 10))]
            raise PlanError("the data set has no samples", found=f"{manifest.num_shards} shards: {', '.join(urls)}")
        if lanes is None:
            one_lane = shuffle is not True or tail in PARITY_TAILS
            lanes = 1 if one_lane else default_lanes(world_size * batch_size * accumulate, manifest.num_blocks)
        packed = Packed.of(manifest, packing) if isinstance(packing, Packing) else packing
        if packed is not None and packed.num_sequences == 0:
            raise PlanError("the data set has no two tokens to make a sequence of", found=f"{packed.num_places} tokens")
        plan = cls(manifest, seed, world_size, batch_size, accumulate, lanes, shuffle, tail, packed)
        first = plan.epoch(0)
        if first.deal.num_windows == 0:
            warnings.warn(
                f"tail={tail!r} leaves no step: {plan.num_positions} samples do not fill one global batch of "
                f"{plan.global_batch} ({world_size} ranks); use tail='pad' or a smaller global batch",
                ShardStreamWarning,
                stacklevel=2,
            )
        return plan

    @cached_property  # these two are asked for by every batch
    def global_batch(self) -> int:
        """G: samples of one optimizer step over all ranks."""
        return self.world_size * self.batch_size * self.accumulate

    @cached_property
    def num_positions(self) -> int:
        """N: positions of an epoch."""
        return self.manifest.num_samples if self.packed is None else self.packed.num_sequences

    @cached_property
    def order(self) -> Callable[[int], _Order]:
        """Returns the order of an epoch; those in use are kept: the current one, the next where windows reach over."""
        return lru_cache(maxsize=2)(self._make_order)

    def _make_order(self, epoch: int) -> _Order:
        order = EpochOrder(self.manifest, self.seed, epoch, self.lanes, self.shuffle)
        return order if self.packed is None else PackedOrder(order, self.packed)

    @property
    def fingerprint(self) -> str:
        """The manifest's fingerprint."""
        return self.manifest.fingerprint

    @property
    def has_end(self) -> bool:
        """Whether a pass over it ends."""
        return self.tail != "continue"

    @property
    def lanes_in_turn(self) -> int:
        """Lanes to which positions go in turn."""
        return self.lanes

    @property
    def pin(self) -> int:
        """What a cursor pins of a plan, as one number, in which the main process tells it to workers: the lanes."""
        return self.lanes

    def with_pin(self, pin: int) -> Plan:
        """Returns the plan with what a cursor pinned; 0 pins nothing."""
        return replace(self, lanes=pin) if pin not in (0, self.lanes) else self

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # not what was only remembered

    def epoch(self, epoch: int, start: int = 0) -> EpochPlan:
        """Returns the order and the deal of an epoch, the deal beginning at position ``start``."""
        deal = Deal(
            num_positions=self.num_positions,
            world_size=self.world_size,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            tail=self.tail,
            lanes=self.lanes,
            start=start,
        )
        return EpochPlan(epoch, self.order(epoch), deal)

    def num_micro_batches(self, rank: int, start: Cursor) -> int:
        """Returns a rank's micro-batches from a cursor to the end of its epoch, over all its workers."""
        return self.epoch(start.epoch, start.position).deal.num_micro_batches(rank)

    def sample_ids(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Returns the sample id (of packed sequences: the place on the line) at positions; as ``locate``."""
        ids = np.empty(len(positions), np.int64)
        for order, where, places in self._orders(epoch, positions):
            ids[where] = order.sample_ids(places)
        return ids

    def locate(self, epoch: int, positions: Int64Array) -> Located:
        """Returns block, run and row of positions; those from N on belong to the epochs that follow.

        Raises:
            PlanError: If sequences are packed, which are made of several rows.
        """
        located = np.empty((3, len(positions)), np.int64)
        for order, where, places in self._orders(epoch, positions):
            if isinstance(order, PackedOrder):
                raise PlanError("a packed sequence is not one row", hint="ask the order for its pieces")
            located[:, where] = order.rows(places)
        return Located(*located)

    def _orders(self, epoch: int, positions: Int64Array) -> Iterator[tuple[_Order, BoolArray | slice, Int64Array]]:
        """Yields the order of each epoch that positions are in, which of them those are, and their places in it."""
        if len(positions):
            first, last = (int(end) // self.num_positions for end in (positions.min(), positions.max()))
            for more in range(first, last + 1):
                there = slice(None) if first == last else positions // self.num_positions == more
                yield self.order(epoch + more), there, positions[there] - more * self.num_positions

    # ------------------------------------------------------------------------------------------------ cursors

    def cursor(self, epoch: int = 0, position: int = 0, grid_start: int = 0) -> Cursor:
        """Returns the cursor of a place in this plan.

        Args:
            epoch: The epoch.
            position: Position in the epoch where the next window begins.
            grid_start: Position where windows of this size began in this epoch; with ``tail="continue"``, whose
                windows reach over from the epoch before, it follows from the position.
        """
        if self.tail == "continue":
            grid_start = position % self.global_batch
        return self._first_cursor.at(epoch, position, grid_start)

    @cached_property
    def _first_cursor(self) -> Cursor:
        return Cursor(
            fingerprint=self.manifest.fingerprint,
            seed=self.seed,
            epoch=0,
            position=0,
            global_batch=self.global_batch,
            shuffle=self.shuffle,
            lanes=self.lanes,
            tail=self.tail,
            packing=None if self.packed is None else self.packed.packing.identity(),
            world_size=self.world_size if self.tail in PARITY_TAILS else None,
            manifest=None if self.manifest.path is None else shown_url(self.manifest.path),
            shards="".join(self.manifest.shard_marks) if self.manifest.num_shards <= _MOST_MARKS else None,
        )

    def cursor_after(self, batch: PlannedBatch, grid_start: int = 0) -> Cursor:
        """Returns the cursor that is right once a batch was trained on: its window's last micro-batch moves it."""
        if not batch.is_last_in_window:
            return self.cursor(batch.epoch, batch.position, grid_start)
        behind = batch.position + self.global_batch
        return self._first_cursor.moved(batch.epoch, behind, grid_start, num_positions=self.num_positions)

    def resume(self, cursor: Cursor, *, allow_batch_change: bool = False) -> tuple[Plan, Cursor]:
        """Checks a cursor against this plan and adopts its lanes.

        Args:
            cursor: From a checkpoint.
            allow_batch_change: Accept another global batch; a new grid of windows begins at the cursor. Warns that
                learning rate and warm-up are not changed with it.

        Returns:
            The plan with the cursor's lanes, and the cursor in terms of this plan.

        Raises:
            CursorError: If the cursor is of another manifest, seed, order, batch or tail; everything that differs is
                listed, the shards by name where both manifests can be had.
        """
        plan = replace(self, lanes=cursor.lanes)
        is_other_batch = cursor.global_batch != self.global_batch
        grid_start = cursor.position if is_other_batch else cursor.grid_start
        mine = plan.cursor(cursor.epoch, cursor.position, grid_start)
        if different := cursor.differences(mine, allow_batch_change=allow_batch_change):
            raise CursorError(
                "the cursor does not belong to this run: " + "; ".join(different) + self.differing_shards(cursor),
                hint=way_out(different),
            )
        if not 0 <= cursor.position < self.num_positions:
            expected = f"0..{self.num_positions - 1}"
            raise CursorError("the cursor lies outside the epoch", expected=expected, found=cursor.position)
        if (cursor.position - mine.grid_start) % self.global_batch:
            expected = f"{cursor.grid_start} + a multiple of {self.global_batch}"
            raise CursorError("the cursor is not at the start of a window", expected=expected, found=cursor.position)
        if is_other_batch:
            warn_of_batch_change(cursor, self.global_batch)
        # A larger batch may leave no window in this epoch (tail="drop"): then the next one is where to go on.
        return plan, mine.advanced(0, num_positions=self.num_positions) if is_other_batch else mine

    def differing_shards(self, cursor: Cursor) -> str:
        """Names, for a message, the shards that differ from the manifest that a cursor was made with."""
        if cursor.fingerprint == self.manifest.fingerprint:
            return ""
        reason = "the cursor's manifest was never saved"
        if cursor.manifest is not None:
            try:
                before = Manifest.load(cursor.manifest)
            except Exception as error:  # noqa: BLE001 - the refusal comes through, whatever became of the manifest
                reason = str(error)
            else:
                if before.fingerprint == cursor.fingerprint:
                    return "; shards: " + "; ".join(self.manifest.differences(before))
                reason = f"{cursor.manifest} is no longer the cursor's manifest"
        if cursor.shards is None:
            return f"; which shards differ is unknown: {reason}"
        marks = [cursor.shards[begin : begin + 8] for begin in range(0, len(cursor.shards), 8)]
        return "; shards: " + "; ".join(self.manifest.differences_by_marks(marks))

    # ------------------------------------------------------------------------------------------------ batches

    def micro_batches(
        self, rank: int, start: Cursor, *, worker: int = 0, num_workers: int = 1, first_index: int = 0
    ) -> Iterator[PlannedBatch]:
        """Yields what one worker of a rank reads: every ``num_workers``-th micro-batch, beginning with ``worker``.

        To the end of the epoch; with ``tail="continue"`` on and on.

        Args:
            rank: Data-parallel rank.
            start: Where the pass begins.
            worker: Index of the DataLoader worker.
            num_workers: Number of workers (1 for none).
            first_index: Micro-batches of the rank before this index are skipped.

        Raises:
            PlanError: If there is no such rank or worker.
        """
        check_reader(rank, self.world_size, worker, num_workers)
        return self._pass(rank, start, worker, num_workers, first_index)

    def _pass(
        self, rank: int, start: Cursor, worker: int, num_workers: int, first_index: int
    ) -> Iterator[PlannedBatch]:
        epoch, position, index = start.epoch, start.position, 0
        while True:
            deal = self.epoch(epoch, position).deal
            end = index + deal.num_micro_batches(rank)
            first = max(first_index, index)
            wanted = range(first + (worker - first) % num_workers, end, num_workers)
            yield from _dealt(epoch, deal, rank, wanted, range(index, end))
            if self.tail != "continue":
                return
            index = end
            more, position = divmod(position + deal.num_windows * self.global_batch, self.num_positions)
            epoch += more


def _dealt(epoch: int, deal: Deal, rank: int, wanted: range, of_epoch: range) -> Iterator[PlannedBatch]:
    """Yields the wanted ones of a rank's micro-batches of one epoch; whole windows are dealt many at a time."""
    share, at_once = deal.batch_size * deal.accumulate, max(1, _DEALT_AT_ONCE // (deal.batch_size * deal.accumulate))
    begin, end = 0, 0
    positions = np.empty((0, share), np.int64)
    real = np.zeros(deal.batch_size, np.bool_)
    global_batch, num_whole_windows = deal.global_batch, deal.num_whole_windows
    for index in wanted:
        window, micro = divmod(index - of_epoch.start, deal.accumulate)
        if window >= num_whole_windows:
            cut = deal.micro_batch(rank, index - of_epoch.start)
            here, is_padding, is_last = cut.positions, cut.is_padding, cut.is_last
        else:
            if not begin <= window < end:
                begin, end = window, min(window + at_once, num_whole_windows)
                positions = deal.parts(rank, begin, end - begin)
            here = positions[window - begin, micro * deal.batch_size : (micro + 1) * deal.batch_size]
            is_padding, is_last = real, micro == deal.accumulate - 1
        place = deal.start + window * global_batch
        of_pass, is_end = index // deal.accumulate, index == of_epoch.stop - 1
        yield PlannedBatch(index, epoch, place, of_pass, micro, here, is_padding, is_last, is_end)


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The order and the deal of one epoch."""

    epoch: int
    order: _Order
    deal: Deal


def check_reader(rank: int, world_size: int, worker: int, num_workers: int) -> None:
    """Refuses ranks and workers that do not exist.

    Raises:
        PlanError: If there is no such rank or worker.
    """
    if not 0 <= rank < world_size:
        raise PlanError("no such rank", expected=f"0..{world_size - 1}", found=rank)
    if not 0 <= worker < num_workers:
        raise PlanError("no such worker", expected=f"0..{num_workers - 1}", found=worker)
