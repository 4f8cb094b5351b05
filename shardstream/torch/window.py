"""``Window``: the micro-batches of one optimizer step, and the arithmetic that makes every target weigh the same."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from shardstream.cursor import Cursor
from shardstream.errors import DesyncError, PlanError, listed
from shardstream.torch.batch import Batch
from shardstream.torch.counts import WindowCounts

LossSum: TypeAlias = Tensor | tuple[Tensor, float]
Gradients: TypeAlias = Literal["mean", "sum"]
Sync: TypeAlias = Literal["last", "each"]


class Watcher(Protocol):
    """Who is told how far a loop is in a window: ``shardstream.torch.ledger``."""

    def entered(self, micro_index: int, model: object) -> None:
        """The loop is about to get a micro-batch."""

    def losses(self, sums: Mapping[str, LossSum], loss: Tensor) -> None:
        """The loop has a loss of the micro-batch, and will call ``backward`` on it."""

    def left(self, micro_index: int) -> None:
        """The loop is done with a micro-batch."""

    def finished(self) -> None:
        """The loop has got all micro-batches, and is about to step."""


@dataclass
class Loop:
    """What the windows of one loop have in common.

    Attributes:
        rank: Data-parallel rank.
        gradients: How gradients are joined over the ranks.
        sync: When, as the user said; None for what suits the model.
        hand_out: Called with each micro-batch that the loop gets.
        has_seen_loss: Whether ``Window.loss`` was called in this loop.
    """

    rank: int
    gradients: Gradients
    sync: Sync | None
    hand_out: Callable[[Batch], None]
    has_seen_loss: bool = False


class Window:
    """One optimizer step: this rank's micro-batches of the global batch, and what all ranks have of it.

    Attributes:
        batches: This rank's micro-batches; ``micro_batches`` hands them out.
        targets: Head name → N_h, the valid targets of the window over all data-parallel ranks.
        scale: Head name → D / N_h, what a sum of losses is multiplied by; 0 where there is no target.
        num_samples: Samples of the window over all ranks, padding left out.
        num_micro_batches: Micro-batches of the window over all ranks.
        num_averaged: D, the number of ranks that gradients are averaged over; 1 where they are summed.
        watcher: Who is told how far the loop is, or None.
    """

    def __init__(self, loop: Loop, batches: Sequence[Batch], counts: WindowCounts, num_averaged: int) -> None:
        self._loop, self.batches = loop, tuple(batches)
        self.targets, self.num_samples = counts.targets, counts.num_samples
        self.num_micro_batches, self.num_averaged = counts.num_micro_batches, num_averaged
        self.scale = {head: num_averaged / count if count else 0.0 for head, count in self.targets.items()}
        self.watcher: Watcher | None = None
        self._current: Batch | None = None
        self._num_handed_out = 0
        self._roots: dict[str, Tensor] = {}  # the sums of the current micro-batch
        self._is_withheld = False
        self._has_loss = True
        self._under_way: WeakSet[Any] = WeakSet()  # weak: a loop that was left ends at once, as nobody holds it

    def __repr__(self) -> str:
        targets = ", ".join(f"{head}: {count}" for head, count in self.targets.items())
        return f"Window({self.batches[0].window_index}, {self.num_samples} samples, targets {{{targets}}})"

    @property
    def cursor(self) -> Cursor:
        """The cursor to save when this window has been trained on; the same on every rank."""
        cursor: Cursor = self.batches[-1].place.cursor
        return cursor

    @property
    def position(self) -> int:
        """Position in the epoch at which the window begins."""
        return self.batches[0].position

    @property
    def has_targets(self) -> bool:
        """Whether any head has a target, or, without heads, whether there is any sample: the same on every rank.

        Without, the optimizer must not step: weights would still decay, and moments move.
        """
        return any(self.targets.values()) if self.targets else self.num_samples > 0

    def micro_batches(self, model: object = None) -> Iterator[Batch]:
        """Yields this rank's micro-batches; forward and backward belong into the body of the loop.

        All but the last are under ``no_sync`` with DDP. FSDP2 (``fully_shard``) reduce-scatters each, and with HSDP
        all-reduces after the last. However the loop is left, the model synchronises again afterwards.

        Args:
            model: The model as it is called: DDP, FSDP or a plain module, for which nothing is done.

        Raises:
            PlanError: If there are several micro-batches, and the model is DDP with ``static_graph=True``, or sums
                gradients after each.
            DesyncError: If the loop went past a micro-batch without ``loss``, as others do call it: their gradients
                would pair with those of another step.
        """
        if len(self.batches) > 1 and _is_ddp(model):
            _refuse_ddp(model, self._loop)
        handed_out = self._hand_out(model)
        self._under_way.add(handed_out)
        return handed_out

    def _hand_out(self, model: object) -> Iterator[Batch]:
        try:
            for index, batch in enumerate(self.batches):
                self._current, self._has_loss, self._num_handed_out = batch, False, index + 1
                self._loop.hand_out(batch)
                is_last = batch is self.batches[-1]
                with _synchronised(model, self._loop.sync, is_last=is_last) as self._is_withheld:
                    if self.watcher is not None:
                        self.watcher.entered(index, model)
                    yield batch
                    if self.watcher is not None:
                        self.watcher.left(index)
                    self._check_reduced(model)
                    self._roots = {}  # graphs are not kept beyond their micro-batch
                self._check_loss()
            if self.watcher is not None:
                self.watcher.finished()
        finally:
            self._current, self._has_loss, self._is_withheld, self._roots = None, True, False, {}

    def _check_loss(self) -> None:
        if not self._has_loss and self._loop.has_seen_loss:
            raise DesyncError(
                f"rank {self._loop.rank} went past a micro-batch without window.loss, in {self!r}",
                hint="run forward and backward on every micro-batch: its loss is an exact 0 where it has no targets",
            )

    def _check_reduced(self, model: Any) -> None:
        """Refuses to go on where DDP waits for parameters that the loss did not reach, as the other ranks then do."""
        is_reduced = getattr(getattr(model, "reducer", None), "_check_reducer_finalized", None)
        if is_reduced is None or self._is_withheld:
            return
        try:
            is_reduced()
        except RuntimeError as error:
            reached = {head: parameters_reached(root) for head, root in self._roots.items()}
            everywhere = set().union(*reached.values())
            named = model.module.named_parameters()
            left_out = [name for name, each in named if each.requires_grad and each not in everywhere]
            counts = ", ".join(f"head {head!r} {len(found)}" for head, found in reached.items())
            raise DesyncError(
                f"gradients were not summed over the ranks: the losses do not reach all parameters on rank "
                f"{self._loop.rank}, {self!r}; reached are by {counts or 'the loss fewer'}",
                expected="all parameters that have a gradient",
                found=f"none for {listed(left_out)}" if left_out else str(error).splitlines()[0],
                hint="run every head on every rank, if only on nothing; or DistributedDataParallel("
                "find_unused_parameters=True)",
            ) from error

    def loss(self, **sums: LossSum) -> Tensor:
        """Returns what to call ``backward`` on: the sum over heads of weight x sum x D / N_h.

        Added up over micro-batches and averaged over ranks, the gradients are those of one process on the whole
        window. A sum over no targets becomes an exact 0 with its graph attached, so that every rank takes part in
        every synchronisation. Nothing waits for a device.

        Args:
            **sums: For *each* head the **sum** (not the mean) of its losses over the targets of this micro-batch, or
                (sum, weight). Rows that are ``is_padding`` have no targets: labels are masked there, but a loss
                that reads no labels must leave them out. Sums in half precision are scaled in float32.

        Returns:
            A scalar.

        Raises:
            PlanError: If there is no such head.
            DesyncError: If a head is missing or has no graph on this rank, which the others would wait for.
        """
        total = self._scaled(self._current, sums)
        self._has_loss = self._loop.has_seen_loss = True
        return self._given(total, sums)

    def loss_of(self, batch: Batch, **sums: LossSum) -> Tensor:
        """Returns what ``loss`` does, for a micro-batch of this window that a loop of somebody else's is at.

        A framework may take micro-batches ahead of the one that it trains on, and synchronises by itself: ``loss``'s
        checks of when ``backward`` comes do not apply.

        Args:
            batch: The micro-batch; it may have been moved to a device.
            **sums: As of ``loss``.

        Raises:
            PlanError: If there is no such head.
            DesyncError: If a head is missing or has no graph on this rank, which the others would wait for.
        """
        total, self._roots = self._scaled(batch, sums), {}
        return total

    def _scaled(self, batch: Batch | None, sums: Mapping[str, LossSum]) -> Tensor:
        self._check_heads(sums)
        terms = []
        for head in self.targets:
            value = sums[head]
            terms.append(self._term(batch, head, sum_of(value), value[1] if isinstance(value, tuple) else 1.0))
        return sum(terms[1:], terms[0])

    def _given(self, loss: Tensor, sums: Mapping[str, LossSum]) -> Tensor:
        """Hands out what ``backward`` is to be called on."""
        if self.watcher is not None:
            self.watcher.losses(sums, loss)
        if self._is_withheld and loss.requires_grad:
            loss.register_hook(partial(self._check_place, self._current))  # type: ignore[no-untyped-call]
        return loss

    def _check_place(self, batch: Batch | None, _gradient: Tensor) -> None:
        """Refuses a backward that comes when its micro-batch is over: DDP would sum some gradients and not others."""
        if self._current is not batch:
            raise PlanError(
                f"backward was called when its micro-batch was over, on rank {self._loop.rank}, in {self!r}",
                hint="call window.loss(...).backward() inside of the loop over window.micro_batches(model)",
            )

    def _term(self, batch: Batch | None, head: str, total: Tensor, weight: float) -> Tensor:
        if total.dtype in (torch.float16, torch.bfloat16):
            total = total.float()
        if batch is None or bool(batch.valid_tokens[head].any()):
            return total * (weight * self.scale[head])
        # A mean over nothing is nan, and nan x 0 is nan: an exact 0 all the same.
        return torch.nan_to_num(total, nan=0.0, posinf=0.0, neginf=0.0) * 0.0

    def _check_heads(self, sums: Mapping[str, LossSum]) -> None:
        if not self.targets:
            hint = "give StreamingDataset(targets={'lm': 'labels'}, shifted=...), or call mean_loss"
            raise PlanError("the dataset counts no targets, which loss divides by", hint=hint)
        place = f"rank {self._loop.rank}, {self!r}"
        for name in sums:
            if name not in self.targets:
                raise unknown_head(name, self.targets)
        for head in self.targets:
            if head not in sums:
                raise DesyncError(
                    f"head {head!r} has no loss on {place}",
                    expected=", ".join(self.targets),
                    found=", ".join(sums) or "none",
                    hint="give its sum for every micro-batch: over no targets that is 0, with the graph attached",
                )
            total = sum_of(sums[head])
            if getattr(total, "shape", None) != ():
                found = getattr(total, "shape", type(total).__name__)
                raise PlanError(f"the loss of head {head!r} must be a sum", expected="a scalar tensor", found=found)
            self._roots[head] = total
            if torch.is_grad_enabled() and not total.requires_grad:
                raise DesyncError(
                    f"head {head!r} is not in the graph on {place}",
                    hint="run the head even on nothing: the sum of its empty output is 0, with a graph",
                )

    def mean_loss(self, value: Tensor) -> Tensor:
        """Returns what to call ``backward`` on for a term that is a mean already, such as a router's balance loss.

        Added up and averaged over ranks it is the mean over the window's micro-batches and ranks, each weighing the
        same, those of a padded tail included.

        Args:
            value: A scalar of this micro-batch.
        """
        return self._given(value * (self.num_averaged / self.num_micro_batches), {})

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Steps the optimizer, unless the window has no targets; the same on every rank.

        A ``GradScaler`` is left alone with it: its ``update`` asserts that a step was taken. If you unscale gradients
        yourself (to clip them), do that only if ``has_targets``.

        Returns:
            ``has_targets``.

        Raises:
            PlanError: As ``check_whole``.
        """
        self.check_whole()
        if self.has_targets and scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif self.has_targets:
            optimizer.step()
        return self.has_targets

    def check_whole(self) -> None:
        """Refuses to step on a part of the window, with gradients that nobody summed over the ranks.

        Raises:
            PlanError: If the loop over ``micro_batches`` was left on its way.
        """
        if 0 < self._num_handed_out < len(self.batches):
            raise PlanError(
                "the window is to be stepped on a part of its micro-batches",
                expected=f"all {len(self.batches)} handed out",
                found=self._num_handed_out,
                hint="finish the loop over window.micro_batches, or do not step and call zero_grad",
            )

    def close(self) -> None:
        """Ends loops over ``micro_batches`` that were left but are still referenced somewhere."""
        for handed_out in list(self._under_way):
            handed_out.close()


