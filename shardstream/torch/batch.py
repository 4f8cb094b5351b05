"""What a training loop gets: ``Batch``, and ``Ragged`` for columns whose rows differ in length.

Neither is a ``Mapping`` or a ``Sequence``. ``torch.utils.data`` rebuilds those from their parts (``default_convert`` in
a plain ``DataLoader(batch_size=None)``, its pin-memory thread in some versions), and the cursor is lost with the rest.

**When is a batch consumed?** A plain DataLoader prefetches, so a batch counts as consumed when the main process first
touches its data. Batches that come from a worker are made by unpickling, which the dataset does not see. So each batch
carries the number of its dataset (``origin_token``), and when it comes out of a queue or pipe (``ForkingPickler``; not
when it is copied or read from a file) it is shown to the dataset that waits under that number in *this* process
(``ARRIVALS``), which then sets ``batch._on_touch``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor

from shardstream.quarantine import MaskedSample
from shardstream.torch.parcel import Parcel, pack, unpack
from shardstream.torch.ragged import Device, each_tensor, pinned

Touch: TypeAlias = Callable[[], None]


class Place(NamedTuple):
    """Where a batch stands in the epoch.

    Attributes:
        position: Global position at which the batch's window starts: what all ranks have consumed before it.
        cursor: What to save when the last batch trained on is this one.
        window_index: Counts the windows of the pass.
        micro_index: Counts this rank's micro-batches of the window.
        is_last_in_window: True for the window's last micro-batch, after which the optimizer steps.
        is_last_in_pass: True for the rank's last micro-batch of the pass.
        pass_start: Epoch, position, start of the window grid and lanes where the pass began: where a broken one begins
            again. And which pass it is (see ``PassId``).
    """

    position: int
    cursor: Any
    window_index: int
    micro_index: int
    is_last_in_window: bool
    is_last_in_pass: bool = False
    pass_start: tuple[int, ...] = (0, 0, 0, 0, 0, 0)


class Receiver(Protocol):
    """Who wants to know of batches that reach this process."""

    def arrived(self, batch: Batch) -> None:
        """Is called with each batch of this origin that comes from another process; must not touch the batch's data."""


ARRIVALS: WeakValueDictionary[int, Receiver] = WeakValueDictionary()
"""Who receives the batches of an origin in this process. Weak: a dataset that is gone wants no batches."""


def register_receiver(receiver: Receiver) -> int:
    """Enters ``receiver`` in ``ARRIVALS`` of this process.

    Returns:
        The number to be given to its batches as ``origin_token``. It is random, so that a batch kept in a file is
        foreign to every dataset of a later process; it has no influence on data or order.
    """
    token = secrets.randbits(63)
    ARRIVALS[token] = receiver
    return token


