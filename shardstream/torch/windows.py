"""``windows``: one optimizer step at a time, with the denominators of the whole global batch.

The loader is read one window ahead: while window k trains, the targets of window k + 1 are being summed over the
ranks. Batches of the window ahead are looked at without touching their data, so they do not count as consumed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from shardstream.cursor import Cursor
from shardstream.errors import DesyncError, PlanError, TopologyError
from shardstream.torch.batch import Batch, Place
from shardstream.torch.counts import PendingCounts, RankSums, WindowCounts
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.uneven import UnevenInputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

LossSum: TypeAlias = Tensor | tuple[Tensor, float]
Gradients: TypeAlias = Literal["mean", "sum"]
Sync: TypeAlias = Literal["last", "each"]
ConstantTargets: TypeAlias = Callable[[Place], Mapping[str, int] | None]


def windows(
    loader: Iterable[Batch],
    *,
    heads: Sequence[str] | None = None,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    mesh_dim: str | Sequence[str] = "dp",
    gradients: Gradients = "mean",
    sync: Sync | None = None,
    uneven: UnevenInputs | None = None,
    counts_backend: str | None = None,
    timeout_s: float = 600.0,
) -> Iterator[Window]:
    """Yields one ``Window`` for each optimizer step: the micro-batches of this rank, and the counts of all ranks.

    All data-parallel ranks call it alike. It looks one window ahead, so up to two windows of micro-batches are held.
    Save ``window.cursor``, or ``StreamingLoader.state_dict()``, which counts what the loop got and not what is held.

    Where ``loader.dataset`` has a method ``constant_targets(place)`` that returns the targets of a head for the whole
    window at that place (packed sequences without masks), nothing is communicated for it; None means count.

    Args:
        loader: A ``StreamingLoader``, a DataLoader over a ``StreamingDataset``, or anything that yields ``Batch``.
        heads: The losses; default every head of the dataset's ``targets``.
        group: The data-parallel ranks; default all ranks.
        mesh: A device mesh, as the other way to say who is data-parallel.
        mesh_dim: The data-parallel dimension of the mesh; several (``("dp_replicate", "dp_shard")``) count as one.
        gradients: How gradients are joined over the ranks: ``"mean"`` (DDP, FSDP) or ``"sum"`` (a communication hook
            or a gradient divide factor that sums).
        sync: When gradients are: after the ``"last"`` micro-batch, or after ``"each"``. Default: last with DDP; each
            with FSDP, which would keep whole gradients otherwise.
        uneven: The context in which ranks may run out of data, for ``tail="uneven"``.
        counts_backend: Backend of the group that sums the counts; default gloo up to 256 ranks.
        timeout_s: Until the counts of a window must have come from every rank.

    Raises:
        PlanError: If heads, tail or accumulation do not fit; while iterating, if batches lack a head.
        TopologyError: If the dataset was dealt to other ranks than those that are summed over.
        DesyncError: While iterating, if a rank does not come in time.

    Example:
        >>> for window in windows(loader, heads=("lm",)):  # doctest: +SKIP
        ...     for micro in window.micro_batches(model):
        ...         loss_sum = cross_entropy(model(micro["input_ids"]), micro["labels"], reduction="sum")
        ...         window.loss(lm=loss_sum).backward()
        ...     window.step(optimizer)
        ...     optimizer.zero_grad()
    """
    for name, value, choices in (("gradients", gradients, ["mean", "sum"]), ("sync", sync, ["last", "each", None])):
        if value not in choices:
            raise PlanError(f"unknown {name}", expected=" or ".join(map(repr, choices)), found=repr(value))
    if uneven is not None:
        sums = uneven.sums
    else:
        sums = RankSums(group=group, mesh=mesh, mesh_dim=mesh_dim, backend=counts_backend, timeout_s=timeout_s)
    dataset = getattr(loader, "dataset", loader)
    if isinstance(dataset, StreamingDataset):
        _check_dataset(dataset, sums, uneven)
        known = sorted(dataset._assembly.targets)  # noqa: SLF001 - a rank without any batch must know them, too
        heads = known if heads is None else _checked_heads(heads, known)
    return _Driver(loader, dataset, heads, sums, uneven, gradients, sync).windows()


def _check_dataset(dataset: StreamingDataset, sums: RankSums, uneven: UnevenInputs | None) -> None:
    """Refuses, before any collective, ranks that do not fit and tails at which a rank would wait for ever."""
    mine, dealt = sums.topology, dataset.topology
    if (mine.rank, mine.world_size) != (dealt.rank, dealt.world_size):
        raise TopologyError(
            "the data was dealt to other ranks than those whose targets are summed",
            expected=f"rank {dealt.rank} of {dealt.world_size} ({dealt.source})",
            found=f"rank {mine.rank} of {mine.world_size} ({mine.source})",
            hint="initialise the process group first; give windows() the group or mesh that the topology came from",
        )
    plan = dataset.plan
    if plan.tail == "uneven" and uneven is None and plan.world_size > 1:
        raise PlanError(
            "with tail='uneven' a rank may have fewer windows than the others, which would wait for it",
            hint="give windows(uneven=UnevenInputs(model, optimizer)), or use tail='pad': the same gradients",
        )
    if uneven is not None and plan.accumulate > 1:
        raise _not_accumulated(plan.accumulate)


def _not_accumulated(accumulate: int) -> PlanError:
    return PlanError(
        "UnevenInputs goes with accumulate=1 only: a rank that runs out inside no_sync would leave the gradients of "
        "its micro-batches unsummed, without a word",
        found=f"accumulate={accumulate}",
        hint="use tail='pad', which gives the same gradients, or larger micro-batches",
    )


class Window:
    """One optimizer step: this rank's micro-batches of the global batch, and what all ranks have of it.

    Attributes:
        batches: This rank's micro-batches; ``micro_batches`` hands them out.
        targets: Head name → N_h, the valid targets of the window over all data-parallel ranks.
        scale: Head name → D / N_h, what a sum of losses is multiplied by; 0 where there is no target.
        num_samples: Samples of the window over all ranks, padding left out.
        num_micro_batches: Micro-batches of the window over all ranks.
        num_averaged: D, the number of ranks that gradients are averaged over; 1 where they are summed.
    """

    def __init__(self, driver: _Driver, batches: Sequence[Batch], counts: WindowCounts, num_averaged: int) -> None:
        self._driver, self.batches = driver, tuple(batches)
        self.targets, self.num_samples = counts.targets, counts.num_samples
        self.num_micro_batches, self.num_averaged = counts.num_micro_batches, num_averaged
        self.scale = {head: num_averaged / count if count else 0.0 for head, count in self.targets.items()}
        self._current: Batch | None = None
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
            self._driver.check_ddp(model)
        handed_out = self._hand_out(model)
        self._under_way.add(handed_out)
        return handed_out

    def _hand_out(self, model: object) -> Iterator[Batch]:
        try:
            for batch in self.batches:
                self._check_loss()
                self._current, self._has_loss = batch, False
                self._driver.hand_out(batch)
                with _synchronised(model, self._driver.sync, is_last=batch is self.batches[-1]):
                    yield batch
            self._check_loss()
        finally:
            self._current, self._has_loss = None, True

    def _check_loss(self) -> None:
        if not self._has_loss and self._driver.has_seen_loss:
            raise DesyncError(
                f"rank {self._driver.rank} went past a micro-batch without window.loss, in {self!r}",
                hint="run forward and backward on every micro-batch: its loss is an exact 0 where it has no targets",
            )

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
        self._check_heads(sums)
        self._has_loss = self._driver.has_seen_loss = True
        terms = []
        for head in self.targets:
            value = sums[head]
            total, weight = value if isinstance(value, tuple) else (value, 1.0)
            terms.append(self._term(head, total, weight))
        return sum(terms[1:], terms[0])

    def _term(self, head: str, total: Tensor, weight: float) -> Tensor:
        if total.dtype in (torch.float16, torch.bfloat16):
            total = total.float()
        if self._current is None or bool(self._current.valid_tokens[head].any()):
            return total * (weight * self.scale[head])
        # A mean over nothing is nan, and nan x 0 is nan: an exact 0 all the same.
        return torch.nan_to_num(total, nan=0.0, posinf=0.0, neginf=0.0) * 0.0

    def _check_heads(self, sums: Mapping[str, LossSum]) -> None:
        if not self.targets:
            hint = "give StreamingDataset(targets={'lm': 'labels'}, shifted=...), or call mean_loss"
            raise PlanError("the dataset counts no targets, which loss divides by", hint=hint)
        place = f"rank {self._driver.rank}, {self!r}"
        for name in sums:
            if name not in self.targets:
                raise _unknown_head(name, self.targets)
        for head in self.targets:
            if head not in sums:
                raise DesyncError(
                    f"head {head!r} has no loss on {place}",
                    expected=", ".join(self.targets),
                    found=", ".join(sums) or "none",
                    hint="give its sum for every micro-batch: over no targets that is 0, with the graph attached",
                )
            total = sums[head][0] if isinstance(sums[head], tuple) else sums[head]
            if torch.is_grad_enabled() and not total.requires_grad:  # type: ignore[union-attr]
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
        return value * (self.num_averaged / self.num_micro_batches)

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> bool:
        """Steps the optimizer, unless the window has no targets; the same on every rank.

        A ``GradScaler`` is left alone with it: its ``update`` asserts that a step was taken. If you unscale gradients
        yourself (to clip them), do that only if ``has_targets``.

        Returns:
            ``has_targets``.
        """
        if self.has_targets and scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif self.has_targets:
            optimizer.step()
        return self.has_targets

    def close(self) -> None:
        """Ends loops over ``micro_batches`` that were left but are still referenced somewhere."""
        for handed_out in list(self._under_way):
            handed_out.close()


def _checked_heads(heads: Sequence[str], known: Iterable[str]) -> Sequence[str]:
    for head in heads:
        if head not in known:
            raise _unknown_head(head, known)
    return heads


def _unknown_head(name: str, known: Iterable[str]) -> PlanError:
    near = difflib.get_close_matches(name, known, 1)
    expected = " or ".join(known) or "no head: the dataset has no targets"
    return PlanError(
        f"there is no head {name!r}", expected=expected, hint=f"did you mean {near[0]!r}?" if near else None
    )


@contextmanager
def _synchronised(model: Any, sync: Sync | None, *, is_last: bool) -> Iterator[None]:
    """Withholds what need not be communicated before the last micro-batch, and restores it in any case."""
    if is_last or model is None:
        yield
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2, HSDP
        # Reduce-scatter each micro-batch, all-reduce over replicas (HSDP) the last one only.
        withhold = model.set_requires_gradient_sync if sync == "last" else model.set_requires_all_reduce
        withhold(False)  # noqa: FBT003 - FSDP2's interface
        try:
            yield
        finally:
            withhold(True)  # noqa: FBT003
    elif hasattr(model, "no_sync") and (sync == "last" or (sync is None and _is_ddp(model))):
        with model.no_sync():
            yield
    else:
        yield


def _is_ddp(model: object) -> bool:
    return hasattr(model, "require_backward_grad_sync")  # asked of the wrapped model by compiled ones


class _Driver:
    """Reads a loader window by window, one ahead."""

    def __init__(
        self,
        loader: Iterable[Batch],
        dataset: Any,
        heads: Sequence[str] | None,
        sums: RankSums,
        uneven: UnevenInputs | None,
        gradients: Gradients,
        sync: Sync | None,
    ) -> None:
        self._loader, self._heads, self._sums, self._uneven = loader, heads, sums, uneven
        self._constant: ConstantTargets = getattr(dataset, "constant_targets", lambda _: None)
        self._gradients, self.sync, self.rank = gradients, sync, sums.topology.rank
        self._pass: Any = None  # of a StreamingLoader, which is told what the loop got
        self.has_seen_loss = False
        if uneven is not None:
            if heads is None:
                raise PlanError("heads= must be named: a rank without any batch must know them, too")
            uneven.expect(len(WindowCounts.of([], heads).vector()))

    def check_ddp(self, model: Any) -> None:
        """Refuses what DDP cannot do with several micro-batches."""
        if self.sync == "each" and self._gradients == "sum":
            hint = "leave sync= out: gradients are then summed once, after the last micro-batch"
            raise PlanError("DDP would sum what is summed already again after each micro-batch", hint=hint)
        if self.sync != "each" and getattr(model, "static_graph", False):
            hint = "use static_graph=False, accumulate=1, or windows(sync='each')"
            raise PlanError("DDP with static_graph=True cannot leave out a synchronisation", hint=hint)

    def windows(self) -> Iterator[Window]:
        batches = iter(self._loader)
        if hasattr(batches, "hold_back"):
            self._pass = batches
            self._pass.hold_back()
        collected = self._collect(batches)
        while collected is not None:
            # With uneven inputs nothing may be communicated for a window before all know who takes part in it.
            ahead = None if self._uneven else self._collect(batches)
            window = self._window(*collected)
            try:
                yield window
            finally:
                window.close()
            self.hand_out(window.batches[-1])
            collected = self._collect(batches) if self._uneven else ahead
        if self._pass is not None:
            self._pass.finish()

    def hand_out(self, batch: Batch) -> None:
        """Notes that the loop has got a batch."""
        if self._pass is not None:
            self._pass.hand_out(batch)

    def _collect(self, batches: Iterator[Batch]) -> tuple[list[Batch], WindowCounts | PendingCounts] | None:
        """Reads the next window and begins to count it; None at the end."""
        window: list[Batch] = []
        for batch in batches:
            self._heads = _checked_heads(
                sorted(batch.valid_tokens) if self._heads is None else self._heads, batch.valid_tokens
            )
            window.append(batch)
            if batch.is_last_in_window:
                break
        if not window:
            return None
        return window, self._count(window)

    def _count(self, window: list[Batch]) -> WindowCounts | PendingCounts:
        heads, world_size = self._heads or (), self._sums.world_size
        mine = WindowCounts.of(window, heads)
        constant = None if self._uneven is not None else self._constant(window[0].place)
        if constant is not None and set(heads) <= set(constant):
            targets = {head: constant[head] for head in heads}
            return WindowCounts(targets, mine.num_samples * world_size, mine.num_micro_batches * world_size)
        if world_size == 1:
            return mine
        place = window[0].place
        what = f"window {place.window_index} (position {place.position})"
        if self._uneven is not None:
            if len(window) > 1:
                raise _not_accumulated(len(window))
            self._uneven.notify()
        return self._sums.issue(mine.vector(), what)

    def _window(self, batches: list[Batch], counts: WindowCounts | PendingCounts) -> Window:
        if isinstance(counts, PendingCounts):
            counts = WindowCounts.from_vector(counts.wait(), self._heads or ())
        if self._gradients == "sum":
            return Window(self, batches, counts, 1)
        num_averaged = self._sums.world_size if self._uneven is None else self._uneven.num_averaged(counts)
        return Window(self, batches, counts, num_averaged)
