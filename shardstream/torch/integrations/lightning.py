"""PyTorch Lightning: a data module that resumes inside an epoch on any number of devices, and exact denominators.

It is a mixin, so that it fits ``lightning`` and ``pytorch_lightning``, whose classes are not each other's.

Lightning counts the micro-batches of an epoch, of one rank. After a resume it compares that count with the loader's
length, and steps the optimizer where it can be divided by ``accumulate_grad_batches``. So the length that it is told is
that of the whole epoch, and its count is translated where a resumed run has other micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardstream.cursor import Cursor
from shardstream.errors import PlanError
from shardstream.torch.batch import Batch, Place
from shardstream.torch.loader import StreamingLoader
from shardstream.torch.window import LossSum, Window
from shardstream.torch.windows import windows

_MAX_WINDOWS_AHEAD = 2  # Lightning prefetches one batch at most, which may be the next window's


class StreamingData:
    """Mixin of a ``LightningDataModule``: ``class Data(StreamingData, lightning.LightningDataModule)``.

    Define ``train_loader``; ``train_dataloader``, the state and the denominators are given. The cursor in a checkpoint
    is that of the last batch that was trained on, and can be resumed on any number of devices, with other micro-batches
    and ``accumulate_grad_batches``, as long as the global batch stays.

    Attributes:
        heads: The losses, as of ``windows``; None for all that the dataset counts.
        trainer: Lightning's.

    Example:
        >>> class Data(StreamingData, lightning.LightningDataModule):  # doctest: +SKIP
        ...     def train_loader(self):
        ...         return StreamingLoader(StreamingDataset("corpus.manifest.parquet", batch_size=8, accumulate=2))
    """

    heads: Sequence[str] | None = None
    trainer: Any

    _steps: _Steps | None = None
    _loaded: Mapping[str, Any] | None = None
    _entered: deque[Place] | None = None

    def train_loader(self) -> StreamingLoader:
        """Returns the loader of this rank's micro-batches; to be defined by you.

        It is called when processes and devices are there, so that the dataset finds rank and world size.
        """
        raise NotImplementedError(f"{type(self).__name__} must define train_loader()")

    def train_dataloader(self) -> _Steps:
        """Returns what Lightning iterates: the micro-batches of ``train_loader``, where the checkpoint left them.

        Raises:
            PlanError: If the dataset and Lightning accumulate differently.
            CursorError: If the checkpoint belongs to another manifest, seed, order or global batch.
        """
        loader = self.train_loader()
        plan, accumulate = loader.streaming_dataset.plan, self.trainer.accumulate_grad_batches
        if plan.accumulate != accumulate:
            raise PlanError(
                "the optimizer would not step where a global batch ends",
                expected=f"Trainer(accumulate_grad_batches={plan.accumulate}), as the dataset has it",
                found=accumulate,
            )
        num_done = 0
        if self._steps is not None:  # it is asked for again: reload_dataloaders_every_n_epochs
            loader.load_state_dict(self._trained())
        elif self._loaded is not None:
            length = None if plan.tail == "continue" else len(loader)
            loader.load_state_dict(self._loaded["cursor"])
            num_done = self._translate(self._loaded, plan.accumulate, length)
        self._entered = deque(maxlen=2)
        self._steps = _Steps(self, loader, num_done)
        return self._steps

    def loss(self, batch: Batch, **sums: LossSum) -> Tensor:
        """Returns the loss of a micro-batch for ``training_step``: its gradients are those of the whole global batch.

        Lightning averages gradients over the ranks and divides by ``accumulate_grad_batches``; with the denominators
        that this divides by, every target weighs the same all the same.

        Args:
            batch: What ``training_step`` got.
            **sums: For each head the **sum** of its losses, or (sum, weight); see ``Window.loss``.

        Raises:
            PlanError: If there is no such head, or the batch is not of the windows under way.
            DesyncError: If a head is missing or has no graph.
        """
        is_divided = self.trainer.lightning_module.automatic_optimization
        return self.window_of(batch).loss_of(batch, **sums) * (
            self.trainer.accumulate_grad_batches if is_divided else 1
        )

    def window_of(self, batch: Batch) -> Window:
        """Returns the window of a batch: ``targets``, ``scale`` and ``has_targets``, the same on every rank.

        Raises:
            PlanError: If the batch is not of the windows under way.
        """
        under_way = {} if self._steps is None else self._steps.windows
        if batch.window_index not in under_way:
            raise PlanError("the batch is of no window under way", expected=list(under_way), found=batch.window_index)
        return under_way[batch.window_index]

    # ------------------------------------------------------------------------------------------------ Lightning's hooks

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ARG002 - Lightning's interface
        """Notes which batch is about to be trained on. Called by Lightning; call it if you override it."""
        if self.trainer.training and isinstance(batch, Batch) and self._entered is not None:
            self._entered.append(batch.place)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns what goes into Lightning's checkpoint: the cursor, and how many windows of the epoch it is behind."""
        if self._steps is None:
            return {}
        progress = self._progress().current
        num_windows, rest = divmod(progress.processed, self.trainer.accumulate_grad_batches)
        place = self._trained_place()
        is_short_end = rest > 0 and place is not None and place.is_last_in_window
        return {"cursor": self._trained().state_dict(), "num_windows": num_windows + int(is_short_end)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` returned; the loader that Lightning asks for next begins there."""
        self._loaded, self._steps = state, None

    def _trained_place(self) -> Place | None:
        """Place of the last batch whose ``training_step`` is over: a batch that failed was not trained on."""
        assert self._entered is not None  # noqa: S101 - narrows the type
        progress = self._progress().current
        back = 1 if progress.ready == progress.processed else 2
        return self._entered[-back] if len(self._entered) >= back else None

    def _trained(self) -> Cursor:
        assert self._steps is not None  # noqa: S101 - narrows the type
        place = self._trained_place()
        return self._steps.start if place is None else place.cursor

    def _progress(self) -> Any:
        return self.trainer.fit_loop.epoch_loop.batch_progress

    def _translate(self, state: Mapping[str, Any], accumulate: int, length: int | None) -> int:
        """Lets Lightning's counters say how many micro-batches of *this* rank the windows behind us are.

        Returns:
            How many of the epoch under way.
        """
        num_done = state["num_windows"] * accumulate
        is_end = length is not None and num_done > 0 and Cursor.from_state_dict(state["cursor"]).position == 0
        if is_end and length is not None:
            num_done = length
        current = self._progress().current
        difference = num_done - current.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + difference)
        return 0 if is_end else num_done


class _Steps:
    """The micro-batches of a loader, window by window: what Lightning iterates.

    Attributes:
        start: The cursor where it began.
        windows: The windows of which Lightning may hold micro-batches, by index.
    """

    def __init__(self, data: StreamingData, loader: StreamingLoader, num_done: int) -> None:
        self._data, self._loader, self._num_done = data, loader, num_done
        self.dataset = loader.streaming_dataset
        self.start = self.dataset.start
        self.windows: dict[int, Window] = {}

    def __iter__(self) -> Iterator[Batch]:
        for window in windows(self._loader, heads=self._data.heads):
            self.windows[window.batches[0].window_index] = window
            for index in [
                index for index in self.windows if index <= window.batches[0].window_index - _MAX_WINDOWS_AHEAD
            ]:
                del self.windows[index]
            yield from window.micro_batches()
        self.windows = {}

    def __len__(self) -> int:
        """Returns the micro-batches of the whole epoch, those before a resume included, as Lightning counts."""
        start = self.dataset.start
        return self.dataset.num_micro_batches(start) + (self._num_done if start == self.start else 0)

    # Lightning warns of a loader without these; what the data module saved is loaded before.

    def state_dict(self) -> dict[str, Any]:
        return self._data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