class Batch:
    """One micro-batch of one rank: columns, and what is needed to train on it exactly once.

    Works like a dict of columns (``batch["tokens"]``, ``in``, ``keys()``, ``items()``, ``**batch``) without being one;
    ``model_inputs()`` is the plain dict. Columns are tensors ``[b, ...]``, ``Ragged`` or lists of b values.

    Args:
        columns: Column name → tensor, ``Ragged`` or list.
        sample_ids: ``int64[b]``, ordinals in manifest order.
        is_padding: ``bool[b]``, True for rows that only fill the batch and must not be counted.
        valid_tokens: Head name → ``int64[b]``, targets of each sample that count; 0 for padding rows.
        place: Position, cursor and window of the batch.
        origin_token: Number of the dataset it came from (see ``register_receiver``), or None.
        source_index: ``int64[b]``, of a mixture: which of ``source_names`` each sample is of; else None.
        source_names: Names of a mixture's sources, sorted.
        masked: Samples of the batch that cannot be decoded (``on_error="mask"``). Their rows are padding and keep their
            sample ids; of packed data documents that begin in its sequences, whose tokens are no targets.

    Example:
        >>> import torch
        >>> place = Place(position=8, cursor=None, window_index=2, micro_index=0, is_last_in_window=True)
        >>> ids, padding = torch.tensor([5, 3]), torch.tensor([False, True])
        >>> batch = Batch({"x": torch.ones(2)}, sample_ids=ids, is_padding=padding, valid_tokens={}, place=place)
        >>> len(batch), batch.position, batch.model_inputs()
        (2, 8, {'x': tensor([1., 1.])})
    """

    __slots__ = (
        *("_columns", "_on_touch", "_sample_ids", "is_padding", "origin_token", "place", "valid_tokens"),
        *("source_index", "source_names", "masked"),
    )

    def __init__(
        self,
        columns: Mapping[str, Any],
        *,
        sample_ids: Tensor,
        is_padding: Tensor,
        valid_tokens: Mapping[str, Tensor],
        place: Place,
        origin_token: int | None = None,
        source_index: Tensor | None = None,
        source_names: tuple[str, ...] = (),
        masked: Sequence[MaskedSample] = (),
    ) -> None:
        self._columns = dict(columns)
        self._sample_ids = sample_ids
        self.is_padding = is_padding
        self.valid_tokens = dict(valid_tokens)
        self.place = place
        self.origin_token = origin_token
        self.source_index, self.source_names = source_index, source_names
        self.masked = tuple(masked)
        self._on_touch: Touch | None = None

    def __len__(self) -> int:
        return self._sample_ids.numel()

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def __getitem__(self, column: str) -> Any:
        """Returns a column: tensor ``[b, ...]``, ``Ragged`` or list of b values.

        Raises:
            KeyError: There is no such column; the message lists those there are.
        """
        self._touch()
        if column not in self._columns:
            raise KeyError(f"no column {column!r} in this batch; there are {list(self._columns)}")
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        self._touch()
        return iter(self._columns)

    def __repr__(self) -> str:
        place = f"window {self.window_index}, micro-batch {self.micro_index}, position {self.position}"
        return f"Batch({len(self)} samples of {list(self._columns)}; {place})"

    def keys(self) -> list[str]:
        """Returns the names of the columns."""
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        """Returns names and columns."""
        return list(self.model_inputs().items())

    def model_inputs(self) -> dict[str, Any]:
        """Returns the columns as a plain dict, a new one at each call."""
        self._touch()
        return dict(self._columns)

    @property
    def sample_ids(self) -> Tensor:
        """``int64[b]``: ordinals of the samples in manifest order; always on the CPU."""
        self._touch()
        return self._sample_ids

    @property
    def cursor(self) -> Any:
        """The cursor to save when this is the last batch trained on."""
        self._touch()
        return self.place.cursor

    @property
    def position(self) -> int:
        """Global position at which the batch's window starts."""
        return self.place.position

    @property
    def window_index(self) -> int:
        """Index of the batch's window in the pass (the epoch, unless it began at a cursor)."""
        return self.place.window_index

    @property
    def micro_index(self) -> int:
        """Index of the micro-batch in its window."""
        return self.place.micro_index

    @property
    def is_last_in_window(self) -> bool:
        """True for the window's last micro-batch."""
        return self.place.is_last_in_window

    def to(self, device: Device, *, non_blocking: bool = False) -> Batch:
        """Returns the batch with columns and ``is_padding`` on ``device``.

        ``sample_ids`` and ``valid_tokens`` stay on the CPU, where they are summed and logged with no wait for a device.
        """
        self._touch()
        return self._mapped(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Returns the batch with columns and ``is_padding`` in page-locked memory; same values without accelerator.

        A DataLoader's own thread calls it, so it does not count as a touch.
        """
        return self._mapped(pinned)

    def replace(self, columns: Mapping[str, Any]) -> Batch:
        """Returns the batch with other columns and everything else kept."""
        return self._rebuilt(columns, self.is_padding)

    def _mapped(self, function: Callable[[Any], Any]) -> Batch:
        return self._rebuilt(each_tensor(self._columns, function), function(self.is_padding))

    def _rebuilt(self, columns: Mapping[str, Any], is_padding: Tensor) -> Batch:
        batch = Batch(
            columns,
            sample_ids=self._sample_ids,
            is_padding=is_padding,
            valid_tokens=self.valid_tokens,
            place=self.place,
            origin_token=self.origin_token,
            source_index=self.source_index,
            source_names=self.source_names,
            masked=self.masked,
        )
        # Handed on, not copied: of a batch and its pinned or replaced successor one touch is enough.
        batch._on_touch, self._on_touch = self._on_touch, None
        return batch

    def _touch(self) -> None:
        if self._on_touch is not None:
            touch, self._on_touch = self._on_touch, None
            touch()

    def __getstate__(self) -> dict[str, Any]:
        self._touch()  # whoever copies, stores or sends a batch has read it
        return {name: getattr(self, name) for name in self.__slots__ if name != "_on_touch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._on_touch = None
        for name, value in state.items():
            setattr(self, name, value)


def restored(state: dict[str, Any]) -> Batch:
    """Returns the batch whose ``__getstate__`` gave the state."""
    batch = Batch.__new__(Batch)
    batch.__setstate__(state)
    return batch


def _receive(parcel: Parcel) -> Batch:
    batch = restored(unpack(parcel))
    receiver = None if batch.origin_token is None else ARRIVALS.get(batch.origin_token)
    if receiver is not None:
        receiver.arrived(batch)
    return batch


# Registered for the pickler of queues and pipes alone: a copy of an old batch, or one read from a file, must not count
# as consumed now.
ForkingPickler.register(Batch, lambda batch: (_receive, (pack(batch.__getstate__()),)))
