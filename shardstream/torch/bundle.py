"""A bundle: the micro-batches of one gather, made together and cut apart late.

What is done once a gather instead of once a batch (tensors made, targets counted, memory sent to another process) is
what makes batches of 32 cheap. The batches of a bundle are views of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardstream.cursor import Cursor
from shardstream.torch.batch import Batch, Place, Ragged
from shardstream.torch.parcel import Parcel, pack, unpack


class Mark(NamedTuple):
    """One micro-batch of a bundle: its size and its place, in plain numbers."""

    num_rows: int
    position: int
    window: int
    micro: int
    is_last_in_window: bool
    is_last_in_pass: bool
    cursor: tuple[int, int, int]
    """Epoch, position and grid start of the cursor that is right once it was trained on."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Micro-batches that were made together.

    Attributes:
        columns: Column name → tensor, ``Ragged`` or list of all rows.
        sample_ids: int64[n].
        is_padding: bool[n].
        valid_tokens: Head name → int64[n].
        marks: The micro-batches, in order.
        identity: A cursor of the plan.
        pass_start: See ``Place``.
        origin_token: See ``Batch``.
    """

    columns: Mapping[str, Any]
    sample_ids: Tensor
    is_padding: Tensor
    valid_tokens: Mapping[str, Tensor]
    marks: Sequence[Mark]
    identity: Cursor
    pass_start: tuple[int, ...]
    origin_token: int | None

    def batches(self) -> Iterator[Batch]:
        """Cuts it into its micro-batches."""
        sizes = [mark.num_rows for mark in self.marks]
        columns = {name: _split(column, sizes) for name, column in self.columns.items()}
        valid = {head: torch.split_with_sizes(counts, sizes) for head, counts in self.valid_tokens.items()}
        ids, padding = torch.split_with_sizes(self.sample_ids, sizes), torch.split_with_sizes(self.is_padding, sizes)
        for number, mark in enumerate(self.marks):
            yield Batch(
                {name: column[number] for name, column in columns.items()},
                sample_ids=ids[number],
                is_padding=padding[number],
                valid_tokens={head: counts[number] for head, counts in valid.items()},
                place=place_of(mark, self.identity, self.pass_start),
                origin_token=self.origin_token,
            )

    def __getstate__(self) -> Parcel:
        return pack(self.__dict__)

    def __setstate__(self, parcel: Parcel) -> None:
        self.__dict__.update(unpack(parcel))


def place_of(mark: Mark, identity: Cursor, pass_start: tuple[int, ...]) -> Place:
    """Returns the place that a mark stands for."""
    return Place(
        position=mark.position,
        cursor=identity.at(*mark.cursor),
        window_index=mark.window,
        micro_index=mark.micro,
        is_last_in_window=mark.is_last_in_window,
        is_last_in_pass=mark.is_last_in_pass,
        pass_start=pass_start,
    )


def _split(column: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Cuts a column into pieces of the given numbers of rows; tensors into views."""
    if isinstance(column, Tensor):
        return torch.split_with_sizes(column, list(sizes))
    if isinstance(column, Ragged):
        return _split_ragged(column, np.array(sizes, np.int64))
    ends = np.cumsum([0, *sizes]).tolist()
    return [column[begin:end] for begin, end in pairwise(ends)]


def _split_ragged(column: Ragged, sizes: npt.NDArray[np.int64]) -> list[Ragged]:
    # In numpy: torch would wake all its threads for these few numbers, which on busy cores takes milliseconds.
    all_offsets = column.offsets.numpy()
    first_row = np.cumsum(sizes) - sizes
    # Every piece needs the offset behind its last row as well, so the pieces of the offsets overlap by one.
    piece = np.repeat(np.arange(len(sizes)), sizes + 1)
    starts = all_offsets[first_row]
    offsets = torch.from_numpy(all_offsets[np.arange(len(piece)) - piece] - starts[piece])
    lengths = all_offsets[first_row + sizes] - starts
    nulls: Sequence[Tensor | None] = [None] * len(sizes)
    if column.is_null is not None:  # whether a batch has nulls must not depend on those that it was made with
        parts = torch.split_with_sizes(column.is_null, sizes.tolist())
        nulls = [part if bool(part.any()) else None for part in parts]
    return [
        Ragged(*parts)
        for parts in zip(
            torch.split_with_sizes(column.values, lengths.tolist()),
            torch.split_with_sizes(offsets, (sizes + 1).tolist()),
            nulls,
            strict=True,
        )
    ]
