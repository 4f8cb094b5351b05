"""Columns in memory: what formats hand over, fetching gathers and batches are made of. Numpy only.

A column of n rows is one of three frozen values. ``Dense`` and ``Slices`` are views of the memory that the decoder
filled; ``gather`` makes the one copy, from there into the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

SliceKind: TypeAlias = Literal["list", "bytes", "text"]


@dataclass(frozen=True, eq=False)
class Dense:
    """Numbers, one cell a row: ``values[n]``, or ``values[n, k]`` for lists of a fixed size.

    ``nulls`` is ``bool[n]`` (True where the row has no value; ``values`` holds anything there) or None.
    """

    values: npt.NDArray[Any]
    nulls: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, eq=False)
class Slices:
    """Rows of varying length: row i is ``values[starts[i] : starts[i] + lengths[i]]``.

    ``kind`` says what a row is: "list" (numbers), "bytes" or "text" (both ``values`` of uint8; text is UTF-8).
    ``starts`` and ``lengths`` are int64[n]; rows may lie anywhere in ``values``, in any order.
    ``nulls`` is ``bool[n]`` (True where the row has no value, its length is 0 then) or None.
    """

    values: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    kind: SliceKind
    nulls: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, eq=False)
class Objects:
    """Everything else: one Python value a row (None where there is no value)."""

    values: Sequence[Any]

    def __len__(self) -> int:
        return len(self.values)


Column: TypeAlias = Dense | Slices | Objects


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows held in memory together (a run, or what was gathered for a batch): columns of equal length by name."""

    num_rows: int
    columns: dict[str, Column]
    num_bytes: int = 0
