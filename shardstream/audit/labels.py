"""Labels of all samples, as class codes: given as an array, or one column read from the shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.columns import Column, Dense, Objects, Slices
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.permutation import Int64Array


@dataclass(frozen=True, eq=False)
class Labels:
    """The class of each sample.

    Attributes:
        codes: int64[num_samples], indices of ``class_sizes``.
        class_sizes: int64[num_classes], samples of each class.
    """

    codes: Int64Array
    class_sizes: Int64Array

    @classmethod
    def from_array(cls, labels: npt.ArrayLike, num_samples: int) -> Labels:
        """Makes codes of any labels that can be sorted.

        Args:
            labels: One label a sample, in the order of sample ids.
            num_samples: How many there must be.

        Raises:
            PlanError: If there are more or fewer labels than samples.

        Example:
            >>> Labels.from_array([7, 3, 7], 3).class_sizes.tolist()
            [1, 2]
        """
        given = np.asarray(labels)
        if given.shape != (num_samples,):
            raise PlanError("there must be one label a sample", expected=(num_samples,), found=given.shape)
        _, codes, sizes = np.unique(given, return_inverse=True, return_counts=True)
        return cls(codes.astype(np.int64).reshape(-1), sizes.astype(np.int64))


def read_labels(manifest: Manifest, column: str, storage_options: Mapping[str, Any] | None = None) -> Labels:
    """Reads one column of all shards, whose values are the classes.

    Args:
        manifest: The data set.
        column: Name of the column, or suffix of tar members.
        storage_options: Given to fsspec.

    Returns:
        The labels; rows without a value are a class of their own.

    Raises:
        PlanError: If the column's values are no labels (lists).
        ReadError: If shards cannot be read.
    """
    from shardstream.formats import Shard, format_of

    code_of: dict[object, int] = {}
    codes = [np.empty(0, np.int64)]
    for index in range(manifest.num_shards):
        shard = Shard(manifest, index, storage_options or {})
        for block in range(*manifest.shard_first_block[index : index + 2].tolist()):
            for rows in format_of("." + manifest.formats[index]).read_runs(shard, block, [column]):
                if column not in rows.columns:
                    raise PlanError("no such column", url=shard.url, expected=column, found=sorted(rows.columns))
                codes.append(_codes(_values(rows.columns[column], column), code_of))
    return Labels.from_array(np.concatenate(codes), manifest.num_samples)


def _codes(values: Iterable[object], code_of: dict[object, int]) -> Int64Array:
    return np.array([code_of.setdefault(value, len(code_of)) for value in values], np.int64)


def _values(column: Column, name: str) -> Iterable[object]:
    """Yields one hashable value a row, None where there is none."""
    if isinstance(column, Objects):
        return column.values
    if (isinstance(column, Slices) and column.kind == "list") or (isinstance(column, Dense) and column.values.ndim > 1):
        raise PlanError(
            f"column {name!r} holds lists, which are no labels", hint="choose a column with one value a row"
        )
    nulls = column.nulls if column.nulls is not None else np.zeros(len(column), np.bool_)
    if isinstance(column, Dense):
        values = column.values.tolist()
    else:
        ends = (column.starts + column.lengths).tolist()
        values = [column.values[a:b].tobytes() for a, b in zip(column.starts.tolist(), ends, strict=True)]
    return [None if null else value for value, null in zip(values, nulls.tolist(), strict=True)]
