"""Medians of repetitions, ratios of medians, and the order in which cases take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Spread(NamedTuple):
    """A median with what lies around it."""

    median: float
    least: float
    most: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of at least one value.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, least=1.0, most=3.0, num=3)
        """
        return cls(median(values), min(values), max(values), len(values))


def interleaved(cases: Sequence[T], num_repetitions: int) -> Iterator[tuple[int, T]]:
    """Yields (repetition, case), every case once a repetition; every other repetition goes backwards.

    So a slow drift of the machine meets all cases alike, and neighbours do not always stand in the same order.

    Example:
        >>> "".join(case for _, case in interleaved("abc", 2))
        'abccba'
    """
    for repetition in range(num_repetitions):
        for case in cases if repetition % 2 == 0 else reversed(cases):
            yield repetition, case


def ratio_of_medians(ours: Sequence[float], against: Sequence[Sequence[float]]) -> float:
    """Returns the median of ours over the largest median of the others: "how many times the best of them".

    Args:
        ours: Values of all repetitions.
        against: The same for each of the others; those without values are left out.

    Raises:
        ValueError: If there is nothing to compare with.

    Example:
        >>> ratio_of_medians([10, 30, 20], [[1, 2, 3], [5, 4], []])
        4.444444444444445
    """
    medians = [median(values) for values in against if values]
    if not ours or not medians:
        raise ValueError("no values to compare")
    return median(ours) / max(medians)