def sum_of(value: LossSum) -> Tensor:
    """Returns the sum of what ``Window.loss`` takes, which is a sum or (sum, weight)."""
    return value[0] if isinstance(value, tuple) else value


def unknown_head(name: str, known: Iterable[str]) -> PlanError:
    """Returns the error for a head that nobody declared, with the nearest one that somebody did."""
    near = difflib.get_close_matches(name, known, 1)
    expected = " or ".join(known) or "no head: the dataset has no targets"
    return PlanError(
        f"there is no head {name!r}", expected=expected, hint=f"did you mean {near[0]!r}?" if near else None
    )


def _refuse_ddp(model: Any, loop: Loop) -> None:
    """Refuses what DDP cannot do with several micro-batches."""
    if loop.sync == "each" and loop.gradients == "sum":
        hint = "leave sync= out: gradients are then summed once, after the last micro-batch"
        raise PlanError("DDP would sum what is summed already again after each micro-batch", hint=hint)
    if loop.sync != "each" and getattr(model, "static_graph", False):
        hint = "use static_graph=False, accumulate=1, or windows(sync='each')"
        raise PlanError("DDP with static_graph=True cannot leave out a synchronisation", hint=hint)


@contextmanager
def _synchronised(model: Any, sync: Sync | None, *, is_last: bool) -> Iterator[bool]:
    """Withholds what need not be communicated before the last micro-batch, and restores it in any case.

    Yields whether it is decided now, before the backward, that gradients are withheld.
    """
    if is_last or model is None:
        yield False
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2, HSDP
        # Reduce-scatter each micro-batch, all-reduce over replicas (HSDP) the last one only.
        withhold = model.set_requires_gradient_sync if sync == "last" else model.set_requires_all_reduce
        withhold(False)  # noqa: FBT003 - FSDP2's interface
        try:
            yield False
        finally:
            withhold(True)  # noqa: FBT003
    elif hasattr(model, "no_sync") and (sync == "last" or (sync is None and _is_ddp(model))):
        with model.no_sync():
            yield True
    else:
        yield False


def _is_ddp(model: object) -> bool:
    return hasattr(model, "require_backward_grad_sync")  # asked of the wrapped model by compiled ones


def parameters_reached(total: Tensor) -> set[Tensor]:
    """Returns the leaves that a backward from here gives gradients to. Walks its graph: a microsecond a node.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> len(parameters_reached(model(torch.ones(2)).sum()))
        2
    """
    if total.grad_fn is None:
        return {total} if total.requires_grad else set()
    seen, waiting = {total.grad_fn}, [total.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return {node.variable for node in seen if hasattr(node, "variable")}
