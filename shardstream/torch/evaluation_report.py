"""What an evaluation found: frozen values, and the tally that makes them, one range of sample ids after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shardstream.errors import DesyncError
from shardstream.manifest import Manifest
from shardstream.torch.spool import IDS_PER_PART, Float64Array, Held, Int64Array, Layout

NUM_SHOWN = 20
_NUM_CONFLICTS_SHOWN = 5


@dataclass(frozen=True)
class NamedIds:
    """Samples that something is wrong with.

    Attributes:
        num_ids: How many there are.
        shown: The first 20: sample id, and where it is (``"part-00000.parquet:17"``, the shard and the row in it).
    """

    num_ids: int = 0
    shown: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Mean:
    """A quantity over all samples, each once, and what naive ways of averaging would have given.

    Attributes:
        sum: Sum over the samples in the order of their ids; the same bits for every number of ranks.
        count: What it is divided by: targets of a head, samples of a metric.
        mean_of_batch_means: Every micro-batch of every rank weighing the same.
        mean_of_rank_means: Every rank weighing the same.
        mean_of_rows: All rows, those that are padding and repeated ones counted as samples.
    """

    sum: float
    count: int
    mean_of_batch_means: float = math.nan
    mean_of_rank_means: float = math.nan
    mean_of_rows: float = math.nan

    @property
    def mean(self) -> float:
        """``sum / count``; NaN if nothing counts."""
        return self.sum / self.count if self.count else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON values; ``off`` is how far each naive mean is from the right one."""
        naive = {name: value for name, value in asdict(self).items() if name.startswith("mean_of")}
        off = {name: value - self.mean for name, value in naive.items()}
        return {"sum": self.sum, "count": self.count, "mean": self.mean, **naive, "off": off}


@dataclass(frozen=True)
class EvaluationReport:
    """What was evaluated, exactly: every sample counts once, whoever evaluated it how often.

    Attributes:
        heads: Loss head → its sum over the samples and its targets.
        metrics: Metric → its sum over the samples and their number.
        num_samples: Samples that count.
        num_expected: Samples that should.
        num_rows: Rows that all ranks added, padding not.
        num_padding: Rows that were flagged as padding and left out.
        missing: Samples that no rank evaluated, and that were not masked either.
        masked: Samples that no rank evaluated because they cannot be decoded (``on_error="mask"``).
        extra: Samples that were not expected; they do not count.
        duplicates: Samples that were evaluated more than once, with equal values; they count once.
        world_size: Number of ranks.

    Example:
        >>> report = EvaluationReport(heads={"lm": Mean(3.0, 2)}, metrics={}, num_samples=1, num_expected=1)
        >>> report.heads["lm"].mean, report.is_complete
        (1.5, True)
    """

    heads: Mapping[str, Mean]
    metrics: Mapping[str, Mean]
    num_samples: int
    num_expected: int
    num_rows: int = 0
    num_padding: int = 0
    missing: NamedIds = field(default_factory=NamedIds)
    extra: NamedIds = field(default_factory=NamedIds)
    duplicates: NamedIds = field(default_factory=NamedIds)
    world_size: int = 1
    masked: NamedIds = field(default_factory=NamedIds)

    @property
    def is_complete(self) -> bool:
        """Whether all samples that should count do, and no others were evaluated."""
        return not (self.missing.num_ids or self.masked.num_ids or self.extra.num_ids)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        means = {
            kind: {name: mean.to_dict() for name, mean in getattr(self, kind).items()} for kind in ("heads", "metrics")
        }
        return {"is_complete": self.is_complete, **asdict(self), **means}


