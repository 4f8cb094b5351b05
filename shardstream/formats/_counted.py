"""Counting tokens and targets of shards whose columns have Arrow types, run by run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardstream.columns import Column
from shardstream.errors import ManifestError
from shardstream.formats import IndexOptions
from shardstream.formats._arrow import is_number, is_number_list
from shardstream.formats._counts import RunLengths, num_valid_targets, run_lengths, token_counts


def counted_columns(url: str, schema: pa.Schema, options: IndexOptions) -> list[str]:
    """Returns the columns that counts need, each once.

    Args:
        url: The shard, for messages.
        schema: Its columns.
        options: What is to be counted.

    Raises:
        ManifestError: If one is missing or holds no numbers, or a type of raw tokens is given.
    """
    if options.tokens_dtype is not None:
        hint = "leave it out: lists of numbers say it themselves"
        raise ManifestError("tokens_dtype is for raw bytes in tars", url=url, found=options.tokens_dtype, hint=hint)
    only_lists = {} if options.tokens_column is None else {options.tokens_column: True}
    wanted = {**dict.fromkeys(options.targets.values(), False), **only_lists}
    for name, must_be_list in wanted.items():
        if name not in schema.names:
            raise ManifestError(f"the shard has no column {name!r}", url=url, found=", ".join(schema.names))
        kind = schema.field(name).type
        if not (pa.types.is_null(kind) or is_number_list(kind) or (is_number(kind) and not must_be_list)):
            expected = "lists of numbers" if must_be_list else "numbers or lists of numbers"
            raise ManifestError(f"column {name!r} cannot be counted", url=url, expected=expected, found=kind)
    return list(wanted)


def counts_of(runs: Iterable[Mapping[str, Column]], options: IndexOptions) -> dict[str, npt.NDArray[Any]]:
    """Returns the lists of counts that a manifest keeps; nothing if none is asked for.

    Args:
        runs: Of every run of a shard, in order, the columns that ``counted_columns`` named.
        options: What is to be counted.
    """
    documents: list[RunLengths] = []
    valid: dict[str, list[npt.NDArray[np.int32]]] = {head: [] for head in options.targets}
    for columns in runs:
        if options.tokens_column is not None:
            documents.append(run_lengths(columns[options.tokens_column]))
        for head, name in options.targets.items():
            valid[head].append(num_valid_targets(columns[name], options.ignore_index))
    empty = [np.zeros(0, np.int32)]
    counts: dict[str, npt.NDArray[Any]] = {
        f"targets.{head}": np.concatenate(parts or empty) for head, parts in valid.items()
    }
    return counts if options.tokens_column is None else counts | token_counts(documents, options.pack)
