"""The audit of a mixture: windows, quotas, and each source exactly once a pass.

It looks at what ranks and workers are dealt and at where the sources' positions lead, never at how they are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from shardstream.audit.arithmetic import check_epoch_order
from shardstream.audit.enumeration import check_order, named
from shardstream.audit.tokens import check_tokens
from shardstream.cursor import Cursor
from shardstream.errors import PlanError
from shardstream.mixing import shares
from shardstream.mixture_plan import MixturePlan
from shardstream.permutation import Int64Array

MOST_POSITIONS = 1_000_000  # that are dealt out and counted, unless asked for more
_MOST_PASSES = 4  # of a source that are followed sample by sample
_WHOLE_ORDER = 1_000_000  # samples; above that an order is proved by arithmetic


@dataclass(frozen=True)
class SourceCounts:
    """What a mixture takes of one source.

    Attributes:
        name: The source.
        weights: Its share from each change of the weights on, first to last.
        num_samples: Samples of a pass over it (sequences, if packed).
        num_given: Samples it gives in the audited windows, or to where the mixture stops.
        num_passes: How many times it is been through then.
        lanes: Its lanes.
    """

    name: str
    weights: tuple[float, ...]
    num_samples: int
    num_given: int
    num_passes: float
    lanes: int


@dataclass(frozen=True)
class MixtureReport:
    """What ``audit_mixture`` found.

    Attributes:
        settings: The plan in plain values.
        violations: Each broken promise, in words; empty if everything holds.
        proofs: How each promise was shown, and on how much of the stream.
        sources: What is taken of each source.
    """

    settings: dict[str, Any]
    violations: tuple[str, ...]
    proofs: tuple[str, ...]
    sources: tuple[SourceCounts, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {"holds": self.holds, **asdict(self)}


def audit_mixture(
    plan: MixturePlan, *, num_workers: int = 0, num_windows: int | None = None, start: Cursor | None = None
) -> MixtureReport:
    """Simulates every rank and worker of a mixture, and shows quotas, disjointness and each source's passes.

    Args:
        plan: The plan.
        num_workers: DataLoader workers of each rank, 0 for none.
        num_windows: How many windows are dealt out; by default to where the mixture stops, or until every source has
            been through, and no more than a million positions.
        start: Where to begin, as ``plan.resume`` returns it; by default at the beginning.

    Raises:
        PlanError: If a number is impossible.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> from shardstream.mixing import Mixture
        >>> web = Manifest.synthetic(num_shards=2, blocks_per_shard=2, rows_per_block=50)
        >>> plan = MixturePlan.make(Mixture({"web": (web, 2), "code": (web, 1)}), batch_size=3, world_size=2)
        >>> report = audit_mixture(plan, num_workers=2)
        >>> report.holds, [(source.name, source.num_passes) for source in report.sources]
        (True, [('code', 1.0), ('web', 2.0)])
    """
    if num_workers < 0 or (num_windows is not None and num_windows < 1):
        raise PlanError("num_workers must be at least 0 and num_windows at least 1", found=(num_workers, num_windows))
    first = (start or plan.cursor()).position
    end = first + plan.global_batch * (num_windows or _default_windows(plan, first))
    if plan.stop is not None:
        end = max(first, min(end, plan.stop))
    violations = [*_check_dealt(plan, first, end, max(num_workers, 1)), *_check_quotas(plan, first, end)]
    num_positions, readers = end - first, f"{plan.world_size} rank(s) x {max(num_workers, 1)} reader(s)"
    proofs = [
        f"deal: {num_positions} positions from {first} on dealt to {readers}, each once, in equal steps",
        f"quotas: all {num_positions // plan.global_batch} windows counted by source, each close to its share so far",
    ]
    for faults, proof in _check_sources(plan, first, end):
        violations += faults
        proofs.append(proof)
    return MixtureReport(_settings(plan, num_workers, first, end), tuple(violations), tuple(proofs), _counts(plan, end))


def _default_windows(plan: MixturePlan, first: int) -> int:
    if plan.stop is not None:
        end = plan.stop
    else:
        reached = [plan.shares.reach(source, each.num_positions) for source, each in enumerate(plan.plans)]
        end = max(position for position in reached if position is not None)
    most = max(1, MOST_POSITIONS // plan.global_batch)
    return max(1, min(most, -(-(end - first) // plan.global_batch)))


def _settings(plan: MixturePlan, num_workers: int, first: int, end: int) -> dict[str, Any]:
    names = ("fingerprint", "seed", "world_size", "batch_size", "accumulate", "global_batch", "lanes", "shuffle")
    return {
        **{name: getattr(plan, name) for name in names},
        "num_workers": num_workers,
        "stop": plan.stop,
        "start": first,
        "end": end,
        "schedule": plan.identity()["schedule"],
    }


def _counts(plan: MixturePlan, end: int) -> tuple[SourceCounts, ...]:
    position = end if plan.stop is None else plan.stop
    given, passes = plan.counts(position), plan.passes(position)
    by_era = [[float(share) for share in shares(era.weights)] for era in plan.shares.eras]
    return tuple(
        SourceCounts(
            name=name,
            weights=tuple(weights[index] for weights in by_era),
            num_samples=each.num_positions,
            num_given=given[name],
            num_passes=passes[name],
            lanes=each.lanes,
        )
        for index, (name, each) in enumerate(plan.by_name.items())
    )


# --------------------------------------------------------------------------------------------------------------- deal


def _check_dealt(plan: MixturePlan, first: int, end: int, num_readers: int) -> list[str]:
    """Every position of the windows once over all ranks and workers; the same steps on every rank."""
    size, start = plan.global_batch, plan.cursor(0, first)
    times = np.zeros(end - first, np.int64)
    faults: list[str] = []
    for rank in range(plan.world_size):
        num_batches = 0
        for worker in range(num_readers):
            for batch in plan.micro_batches(rank, start, worker=worker, num_workers=num_readers):
                if batch.position >= end:
                    break
                num_batches += 1
                inside = (batch.positions >= batch.position) & (batch.positions < batch.position + size)
                if (
                    not inside.all()
                    or len(batch.positions) != plan.batch_size
                    or batch.batch_index % num_readers != worker
                ):
                    faults.append(
                        f"rank {rank} worker {worker}: micro-batch {batch.batch_index} is not one of its window"
                    )
                np.add.at(times, batch.positions[inside] - first, 1)
        expected = (end - first) // size * plan.accumulate
        if num_batches != expected:
            faults.append(f"rank {rank} has {num_batches} micro-batches, the plan says {expected}")
    wrong = np.flatnonzero(times != 1)
    faults += named((f"position {first + k} is dealt {times[k]} times" for k in wrong.tolist()), len(wrong))
    return faults


def _check_quotas(plan: MixturePlan, first: int, end: int) -> list[str]:
    """In every window each source has what is due to it, and no source starves."""
    size, num_sources = plan.global_batch, len(plan.plans)
    faults: list[str] = []
    for index, era in enumerate(plan.shares.eras):
        begin = max(first, era.start)
        stop = end if index + 1 == len(plan.shares.eras) else min(end, plan.shares.eras[index + 1].start)
        if begin >= stop:
            continue
        places = plan.sources(np.arange(begin, stop))
        num_windows = (stop - begin) // size
        window = np.arange(stop - begin) // size
        counted = np.bincount(window * num_sources + places.source, minlength=num_windows * num_sources)
        served = np.cumsum(counted.reshape(num_windows, num_sources), axis=0)
        served += plan.shares.counts(np.array([begin]))[0] - plan.shares.counts(np.array([era.start]))[0]
        windows = (begin - era.start) // size + np.arange(1, num_windows + 1)
        faults += _quota_faults(plan.names, shares(era.weights), windows * size, served, begin)
    return faults


def _quota_faults(
    names: Sequence[str], due: list[Fraction], positions: Int64Array, served: Int64Array, begin: int
) -> Iterator[str]:
    # Of a table's 65,536 positions or more a share is a whole number of samples; in a window it is one for each source.
    slack = 2 + positions // 65536 + len(names)
    for index, name in enumerate(names):
        off = np.abs(served[:, index] - float(due[index]) * positions)
        if due[index] == 0 and served[-1, index]:
            yield f"source {name!r} has weight 0 from position {begin} on and {served[-1, index]} samples"
        if (off > slack).any():
            where = int(np.flatnonzero(off > slack)[0])
            yield (
                f"source {name!r} has {served[where, index]} samples in the {positions[where]} positions up to window "
                f"{where} behind position {begin}, its share is {float(due[index]) * positions[where]:.1f}"
            )


# ------------------------------------------------------------------------------------------------------------- sources


def _check_sources(plan: MixturePlan, first: int, end: int) -> Iterator[tuple[list[str], str]]:
    """Each source's own positions come once and without a gap, and its orders are bijections."""
    places = plan.sources(np.arange(first, end))
    before = plan.counts(first)
    for index, (name, each) in enumerate(plan.by_name.items()):
        mine = places.position[places.source == index]
        faults = []
        if not np.array_equal(np.sort(mine), np.arange(before[name], before[name] + len(mine))):
            faults.append(f"source {name!r}: its positions from {before[name]} on do not come once each")
        begin, last = before[name] // each.num_positions, max(0, before[name] + len(mine) - 1) // each.num_positions
        followed = range(begin, min(last + 1, begin + _MOST_PASSES)) if len(mine) else range(0)
        for here in map(each.epoch, followed):
            is_small = each.num_positions <= _WHOLE_ORDER
            faults += [
                f"source {name!r}: {fault}" for fault in (check_order(here) if is_small else check_epoch_order(here)[0])
            ]
            if each.packed is not None:
                faults += [f"source {name!r}: {fault}" for fault in check_tokens(here)[0]]
        what = f"{len(followed)} pass(es) of {each.num_positions}" + ", all tokens," * (each.packed is not None)
        yield faults, f"source {name}: {len(mine)} positions, each once; {what} followed"
