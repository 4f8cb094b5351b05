"""Counts per sample that need a column's lists: token lengths and valid targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.columns import Column, Dense, Objects, Slices
from shardstream.fitting import num_best_fit, num_unpacked, sequence_counts_name


class RunLengths(NamedTuple):
    """The documents of a run."""

    lengths: npt.NDArray[np.int32]
    """int32[n], tokens of each row; 0 where it has no list."""
    is_document: npt.NDArray[np.bool_]
    """bool[n], whether the row has a list, be it empty."""


def token_counts(runs: Sequence[RunLengths], sequence_lengths: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
    """Returns what a manifest keeps of a shard's tokens.

    Args:
        runs: All of them, in order.
        sequence_lengths: For each of them it is counted how many sequences each run makes, of whole documents and of
            unpacked ones.

    Returns:
        ``token_lengths`` int32[num_samples]; int64[num_runs]: ``run_num_tokens``, ``run_num_documents`` (rows that have
        a list), and for each sequence length T ``sequences.<T>`` and ``parts.<T>`` (unpacked documents), and the same
        with ``+eos``, each document having an end of one token.

    Example:
        >>> run = RunLengths(np.array([3, 0, 0, 4], np.int32), np.array([True, False, True, True]))
        >>> {name: counts.tolist() for name, counts in token_counts([run], [4]).items()}
        {'token_lengths': [3, 0, 0, 4], 'run_num_tokens': [7], 'run_num_documents': [3],
         'sequences.4': [2], 'parts.4': [2], 'sequences.4+eos': [2], 'parts.4+eos': [3]}
    """
    counts: dict[str, npt.NDArray[Any]] = {
        "token_lengths": _joined([run.lengths for run in runs]),
        "run_num_tokens": np.array([run.lengths.sum(dtype=np.int64) for run in runs], np.int64),
        "run_num_documents": np.array([np.count_nonzero(run.is_document) for run in runs], np.int64),
    }
    for length in sequence_lengths:
        for has_eos in (False, True):
            documents = [run.lengths[run.is_document].astype(np.int64) + has_eos for run in runs]
            for mode, count in (("whole", num_best_fit), ("unpacked", num_unpacked)):
                name = sequence_counts_name(length, has_eos=has_eos, mode=mode)
                counts[name] = np.array([count(lengths, length) for lengths in documents], np.int64)
    return counts


def _joined(parts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def run_lengths(column: Column) -> RunLengths:
    """Returns the documents of a run from its column of token lists.

    Example:
        >>> run_lengths(Objects([[7, 8, None], [], None])).is_document.tolist()
        [True, True, False]
    """
    if isinstance(column, Objects):
        is_document = np.array([row is not None for row in column.values], np.bool_)
    else:
        is_document = np.ones(len(column), np.bool_) if column.nulls is None else ~column.nulls
    return RunLengths(list_lengths(column), is_document)


def list_lengths(column: Column) -> npt.NDArray[np.int32]:
    """Returns the length of each row's list: int32[n]; rows without a value count 0.

    Example:
        >>> list_lengths(Objects([[7, 8, None], [], None])).tolist()
        [3, 0, 0]
    """
    if isinstance(column, Slices):
        return column.lengths.astype(np.int32)
    if isinstance(column, Dense):
        lengths = np.full(len(column), column.values.shape[1], np.int32)
        if column.nulls is not None:
            lengths[column.nulls] = 0
        return lengths
    return np.array([0 if row is None else len(row) for row in column.values], np.int32)


def num_valid_targets(column: Column, ignore_index: int) -> npt.NDArray[np.int32]:
    """Returns how many entries of each row are targets: int32[n].

    Args:
        column: Lists of labels, or one label a row.
        ignore_index: The label that is not a target; nulls are none either.

    Example:
        >>> num_valid_targets(Dense(np.array([[1, -100], [-100, -100], [3, 4]])), -100).tolist()
        [1, 0, 2]
    """
    if isinstance(column, Slices):
        before = np.zeros(len(column.values) + 1, np.int64)
        np.cumsum(column.values != ignore_index, out=before[1:])
        in_rows = before[column.starts + column.lengths] - before[column.starts]
        return np.asarray(in_rows, np.int32)
    if isinstance(column, Dense):
        is_target = np.asarray(column.values != ignore_index).reshape(len(column), -1)
        counts: npt.NDArray[np.int32] = is_target.sum(axis=1, dtype=np.int32)
        if column.nulls is not None:
            counts[column.nulls] = 0
        return counts
    rows = (row if isinstance(row, list) else [row] for row in column.values)
    return np.array([sum(x is not None and x != ignore_index for x in row) for row in rows], np.int32)
