"""``Evaluation``: losses and metrics over samples that each count once, whatever ranks, padding and batches were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from shardstream.errors import DesyncError, PlanError
from shardstream.manifest import Manifest
from shardstream.torch.batch import Batch
from shardstream.torch.counts import RankSums
from shardstream.torch.evaluation_report import Averages, EvaluationReport, Tally
from shardstream.torch.groups import device_for
from shardstream.torch.meeting import agree
from shardstream.torch.spool import IDS_PER_PART, Held, Int64Array, Layout, Spool, collapse
from shardstream.torch.topology import data_parallel_ranks, is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Values: TypeAlias = torch.Tensor | npt.ArrayLike


class Evaluation:
    """Collects what a model gives for each sample, and sums it up exactly once every rank is through.

    There is no collective inside the loop, so ranks may have different numbers of batches, or none. Given the same
    values for each sample, the result has the same bits for every number of ranks and every batch size.

    Args:
        manifest: The data set that sample ids belong to.
        expected_ids: ``int64[n]``, the samples that are to count, where that is not the whole data set; the same on
            every rank.
        rtol: How far floats of a sample that was evaluated twice may differ to be taken for equal; the lowest rank's
            counts then. By default they must be equal: rounding may differ with the shape of a batch, and so would
            the result.
        memory_num_bytes: What is added beyond this size goes to a temporary file.
        directory: Where that is.

    Raises:
        PlanError: If expected ids are not whole numbers.

    Example:
        >>> manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=3)
        >>> evaluation = Evaluation(manifest)
        >>> evaluation.add([0, 1], sums={"lm": [2.0, 4.0]}, counts={"lm": [1, 3]})
        >>> evaluation.add([2, 0], sums={"lm": [3.0, 2.0]}, counts={"lm": [4, 1]}, is_padding=[False, True])
        >>> report = evaluation.result()
        >>> report.heads["lm"].mean, report.num_samples, report.num_padding
        (1.125, 3, 1)
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        expected_ids: Values | None = None,
        rtol: float = 0.0,
        memory_num_bytes: int = 64 << 20,
        directory: str | None = None,
    ) -> None:
        self.manifest = manifest
        self._expected = None if expected_ids is None else np.unique(_integers("expected_ids", expected_ids))
        self._rtol, self._spooling = rtol, (memory_num_bytes, directory)
        self._layout: Layout | None = None
        self._spool: Spool | None = None
        self._averages = Averages()
        self._num_rows = self._num_padding = 0
        self._masked: set[int] = set()
        self._is_over = False

    # ------------------------------------------------------------------------------------------------ the loop

    def add_batch(
        self,
        batch: Batch,
        *,
        sums: Mapping[str, Values] | None = None,
        counts: Mapping[str, Values] | None = None,
        metrics: Mapping[str, Values] | None = None,
    ) -> None:
        """Adds what the model gave for a batch; rows that are padding are left out, masked samples noted.

        Args:
            batch: The batch, for its sample ids, padding and valid targets.
            sums: As in ``add``.
            counts: As in ``add``; default the batch's ``valid_tokens`` of the heads in ``sums``.
            metrics: As in ``add``.

        Raises:
            PlanError: As ``add``.
        """
        if counts is None:
            counts = {head: batch.valid_tokens[head] for head in sums or {} if head in batch.valid_tokens}
        self.add(batch.sample_ids, sums=sums, counts=counts, metrics=metrics, is_padding=batch.is_padding)
        if batch.masked:
            padding = set(batch.sample_ids[batch.is_padding.cpu()].tolist())  # of packed data masked are documents
            self._masked |= padding & {sample.sample_id for sample in batch.masked}

    def add(
        self,
        sample_ids: Values,
        *,
        sums: Mapping[str, Values] | None = None,
        counts: Mapping[str, Values] | None = None,
        metrics: Mapping[str, Values] | None = None,
        is_padding: Values | None = None,
    ) -> None:
        """Adds what the model gave for some samples: tensors on any device, arrays or lists.

        Args:
            sample_ids: ``int64[b]``.
            sums: Head → ``[b]``, the sum of the loss over each sample's targets; held as float64.
            counts: Head → ``int64[b]``, each sample's targets.
            metrics: Metric → ``[b]``, a number for each sample; held as float64.
            is_padding: ``bool[b]``, True for rows that do not count.

        Raises:
            PlanError: If names or shapes do not fit, or ``result`` was called.
        """
        if self._is_over:
            raise PlanError("this evaluation is over: its result was asked for", hint="make a new Evaluation")
        ids = _integers("sample_ids", sample_ids)
        layout = self._checked_layout(sums or {}, counts or {}, metrics or {})
        given = {"sum": sums or {}, "count": counts or {}, "metric": metrics or {}}
        values = {
            (kind, name): (_integers if kind == "count" else _floats)(f"{kind} {name!r}", given[kind][name], len(ids))
            for kind, name in layout.names
        }
        if any((values["count", head] < 0).any() for head in layout.heads):
            raise PlanError("counts must not be negative")
        if is_padding is None:
            is_real = np.ones(len(ids), np.bool_)
        else:
            is_real = _integers("is_padding", is_padding, len(ids)) == 0
        self._layout = layout
        self._average(layout, values, is_real)
        if self._spool is None:
            self._spool = Spool(layout.num_words, *self._spooling)
        real = {name: value[is_real] for name, value in values.items()}
        self._spool.add(layout.rows(ids[is_real], real))
        self._num_rows += int(is_real.sum())
        self._num_padding += int((~is_real).sum())

    def _checked_layout(self, *given: Mapping[str, Values]) -> Layout:
        sums, counts, metrics = given
        if set(sums) != set(counts):
            raise PlanError("every head needs sums and counts", expected=sorted(sums), found=sorted(counts))
        layout = Layout(tuple(sorted(sums)), tuple(sorted(metrics)))
        if self._layout is not None and self._layout != layout:
            expected, found = _named(self._layout), _named(layout)
            raise PlanError("heads and metrics must be the same all along", expected=expected, found=found)
        return layout

    def _average(self, layout: Layout, values: Mapping[tuple[str, str], Any], is_real: npt.NDArray[np.bool_]) -> None:
        for head in layout.heads:
            count = values["count", head].astype(np.float64)
            self._averages.add(f"head {head}", values["sum", head], count, is_real)
        for metric in layout.metrics:
            self._averages.add(f"metric {metric}", values["metric", metric], np.ones(len(is_real)), is_real)

    # ------------------------------------------------------------------------------------------------ the end

    def result(self, *, group: ProcessGroup | None = None, timeout_s: float = 600.0) -> EvaluationReport:
        """Gathers what all ranks added and sums it up; every rank gets the same report. Call it once, on every rank.

        Args:
            group: The ranks that evaluated together; default all.
            timeout_s: Until all ranks must have come, and until each next part of their rows must have.

        Raises:
            TopologyError: If a rank does not come in time; it says which.
            DesyncError: If a sample has different values (names sample, ranks and values), or ranks differ in heads,
                metrics, manifest or expected samples.
            PlanError: If it was called before.
        """
        if self._is_over:
            raise PlanError("the result was asked for before", hint="keep the report, or make a new Evaluation")
        self._is_over = True
        try:
            return self._gather(data_parallel_ranks(group), group, timeout_s)
        finally:
            if self._spool is not None:
                self._spool.close()

    def _gather(self, ranks: list[int], group: ProcessGroup | None, timeout_s: float) -> EvaluationReport:
        offers: dict[int, dict[str, Any]] = {}

        def decide(all_offers: Mapping[int, dict[str, Any]]) -> None:
            _check_alike(all_offers)
            offers.update(all_offers)

        agree("Evaluation.result", self._offer(), decide, group=group, timeout_s=timeout_s)
        if len(ranks) == 1:
            return self._summed(offers, _Wire(None, ranks, timeout_s))
        wire = _Wire(RankSums(group=group, timeout_s=timeout_s).group, ranks, timeout_s)
        if not offers:  # this is not the rank that sums up
            for part in self._parts():
                wire.send(self._own(part).rows)
            return wire.share(None)
        outcome: EvaluationReport | DesyncError
        try:
            outcome = self._summed(offers, wire)
        except DesyncError as error:
            if wire.is_broken:
                raise
            outcome = error
        return wire.share(outcome)

    def _offer(self) -> dict[str, Any]:
        expected = None if self._expected is None else hashlib.blake2b(self._expected.tobytes(), digest_size=8)
        return {
            "manifest": self.manifest.fingerprint,
            "expected_ids": "all" if expected is None else expected.hexdigest(),
            "layout": None if self._layout is None else [list(self._layout.heads), list(self._layout.metrics)],
            "parts": self._parts(),
            "num_rows": self._num_rows,
            "num_padding": self._num_padding,
            "averages": self._averages.sums,
            "masked": sorted(self._masked),
        }

    def _parts(self) -> list[int]:
        return [] if self._spool is None else self._spool.parts()

    def _own(self, part: int) -> Held:
        """This rank's rows of a range of ids, equal ones joined."""
        assert self._spool is not None  # noqa: S101 - narrows the type
        assert self._layout is not None  # noqa: S101 - narrows the type
        rows = self._spool.read(part)
        me = dist.get_rank() if is_initialized() else 0
        return collapse([Held(rows, np.full(len(rows), me))], self._layout, self._rtol)

    def _summed(self, offers: Mapping[int, dict[str, Any]], wire: _Wire) -> EvaluationReport:
        """On the rank that sums up: takes in one range of ids after the other, from one rank after the other."""
        heads, metrics = next((offer["layout"] for offer in offers.values() if offer["layout"]), ([], []))
        layout = Layout(tuple(heads), tuple(metrics))
        masked = np.unique(np.array([sample for offer in offers.values() for sample in offer["masked"]], np.int64))
        tally = Tally(layout, self.manifest, self._expected, self._rtol, masked)
        holders: dict[int, list[int]] = {}
        for rank, offer in offers.items():
            for part in offer["parts"]:
                holders.setdefault(part, []).append(rank)
        for part in sorted({*holders, *tally.expected_parts()}):
            tally.add(part, self._joined(part, holders.get(part, []), layout, wire))
        return tally.report(offers)

    def _joined(self, part: int, holders: Sequence[int], layout: Layout, wire: _Wire) -> Held:
        """The rows of a range from all ranks. What came is joined whenever it is as much again as there are ids."""
        held = Held(np.empty((0, layout.num_words), np.int64), np.empty(0, np.int64))
        waiting = [held]
        for rank in holders:
            if rank == wire.ranks[0]:
                came = self._own(part)
            else:
                rows = wire.receive(rank, layout.num_words)
                came = Held(rows, np.full(len(rows), rank))
            waiting.append(came)
            if sum(len(more.rows) for more in waiting[1:]) > IDS_PER_PART:
                waiting = [collapse(waiting, layout, self._rtol)]
        return collapse(waiting, layout, self._rtol)


