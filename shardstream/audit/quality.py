"""Shuffle quality: how the order mixes, beside what a uniform shuffle of all samples would give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardstream.audit.labels import Labels
from shardstream.permutation import Int64Array
from shardstream.plan import EpochPlan, Plan

_MOST_POSITIONS = 1 << 20  # all windows up to here, some beyond
_MOST_PARTS = 1 << 12  # of windows, one a rank
_NUM_WINDOWS = 16  # looked at, at least


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
        The figures, or None where the epoch has no window.
    """
    here = plan.epoch(epoch)
    num_windows, num_samples = here.deal.num_windows, plan.num_positions
    if num_windows == 0:
        return None
    windows = list(range(num_windows))
    if num_samples > _MOST_POSITIONS or num_windows * plan.world_size > _MOST_PARTS:
        at_most = max(_NUM_WINDOWS, min(_MOST_POSITIONS // plan.global_batch, _MOST_PARTS // plan.world_size))
        windows = sorted(set(np.linspace(0, num_windows - 1, at_most).astype(np.int64).tolist()))
    sizes: list[int] = []
    num_meeting, in_window, in_micro = 0, [], []
    for window in windows:
        micro_batches = _micro_batches(here, window, num_samples)
        ids = np.unique(np.concatenate(micro_batches))
        sizes.append(len(ids))
        num_meeting += _num_neighbours(here, ids)
        if labels is not None:
            in_window.append(len(np.unique(labels.codes[ids])))
            in_micro += [(len(micro), len(np.unique(labels.codes[micro]))) for micro in micro_batches]
    all_sizes = np.full(num_windows, plan.global_batch)
    all_sizes[-1] = sizes[-1]
    num_pairs = num_samples - int(np.count_nonzero(np.diff(plan.manifest.first_sample)))
    scale = int(all_sizes.sum()) / sum(sizes) / max(num_pairs, 1)
    quality = (len(windows), num_windows, float(num_meeting * scale), uniform_neighbours(all_sizes, num_samples))
    if labels is None:
        return ShuffleQuality(*quality)
    return ShuffleQuality(
        *quality,
        classes_per_global_batch=float(np.mean(in_window)),
        uniform_classes_per_global_batch=_mean_expected(labels, sizes),
        classes_per_micro_batch=float(np.mean([found for _, found in in_micro])),
        uniform_classes_per_micro_batch=_mean_expected(labels, [size for size, _ in in_micro]),
        num_classes=len(labels.class_sizes),
    )


def _mean_expected(labels: Labels, sizes: list[int]) -> float:
    by_size = {size: expected_classes(labels.class_sizes, size) for size in set(sizes)}
    return float(np.mean([by_size[size] for size in sizes]))


def _micro_batches(here: EpochPlan, window: int, num_samples: int) -> list[Int64Array]:
    """Returns the sample ids of each micro-batch of a window, padding and what lies in the next epoch left out."""
    parts = [here.deal.part(window, rank) for rank in range(here.deal.world_size)]
    counted = [~part.is_padding & (part.positions < num_samples) for part in parts]
    positions = np.concatenate([part.positions[real] for part, real in zip(parts, counted, strict=True)])
    ids = here.order.sample_ids(positions)
    size, ends = here.deal.batch_size, np.cumsum([int(real.sum()) for real in counted])
    of_rank = np.split(ids, ends[:-1])
    return [part[k : k + size] for part in of_rank for k in range(0, len(part), size)]


def _num_neighbours(here: EpochPlan, sorted_ids: Int64Array) -> int:
    shard = here.order.manifest.shard_of_sample(sorted_ids)
    return int(((np.diff(sorted_ids) == 1) & (np.diff(shard) == 0)).sum())
