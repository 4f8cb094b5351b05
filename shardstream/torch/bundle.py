"""A bundle: the micro-batches of one gather, made together and cut apart late.

What is done once a gather instead of once a batch (tensors made, targets counted, memory sent to another process) is
what makes batches of 32 cheap. The batches of a bundle are views of its memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

from shardstream.columns import Scattered
from shardstream.read_stats import ReadCounts
from shardstream.torch.batch import Batch, Place, restored
from shardstream.torch.parcel import Parcel, pack, unpack
from shardstream.torch.ragged import Ragged, each_tensor, pinned


@dataclass(frozen=True, eq=False)
class Bundle:
    """Micro-batches that were made together.

    Attributes:
        columns: Column name → tensor, ``Ragged`` or list of all rows; or ``Scattered``, of which each batch makes its
            own list when it is cut off.
        sample_ids: int64[n].
        is_padding: bool[n].
        valid_tokens: Head name → int64[n].
        sizes: Rows of each micro-batch.
        places: Where each stands.
        origin_token: See ``Batch``.
        source_index: See ``Batch``: int64[n], or None.
        source_names: See ``Batch``.
        read: What its worker has read since its last message, if it is one.
    """

    columns: Mapping[str, Any]
    sample_ids: Tensor
    is_padding: Tensor
    valid_tokens: Mapping[str, Tensor]
    sizes: Sequence[int]
    places: Sequence[Place]
    origin_token: int | None
    source_index: Tensor | None = None
    source_names: tuple[str, ...] = ()
    read: ReadCounts | None = None

    def telling(self, read: ReadCounts) -> Bundle:
        """Returns it with what its worker has read."""
        return replace(self, read=read)

    def batches(self) -> Iterator[Batch]:
        """Cuts it into its micro-batches."""
        sizes = list(self.sizes)
        columns = {name: _split(column, sizes) for name, column in self.columns.items()}
        valid = {head: torch.split_with_sizes(counts, sizes) for head, counts in self.valid_tokens.items()}
        ids, padding = torch.split_with_sizes(self.sample_ids, sizes), torch.split_with_sizes(self.is_padding, sizes)
        source = self.source_index
        sources = [None] * len(sizes) if source is None else torch.split_with_sizes(source, sizes)
        for number, place in enumerate(self.places):
            yield Batch(
                {name: _made(column[number]) for name, column in columns.items()},
                sample_ids=ids[number],
                is_padding=padding[number],
                valid_tokens={head: counts[number] for head, counts in valid.items()},
                place=place,
                origin_token=self.origin_token,
                source_index=sources[number],
                source_names=self.source_names,
            )

    def pin_memory(self) -> Bundle:
        """Returns it in page-locked memory; a DataLoader's own thread calls it."""
        return replace(self, columns=each_tensor(dict(self.columns), pinned), is_padding=pinned(self.is_padding))

    def __getstate__(self) -> Parcel:
        return pack({**self.__dict__, "columns": {name: _made(column) for name, column in self.columns.items()}})

    def __setstate__(self, parcel: Parcel) -> None:
        self.__dict__.update(unpack(parcel))


class SingleBatches:
    """Micro-batches that code of the user's made one by one, to be sent together.

    Args:
        batches: Yields them.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches: list[Batch] = []
        self._error: ExceptionWrapper | None = None
        self.read: ReadCounts | None = None
        try:
            for batch in batches:
                self._batches.append(batch)
        except Exception:  # noqa: BLE001 - raised where it belongs: behind the batches before it
            self._error = ExceptionWrapper(where="in a DataLoader worker process")  # type: ignore[no-untyped-call]

    def telling(self, read: ReadCounts) -> SingleBatches:
        """Lets it say what its worker has read; returns it."""
        self.read = read
        return self

    def batches(self) -> Iterator[Batch]:
        """Yields the batches, and raises what came up behind them."""
        yield from self._batches
        if self._error is not None:
            self._error.reraise()  # type: ignore[no-untyped-call]

    def pin_memory(self) -> SingleBatches:
        """Returns it in page-locked memory; a DataLoader's own thread calls it."""
        self._batches = [batch.pin_memory() for batch in self._batches]
        return self

    def __getstate__(self) -> tuple[Parcel, ExceptionWrapper | None, ReadCounts | None]:
        return pack([batch.__getstate__() for batch in self._batches]), self._error, self.read

    def __setstate__(self, state: tuple[Parcel, ExceptionWrapper | None, ReadCounts | None]) -> None:
        parcel, self._error, self.read = state
        self._batches = [restored(batch_state) for batch_state in unpack(parcel)]


Bundles: TypeAlias = Iterator[Bundle | SingleBatches]


def in_turn(bundles: Bundles, num_workers: int) -> Generator[Batch, None, None]:
    """Yields a rank's micro-batches in their order: the i-th is the next one of worker ``i % num_workers``.

    Args:
        bundles: From the workers in turn. Those of one round hold equally many micro-batches, but for the last round.
        num_workers: Number of workers.
    """
    for first in bundles:
        round_: list[Iterator[Batch]] = []
        for bundle in chain([first], islice(bundles, num_workers - 1)):
            round_.append(bundle.batches())
            yield next(round_[-1])
        for batches in cycle(round_):
            batch = next(batches, None)
            if batch is None:
                break
            yield batch


def _split(column: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Cuts a column into pieces of the given numbers of rows; tensors into views."""
    if isinstance(column, Tensor):
        return torch.split_with_sizes(column, list(sizes))
    if isinstance(column, Ragged):
        return _split_ragged(column, np.array(sizes, np.int64))
    ends = np.cumsum([0, *sizes]).tolist()
    return [column[begin:end] for begin, end in pairwise(ends)]


def _made(column: Any) -> Any:
    # Not isinstance, which of an abstract class costs as much as all else that is done for a column of a batch.
    return list(column) if type(column) is Scattered else column


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