class _Wire:
    """Rows from all ranks to the first one, and what it made of them to all; each step has a deadline."""

    def __init__(self, group: Any, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks, self.is_broken = ranks, False
        self._group, self._timeout_s = group, timeout_s
        self._device = device_for("gloo" if group is None else str(dist.get_backend(group)))

    def send(self, rows: Int64Array) -> None:
        """Sends ``int64[n, num_words]`` to the first rank."""
        with self._deadline(f"rank {self.ranks[0]} to take rows"):
            for tensor in (torch.tensor([len(rows)]), torch.from_numpy(rows)):
                dist.send(tensor.to(self._device), self.ranks[0], group=self._group)

    def receive(self, rank: int, num_words: int) -> Int64Array:
        """Returns the rows that a rank sends next, ``int64[n, num_words]``."""
        with self._deadline(f"rank {rank} to send rows"):
            num_rows = torch.zeros(1, dtype=torch.int64, device=self._device)
            dist.recv(num_rows, rank, group=self._group)
            rows = torch.empty((int(num_rows), num_words), dtype=torch.int64, device=self._device)
            dist.recv(rows, rank, group=self._group)
        received: Int64Array = rows.cpu().numpy()
        return received

    def share(self, outcome: EvaluationReport | DesyncError | None) -> EvaluationReport:
        """Gives the first rank's outcome to all; raises it if it is an error."""
        shared = [outcome]
        with self._deadline(f"rank {self.ranks[0]} to sum up"):
            dist.broadcast_object_list(shared, self.ranks[0], group=self._group, device=self._device)
        if isinstance(shared[0], DesyncError):
            raise shared[0]
        assert isinstance(shared[0], EvaluationReport)  # noqa: S101 - narrows the type
        return shared[0]

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            raise DesyncError(
                "the evaluation could not be summed up",
                expected=f"{what} within {self._timeout_s:g} s",
                found=str(error).splitlines()[0],
                hint="a rank stopped or was slow: look at the logs of all ranks",
            ) from error


def _check_alike(offers: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuses ranks that evaluated different things. Ranks without any sample know no heads and metrics."""
    for name in ("manifest", "expected_ids", "layout"):
        values = {rank: offer[name] for rank, offer in offers.items() if offer[name] is not None}
        if not values:
            continue
        first = next(iter(values))
        for rank, value in values.items():
            if value != values[first]:
                what = "heads and metrics" if name == "layout" else name
                expected, found = f"{values[first]} as on rank {first}", f"{value} on rank {rank}"
                raise DesyncError(f"ranks evaluated different {what}", expected=expected, found=found)


def _named(layout: Layout) -> str:
    return f"{list(layout.heads)} and {list(layout.metrics)}"


def _integers(name: str, values: Values, num_rows: int | None = None) -> Int64Array:
    """Returns ``int64[n]``; refuses floats, other shapes and other lengths."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.dtype.kind not in "iub" and array.size:
        raise PlanError(f"{name} must be whole numbers", found=array.dtype)
    return _column(name, array, num_rows).astype(np.int64)


def _floats(name: str, values: Values, num_rows: int) -> npt.NDArray[np.float64]:
    """Returns ``float64[n]``; refuses other shapes and other lengths."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()  # numpy does not know bfloat16
    return _column(name, np.asarray(values, np.float64), num_rows)


def _column(name: str, array: npt.NDArray[Any], num_rows: int | None) -> npt.NDArray[Any]:
    if array.ndim != 1 or num_rows not in (None, len(array)):
        expected = "one number a sample" + ("" if num_rows is None else f": [{num_rows}]")
        raise PlanError(f"{name} has the wrong shape", expected=expected, found=list(array.shape))
    return array
