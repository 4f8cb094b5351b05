"""One window under a ledger's eyes: what the loop does with it, in which order, and what its numbers are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shardstream.mixture_plan import AnyPlan
from shardstream.permutation import Int64Array
from shardstream.plan import Plan
from shardstream.torch.mixed import logged_ids
from shardstream.torch.rounds import Rounds
from shardstream.torch.window import LossSum, Window, parameters_reached, sum_of


@dataclass
class WindowNumbers:
    """What a ledger logs of a window.

    Attributes:
        epoch: Epoch in which it begins.
        position: Position where it begins.
        ids: int64[n], this rank's real samples that were handed out.
        masked_ids: Its samples that were dealt and not trained on: not decodable, rejected, or left by the loop.
        num_padding: Rows that only fill micro-batches, masked ones included.
        targets: Head name → valid targets of all ranks, and of this one.
        heads: Heads of which losses were summed.
        sums: float64[num_heads] on the CPU; from a device on the way there until ``arrived``.
        arrived: The device's event, or None.
    """

    epoch: int
    position: int
    ids: Int64Array
    masked_ids: list[int]
    num_padding: int
    targets: Mapping[str, tuple[int, int]]
    heads: tuple[str, ...]
    sums: Tensor | None
    arrived: Any = None

    @property
    def is_late(self) -> bool:
        """Whether a device still has the sums: reading them now would wait for it."""
        return self.arrived is not None

    def read_sums(self) -> dict[str, float]:
        """Returns head name → sum of this rank's losses."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return {} if self.sums is None else dict(zip(self.heads, self.sums.tolist(), strict=True))


