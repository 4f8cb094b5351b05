"""What an evaluation has added on one rank: rows of 64-bit words, in memory up to a size and on disk beyond it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

IDS_PER_PART = 1 << 18
"""Rows are read back by ranges of so many sample ids. Fixed: sums are made range by range."""

_ID, _NUM_COPIES, _FIRST_VALUE = 0, 1, 2


@dataclass(frozen=True)
class Layout:
    """What the words of a row are: id, number of copies, sums, counts, metrics. Floats are held bit by bit.

    Attributes:
        heads: Names of the heads, sorted.
        metrics: Names of the metrics, sorted.
    """

    heads: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def num_words(self) -> int:
        """Words of a row."""
        return _FIRST_VALUE + len(self.names)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Kind (``"sum"``, ``"count"``, ``"metric"``) and name of each value, in the order of the words."""
        heads = [(kind, head) for kind in ("sum", "count") for head in self.heads]
        return heads + [("metric", metric) for metric in self.metrics]

    def rows(self, ids: Int64Array, values: Mapping[tuple[str, str], npt.NDArray[Any]]) -> Int64Array:
        """Returns ``int64[n, num_words]`` of one copy each; equal values have equal bits, NaN and -0.0 included."""
        rows = np.empty((len(ids), self.num_words), np.int64)
        rows[:, _ID], rows[:, _NUM_COPIES] = ids, 1
        for word, name in enumerate(self.names, _FIRST_VALUE):
            value = values[name]
            if name[0] != "count":
                value = np.where(np.isnan(value), np.nan, value + 0.0).view(np.int64)
            rows[:, word] = value
        return rows

    def value(self, rows: Int64Array, kind: str, name: str) -> npt.NDArray[Any]:
        """Returns one value of all rows: ``int64[n]`` for counts, ``float64[n]`` for the others."""
        words = np.ascontiguousarray(rows[:, _FIRST_VALUE + self.names.index((kind, name))])
        return words if kind == "count" else words.view(np.float64)

    def differences(self, rows: Int64Array, others: Int64Array, rtol: float) -> npt.NDArray[np.bool_]:
        """Returns ``bool[n, number of values]``: where two rows differ, floats by more than ``rtol``."""
        differ: npt.NDArray[np.bool_] = rows[:, _FIRST_VALUE:] != others[:, _FIRST_VALUE:]
        if rtol:
            for place, (kind, name) in enumerate(self.names):
                if kind != "count":
                    pair = self.value(rows, kind, name), self.value(others, kind, name)
                    differ[:, place] &= ~np.isclose(*pair, rtol=rtol, atol=0.0, equal_nan=True)
        return differ


class Held(NamedTuple):
    """Rows and the rank that each came from."""

    rows: Int64Array
    ranks: Int64Array

    @property
    def ids(self) -> Int64Array:
        """``int64[n]``: the sample ids."""
        return self.rows[:, _ID]

    @property
    def num_copies(self) -> Int64Array:
        """``int64[n]``: how often each row was added."""
        return self.rows[:, _NUM_COPIES]


def collapse(parts: Sequence[Held], layout: Layout, rtol: float) -> Held:
    """Joins equal rows of one id.

    Args:
        parts: At least one; of equal rows the first stays.
        layout: Of their rows.
        rtol: How far floats may differ to be equal.

    Returns:
        One row an id, sorted by id; of ids with different rows also the first that differs, behind it.
    """
    rows, ranks = np.concatenate([part.rows for part in parts]), np.concatenate([part.ranks for part in parts])
    order = np.argsort(rows[:, _ID], kind="stable")
    rows, ranks = rows[order], ranks[order]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = rows[1:, _ID] != rows[:-1, _ID]
    firsts = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    differing = np.flatnonzero(layout.differences(rows, rows[firsts[group]], rtol).any(axis=1))
    differing = differing[np.unique(group[differing], return_index=True)[1]]
    rows[firsts, _NUM_COPIES] = np.add.reduceat(rows[:, _NUM_COPIES], firsts) if len(rows) else 0
    rows[differing, _NUM_COPIES] = 0  # they are counted with the first
    kept = np.sort(np.concatenate([firsts, differing]))
    return Held(rows[kept], ranks[kept])


