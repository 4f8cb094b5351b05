"""Shuffle quality: how the order mixes, beside what a uniform shuffle of all samples would give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardstream.audit.labels import Labels
from shardstream.audit.simulate import WindowRows, window_rows
from shardstream.deal import Deal
from shardstream.permutation import Int64Array
from shardstream.plan import EpochPlan, Plan

_MOST_POSITIONS = 1 << 20  # all windows up to here, some beyond
_NUM_WINDOWS = 16  # looked at, at least
_SPREAD = 8  # windows apart from each other cost more than all in a row
_ROWS_A_PART = 64  # dealing a rank's part of a window costs about as much as this many rows


@dataclass(frozen=True)
class ShuffleQuality:
    """How an epoch mixes.

    Attributes:
        num_windows: Windows looked at.
        num_windows_in_epoch: Windows there are.
        neighbours: Part of the pairs of neighbours in a shard that meet in one global batch (estimated from the windows
            looked at where these are not all).
        uniform_neighbours: The same for a uniform shuffle.
        classes_per_global_batch: Mean number of distinct classes; None without labels.
        uniform_classes_per_global_batch: The same for a uniform shuffle.
        classes_per_micro_batch: Mean number of distinct classes; None without labels.
        uniform_classes_per_micro_batch: The same for a uniform shuffle.
        num_classes: Classes there are; None without labels.
    """

    num_windows: int
    num_windows_in_epoch: int
    neighbours: float
    uniform_neighbours: float
    classes_per_global_batch: float | None = None
    uniform_classes_per_global_batch: float | None = None
    classes_per_micro_batch: float | None = None
    uniform_classes_per_micro_batch: float | None = None
    num_classes: int | None = None


def uniform_neighbours(window_sizes: npt.NDArray[np.integer], num_samples: int) -> float:
    """Returns the chance that two given samples meet in one global batch after a uniform shuffle.

    The first falls into window w with probability g_w / N, the second joins it with (g_w - 1) / (N - 1); so it is the
    sum over windows of g_w (g_w - 1) / (N (N - 1)). (Elementary: two places drawn without replacement.)

    Args:
        window_sizes: int64[num_windows], samples of each window.
        num_samples: N.

    Example:
        >>> round(uniform_neighbours(np.array([50, 50]), 100), 4)
        0.4949
    """
    if num_samples <= 1:
        return 0.0
    sizes = window_sizes.astype(np.float64)
    return float((sizes * (sizes - 1)).sum() / (num_samples * (num_samples - 1)))


def expected_classes(class_sizes: npt.NDArray[np.integer], num_drawn: int) -> float:
    """Returns how many distinct classes a uniform draw without replacement holds on average.

    A class of n_c among N samples is missing from a draw of g with probability C(N - n_c, g) / C(N, g)
    (hypergeometric), so the mean is the sum over classes of 1 - C(N - n_c, g) / C(N, g): Hurlbert's rarefaction,
    S. H. Hurlbert, "The nonconcept of species diversity", Ecology 52 (1971), equation 3.

    Args:
        class_sizes: int64[num_classes], samples of each class.
        num_drawn: g.

    Example:
        >>> expected_classes(np.array([5, 5]), 1), round(expected_classes(np.array([5, 5]), 2), 4)
        (1.0, 1.5556)
        >>> round(expected_classes(np.full(1000, 1280), 2048))
        871
    """
    sizes, times = np.unique(class_sizes[class_sizes > 0], return_counts=True)
    num_samples = int((sizes * times).sum())
    drawn = min(num_drawn, num_samples)

    def missing(size: int) -> float:
        rest = num_samples - size
        if drawn > rest:
            return 0.0
        ways = math.lgamma(rest + 1) - math.lgamma(rest - drawn + 1)
        return math.exp(ways - math.lgamma(num_samples + 1) + math.lgamma(num_samples - drawn + 1))

    present = (n * (1.0 - missing(size)) for size, n in zip(sizes.tolist(), times.tolist(), strict=True))
    return float(sum(present))


def shuffle_quality(plan: Plan, epoch: int = 0, labels: Labels | None = None) -> ShuffleQuality | None:
    """Measures how an epoch mixes, on all its windows or on evenly spread ones.

    Args:
        plan: The plan.
        epoch: Which epoch.
        labels: Class of each sample, or None.

    Returns:
        The figures, or None where the epoch has no window, and for packed sequences, which are no samples.
    """
    here = plan.epoch(epoch)
    num_windows, num_samples = here.deal.num_windows, plan.num_positions
    if num_windows == 0 or plan.packed is not None:
        return None
    rows, num_seen = _rows_looked_at(here.deal, num_windows)
    real = ~rows.is_padding & (rows.positions < num_samples)  # what lies beyond is the next epoch's
    window, ids = rows.window[real], here.order.sample_ids(rows.positions[real])
    in_window = np.unique(window * num_samples + ids)
    sizes = np.bincount(in_window // num_samples)[np.unique(window)]
    all_sizes = np.full(num_windows, plan.global_batch)
    all_sizes[-1] = sizes[-1]
    num_pairs = num_samples - int(np.count_nonzero(np.diff(plan.manifest.first_sample)))
    neighbours = _num_neighbours(here, in_window) * all_sizes.sum() / sizes.sum() / max(num_pairs, 1)
    quality = (num_seen, num_windows, float(neighbours), uniform_neighbours(all_sizes, num_samples))
    if labels is None:
        return ShuffleQuality(*quality)
    micro_batch = rows.batch_index[real] * plan.world_size + rows.rank[real]
    codes = labels.codes[ids]
    return ShuffleQuality(
        *quality,
        *_classes(labels, window, codes),
        *_classes(labels, micro_batch, codes),
        num_classes=len(labels.class_sizes),
    )


def _rows_looked_at(deal: Deal, num_windows: int) -> tuple[WindowRows, int]:
    """Returns the rows of all windows, or of evenly spread ones, and of how many."""
    at_most = max(_NUM_WINDOWS, _MOST_POSITIONS // deal.global_batch)
    if num_windows <= at_most:
        return window_rows(deal, 0, num_windows), num_windows
    at_most = max(_NUM_WINDOWS, _MOST_POSITIONS // _SPREAD // max(deal.global_batch, deal.world_size * _ROWS_A_PART))
    chosen = sorted(set(np.linspace(0, num_windows - 1, at_most).astype(np.int64).tolist()))
    spread = [window_rows(deal, window, window + 1) for window in chosen]
    return WindowRows(*map(np.concatenate, zip(*spread, strict=True))), len(chosen)


def _classes(labels: Labels, batch: Int64Array, codes: Int64Array) -> tuple[float, float]:
    """Returns the mean number of distinct classes in batches, and what a uniform shuffle would give."""
    num_classes = len(labels.class_sizes)
    _, sizes = np.unique(batch, return_counts=True)
    found = len(np.unique(batch * num_classes + codes)) / len(sizes)
    sizes, times = np.unique(sizes, return_counts=True)
    expected = [expected_classes(labels.class_sizes, size) for size in sizes.tolist()]
    return found, float(np.average(expected, weights=times))


def _num_neighbours(here: EpochPlan, in_window: Int64Array) -> int:
    """Counts neighbours in a shard that are in the same window; ``in_window`` is sorted, window * N + id."""
    window, ids = np.divmod(in_window, here.deal.num_positions)
    shard = here.order.manifest.shard_of_sample(ids)
    return int(((np.diff(in_window) == 1) & (np.diff(window) == 0) & (np.diff(shard) == 0)).sum())
