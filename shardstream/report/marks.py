"""Marks as SVG paths. They hold numbers only, so nothing in them has to be escaped, and names are HTML beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

_BOX = 100.0
_GAP = 0.12  # of a bar's room
NUM_SHADES = 4


def bar_paths(values: Sequence[float]) -> tuple[str, ...]:
    """Returns one path a value, side by side in a box of 100 x 100, the highest as high as the box.

    Example:
        >>> bar_paths([1, 2])
        ('M3 100V50H47V100Z', 'M53 100V0H97V100Z')
    """
    top, room = max(values, default=0) or 1, _BOX / max(len(values), 1)
    gap = room * _GAP / 2
    return tuple(
        f"M{_n(k * room + gap)} 100V{_n(_BOX - _BOX * value / top)}H{_n((k + 1) * room - gap)}V100Z"
        for k, value in enumerate(values)
    )


def line_paths(x: Sequence[float], series: Iterable[Sequence[float | None]], top: float) -> tuple[str, ...]:
    """Returns one path a line in a box of 100 x 100; it is broken where there is no point.

    Example:
        >>> line_paths([0, 1, 2, 3], [[4, None, 2, 0]], 4)
        ('M0 0h0M66.67 50L100 100',)
    """
    at = _places(x)
    return tuple(_line(at, points, top or 1) for points in series)


def _line(at: Sequence[float], points: Sequence[float | None], top: float) -> str:
    path = ""
    for is_there, stretch in groupby(zip(at, points, strict=True), key=lambda point: point[1] is not None):
        if is_there:
            places = [f"{_n(x)} {_n(_BOX - _BOX * (y or 0) / top)}" for x, y in stretch]
            path += "M" + "L".join(places) + ("h0" if len(places) == 1 else "")
    return path


def area_path(x: Sequence[float], low: Sequence[float], high: Sequence[float], top: float) -> str:
    """Returns what lies between two lines.

    Example:
        >>> area_path([0, 1], [0, 1], [2, 2], 2)
        'M0 0L100 0L100 50L0 100Z'
    """
    at = _places(x)
    there = [*zip(at, high, strict=True), *reversed(list(zip(at, low, strict=True)))]
    return "M" + "L".join(f"{_n(x)} {_n(_BOX - _BOX * y / (top or 1))}" for x, y in there) + "Z" if there else ""


def heat_paths(rows: Sequence[Sequence[int]], top: int) -> tuple[tuple[int, str], ...]:
    """Returns for each shade that occurs, 1 to 4, a path of its cells; a cell is 1 x 1, cells of 0 are left out.

    Example:
        >>> heat_paths([[0, 4, 4], [1, 0, 0]], 4)
        ((1, 'M0 1h1v1h-1z'), (4, 'M1 0h2v1h-2z'))
    """
    cells: dict[int, str] = {}
    for y, row in enumerate(rows):
        x = 0
        for shade, same in groupby(heat_shade(count, top) for count in row):
            width = len(list(same))
            if shade:
                cells[shade] = cells.get(shade, "") + f"M{x} {y}h{width}v1h-{width}z"
            x += width
    return tuple(sorted(cells.items()))


def heat_shade(count: int, top: int) -> int:
    """Returns the shade of a count: 0 for none, up to 4 for ``top``."""
    return -(-NUM_SHADES * count // max(top, 1))


def _places(x: Sequence[float]) -> list[float]:
    first, width = x[0] if x else 0, (x[-1] - x[0] if x else 0) or 1
    return [_BOX * (each - first) / width for each in x]


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
