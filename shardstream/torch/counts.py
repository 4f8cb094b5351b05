"""Denominators: how many targets the window has over all data-parallel ranks, known one window ahead.

Each rank adds up what its own micro-batches hold, and one int64 vector per window is summed over the ranks. It is
issued while the window before trains and travels on a group of the library's own, so it neither waits for a device nor
has an order against the gradients' collectives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardstream.errors import DesyncError, TopologyError
from shardstream.torch.batch import Batch
from shardstream.torch.desync import NUM_SLOTS, all_equal, equality_slots
from shardstream.torch.groups import default_backend, device_for, own_group
from shardstream.torch.topology import Topology, data_parallel_ranks, is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class WindowCounts:
    """What a window holds, of one rank or of all.

    Attributes:
        targets: Head name → number of valid targets.
        num_samples: Samples, padding rows left out.
        num_micro_batches: Micro-batches.
        num_ranks: Ranks that have a part of it.
    """

    targets: Mapping[str, int]
    num_samples: int
    num_micro_batches: int
    num_ranks: int = 1

    @classmethod
    def of(cls, batches: Sequence[Batch], heads: Sequence[str]) -> WindowCounts:
        """Returns the counts of one rank's micro-batches. Does not touch their data.

        Example:
            >>> WindowCounts.of([], ["lm"])
            WindowCounts(targets={'lm': 0}, num_samples=0, num_micro_batches=0, num_ranks=1)
        """
        targets = {head: sum(int(batch.valid_tokens[head].sum()) for batch in batches) for head in heads}
        num_samples = sum(len(batch) - int(batch.is_padding.sum()) for batch in batches)
        return cls(targets, num_samples, len(batches))

    def vector(self) -> list[int]:
        """Returns the numbers in the order of ``from_vector``."""
        return [*self.targets.values(), self.num_samples, self.num_micro_batches, self.num_ranks]

    @classmethod
    def from_vector(cls, vector: Sequence[int], heads: Sequence[str]) -> WindowCounts:
        """Reads what ``vector`` returned."""
        *targets, num_samples, num_micro_batches, num_ranks = vector
        return cls(dict(zip(heads, targets, strict=True)), num_samples, num_micro_batches, num_ranks)


class PendingCounts:
    """A reduction under way, or its result where none was needed."""

    def __init__(self, sums: RankSums, vector: torch.Tensor, work: Any, what: str) -> None:
        self._sums, self._vector, self._work, self._what = sums, vector, work, what

    def wait(self) -> list[int]:
        """Returns the sums over all ranks.

        Raises:
            DesyncError: If a rank did not take part before the deadline, or ranks summed different things.
        """
        started = time.monotonic()
        try:
            sums, is_same = self.settle()
        except RuntimeError as error:
            raise DesyncError(
                f"the targets of {self._what} could not be summed over the ranks",
                expected=f"all {self._sums.world_size} ranks within {self._sums.timeout_s:g} s",
                found=f"{str(error).splitlines()[0]} after {time.monotonic() - started:.1f} s",
                hint="a rank stopped, was slow, or took another number of windows: look at the logs of all ranks",
            ) from error
        if not is_same:  # every rank sees it
            raise DesyncError(
                "ranks are at different windows",
                expected=f"{self._what}, as on this rank",
                found="another one elsewhere",
                hint="a loop was left, began or skipped a window on some ranks only: look at the logs of all ranks",
            )
        return sums

    def settle(self, timeout_s: float | None = None) -> tuple[list[int], bool]:
        """Waits for the sums.

        Args:
            timeout_s: How long; default as long as the group's sums may take.

        Returns:
            The sums over all ranks, and whether all ranks summed the same thing.

        Raises:
            RuntimeError: If a rank did not take part before the deadline, or is gone.
        """
        if self._work is None:
            numbers = self._vector.tolist()
        else:
            deadline = timedelta(seconds=self._sums.timeout_s if timeout_s is None else timeout_s)
            with self._sums.on_own_stream():  # on a device, too, this waits for the sum alone
                self._work.wait(deadline)
                numbers = self._vector.tolist()
        sums = list(map(int, numbers))
        return sums[:-NUM_SLOTS], all_equal(sums[-NUM_SLOTS:])


class RankSums:
    """Sums int64 vectors over the data-parallel ranks, without waiting for them.

    Args:
        group: The data-parallel ranks; default, and where there is no mesh either, all ranks.
        mesh: A device mesh, as the other way to say which ranks these are. Peers that differ in other dimensions only
            (tensor, context, pipeline parallel) hold the same data, which counts once.
        mesh_dim: The data-parallel dimension of the mesh; several count as one.
        backend: Of the group that is made for the sums: ``"gloo"`` up to 256 ranks, above that the backend of the
            job's own group, unless given.
        timeout_s: Until a sum must have come.
        purpose: What is summed. Each purpose has a group of its own, so that its sums keep their order whatever
            becomes of the others.

    Raises:
        TopologyError: If this process is not in the group, or a rank of it does not come in time.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        mesh_dim: str | Sequence[str] = "dp",
        backend: str | None = None,
        timeout_s: float = 600.0,
        purpose: str = "counts",
    ) -> None:
        self.timeout_s = timeout_s
        self.ranks = data_parallel_ranks(group, mesh, mesh_dim)
        self.group: Any = None
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        me = dist.get_rank() if is_initialized() else 0
        if me not in self.ranks:
            raise TopologyError(f"rank {me} is not among the data-parallel ranks", found=self.ranks[:16])
        self.topology = Topology(self.ranks.index(me), len(self.ranks), source="process group")
        if self.world_size > 1:
            backend = backend or default_backend(self.world_size)
            self.group = own_group(self.ranks, backend, timeout_s, purpose)
            self._device = device_for(backend)
            self._stream = torch.cuda.Stream() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.ranks)

    def check_dealt(self, dealt: Topology) -> None:
        """Refuses data that was dealt to other ranks.

        Raises:
            TopologyError: If ``dealt`` is another rank or world size.
        """
        mine = self.topology
        if (mine.rank, mine.world_size) != (dealt.rank, dealt.world_size):
            raise TopologyError(
                "the data was dealt to other ranks than those whose targets are summed",
                expected=f"rank {dealt.rank} of {dealt.world_size} ({dealt.source})",
                found=f"rank {mine.rank} of {mine.world_size} ({mine.source})",
                hint="initialise the process group first; give the group or mesh that the topology came from",
            )

    def issue(self, vector: Sequence[int], what: str, *, is_shadow: bool = False) -> PendingCounts:
        """Begins to sum a vector over the ranks; there is no communication with one rank.

        Args:
            vector: This rank's numbers, as many on every rank.
            what: What they are of: the same text on every rank, or all of them learn of it.
            is_shadow: Whether this rank has none of what the others sum, and does not know what that is.
        """
        check = [0] * NUM_SLOTS if is_shadow else equality_slots(what)
        with self.on_own_stream():
            numbers = torch.tensor([*vector, *check], dtype=torch.int64, device=self._device)
            work = None if self.group is None else dist.all_reduce(numbers, group=self.group, async_op=True)
        return PendingCounts(self, numbers, work, what)

    def on_own_stream(self) -> AbstractContextManager[Any]:
        """On a device the sums have a stream of their own, so that reading one waits for no forward or backward."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
