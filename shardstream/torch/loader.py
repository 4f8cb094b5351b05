"""``StreamingLoader``: a DataLoader that knows where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch.utils.data import DataLoader

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, PlanError
from shardstream.torch.batch import Batch
from shardstream.torch.dataset import StreamingDataset

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

    def __init__(self, dataset: StreamingDataset, *, on_break: OnBreak = "restart", **options: Any) -> None:
        if on_break not in get_args(OnBreak):
            raise PlanError("unknown on_break", expected=" or ".join(get_args(OnBreak)), found=repr(on_break))
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn"):
            if options.get(name) is not None:
                raise PlanError(f"StreamingLoader takes no {name}", hint="the dataset decides: give it there")
        if options.get("in_order", True) is False:
            raise PlanError("in_order=False would make the order depend on timing", hint="leave it out")
        super().__init__(dataset, batch_size=None, **options)
        self.on_break = on_break
        self._last: Cursor | None = None  # of the last batch handed out
        self._pass: _LoaderPass | None = None
        self._last_break: tuple[int, int, int] | None = None

    @property
    def streaming_dataset(self) -> StreamingDataset:
        """The dataset, typed."""
        assert isinstance(self.dataset, StreamingDataset)  # noqa: S101 - narrows the type
        return self.dataset

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._settle_break()
        start = self.streaming_dataset.start
        self._last = None
        self._pass = _LoaderPass(self, super().__iter__(), start)
        return self._pass

    def __len__(self) -> int:
        """Returns the micro-batches of this rank in the pass under way, or in the next one if none is.

        Raises:
            TypeError: If the tail is ``"continue"``, which has no end.
        """
        under_way = self._pass is not None and not self._pass.is_finished
        start = self._pass.start if under_way and self._pass is not None else self.streaming_dataset.start
        return self.streaming_dataset.num_micro_batches(start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor of the last batch handed out: JSON values, the same on every rank.

        Prefetched batches do not count. Code that holds batches back must save ``batch.cursor`` of the last batch it
        trained on instead.
        """
        return (self._last or self.streaming_dataset.start).state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Cursor, *, allow_batch_change: bool = False) -> None:
        """Lets the next pass begin at a cursor; see ``StreamingDataset.load_state_dict``.

        Raises:
            CursorError: If it belongs to another manifest, seed, order, batch or tail.
        """
        self._forget_pass()
        self.streaming_dataset.load_state_dict(state, allow_batch_change=allow_batch_change)

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass be the given epoch; see ``StreamingDataset.set_epoch``."""
        self._forget_pass()
        self.streaming_dataset.set_epoch(epoch)

    def _forget_pass(self) -> None:
        self._pass = self._last = None

    def _settle_break(self) -> None:
        """Decides where the next pass begins if the one before was left before its end."""
        left = self._pass
        if left is None or left.is_finished or self._last is None:
            return
        dataset, last, start = self.streaming_dataset, self._last, left.start
        if self.on_break == "next":
            dataset.move_to(dataset.plan.cursor(start.epoch + 1))
        elif self.on_break == "continue":
            dataset.move_to(last)
        else:
            if left.left_at is not None and self._last_break == left.left_at:
                raise CursorError(
                    f"the loop left epoch {start.epoch} at position {last.position} for the second time",
                    hint="it would never see the rest: give on_break='continue' (go on there) or 'next' (next epoch)",
                )
            self._last_break = left.left_at
            dataset.move_to(start)

    def _handed_out(self, batch: Batch) -> None:
        self._last = batch.place.cursor

    def _finished(self, start: Cursor) -> None:
        dataset = self.streaming_dataset
        dataset.move_to(dataset.plan.cursor(start.epoch + 1))
        self._last = None


class _LoaderPass(Iterator[Batch]):
    """One pass over a loader."""

    def __init__(self, loader: StreamingLoader, batches: Any, start: Cursor) -> None:
        self._loader, self._batches, self.start = loader, batches, start
        self.is_finished = False
        self.left_at: tuple[int, int, int] | None = None

    def __next__(self) -> Batch:
        try:
            batch: Batch = next(self._batches)
        except StopIteration:
            if not self.is_finished and self._loader._pass is self:  # noqa: SLF001 - the loader's own iterator
                self._loader._finished(self.start)  # noqa: SLF001
            self.is_finished = True
            raise
        if self._loader._pass is self:  # noqa: SLF001
            self._loader._handed_out(batch)  # noqa: SLF001
        self.left_at = (batch.place.cursor.epoch, batch.position, batch.micro_index)
        return batch

    def __len__(self) -> int:
        return len(self._loader)
