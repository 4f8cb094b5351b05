"""``Ledger``: what each rank trained on, proved epoch by epoch, and no step that ranks do not take together.

Before gradients are summed, all ranks compare what they did since the last time and are about to do
(``shardstream.torch.rounds``). They do so when the backward begins, and not when the micro-batch is handed out: a rank
that leaves the loop's body in between (``if loss.isnan(): continue``) would leave the others waiting in a sum of
gradients, and they would never learn why.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardstream.audit.exactly_once import IdSum, Place, expected_of_mixture, expected_sum
from shardstream.consumed import ConsumedLog, next_attempt
from shardstream.errors import DesyncError, PlanError
from shardstream.mixing import TABLE_POSITIONS
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.rounds import RoundsLog
from shardstream.torch.counts import RankSums
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.meeting import agree
from shardstream.torch.rounds import Rounds
from shardstream.torch.watched import WatchedWindow, WindowNumbers
from shardstream.torch.window import Window

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_LAST_WORD_S = 5.0
_NUM_EARLY = 2
_BITS = 32  # checksums travel as two halves, whose sums over the ranks are exact in int64


@final
class Ledger:
    """Logs what this rank trains on, proves each epoch over all ranks, and finds ranks that are not in step.

    In ``directory`` each rank writes, as JSON lines, numbers (``rank-00000.attempt-0000.jsonl``: windows with positions
    and a checksum of the sample ids, targets and sums of losses) and communication (``….rounds.jsonl``: what all ranks
    did together). ``shardstream audit MANIFEST --ledger DIR`` checks them. All ranks make it alike, before ``windows``.

    Before gradients are summed, and before each ``collective``, every rank learns whether all are about to do the same.
    If not, or if a rank does not come, **every** rank raises ``DesyncError`` before its optimizer steps.

    At the end of an epoch the number of samples and the checksum of their ids, summed over the ranks, must be those of
    the manifest: each sample exactly once. A mixture has no epochs: its samples must be those that the plan has there,
    every 65,536 positions, where it stops, and when the ledger is closed.

    Args:
        directory: Where to log; made if missing. A folder of each host is fine.
        data: The ``StreamingDataset``, or a loader over it.
        group: The data-parallel ranks; default all ranks.
        mesh: A device mesh, as the other way to say who is data-parallel. Of peers that share data the first logs.
        mesh_dim: The data-parallel dimension of the mesh; several count as one.
        check: Whether ranks compare what they do and prove epochs. Without, nothing is communicated.
        ids: Whether to log all sample ids, and not only their checksum.
        rotate_num_bytes: A file that is as large is followed by another part.
        keep_num_bytes: What this rank's parts of either ledger may take together in an attempt; None keeps all. The
            oldest are deleted, and what they held is no longer proved.
        timeout_s: Until the slowest rank must have come to where the others wait.

    Raises:
        PlanError: If there is no ``StreamingDataset``, or its tail is ``"uneven"``, where ranks part on purpose.
        TopologyError: If a rank does not make a ledger, or the dataset was dealt to other ranks.

    Example:
        >>> with Ledger("run/ledger", loader) as ledger:  # doctest: +SKIP
        ...     for window in ledger.watch(windows(loader, heads=("lm",))):
        ...         for micro in window.micro_batches(model):
        ...             window.loss(lm=loss_sum(model, micro)).backward()
        ...         with ledger.collective("norm of gradients"):
        ...             norm = clip_grad_norm_(model.parameters(), 1.0)
        ...         window.step(optimizer)
        ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        data: object,
        *,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        mesh_dim: str | tuple[str, ...] = "dp",
        check: bool = True,
        ids: bool = False,
        rotate_num_bytes: int = 64 << 20,
        keep_num_bytes: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        dataset = getattr(data, "dataset", data)
        if not isinstance(dataset, StreamingDataset):
            raise PlanError("a ledger is of a StreamingDataset or a loader over one", found=type(data).__name__)
        self._dataset, topology = dataset, dataset.topology
        if check and self._plan.tail == "uneven" and topology.world_size > 1:
            hint = "use tail='pad', which gives the same gradients; or check=False, and only log"
            raise PlanError("with tail='uneven' ranks do different things at the end on purpose", hint=hint)
        sums = None
        if check:
            sums = RankSums(group=group, mesh=mesh, mesh_dim=mesh_dim, timeout_s=timeout_s, purpose="ledger")
            sums.check_dealt(topology)
        me = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        offer = {"data_rank": topology.rank, "attempt": next_attempt(directory)}
        agreed = agree("Ledger", offer, _attempt_and_writers, timeout_s=timeout_s)
        self._rank, self._place, self._is_writer = topology.rank, directory, me in agreed["writers"]
        self._bounds = {"rotate_num_bytes": rotate_num_bytes, "keep_num_bytes": keep_num_bytes}
        self._attempt, self._with_ids = agreed["attempt"], ids
        log = self._make_rounds_log() if self._is_writer else None
        self._rounds, self._rounds_log = Rounds(sums, log), log
        self._consumed: ConsumedLog | None = None
        self._watched: WatchedWindow | None = None
        self._span: tuple[Place, Place] | None = None  # where the samples counted below begin, and the next window
        self._counted, self._num_windows = IdSum(), 0
        self._late: list[WindowNumbers] = []
        self._is_checked, self._is_closed = check, False

    @property
    def _plan(self) -> AnyPlan:
        return self._dataset.plan  # its lanes are those of the cursor that is loaded last

    @property
    def attempt(self) -> int:
        """Number of this start of the job: one more than the highest in the folder."""
        return int(self._attempt)

    def watch(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Yields the windows of a loop, and logs and compares what is done with each.

        Args:
            windows: What ``windows()`` returned.

        Raises:
            DesyncError: While iterating, on every rank, if ranks are not in step, one does not come, or an epoch's
                samples were not each consumed exactly once.
        """
        hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        try:
            for window in windows:
                self._begin(window)
                yield window
                self._end()
        finally:
            for hook in hooks:
                hook.remove()
            self._write_times()

    @contextmanager
    def collective(self, label: str, *, check: bool = True) -> Iterator[None]:
        """Labels a collective of the loop's own, and runs it only once all ranks are about to run the same.

        Args:
            label: The same text on all ranks.
            check: Whether to compare now, at the cost of one small sum. Otherwise it is compared at the next place
                where ranks are, before the optimizer steps at the latest.

        Raises:
            DesyncError: On every rank, if they are not in step.
        """
        event = f"collective {label!r}"
        if check:
            self._rounds.ask(event)
        else:
            self._rounds.note(event)
        self._time(f"{event} begins")
        yield
        self._time(f"{event} ends")

    def close(self) -> None:
        """Compares a last time, and logs that the run ended by itself.

        Raises:
            DesyncError: If a rank goes on, or did something else since the last time.
        """
        self._write_times()
        if not self._is_closed and not self._rounds.has_failed:
            if self._is_checked and isinstance(self._plan, MixturePlan) and self._has_unproved:
                self._prove()
            self._rounds.ask("the ledger is closed")
            self._write_late()
        self._close_files(has_ended=not self._rounds.has_failed)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._write_times()
        if isinstance(error, Exception):  # the others learn of it where they are next
            text = f"{type(error).__name__}: {str(error)[:300]}"
            self._rounds.last_word(f"left the loop with {text}", _LAST_WORD_S)
        self._close_files(has_ended=False)

    # ------------------------------------------------------------------------------------------------------- windows

    def _begin(self, window: Window) -> None:
        epoch = _epoch_of(window, self._plan.num_positions, self._plan.tail)
        if self._is_writer and self._consumed is None:
            first = window.batches[0].place.pass_start
            start = self._plan.cursor(epoch, window.position, first[2])
            place = (self._place, self._rank, self._plan.world_size, self._attempt)
            bounds: Any = self._bounds
            self._consumed = ConsumedLog(*place, start, self._plan, with_ids=self._with_ids, **bounds)
        here = (epoch, window.position)
        is_new_pass = window.batches[0].window_index == 0
        if self._span is None or (is_new_pass and self._span[1] != here):  # it began anew, or was sent elsewhere
            self._span, self._counted = (here, here), IdSum()
        self._num_windows += 1
        is_early = self._is_checked and self._num_windows <= _NUM_EARLY
        self._watched = WatchedWindow(window, epoch, self._rounds, self._record, is_early=is_early)
        window.watcher = self._watched

    def _end(self) -> None:
        assert self._watched is not None  # noqa: S101 - narrows the type
        self._watched.close()
        self._write_times()

    def _record(self, watched: WatchedWindow) -> None:
        """Logs a window's numbers and adds its samples to what the epoch is proved with."""
        numbers = watched.numbers(self._plan, self._rank)
        if self._consumed is not None:
            self._consumed.window(
                epoch=numbers.epoch,
                position=numbers.position,
                ids=numbers.ids,
                num_padding=numbers.num_padding,
                masked_ids=numbers.masked_ids,
                targets=numbers.targets,
            )
        self._write_late()
        self._late.append(numbers)
        if not numbers.is_late:
            self._write_late()
        after = watched.window.cursor
        assert self._span is not None  # noqa: S101 - narrows the type
        last, self._span = self._span[1], (self._span[0], (after.epoch, after.position))
        self._counted += IdSum.of(numbers.ids) + IdSum.of(numbers.masked_ids)
        if self._is_checked and (after.epoch > last[0] or self._ends_stretch(watched.window)):
            self._prove(last)

    @property
    def _has_unproved(self) -> bool:
        return self._span is not None and self._span[0] != self._span[1]

    def _ends_stretch(self, window: Window) -> bool:
        """Whether a mixture is to be proved behind a window: after as many positions as shares are exact over."""
        assert self._span is not None  # noqa: S101 - narrows the type
        num_positions = self._span[1][1] - self._span[0][1]
        is_end = num_positions >= TABLE_POSITIONS or window.batches[-1].place.is_last_in_pass
        return isinstance(self._plan, MixturePlan) and is_end

    def _write_late(self) -> None:
        for numbers in self._late:
            if self._consumed is not None and (sums := numbers.read_sums()):
                self._consumed.sums(epoch=numbers.epoch, position=numbers.position, sums=sums)
        self._late.clear()

    def _prove(self, last: Place = (0, 0)) -> None:
        """Compares what all ranks consumed of an epoch, or since the last proof of a mixture, with what there is.

        Args:
            last: Where the epoch's last window began; a mixture has none.
        """
        assert self._span is not None  # noqa: S101 - narrows the type
        start, end = self._span
        plan, share = self._plan, (self._rank, self._plan.world_size)
        if isinstance(plan, MixturePlan):
            mine = expected_of_mixture(plan, start[1], end[1], share)
        else:
            mine = expected_sum(plan, start, last, end, share)
        vector = [part for each in (self._counted, mine) for part in _halves(each)]
        what = f"samples of epoch {start[0]} from position {start[1]}, summed over the ranks"
        sums = self._rounds.sums(vector, what)
        found, expected = _whole(sums[:3]), _whole(sums[3:])
        self._span, self._counted = (end, end), IdSum()
        if found != expected:
            raise _not_once(start, found, expected)
        if self._consumed is not None:
            numbers = {"num_samples": found.num_samples, "checksum": found.checksum}
            self._consumed.epoch(start[0], position=start[1], **numbers)

    def _time(self, text: str) -> None:
        if self._watched is not None:
            self._watched.time(text)

    def _write_times(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None and self._rounds_log is not None:
            self._rounds_log.times(watched.epoch, watched.window.position, watched.times)

    def _before_step(self, *_: object) -> None:
        if self._watched is None:
            return
        self._watched.window.check_whole()
        if self._rounds.is_behind:
            self._rounds.ask("step of the optimizer")

    def _after_step(self, *_: object) -> None:
        if self._watched is not None:
            self._watched.moved()

    # --------------------------------------------------------------------------------------------------------- files

    def _make_rounds_log(self) -> RoundsLog:
        bounds: Any = self._bounds
        return RoundsLog(self._place, self._rank, self._plan.world_size, self._attempt, **bounds)

    def _close_files(self, *, has_ended: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for log in (self._consumed, self._rounds_log):
            if log is not None:
                log.end() if has_ended else log.close()


def _attempt_and_writers(offers: Mapping[int, Mapping[str, int]]) -> dict[str, Any]:
    """One attempt for all, and of the peers that share data the first one to log."""
    writers: dict[int, int] = {}
    for rank, offer in sorted(offers.items()):
        writers.setdefault(offer["data_rank"], rank)
    return {"attempt": max(offer["attempt"] for offer in offers.values()), "writers": sorted(writers.values())}


def _epoch_of(window: Window, num_positions: int, tail: str) -> int:
    """The epoch in which a window begins."""
    if tail != "continue":
        return window.batches[0].place.pass_start[0]
    after = window.cursor
    return after.epoch - (window.position + after.global_batch) // num_positions


def _halves(ids: IdSum) -> tuple[int, int, int]:
    return ids.num_samples, ids.checksum >> _BITS, ids.checksum & (1 << _BITS) - 1


def _whole(sums: list[int]) -> IdSum:
    num_samples, high, low = sums
    return IdSum(num_samples, ((high << _BITS) + low) % (1 << 2 * _BITS))


def _not_once(start: Place, found: IdSum, expected: IdSum) -> DesyncError:
    difference = found.num_samples - expected.num_samples
    number = f"{abs(difference)} samples too {'few' if difference < 0 else 'many'}"
    what = number if difference else "as many samples as there should be, but wrong ones"
    return DesyncError(
        f"epoch {start[0]} was not consumed exactly once from position {start[1]} on: {what}",
        expected=f"{expected.num_samples} samples, checksum {expected.checksum:016x}",
        found=f"{found.num_samples} samples, checksum {found.checksum:016x}",
        hint="shardstream audit --ledger names them; ids=True lets it do so even for a wrong order",
    )