class WatchedWindow:
    """Watches what the loop does with a window; the ``Watcher`` of ``shardstream.torch.window``.

    Args:
        window: The window.
        epoch: Epoch in which it begins.
        rounds: Where ranks compare what they do.
        record: Called once, when all micro-batches were handed out or the loop has left the window.
        is_early: Whether it is one of the loop's first windows, in which DDP communicates in the forward, too: after
            its first backward it agrees on new buckets.
    """

    def __init__(
        self,
        window: Window,
        epoch: int,
        rounds: Rounds,
        record: Callable[[WatchedWindow], None],
        *,
        is_early: bool = False,
    ) -> None:
        self.window, self.epoch, self._is_early = window, epoch, is_early
        self.times: list[tuple[float, str]] = []
        self._rounds, self._record = rounds, record
        self._model: object = None
        self._forward_hook: RemovableHandle | None = None
        self._num_entered, self._num_left = 0, 0
        self._has_backward = self._has_moved = self._is_recorded = False
        self._sums: dict[str, Tensor] = {}
        self._reached = ""
        place = f"window at epoch {epoch}, position {window.position}"
        rounds.note(f"{place}, {len(window.batches)} micro-batch(es)")

    # ----------------------------------------------------------------------------------------------- what the loop does

    def entered(self, micro_index: int, model: object) -> None:
        """The loop is about to get a micro-batch."""
        self._model, self._num_entered, self._has_backward = model, micro_index + 1, False
        self.time(f"takes micro-batch {micro_index}")
        if isinstance(model, torch.nn.Module) and (self._is_early or _communicates_in_forward(model)):
            self._forward_hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, *_: object) -> None:
        self._remove_forward_hook()
        self._rounds.ask(f"forward of micro-batch {self._num_entered - 1}")

    def _remove_forward_hook(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def losses(self, sums: Mapping[str, LossSum], loss: Tensor) -> None:
        """The loop has a loss of the micro-batch, and will call ``backward`` on it."""
        batch = self.window.batches[self._num_entered - 1]
        for head, value in sums.items():
            if bool(batch.valid_tokens[head].any()):  # a sum over nothing may be a mean over nothing: nan
                total = sum_of(value).detach().double()
                self._sums[head] = self._sums[head] + total if head in self._sums else total
        self._reached = self._parameters_reached(sums, loss)
        if loss.requires_grad:
            loss.register_hook(self._before_backward)  # type: ignore[no-untyped-call]

    def _parameters_reached(self, sums: Mapping[str, LossSum], loss: Tensor) -> str:
        """DDP waits for every parameter: a rank whose loss leaves some out would leave the others waiting."""
        if not self._sums_gradients or getattr(self._model, "find_unused_parameters", True):
            return ""
        roots = {head: sum_of(value) for head, value in sorted(sums.items())} or {"mean": loss}
        return (
            f" to {', '.join(f'{len(parameters_reached(root))} parameters of {head}' for head, root in roots.items())}"
        )

    def _before_backward(self, _gradient: Tensor) -> None:
        if self._has_backward:
            return
        self._has_backward = True
        event = f"backward of micro-batch {self._num_entered - 1}{self._reached}"
        if self._sums_gradients:
            self._rounds.ask(f"{event}, gradients are summed")
            self.time("gradients are summed: begins")
        else:
            self._rounds.note(f"{event}, gradients are kept")

    def left(self, micro_index: int) -> None:
        """The loop is done with a micro-batch."""
        self._num_left = micro_index + 1
        self._remove_forward_hook()
        if not self._has_backward:
            self._rounds.note(f"micro-batch {micro_index} was left without backward")
            if self._sums_gradients:
                self._rounds.ask("no sum of gradients")
        elif self._sums_gradients:
            self.time("gradients are summed: ends")

    def finished(self) -> None:
        """The loop has got all micro-batches, and is about to step."""
        if self._rounds.is_behind:
            self._rounds.ask("all micro-batches are done")
        self._record_once()

    def moved(self) -> None:
        """An optimizer has stepped."""
        if not self._has_moved:
            self.time("parameters moved")
        self._has_moved = True

    def close(self) -> None:
        """The loop has come to the end of its body."""
        self._remove_forward_hook()
        num_batches = len(self.window.batches)
        if not self._is_recorded:
            self._rounds.ask(f"the window was left after {self._num_left} of {num_batches} micro-batch(es)")
            self._record_once()
        self._rounds.note("parameters moved" if self._has_moved else "parameters did not move")

    def time(self, text: str) -> None:
        """Notes that something happens now."""
        self.times.append((time.time(), text))

    def _record_once(self) -> None:
        if not self._is_recorded:
            self._is_recorded = True
            self._record(self)

    @property
    def _sums_gradients(self) -> bool:
        """Whether the backward of the current micro-batch sums gradients over the ranks, as far as can be known."""
        flag = getattr(self._model, "require_backward_grad_sync", None)  # DDP's, False inside no_sync
        if flag is not None:
            return bool(flag)
        is_last = self._num_entered == len(self.window.batches)
        return is_last or hasattr(self._model, "set_requires_gradient_sync")  # FSDP2 sums after each

    # ------------------------------------------------------------------------------------------------------- numbers

    def numbers(self, plan: AnyPlan, rank: int) -> WindowNumbers:
        """Returns what was consumed of the window."""
        batches = self.window.batches
        ids = torch.cat([logged_ids(batch) for batch in batches]).numpy()
        is_padding = torch.cat([batch.is_padding for batch in batches]).cpu().numpy()
        is_kept = np.concatenate([np.full(len(b), k < self._num_entered) for k, b in enumerate(batches)])
        masked = _masked(plan, self.epoch, self.window.position, rank, is_padding | ~is_kept)
        heads = tuple(sorted(self._sums))
        sums, arrived = _on_cpu([self._sums[head] for head in heads])
        mine = {head: sum(int(batch.valid_tokens[head].sum()) for batch in batches) for head in self.window.targets}
        return WindowNumbers(
            epoch=self.epoch,
            position=self.window.position,
            ids=ids[~is_padding & is_kept],
            masked_ids=ids[masked].tolist(),
            num_padding=int((is_padding | ~is_kept).sum()),
            targets={head: (total, mine[head]) for head, total in self.window.targets.items()},
            heads=heads,
            sums=sums,
            arrived=arrived,
        )


def _masked(
    plan: AnyPlan, epoch: int, position: int, rank: int, is_left_out: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """bool[n]: rows that were dealt as real samples and are not trained on."""
    if plan.tail == "continue" or not is_left_out.any():  # nothing is padded in a stream
        return is_left_out
    assert isinstance(plan, Plan)  # noqa: S101 - a mixture is a stream
    dealt = plan.epoch(epoch, position).deal.part(0, rank).is_padding
    result: np.ndarray[Any, Any] = is_left_out & ~dealt
    return result


def _on_cpu(sums: list[Tensor]) -> tuple[Tensor | None, Any]:
    """Brings sums to the CPU without waiting for a device."""
    if not sums:
        return None, None
    stacked = torch.stack(sums)
    if stacked.device.type != "cuda":
        return stacked.cpu(), None
    host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


def _communicates_in_forward(model: torch.nn.Module) -> bool:
    """Whether a rank that does not call the model leaves the others waiting: FSDP, and DDP with buffers."""
    will_sync = getattr(model, "will_sync_module_buffers", None)
    return hasattr(model, "set_requires_gradient_sync") or (callable(will_sync) and bool(will_sync()))
