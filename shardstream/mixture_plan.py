"""The plan of a mixture: several sources as one stream of windows, with the same one-integer cursor.

A source is a plan of its own, with ``tail="continue"`` and a seed of its own; what is added here is which of its
positions a window holds. All of it is arithmetic on the position.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from shardstream.batching import resolve_accumulate
from shardstream.cursor import Cursor, warn_of_batch_change, way_out
from shardstream.errors import CursorError, PlanError, ShardStreamWarning, shown_url
from shardstream.mixing import ENDLESS, Era, Mixture, Shares, SourcePlaces, shares, source_lanes, source_seed
from shardstream.mixture_past import Past
from shardstream.order import Shuffle
from shardstream.packing import Packed, Packing
from shardstream.permutation import Int64Array
from shardstream.plan import Plan, PlannedBatch, check_reader

SOURCE_BITS = 40  # logs know a sample by its id and, from this bit on, the index of its source
_SORTED_AT_ONCE = 65536  # positions of windows


@dataclass(frozen=True, eq=False)
class MixturePlan:
    """Sources, shares and batch of a job; the same on every rank. Make one with ``MixturePlan.make``.

    There is one epoch without an end: positions count what all ranks have consumed of all sources.

    Attributes:
        mixture: Sources, weights, schedule.
        seed: The job's seed; each source has one of its own made of it and its name.
        world_size: Number of data-parallel ranks.
        batch_size: Samples of a micro-batch.
        accumulate: Micro-batches of a rank in a window.
        plans: The sources' own plans, in the order of names.
        grid: (position, global batch): where windows of a new size began; the first entry is at 0.
    """

    mixture: Mixture
    seed: int
    world_size: int
    batch_size: int
    accumulate: int
    plans: tuple[Plan, ...]
    grid: tuple[tuple[int, int], ...]

    tail = "continue"
    packed = None

    @classmethod
    def make(
        cls,
        mixture: Mixture,
        *,
        batch_size: int,
        world_size: int = 1,
        global_batch: int | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        shuffle: Shuffle = True,
        packing: Sequence[Packing | Packed | None] | None = None,
    ) -> MixturePlan:
        """Returns a plan with everything checked.

        Args:
            mixture: Sources, weights, schedule.
            batch_size: Samples of a micro-batch.
            world_size: Number of data-parallel ranks.
            global_batch: Samples of a window over all ranks.
            accumulate: Micro-batches of a rank in a window, as the other way to say it.
            seed: The job's seed.
            shuffle: How each source's order is shuffled.
            packing: For each source, in the order of names, how it is packed; None for rows.

        Raises:
            PlanError: If settings do not fit together, or a source is empty.

        Example:
            >>> from shardstream.manifest import Manifest
            >>> web = Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=50)
            >>> code = Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=30)
            >>> plan = MixturePlan.make(Mixture({"web": (web, 0.7), "code": (code, 0.3)}), batch_size=4, world_size=2)
            >>> plan.counts(80), {name: round(times, 2) for name, times in plan.passes(800).items()}
            ({'code': 24, 'web': 56}, {'code': 4.0, 'web': 2.8})
        """
        accumulate = resolve_accumulate(
            world_size=world_size, batch_size=batch_size, global_batch=global_batch, accumulate=accumulate
        )
        batch = {"world_size": world_size, "batch_size": batch_size, "accumulate": accumulate}
        size = world_size * batch_size * accumulate
        eras, plans = mixture.eras(size), []
        for index, (name, manifest) in enumerate(zip(mixture.names, mixture.manifests, strict=True)):
            served = [float(shares(era.weights)[index]) * size for era in eras if era.weights[index]]
            lanes = source_lanes(min(served, default=1), manifest.num_blocks) if shuffle is True else 1
            try:
                plan = Plan.make(
                    manifest,
                    seed=source_seed(seed, name),
                    lanes=lanes,
                    shuffle=shuffle,
                    tail=cls.tail,
                    packing=None if packing is None else packing[index],
                    **batch,
                )
            except PlanError as error:
                raise PlanError(f"source {name!r}: {error}") from error
            plans.append(plan)
        return cls(mixture, seed, world_size, batch_size, accumulate, tuple(plans), ((0, size),))

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # not what was only derived

    # ------------------------------------------------------------------------------------------------ figures

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources, sorted."""
        return self.mixture.names

    @property
    def by_name(self) -> dict[str, Plan]:
        """The sources' own plans."""
        return dict(zip(self.names, self.plans, strict=True))

    @property
    def shuffle(self) -> Shuffle:
        """How each source's order is shuffled."""
        return self.plans[0].shuffle

    @property
    def global_batch(self) -> int:
        """G: samples of one optimizer step over all ranks."""
        return self.world_size * self.batch_size * self.accumulate

    @property
    def num_positions(self) -> int:
        """Positions of the one epoch: more than anybody will consume."""
        return ENDLESS

    @property
    def has_end(self) -> bool:
        """Whether a pass over it ends."""
        return self.stop is not None

    @property
    def lanes(self) -> int:
        """Lanes of all sources together."""
        return sum(plan.lanes for plan in self.plans)

    @property
    def lanes_in_turn(self) -> int:
        """Lanes to which positions go in turn: as if there were G, as every window visits each about once."""
        return self.global_batch

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over names and fingerprints of the sources."""
        texts = json.dumps([[name, plan.fingerprint] for name, plan in self.by_name.items()])
        return hashlib.blake2b(texts.encode(), digest_size=16, person=b"mixture1").hexdigest()

    @cached_property
    def shares(self) -> Shares:
        """Which positions are whose."""
        return Shares(self.mixture.eras(*self.grid))

    @cached_property
    def stop(self) -> int | None:
        """Position where the stream ends, the start of a window; None if nothing ends it."""
        wanted = self.mixture.stop_after
        if wanted is None or wanted == 0:
            return wanted
        if isinstance(wanted, str):
            source = self.names.index(wanted)
            stop = self.shares.reach(source, self.plans[source].num_positions)
            if stop is None:
                hint = "give it a weight that lasts, or stop after a number of positions"
                raise PlanError(f"source {wanted!r} never comes to its end", hint=hint)
            return stop
        last = int(self.shares.window_start(np.array([wanted - 1]))[0])
        return last + self.shares.global_batch(last)

    def counts(self, position: int) -> dict[str, int]:
        """Returns how many samples each source has given before a window that begins at ``position``."""
        counts = self.shares.counts(np.array([position]))[0].tolist()
        return dict(zip(self.names, counts, strict=True))

    def passes(self, position: int) -> dict[str, float]:
        """Returns how many times each source has been through before a window that begins at ``position``."""
        return {name: num / self.by_name[name].num_positions for name, num in self.counts(position).items()}

    # ------------------------------------------------------------------------------------------------ positions

    def sources(self, positions: Int64Array) -> SourcePlaces:
        """Returns source and the source's own position, counted over its passes, of positions."""
        return self.shares.locate(positions)

    def sample_ids(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Returns the id of the sample at positions, in its own source: as ``Plan.sample_ids`` of it."""
        places, ids = self.sources(epoch * ENDLESS + positions), np.empty(len(positions), np.int64)
        for source in np.unique(places.source).tolist():
            here = places.source == source
            ids[here] = self.plans[source].sample_ids(0, places.position[here])
        return ids

    def windows(self, position: int, num_windows: int) -> Int64Array:
        """Returns the positions of windows as they are dealt: int64[num_windows, G], source by source, lane by lane.

        Equal parts of a window, one a rank, keep a rank on its own lanes. So a window holds the same positions for
        every topology.

        Args:
            position: Where the first window begins.
            num_windows: How many.
        """
        positions = np.arange(position, position + num_windows * self.global_batch)
        places = self.sources(positions)
        lanes = np.array([plan.lanes for plan in self.plans], np.int64)
        sizes = np.array([plan.num_positions for plan in self.plans], np.int64)[places.source]
        lane = (np.cumsum(lanes) - lanes)[places.source] + places.position % sizes % lanes[places.source]
        by_lane = np.argsort(lane.reshape(num_windows, -1), axis=1, kind="stable")
        dealt: Int64Array = by_lane + position + np.arange(num_windows)[:, None] * self.global_batch
        return dealt

    def micro_batches(
        self, rank: int, start: Cursor, *, worker: int = 0, num_workers: int = 1, first_index: int = 0
    ) -> Iterator[PlannedBatch]:
        """Yields what one worker of a rank reads: as ``Plan.micro_batches``, to where the stream stops.

        Raises:
            PlanError: If there is no such rank or worker.
            CursorError: If the start lies before the windows of this global batch.
        """
        check_reader(rank, self.world_size, worker, num_workers)
        if start.position < self.grid[-1][0]:
            expected = f"{self.grid[-1][0]} or later"
            raise CursorError("windows were of another size there", expected=expected, found=start.position)
        first = first_index + (worker - first_index) % num_workers
        end = self.num_micro_batches(rank, start) if self.has_end else None
        return self._pass(
            rank, start.position, range(first, end, num_workers) if end is not None else count(first, num_workers), end
        )

    def num_micro_batches(self, rank: int, start: Cursor) -> int:  # noqa: ARG002 - as ``Plan``
        """Returns a rank's micro-batches from a cursor to where the stream stops: as many on every rank.

        Raises:
            PlanError: If it does not stop.
        """
        if self.stop is None:
            raise PlanError("the stream has no end", hint="give the mixture stop_after=")
        return max(0, self.stop - start.position) // self.global_batch * self.accumulate

    def _pass(self, rank: int, position: int, wanted: Iterable[int], end: int | None) -> Iterator[PlannedBatch]:
        size, share = self.global_batch, self.batch_size * self.accumulate
        at_once, begin, parts = max(1, _SORTED_AT_ONCE // size), 0, np.empty((0, share), np.int64)
        real = np.zeros(self.batch_size, np.bool_)
        for index in wanted:
            window, micro = divmod(index, self.accumulate)
            if not begin <= window < begin + len(parts):
                begin, num_windows = window, min(at_once, 8 * max(1, len(parts)))  # few at first: a start is a seek
                if end is not None:
                    num_windows = min(num_windows, end // self.accumulate - begin)
                parts = self.windows(position + begin * size, num_windows)[:, rank * share : (rank + 1) * share]
            here = parts[window - begin, micro * self.batch_size : (micro + 1) * self.batch_size]
            place, is_last = position + window * size, micro == self.accumulate - 1
            yield PlannedBatch(
                index,
                0,
                place,
                window,
                micro,
                here,
                real,
                is_last,
                is_last_in_epoch=end is not None and index == end - 1,
            )

    # ------------------------------------------------------------------------------------------------ cursors

    def identity(self) -> dict[str, Any]:
        """Returns what decides which samples come when, as JSON values: for the cursor."""
        sources = {
            name: {
                "fingerprint": plan.fingerprint,
                "lanes": plan.lanes,
                "packing": None if plan.packed is None else plan.packed.packing.identity(),
                "manifest": None if plan.manifest.path is None else shown_url(plan.manifest.path),
            }
            for name, plan in self.by_name.items()
        }
        return {"sources": sources, "schedule": [self._described(era) for era in self.shares.eras]}

    def _described(self, era: Era) -> list[Any]:
        weights = {name: weight for name, weight in zip(self.names, era.weights, strict=True) if weight}
        return [era.start, era.global_batch, weights]

    @cached_property
    def _origin(self) -> Cursor:
        return Cursor(
            fingerprint=self.fingerprint,
            seed=self.seed,
            epoch=0,
            position=0,
            grid_start=self.grid[-1][0],
            global_batch=self.global_batch,
            shuffle=self.shuffle,
            lanes=self.lanes,
            tail=self.tail,
            mixture=self.identity(),
        )

    def cursor(self, epoch: int = 0, position: int = 0, grid_start: int = 0) -> Cursor:  # noqa: ARG002 - as ``Plan``
        """Returns the cursor of a place in this plan.

        Args:
            epoch: 0.
            position: Where the next window begins.
            grid_start: Follows from the plan.

        Raises:
            PlanError: If the epoch is another one.
        """
        if epoch != 0:
            hint = "leave set_epoch out: each source starts over by itself"
            raise PlanError("a mixture is one stream without epochs", expected=0, found=epoch, hint=hint)
        return self._origin.at(0, position, self.grid[-1][0])

    def cursor_after(self, batch: PlannedBatch, grid_start: int = 0) -> Cursor:
        """Returns the cursor that is right once a batch was trained on: its window's last micro-batch moves it."""
        moved = self.global_batch if batch.is_last_in_window else 0
        return self.cursor(batch.epoch, batch.position + moved, grid_start)

    @property
    def pin(self) -> int:
        """What a cursor pins of a plan, as one number, by which workers see that theirs is another one."""
        pinned = [list(self.grid), [plan.lanes for plan in self.plans]]
        return zlib.crc32(json.dumps(pinned).encode()) or 1

    def with_pin(self, pin: int) -> MixturePlan:
        """Returns the plan itself.

        Raises:
            CursorError: If ``pin`` is not its own.
        """
        if pin not in (0, self.pin):
            hint = "make a new loader after load_state_dict, or use persistent_workers=False"
            raise CursorError("the cursor was loaded when these worker processes were at work already", hint=hint)
        return self

    def resume(self, cursor: Cursor, *, allow_batch_change: bool = False) -> tuple[MixturePlan, Cursor]:
        """Checks a cursor against this plan and adopts its lanes and its past.

        Accepted are other weights from the cursor's position on, and sources that had no samples before it.

        Args:
            cursor: From a checkpoint.
            allow_batch_change: Accept another global batch; new windows and a new table begin at the cursor.

        Returns:
            The plan with the cursor's past, and the cursor in terms of this plan.

        Raises:
            CursorError: If the cursor is of another run; everything that differs is listed.
        """
        past = Past.read(cursor)
        plan = replace(self, grid=past.grid(self.global_batch), plans=past.pinned(self.by_name))
        mine = plan.cursor(0, cursor.position)
        like = replace(cursor, fingerprint=mine.fingerprint, lanes=mine.lanes, mixture=mine.mixture)
        different = like.differences(mine, allow_batch_change=allow_batch_change)
        different += past.differences(plan.by_name, plan.shares.eras)
        if different:
            hint = way_out(different)
            if any(text.startswith(("weights", "source")) for text in different):
                hint = "change weights by a schedule entry at the cursor's position or later; " + hint
            raise CursorError("the cursor does not belong to this run: " + "; ".join(different), hint=hint)
        starts = plan.shares.window_start(np.array([cursor.position]))
        if starts[0] != cursor.position:
            expected = f"{starts[0]} or {starts[0] + plan.global_batch}"
            raise CursorError("the cursor is not at the start of a window", expected=expected, found=cursor.position)
        if cursor.global_batch != self.global_batch:
            warn_of_batch_change(cursor, self.global_batch)
        if changes := past.changes_ahead(plan.names, plan.shares.eras):
            warnings.warn("the mixture is changed ahead of the cursor: " + changes, ShardStreamWarning, stacklevel=3)
        return plan, mine


def logged_ids(plan: MixturePlan, positions: Int64Array) -> Int64Array:
    """Returns what logs know the samples at positions by: int64[n], the id with the index of its source before it."""
    return plan.sample_ids(0, positions) | plan.sources(positions).source << SOURCE_BITS


AnyPlan: TypeAlias = Plan | MixturePlan
