"""Many numbers as few: histograms, and points over steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardstream.permutation import Int64Array
from shardstream.report.page import Bars, Figure, Table, shown

_NUM_BARS = 24
_SKEWED = 32  # with a largest value so many times the median, bars double in width
NUM_POINTS = 60


def histogram(name: str, title: str, values: npt.ArrayLike, *, of: str, unit: str) -> Figure:
    """Returns a figure of how whole numbers are distributed.

    Args:
        name: Anchor of the figure.
        title: Its title.
        values: int64[n], n > 0, none negative.
        of: What has these numbers (``"shards"``).
        unit: What they count (``"bytes"``).

    Example:
        >>> figure = histogram("rows", "Rows", [1, 1, 2], of="blocks", unit="rows")
        >>> figure.chart.labels, figure.chart.values
        (('1', '2'), (2, 1))
        >>> figure.summary
        '3 blocks: 1 to 2 rows, half of them at most 1, 95 of 100 at most 2; 4 rows in all.'
    """
    numbers = np.asarray(values, np.int64)
    edges = _edges(numbers)
    # int64, and numpy's own edges are floats: bytes of a large shard need all their digits.
    counts = np.bincount(np.searchsorted(edges, numbers, side="right") - 1, minlength=len(edges) - 1)[: len(edges) - 1]
    show = size if unit == "bytes" else shown
    labels = tuple(span(low, high - 1, show) for low, high in pairwise(edges.tolist()))
    median, most = (int(np.percentile(numbers, q, method="higher")) for q in (50, 95))
    low, high, total = int(numbers.min()), int(numbers.max()), int(numbers.sum())
    unit_name = "" if unit == "bytes" else f" {unit}"
    summary = (
        f"{len(numbers):,} {of}: {span(low, high, show)}{unit_name}{' each' if low == high else ''}, "
        f"half of them at most {show(median)}, 95 of 100 at most {show(most)}; {show(total)}{unit_name} in all."
    )
    table = Table(f"{title}: numbers of the figure", (unit, of), tuple(zip(labels, counts.tolist(), strict=True)))
    return Figure(name, title, summary, Bars(unit, of, labels, tuple(counts.tolist())), table)


def _edges(numbers: Int64Array) -> Int64Array:
    """Whole numbers at which bars begin, and behind the last."""
    low, high = int(numbers.min()), int(numbers.max())
    if high >= _SKEWED * max(float(np.median(numbers)), 1.0):
        return np.array([0, *(1 << k for k in range(high.bit_length() + 1))], np.int64)
    width = max(1, -(-(high - low + 1) // _NUM_BARS))
    return np.arange(low, high + width + 1, width)


def span(low: int, high: int, show: Callable[[int], str] = str) -> str:
    """Returns whole numbers from one to another as text.

    Example:
        >>> span(3, 3), span(3, 5)
        ('3', '3 to 5')
    """
    first, last = show(low), show(high)
    return first if first == last else f"{first} to {last}"


def size(num_bytes: int) -> str:
    """Returns a number of bytes as people read it.

    Example:
        >>> size(17), size(1_500), size(2_000_000_000)
        ('17 B', '1.5 kB', '2 GB')
    """
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"


def stretches(num: int, at_most: int = NUM_POINTS) -> list[tuple[int, int]]:
    """Cuts 0..num-1 into up to ``at_most`` stretches of about equal length, as (begin, end).

    Example:
        >>> stretches(5, 2), stretches(1)
        ([(0, 2), (2, 5)], [(0, 1)])
    """
    number = min(num, at_most)
    edges = [num * k // number for k in range(number + 1)] if number else []
    return list(pairwise(edges))
