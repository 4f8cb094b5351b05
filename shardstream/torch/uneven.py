"""``UnevenInputs``: PyTorch's ``Join`` with the counts of windows, and optimizer state that is equal afterwards.

``Join`` lets ranks that ran out of data shadow the collectives of the others. What it leaves undone is done here: the
reduction of the counts is shadowed too, and optimizer and scheduler, which those ranks no longer stepped, are taken
from a rank that did, or parameters that are equal on exit would differ after the *next* step.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from shardstream.errors import PlanError
from shardstream.torch.counts import RankSums, WindowCounts
from shardstream.torch.ragged import each_tensor


class Stateful(Protocol):
    """An optimizer, a scheduler, a ``GradScaler``."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Takes over a state."""


class UnevenInputs:
    """A context in which ranks may have different numbers of windows: for ``tail="uneven"``, one context per pass.

    ``tail="pad"`` gives the same gradients without any of this, and costs at most one micro-batch a rank and epoch.
    What to save is ``StreamingLoader.state_dict()`` after the context, or rank 0's ``window.cursor``: a rank that ran
    out has a cursor from before the last window.

    Args:
        model: A ``DistributedDataParallel`` model.
        optimizer: Its optimizer; on exit its state is that of the ranks that stepped last.
        *others: Whatever else is stepped with it: the scheduler, a ``GradScaler``. Treated alike.
        divide_by_initial_world_size: As in ``Join``: whether DDP averages over all ranks, or over those that still have
            data. ``window.loss`` and ``window.mean_loss`` give the same gradients with both.
        counts_backend: As in ``windows``.
        timeout_s: As in ``windows``.

    Raises:
        PlanError: If the model is not DDP.

    Example:
        >>> with UnevenInputs(model, optimizer, scheduler) as uneven:  # doctest: +SKIP
        ...     for window in windows(loader, uneven=uneven):
        ...         ...
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *others: Stateful,
        divide_by_initial_world_size: bool = True,
        counts_backend: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise _not_joinable(model)
        if isinstance(optimizer, Joinable):
            found = type(optimizer).__name__
            hint = "use tail='pad', which gives the same gradients, or a plain optimizer"
            raise PlanError("UnevenInputs needs the whole optimizer state on every rank", found=found, hint=hint)
        self.sums = RankSums(group=model.process_group, backend=counts_backend, timeout_s=timeout_s)
        self._model, self._stateful = model, (optimizer, *others)
        self._by_initial = divide_by_initial_world_size
        self._shadow = _Shadow(self)
        self._join: Join | None = None
        self._num_counts = 0

    def __enter__(self) -> UnevenInputs:  # noqa: PYI034 - Self is in typing from 3.11 on
        # The counts come first on every rank: in a window they are summed before the model's forward.
        joinables: list[Any] = [self._shadow, self._model]
        self._join = Join(joinables, divide_by_initial_world_size=self._by_initial)
        self._join.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        join, self._join = self._join, None
        assert join is not None  # noqa: S101 - narrows the type
        with warnings.catch_warnings():  # Join sets a filter for the whole process
            join.__exit__(kind, error, traceback)

    def notify(self) -> None:
        """Tells the ranks that ran out that this one has another window.

        Raises:
            PlanError: If it is not entered.
        """
        if self._join is None:
            raise PlanError("windows(uneven=...) outside of its context", hint="with UnevenInputs(...) as uneven: ...")
        work = Join.notify_join_context(self._shadow)
        if work is not None and not self._by_initial:
            # DDP learns this from Join only where it is the first Joinable.
            self._model.reducer._set_forward_pass_work_handle(work, False)  # noqa: FBT003, SLF001

    def num_averaged(self, counts: WindowCounts) -> int:
        """Returns how many ranks DDP averages the window's gradients over."""
        return self.sums.world_size if self._by_initial else counts.num_ranks

    def expect(self, num_counts: int) -> None:
        """Notes how many counts a window has, for the windows that this rank will only shadow."""
        self._num_counts = num_counts

    def shadow_counts(self) -> None:
        """Takes part in the sum of a window that this rank has nothing of."""
        self.sums.issue([0] * self._num_counts, "a window of other ranks", is_shadow=True).wait()

    def share_state(self, *, is_last_joiner: bool) -> None:
        """Gives every rank the optimizer's (and scheduler's) state of a rank that took the last step."""
        me = self.sums.topology.rank
        has_stepped = [int(is_last_joiner and rank == me) for rank in range(self.sums.world_size)]
        source = self.sums.issue(has_stepped, "the end of a pass").wait().index(1)
        for stateful in self._stateful:
            state = self._broadcast(stateful.state_dict(), source)
            if me != source:
                stateful.load_state_dict(state)

    def _broadcast(self, state: dict[str, Any], source: int) -> dict[str, Any]:
        """Broadcasts a state: its outline and scalars pickled, its tensors as tensors, one after the other."""
        group, device, rank = self._model.process_group, self._shadow.join_device, self.sums.ranks[source]
        tensors: list[Tensor] = []

        def outlined(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0:
                return tensor.cpu()
            tensors.append(tensor)
            return tensor.to("meta")

        def received(tensor: Tensor) -> Tensor:
            if tensor.device.type == "meta":
                tensor = torch.empty_like(tensor, device=device)
                dist.broadcast(tensor, src=rank, group=group)
            return tensor

        outline = [each_tensor(state, outlined)]
        dist.broadcast_object_list(outline, src=rank, group=group)
        if self.sums.topology.rank != source:
            result: dict[str, Any] = each_tensor(outline[0], received)
            return result
        for tensor in tensors:
            dist.broadcast(tensor.to(device).contiguous(), src=rank, group=group)
        return state


def _not_joinable(model: torch.nn.Module) -> PlanError:
    if hasattr(model, "set_requires_gradient_sync") or hasattr(model, "summon_full_params"):
        return PlanError(
            "FSDP has no Join: a rank that runs out would leave the others waiting for its shards",
            hint="use tail='pad', which gives the same gradients, or tail='continue'",
        )
    found = type(model).__name__
    return PlanError("UnevenInputs needs a DistributedDataParallel model", found=found, hint="or use tail='pad'")


class _Shadow(Joinable):
    """The counts as a Joinable: a rank that ran out adds zeros to them."""

    def __init__(self, uneven: UnevenInputs) -> None:
        super().__init__()
        self.uneven = uneven

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002 - Join's interface
        return _ShadowHook(self.uneven)

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self.uneven._model.join_device  # noqa: SLF001
        return device

    @property
    def join_process_group(self) -> Any:
        return self.uneven._model.join_process_group  # noqa: SLF001


class _ShadowHook(JoinHook):
    def __init__(self, uneven: UnevenInputs) -> None:
        self._uneven = uneven

    def main_hook(self) -> None:
        self._uneven.shadow_counts()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 - Join's interface
        self._uneven.share_state(is_last_joiner=is_last_joiner)