class Averages:
    """What naive averaging gives on one rank: kept only to show how far it is off."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, name: str, values: Float64Array, weights: Float64Array, is_real: Sequence[bool] | Any) -> None:
        """Counts a micro-batch: the values of its rows and what they are divided by, ``float64[b]`` each."""
        with np.errstate(all="ignore"):  # infinite losses are the caller's
            real, rows = (
                [float(array.sum()) for array in pair]
                for pair in ((values[is_real], weights[is_real]), (values, weights))
            )
        batch = [_ratio(*real), 1.0] if real[1] else [0.0, 0.0]
        new = [*batch, *real, *rows]
        self.sums[name] = [a + b for a, b in zip(self.sums.get(name, [0.0] * len(new)), new, strict=True)]

    @staticmethod
    def joined(name: str, ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
        """Returns the naive means of all ranks by name."""
        columns = list(zip(*(sums[name] for sums in ranks if name in sums), strict=True)) or [(0.0,)] * 6
        rank_means = [value / weight for value, weight in zip(columns[2], columns[3], strict=True) if weight]
        return {
            "mean_of_batch_means": _ratio(exact_sum(columns[0]), exact_sum(columns[1])),
            "mean_of_rank_means": _ratio(exact_sum(rank_means), len(rank_means)),
            "mean_of_rows": _ratio(exact_sum(columns[4]), exact_sum(columns[5])),
        }


def _ratio(value: float, weight: float) -> float:
    return value / weight if weight else math.nan


def exact_sum(values: Float64Array | Sequence[float]) -> float:
    """Returns the sum, rounded once; in the given order where numbers are too large or infinite for that.

    Example:
        >>> exact_sum([1e16, 1.0, 1.0, -1e16])
        2.0
    """
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        with np.errstate(all="ignore"):
            return float(np.sum(np.asarray(values)))


class Tally:
    """Sums up samples, one range of ids after the other.

    Args:
        layout: What rows hold.
        manifest: The data set.
        expected: Sorted ids of the samples that should count; None for all of the manifest.
        rtol: How far values of one sample may differ to be equal.
        masked: Ids of samples that could not be decoded.
    """

    def __init__(
        self, layout: Layout, manifest: Manifest, expected: Int64Array | None, rtol: float, masked: Int64Array
    ) -> None:
        self._layout, self._manifest, self._expected, self._rtol = layout, manifest, expected, rtol
        self._masked = masked
        self._sums: dict[tuple[str, str], list[Any]] = {name: [] for name in layout.names}
        self._num_samples = 0
        self._found: dict[str, NamedIds] = dict.fromkeys(("missing", "masked", "extra", "duplicates"), NamedIds())
        self._num_conflicts, self._conflicts = 0, list[str]()

    def expected_parts(self) -> list[int]:
        """Returns the ranges that hold expected samples."""
        if self._expected is None:
            return list(range(-(-self._manifest.num_samples // IDS_PER_PART)))
        parts: list[int] = np.unique(self._expected // IDS_PER_PART).tolist()
        return parts

    def add(self, part: int, held: Held) -> None:
        """Counts a range, the ranges being given in order.

        Args:
            part: Which range it is.
            held: What ``collapse`` made of its rows, of all ranks.
        """
        ids = held.ids
        self._note_conflicts(held)
        is_first = np.ones(len(ids), np.bool_)
        is_first[1:] = ids[1:] != ids[:-1]
        held = Held(held.rows[is_first], held.ranks[is_first])
        expected = self._expected_in(part)
        is_expected = np.isin(held.ids, expected, assume_unique=True)
        missing = np.setdiff1d(expected, held.ids, assume_unique=True)
        is_masked = np.isin(missing, self._masked)
        self._note("missing", missing[~is_masked])
        self._note("masked", missing[is_masked])
        self._note("extra", held.ids[~is_expected])
        self._note("duplicates", held.ids[held.num_copies > 1])
        counted = held.rows[is_expected]
        self._num_samples += len(counted)
        for kind, name in self._layout.names:
            value = self._layout.value(counted, kind, name)
            total = int(value.sum()) if kind == "count" else exact_sum(value)
            self._sums[kind, name].append(total)

    def report(self, offers: Mapping[int, Mapping[str, Any]]) -> EvaluationReport:
        """Returns the report.

        Args:
            offers: Rank → ``num_rows``, ``num_padding`` and ``averages`` (see ``Averages.sums``).

        Raises:
            DesyncError: If a sample had different values; it names samples, ranks and values.
        """
        if self._num_conflicts:
            more = self._num_conflicts - len(self._conflicts)
            raise DesyncError(
                f"{self._num_conflicts} samples were evaluated more than once with different values: "
                + "; ".join(self._conflicts)
                + (f"; and {more} more" if more else ""),
                hint="put the model into eval(), compare the ranks' weights, or accept rounding with rtol=",
            )
        averages = [offer["averages"] for offer in offers.values()]
        heads, metrics = {}, {}
        for head in self._layout.heads:
            count = sum(self._sums["count", head])
            heads[head] = Mean(exact_sum(self._sums["sum", head]), count, **Averages.joined(f"head {head}", averages))
        for metric in self._layout.metrics:
            total = exact_sum(self._sums["metric", metric])
            metrics[metric] = Mean(total, self._num_samples, **Averages.joined(f"metric {metric}", averages))
        num_expected = self._manifest.num_samples if self._expected is None else len(self._expected)
        return EvaluationReport(
            heads,
            metrics,
            self._num_samples,
            num_expected,
            num_rows=sum(offer["num_rows"] for offer in offers.values()),
            num_padding=sum(offer["num_padding"] for offer in offers.values()),
            world_size=len(offers),
            **self._found,
        )

    def _expected_in(self, part: int) -> Int64Array:
        begin, end = part * IDS_PER_PART, (part + 1) * IDS_PER_PART
        if self._expected is None:
            return np.arange(max(begin, 0), min(end, self._manifest.num_samples), dtype=np.int64)
        return self._expected[slice(*np.searchsorted(self._expected, [begin, end]))]

    def _note(self, what: str, ids: Int64Array) -> None:
        before = self._found[what]
        new = [(sample, self._place(sample)) for sample in ids[: NUM_SHOWN - len(before.shown)].tolist()]
        self._found[what] = NamedIds(before.num_ids + len(ids), (*before.shown, *new))

    def _place(self, sample_id: int) -> str:
        if not 0 <= sample_id < self._manifest.num_samples:
            return "not in the manifest"
        shard = int(self._manifest.shard_of_sample(np.array(sample_id)))
        return f"{self._manifest.urls[shard]}:{sample_id - int(self._manifest.first_sample[shard])}"

    def _note_conflicts(self, held: Held) -> None:
        second = np.flatnonzero(held.ids[1:] == held.ids[:-1]) + 1
        self._num_conflicts += len(second)
        for row in second[: _NUM_CONFLICTS_SHOWN - len(self._conflicts)].tolist():
            pair = held.rows[row - 1 : row], held.rows[row : row + 1]
            (differs,) = self._layout.differences(*pair, self._rtol)
            kind, name = self._layout.names[int(np.argmax(differs))]
            values = [self._layout.value(rows, kind, name)[0].item() for rows in pair]
            ranks = held.ranks[row - 1 : row + 1].tolist()
            told = [f"{value!r} on rank {rank}" for value, rank in zip(values, ranks, strict=True)]
            sample = int(held.ids[row])
            self._conflicts.append(
                f"{kind} {name!r} of sample {sample} ({self._place(sample)}) is {' and '.join(told)}"
            )
