"""``StreamingLoader``: a DataLoader that knows where it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.utils.data import DataLoader

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError
from shardstream.permutation import key64
from shardstream.read_stats import ReadStats
from shardstream.torch.batch import Batch, Place
from shardstream.torch.bundle import Bundle, SingleBatches, in_turn
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.stats import LoaderStats, LoopClock

_LOADER_NUMBERS = count()

OnBreak: TypeAlias = Literal["restart", "continue", "next"]


class StreamingLoader(DataLoader[Batch]):
    """A ``torch.utils.data.DataLoader`` over a ``StreamingDataset`` with ``state_dict`` and an exact ``len``.

    A pass that was iterated to its end is followed by the next epoch. After a ``break``, ``on_break`` says what the
    next pass is.

    Args:
        dataset: The dataset; its micro-batches are handed out as they are.
        on_break: ``"restart"``: the broken pass begins again, but a loop that breaks at the same place of the same
            epoch twice is an error, because it would never see the rest. ``"continue"``: behind the last whole window
            that was handed out. ``"next"``: the next epoch.
        log_every_s: Seconds between two lines of figures in the log ``shardstream`` (level INFO); None for none.
        **options: Options of ``DataLoader``: ``num_workers``, ``pin_memory``, ``persistent_workers``,
            ``prefetch_factor``, ``multiprocessing_context``, ``timeout``, ``worker_init_fn``.

    Raises:
        PlanError: If an option is given that the dataset already answers (``batch_size``, ``sampler``, ``shuffle``,
            ``drop_last``, ``collate_fn``, ``in_order=False``).

    Example:
        >>> loader = StreamingLoader(dataset, num_workers=2)  # doctest: +SKIP
        >>> for batch in loader:  # doctest: +SKIP
        ...     train(batch)
        ...     save(loader.state_dict())
    """

    # What Accelerate (and with it the HF Trainer) would split among the ranks once more: it leaves what has this mark.
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        on_break: OnBreak = "restart",
        log_every_s: float | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, StreamingDataset):
            hint = "make one of the manifest; for another dataset use torch's DataLoader"
            raise PlanError("StreamingLoader takes a StreamingDataset", found=type(dataset).__name__, hint=hint)
        if on_break not in get_args(OnBreak):
            raise PlanError("unknown on_break", expected=" or ".join(get_args(OnBreak)), found=repr(on_break))
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"):
            if options.get(name) is not None:
                raise PlanError(f"StreamingLoader takes no {name}", hint="the dataset decides: give it there")
        if options.get("in_order", True) is False:
            raise PlanError("in_order=False would make the order depend on timing", hint="leave it out")
        if options.get("generator") is None:
            options["generator"] = _own_generator()
        if log_every_s is not None and not log_every_s > 0:
            raise PlanError("log_every_s must be positive, or None", found=log_every_s)
        super().__init__(dataset, batch_size=None, **options)
        self.on_break = on_break
        self._clock = LoopClock(log_every_s)
        self._progress: _Progress | None = None
        self._restarted: tuple[int, ...] | None = None  # the break after which a pass was begun again

    @property
    def streaming_dataset(self) -> StreamingDataset:
        """The dataset, typed."""
        assert isinstance(self.dataset, StreamingDataset)  # noqa: S101 - narrows the type
        return self.dataset

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        dataset, left = self.streaming_dataset, self._left
        start = self._next_start()
        if self.on_break == "restart" and left is not None and left.is_broken:
            self._refuse_second(left)
        dataset.say_cost(self.num_workers)
        with dataset.begin_at(start), dataset.sending_bundles():
            batches: Iterator[Any] = super().__iter__()
        if self.num_workers:
            batches = in_turn(map(partial(_told, dataset.stats), batches), self.num_workers)
        self._clock.begin_pass(dataset.counted_column)
        begun = _LoaderPass(self, batches, start, dataset.num_seeks)
        self._progress = begun.progress
        return begun

    def __len__(self) -> int:
        """Returns the micro-batches of this rank in the pass under way, or in the next one if none is.

        Raises:
            TypeError: If the tail is ``"continue"``, which has no end.
        """
        left = self._left
        under_way = left is not None and left.is_alive() is not None and not left.is_finished
        start = left.start if under_way and left is not None else self._next_start()
        return self.streaming_dataset.num_micro_batches(start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor of the last batch handed out: JSON values, the same on every rank.

        Prefetched batches do not count. Code that holds batches back must save ``batch.cursor`` of the last batch it
        trained on instead.
        """
        left = self._left
        if left is None or left.has_ended:
            return self.streaming_dataset.state_dict()
        cursor: Cursor = left.start if left.last is None else left.last.cursor
        return cursor.state_dict()

    def stats(self) -> LoaderStats:
        """Returns what this loader did so far on this rank: how much, how fast, and who waited for whom."""
        return self._clock.stats(self.streaming_dataset.stats)

    def load_state_dict(self, state: Mapping[str, Any] | Cursor, *, allow_batch_change: bool = False) -> None:
        """Lets the next pass begin at a cursor; see ``StreamingDataset.load_state_dict``.

        Raises:
            CursorError: If it belongs to another manifest, seed, order, batch or tail.
        """
        self.streaming_dataset.load_state_dict(state, allow_batch_change=allow_batch_change)

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass be the given epoch; see ``StreamingDataset.set_epoch``."""
        self.streaming_dataset.set_epoch(epoch)

    @property
    def _left(self) -> _Progress | None:
        """The last pass, unless somebody has said since where to go on (here, or at the dataset)."""
        progress = self._progress
        is_valid = progress is not None and progress.num_seeks == self.streaming_dataset.num_seeks
        return progress if is_valid else None

    def _next_start(self) -> Cursor:
        """Where the next pass begins."""
        dataset, left = self.streaming_dataset, self._left
        if left is None or left.is_finished:
            return dataset.start
        if left.last is None or self.on_break == "restart":
            return left.start
        last: Cursor = left.last.cursor
        if self.on_break == "continue":
            return last
        behind = last.epoch if last.position == 0 else last.epoch + 1
        return dataset.plan.cursor(max(behind, left.start.epoch + 1))

    def _refuse_second(self, left: _Progress) -> None:
        """Notices a loop that breaks at the same place of the same epoch again: it would never see the rest."""
        assert left.last is not None  # noqa: S101 - narrows the type
        cursor: Cursor = left.last.cursor
        broken_at = (left.num_seeks, left.start.epoch, cursor.epoch, left.last.position, left.last.micro_index)
        if broken_at == self._restarted:
            raise CursorError(
                f"the loop left epoch {left.start.epoch} at position {cursor.position} for the second time",
                hint="it would never see the rest: give on_break='continue' (go on there) or 'next' (next epoch)",
            )
        self._restarted = broken_at


def _own_generator() -> torch.Generator:
    """A generator for the seeds of workers, which follows from ``torch.manual_seed`` and takes nothing from its stream.

    A DataLoader draws from the global stream whenever it is iterated: a resumed run, which iterates once more, would
    drop out other units than one that was never broken.
    """
    generator = torch.Generator()
    seed = key64(torch.initial_seed(), next(_LOADER_NUMBERS), "loader")
    generator.manual_seed(seed - (1 << 63))
    return generator


def _told(stats: ReadStats, bundle: Bundle | SingleBatches) -> Bundle | SingleBatches:
    """Counts what the worker of a bundle has read for it."""
    if bundle.read is not None:
        stats.add(bundle.read)
    return bundle


@dataclass
class _Progress:
    """How far a pass came.

    Attributes:
        start: Where it began.
        num_seeks: The dataset's, then.
        is_alive: Refers to the pass, if somebody still holds it.
        last: Place of the last batch that was handed out.
        is_finished: Whether everything was handed out.
        has_ended: Whether the consumer was told that it is the end.
    """

    start: Cursor
    num_seeks: int
    is_alive: Callable[[], object]
    last: Place | None = None
    is_finished: bool = False
    has_ended: bool = False

    @property
    def is_broken(self) -> bool:
        """Whether it was left on its way."""
        return self.last is not None and not self.is_finished


class _LoaderPass(Iterator[Batch]):
    """One pass over a loader. Handing a batch out counts as its consumption."""

    def __init__(self, loader: StreamingLoader, batches: Iterator[Batch], start: Cursor, num_seeks: int) -> None:
        self._loader, self._batches = loader, batches
        self._dataset = loader.streaming_dataset
        self.progress = _Progress(start, num_seeks, weakref.ref(self))
        self._is_held_back = False
        self._error: Exception | None = None

    def __next__(self) -> Batch:
        loader, progress = self._loader, self.progress
        if loader.persistent_workers and loader._progress is not progress:  # noqa: SLF001
            raise PlanError(
                "this pass ended when the loader was iterated again: its workers are at work for the new pass",
                hint="for two passes side by side use persistent_workers=False, or two loaders",
            )
        if self._error is not None:
            raise self._error  # a loop that swallowed it must not take what is missing for the end of the epoch
        clock = loader._clock  # noqa: SLF001
        asked_at = clock.asked()
        try:
            batch = next(self._batches)
            batch._on_touch = None  # noqa: SLF001 - the loader knows what it hands out, no touch need tell
            self._dataset.took(batch)
        except StopIteration:
            if not self._is_held_back:
                self.finish()
            raise
        except Exception as error:
            self._error = error
            raise
        if not self._is_held_back:
            self.hand_out(batch)
        clock.gave(batch, asked_at, self._dataset.stats)
        return batch

    def hold_back(self) -> None:
        """Lets the caller, who looks ahead, say himself what the loop got: ``hand_out``, and at its end ``finish``."""
        self._is_held_back = True

    def hand_out(self, batch: Batch) -> None:
        """Notes that the loop has got a batch: it is consumed, and its cursor is the loader's state."""
        progress = self.progress
        progress.last, progress.is_finished = batch.place, batch.place.is_last_in_pass
        if self._is_current:
            self._dataset.consumed(batch.place)

    def finish(self) -> None:
        """Notes that the loop was told that the pass is over."""
        progress = self.progress
        if self._is_current and not progress.is_finished:  # this rank had no batch in it
            self._dataset.end_epoch(progress.start.epoch)
        progress.is_finished = progress.has_ended = True

    @property
    def _is_current(self) -> bool:
        return self._loader._left is self.progress  # noqa: SLF001 - the loader's own iterator

    def __len__(self) -> int:
        return self._dataset.num_micro_batches(self.progress.start)
