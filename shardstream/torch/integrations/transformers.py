"""The Hugging Face ``Trainer``: a loader that it takes as it is, and a callback that keeps the cursor in its state.

The Trainer reads the micro-batches of an optimizer step, counts their targets over all ranks (``num_items_in_batch``)
and divides by that: right, if the loader's steps are its own. What goes wrong is around it: it would split the data
again, and skip what was trained on by reading it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardstream.errors import CursorError, PlanError
from shardstream.torch.batch import Batch
from shardstream.torch.loader import StreamingLoader

_NAME = "CursorCallback"  # the Trainer keeps a callback's state under the name of its class


class TrainerLoader:
    """What ``Trainer.get_train_dataloader`` returns: plain dicts, and steps that all have as many micro-batches.

    The Trainer steps whenever it has seen ``gradient_accumulation_steps`` micro-batches since the epoch, or its resume,
    began. So a last window that is short is filled with micro-batches without targets, which weigh nothing.

    Args:
        loader: The loader of this rank's micro-batches.
        columns: Those that the model takes; None for all.
        labels: Columns of labels, which micro-batches without targets have none of.

    Example:
        >>> class MyTrainer(transformers.Trainer):  # doctest: +SKIP
        ...     def get_train_dataloader(self):
        ...         return TrainerLoader(loader, columns=["input_ids", "labels"])
    """

    def __init__(
        self, loader: StreamingLoader, *, columns: Sequence[str] | None = None, labels: Sequence[str] = ("labels",)
    ) -> None:
        self.loader, self._columns, self._labels = loader, columns, tuple(labels)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        num_wanted = self.loader.streaming_dataset.plan.accumulate
        for batch in self.loader:
            yield self._inputs(batch)
            if batch.place.is_last_in_window:
                for _ in range(batch.micro_index + 1, num_wanted):
                    yield self._without_targets(self._inputs(batch))

    def __len__(self) -> int:
        """Returns the micro-batches of a whole epoch, also where the next pass begins inside of one.

        Raises:
            TypeError: If the tail is ``"continue"``, which has no end: set ``max_steps``.
        """
        dataset = self.loader.streaming_dataset
        plan = dataset.plan
        num_micro_batches = dataset.num_micro_batches(plan.cursor(dataset.start.epoch))
        return -(-num_micro_batches // plan.accumulate) * plan.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Lets the next pass be the given epoch, which the Trainer counts by steps; a stream without end has none."""
        if self.loader.streaming_dataset.plan.has_end:
            self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor of the last batch handed out; between optimizer steps that is the last one trained on."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next pass begin at a cursor."""
        self.loader.load_state_dict(state)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        inputs = batch.model_inputs()
        return inputs if self._columns is None else {name: inputs[name] for name in self._columns}

    def _without_targets(self, inputs: dict[str, Any]) -> dict[str, Any]:
        masked = {name: torch.full_like(inputs[name], -100) for name in self._labels}
        return {**inputs, **masked}


def cursor_callback(loader: TrainerLoader) -> Any:
    """Returns a ``TrainerCallback`` that keeps the loader's cursor in the Trainer's checkpoints, and goes on there.

    Args:
        loader: What the Trainer's ``get_train_dataloader`` returns.

    Returns:
        The callback. When training begins it raises ``PlanError`` for settings of the Trainer with which steps or
        denominators would not be those of the global batch, and ``CursorError`` for a checkpoint without a cursor.

    Raises:
        ImportError: If transformers is not installed.

    Example:
        >>> trainer = MyTrainer(model, args, callbacks=[cursor_callback(loader)])  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
    """
    try:
        from transformers import TrainerCallback
        from transformers.trainer_callback import ExportableState
    except ImportError as error:
        raise ImportError(
            "the HF Trainer's callback needs transformers: pip install 'shardstream[transformers]'"
        ) from error

    class CursorCallback(TrainerCallback, ExportableState):  # type: ignore[misc] # untyped bases
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            _check(args, loader)
            if state.global_step:
                loader.load_state_dict(_saved(state.stateful_callbacks))

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"cursor": loader.state_dict()}}

    return CursorCallback()


def _saved(states: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        cursor: Mapping[str, Any] = states[_NAME]["attributes"]["cursor"]
    except (KeyError, TypeError):
        hint = "resume from a checkpoint that a Trainer with cursor_callback wrote"
        raise CursorError("the Trainer's checkpoint holds no cursor", found=sorted(states), hint=hint) from None
    return cursor


def _check(args: Any, loader: TrainerLoader) -> None:
    """Refuses settings with which the Trainer's steps would not be the global batches."""
    plan = loader.loader.streaming_dataset.plan
    wanted = {
        "gradient_accumulation_steps": plan.accumulate,  # else it steps elsewhere
        "ignore_data_skip": True,  # else it reads what was trained on, and throws it away
        "average_tokens_across_devices": True,  # else each rank divides by its own targets
        "restore_callback_states_from_checkpoint": False,  # else it makes callbacks anew, without their loader
    }
    wrong = {name: value for name, value in wanted.items() if getattr(args, name, value) != value}
    if wrong:
        raise PlanError(
            "the Trainer's optimizer steps would not be the data set's global batches",
            expected=", ".join(f"{name}={value}" for name, value in wrong.items()),
            found=", ".join(f"{name}={getattr(args, name)}" for name in wrong),
            hint="give these to TrainingArguments",
        )
