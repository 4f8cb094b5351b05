"""Hugging Face Accelerate: windows for a loop with an ``Accelerator``, and no second split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardstream.errors import PlanError, TopologyError
from shardstream.torch.batch import Batch
from shardstream.torch.window import Window
from shardstream.torch.windows import windows


def windows_of(accelerator: Any, loader: Iterable[Batch], **options: Any) -> Iterator[Window]:
    """Yields what ``windows`` does, for a loop that calls ``accelerator.backward``.

    Args:
        accelerator: The ``accelerate.Accelerator`` that prepared model and optimizer.
        loader: A ``StreamingLoader``, prepared or not: ``prepare`` leaves it as it is.
        **options: As of ``windows``.

    Raises:
        PlanError: If the accelerator divides losses once more (``gradient_accumulation_steps``).
        TopologyError: If Accelerate splits the loader's batches among the ranks again.

    Example:
        >>> for window in windows_of(accelerator, loader):  # doctest: +SKIP
        ...     for micro in window.micro_batches(model):
        ...         accelerator.backward(window.loss(lm=loss_sum(model, micro)))
        ...     window.step(optimizer)
        ...     optimizer.zero_grad()
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise PlanError(
            "accelerator.backward would divide what is divided by all targets of the global batch already",
            expected="Accelerator(gradient_accumulation_steps=1)",
            found=accelerator.gradient_accumulation_steps,
            hint="give accumulate= to the StreamingDataset: the windows accumulate",
        )
    if type(loader).__name__ in ("DataLoaderDispatcher", "DataLoaderShard") and accelerator.num_processes > 1:
        raise TopologyError(
            "Accelerate splits this loader's batches, which are one rank's already, among the ranks again",
            expected="a StreamingLoader, which accelerator.prepare leaves as it is",
            found=f"{type(loader).__name__}, which prepare made of a DataLoader",
            hint="give StreamingLoader(dataset, ...) to prepare, or do not give it the DataLoader",
        )
    return windows(loader, **options)
