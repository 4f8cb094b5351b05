"""``windows``: one optimizer step at a time, with the denominators of the whole global batch.

The loader is read one window ahead: while window k trains, the targets of window k + 1 are being summed over the
ranks. Batches of the window ahead are looked at without touching their data, so they do not count as consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shardstream.errors import PlanError
from shardstream.torch.batch import Batch, Place
from shardstream.torch.counts import PendingCounts, RankSums, WindowCounts
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.uneven import UnevenInputs
from shardstream.torch.window import Gradients, Loop, Sync, Window, unknown_head

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
        heads: The losses; default every head of the dataset's ``targets``. Of a mixture, ``"lm/web"`` is the part of
            head ``lm`` that is of source ``web``, with a denominator of its own.
        group: The data-parallel ranks; default all ranks.
        mesh: A device mesh, as the other way to say who is data-parallel.
        mesh_dim: The data-parallel dimension of the mesh; several (``("dp_replicate", "dp_shard")``) count as one.
        gradients: How gradients are joined over the ranks: ``"mean"`` (DDP, FSDP) or ``"sum"`` (a communication hook
            or a gradient divide factor that sums).
        sync: When gradients are: after the ``"last"`` micro-batch, or after ``"each"``. Default: last with DDP; each
            with FSDP, which would keep whole gradients otherwise.
        uneven: The context in which ranks may run out of data, for ``tail="uneven"``. Who is data-parallel, backend and
            deadline are then the context's.
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
    heads = [heads] if isinstance(heads, str) else heads
    dataset = getattr(loader, "dataset", loader)
    if isinstance(dataset, StreamingDataset):
        _check_dataset(dataset, sums, uneven)
        known = dataset.heads  # a rank without any batch must know them, too
        heads = known if heads is None else _checked_heads(heads, [*known, *dataset.source_heads])
    if heads is not None and len(set(heads)) < len(heads):
        raise PlanError("a head is named twice", found=list(heads))
    return _Driver(loader, dataset, heads, sums, uneven, gradients, sync).windows()


def _check_dataset(dataset: StreamingDataset, sums: RankSums, uneven: UnevenInputs | None) -> None:
    """Refuses, before any collective, ranks that do not fit and tails at which a rank would wait for ever."""
    sums.check_dealt(dataset.topology)
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


def _checked_heads(heads: Sequence[str], known: Iterable[str]) -> Sequence[str]:
    for head in heads:
        if head not in known:
            raise unknown_head(head, known)
    return heads


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
        self._loop = Loop(sums.topology.rank, gradients, sync, self._hand_out)
        self._pass: Any = None  # of a StreamingLoader, which is told what the loop got
        if uneven is not None:
            if heads is None:
                raise PlanError("heads= must be named: a rank without any batch must know them, too")
            uneven.expect(len(WindowCounts.of([], heads).vector()))

    def windows(self) -> Iterator[Window]:
        batches = iter(self._loader)
        if hasattr(batches, "hold_back"):
            self._pass = batches
            self._pass.hold_back()
        try:
            yield from self._read(batches)
            if self._pass is not None:
                self._pass.finish()
        finally:
            self._pass = None  # a window that somebody keeps must not keep the loader's workers

    def _read(self, batches: Iterator[Batch]) -> Iterator[Window]:
        collected = self._collect(batches)
        while collected is not None:
            # With uneven inputs nothing may be communicated for a window before all know who takes part in it.
            ahead = None if self._uneven else self._collect(batches)
            window = self._window(*collected)
            try:
                yield window
            finally:
                window.close()
            self._hand_out(window.batches[-1])
            collected = self._collect(batches) if self._uneven else ahead

    def _hand_out(self, batch: Batch) -> None:
        """Notes that the loop has got a batch."""
        if self._pass is not None:
            self._pass.hand_out(batch)

    def _collect(self, batches: Iterator[Batch]) -> tuple[list[Batch], WindowCounts | PendingCounts] | None:
        """Reads the next window and begins to count it; None at the end."""
        window: list[Batch] = []
        for batch in batches:
            if not hasattr(batch, "valid_tokens"):
                hint = "give windows() a StreamingLoader, or a DataLoader(dataset, batch_size=None)"
                raise PlanError("the loader yields no Batch", found=type(batch).__name__, hint=hint)
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
            num_samples, num_micro_batches = mine.num_samples * world_size, mine.num_micro_batches * world_size
            return WindowCounts(targets, num_samples, num_micro_batches, world_size)
        if world_size == 1:
            return mine
        place = window[0].place
        epoch, position, *_ = place.pass_start
        what = (
            f"window {place.window_index} at position {place.position} (pass from epoch {epoch}, position {position})"
        )
        if self._uneven is not None:
            if len(window) > 1:
                raise _not_accumulated(len(window))
            self._uneven.notify()
        return self._sums.issue(mine.vector(), what)

    def _window(self, batches: list[Batch], counts: WindowCounts | PendingCounts) -> Window:
        if isinstance(counts, PendingCounts):
            counts = WindowCounts.from_vector(counts.wait(), self._heads or ())
        if self._loop.gradients == "sum":
            return Window(self._loop, batches, counts, 1)
        num_averaged = self._sums.world_size if self._uneven is None else self._uneven.num_averaged(counts)
        return Window(self._loop, batches, counts, num_averaged)
