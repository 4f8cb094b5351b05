"""Rows that cannot be made: which they are, and what is made without them.

A row is at fault if it cannot be made even by itself. That depends on the row alone, so it does not matter which rank
or worker meets it, and in which batch.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardstream.columns import Rows
from shardstream.errors import DecodeError, ShardStreamError
from shardstream.gathering import gather
from shardstream.layout import Layout, Planned, RunKey
from shardstream.permutation import Int64Array

NO_FAULTS: Mapping[int, Exception] = MappingProxyType({})

# What says nothing of the data: the same row may be fine the next time. Libraries have errors of their own for it that
# are none of these, known by their names; a decoder's OSError has no number, that of a machine has.
_PASSING = (MemoryError, ConnectionError, TimeoutError)
_PASSING_WORDS = ("Connection", "Timeout", "OutOfMemory")
_PASSING_NUMBERS = frozenset(
    {errno.EAGAIN, errno.EDQUOT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EIO, errno.EMFILE, errno.ENETDOWN}
    | {errno.ENETUNREACH, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESTALE}
)


def is_of_data(error: BaseException) -> bool:
    """Whether an error says that data is bad, and not that something failed which may work the next time.

    Of this package's errors that is a ``DecodeError``; of others any but those of memory, connections and a machine
    that is at its limits. What an error was raised from counts, too.

    Example:
        >>> from shardstream.errors import ReadError
        >>> is_of_data(DecodeError("cut")), is_of_data(ValueError()), is_of_data(ReadError("no answer"))
        (True, True, False)
    """
    is_ours = isinstance(error, ShardStreamError)
    is_bad = isinstance(error, DecodeError) if is_ours else not _is_passing(error)
    return is_bad and isinstance(error, Exception) and (error.__cause__ is None or is_of_data(error.__cause__))


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _PASSING_NUMBERS:
        return True
    names = [kind.__name__ for kind in type(error).__mro__]
    return isinstance(error, _PASSING) or any(word in name for name in names for word in _PASSING_WORDS)


def rows_at_fault(rows: Sequence[int], attempt: Callable[[Sequence[int]], Any]) -> dict[int, Exception]:
    """Finds the rows with which something fails although they are alone: by halves, for few rows are bad.

    Args:
        rows: The rows.
        attempt: What is tried with some of them.

    Returns:
        Row → what it failed with.

    Raises:
        Exception: What ``attempt`` raises, where that is not of the data.

    Example:
        >>> list(rows_at_fault(range(8), lambda rows: [1 / (row - 5) for row in rows]))
        [5]
    """
    if not rows:
        return {}
    try:
        attempt(rows)
    except Exception as error:
        if not is_of_data(error):
            raise
        if len(rows) == 1:
            return {rows[0]: error}
        half = len(rows) // 2
        return rows_at_fault(rows[:half], attempt) | rows_at_fault(rows[half:], attempt)
    return {}


def stand_ins(num_rows: int, faults: Mapping[int, Any]) -> list[int]:
    """Returns which row's values each row takes: its own, or those of the next sound one before it, or behind it.

    Returns:
        As many row numbers; none if all rows are at fault.

    Example:
        >>> stand_ins(4, {0: "cut", 2: "cut"})
        [1, 1, 1, 3]
    """
    last = next((row for row in range(num_rows) if row not in faults), None)
    if last is None:
        return []
    taken = []
    for row in range(num_rows):
        last = last if row in faults else row
        taken.append(last)
    return taken


def take(rows: Rows, chosen: Sequence[int]) -> Rows:
    """Returns copies of some rows of what ``gather`` made.

    Example:
        >>> from shardstream.columns import Objects
        >>> take(Rows(2, {"x": Objects(["a", "b"])}), [1, 1, 0]).columns["x"].values
        ['b', 'b', 'a']
    """
    return gather([rows], np.zeros(len(chosen), np.int64), np.array(chosen, np.int64))


class Made(NamedTuple):
    """The rows of a gather."""

    rows: Rows
    """All n rows; those at fault hold the values of others. Without columns if none could be made."""
    faults: Mapping[int, Exception] = NO_FAULTS
    """Row → why it could not be made."""


def made_without_faults(layout: Layout, planned: Planned, run_of: Callable[[RunKey], Any]) -> Made:
    """Makes the rows of a gather of which some cannot be made.

    Args:
        layout: What rows are.
        planned: The gather.
        run_of: Returns a run as the layout prepared it, or raises why there is none.

    Raises:
        Exception: Where what failed is not the data.
    """
    sizes = [len(batch.positions) for batch in planned.batches]
    batch_of_row = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.concatenate([batch.positions for batch in planned.batches])

    def attempt(rows: Sequence[int]) -> Rows:
        part = layout.planned(_batches_of(planned, batch_of_row, positions, np.array(rows, np.int64)))
        return part.make([run_of(key) for key in part.keys])

    num_rows = len(positions)
    faults = rows_at_fault(range(num_rows), attempt)
    sound = [row for row in range(num_rows) if row not in faults]
    if not sound:
        return Made(Rows(num_rows, {}), faults)
    place = {row: index for index, row in enumerate(sound)}
    return Made(take(attempt(sound), [place[row] for row in stand_ins(num_rows, faults)]), faults)


def _batches_of(planned: Planned, batch_of_row: Int64Array, positions: Int64Array, rows: Int64Array) -> list[Any]:
    """The gather's batches with some of their rows only, in ascending order."""
    return [
        planned.batches[batch]._replace(positions=positions[rows[batch_of_row[rows] == batch]])
        for batch in dict.fromkeys(batch_of_row[rows].tolist())
    ]