class _Run(NamedTuple):
    """Rows that stand part by part: where each part of theirs begins and ends, and the rows if they are in memory."""

    bounds: dict[int, tuple[int, int]]
    rows: Int64Array | None

    @classmethod
    def of(cls, held: Sequence[Int64Array]) -> _Run:
        """Puts rows together part by part; inside a part they stay in order."""
        rows = np.concatenate(held)
        part = rows[:, _ID] // IDS_PER_PART
        order = np.argsort(part, kind="stable")
        parts, begins = np.unique(part[order], return_index=True)
        bounds = pairwise([*begins.tolist(), len(rows)])
        return cls(dict(zip(parts.tolist(), bounds, strict=True)), rows[order])


class Spool:
    """Rows of one rank, read back by ranges of ids.

    Args:
        num_words: Words of a row.
        memory_num_bytes: Rows beyond this size go to a temporary file. It has no name, so nothing is left of it
            whatever becomes of this process.
        directory: Where the file is; default the system's place for temporary files.
    """

    def __init__(self, num_words: int, memory_num_bytes: int, directory: str | None = None) -> None:
        self._num_words, self._memory_num_bytes, self._directory = num_words, memory_num_bytes, directory
        self._held: list[Int64Array] = []
        self._num_bytes_held = self._num_rows_filed = 0
        self._runs: list[_Run] = []
        self._file: IO[bytes] | None = None

    @property
    def num_bytes_on_disk(self) -> int:
        """Bytes in the temporary file."""
        return self._num_rows_filed * self._num_words * 8

    def add(self, rows: Int64Array) -> None:
        """Takes ``int64[n, num_words]``, the first word being the sample id."""
        self._held.append(rows)
        self._num_bytes_held += rows.nbytes
        if self._num_bytes_held > self._memory_num_bytes:
            self._spill()

    def parts(self) -> list[int]:
        """Returns the ranges in which there are rows: range k has the ids from ``k * IDS_PER_PART`` on; sorted."""
        self._settle()
        return sorted(set().union(*(run.bounds for run in self._runs)))

    def read(self, part: int) -> Int64Array:
        """Returns the rows of a range, ``int64[n, num_words]``, in the order in which they were added."""
        self._settle()
        found = [self._rows(run, *run.bounds[part]) for run in self._runs if part in run.bounds]
        return np.concatenate(found) if found else np.empty((0, self._num_words), np.int64)

    def close(self) -> None:
        """Forgets all rows and gives the disk space back."""
        self._held, self._runs = [], []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _settle(self) -> None:
        if self._held:
            self._runs.append(_Run.of(self._held))
            self._held, self._num_bytes_held = [], 0

    def _spill(self) -> None:
        run = _Run.of(self._held)
        assert run.rows is not None  # noqa: S101 - narrows the type
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - closed in close()
        first = self._num_rows_filed
        self._file.seek(self.num_bytes_on_disk)
        self._file.write(run.rows.data)
        self._runs.append(_Run({part: (first + a, first + b) for part, (a, b) in run.bounds.items()}, None))
        self._num_rows_filed += len(run.rows)
        self._held, self._num_bytes_held = [], 0

    def _rows(self, run: _Run, begin: int, end: int) -> Int64Array:
        if run.rows is not None:
            return run.rows[begin:end]
        assert self._file is not None  # noqa: S101 - narrows the type
        self._file.seek(begin * self._num_words * 8)
        data = self._file.read((end - begin) * self._num_words * 8)
        return np.frombuffer(data, np.int64).reshape(-1, self._num_words)
