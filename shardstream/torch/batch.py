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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Touch: TypeAlias = Callable[[], None]
Device: TypeAlias = torch.device | str | int


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lists of numbers of varying length: all values in one tensor, and where each row begins.

    Attributes:
        values: ``[sum of lengths]``, any dtype.
        offsets: ``int64[b + 1]``; row i is ``values[offsets[i] : offsets[i + 1]]``.
        is_null: ``bool[b]``, True where the row has no value (its length is 0), or None if all have one.

    Example:
        >>> ragged = Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2, 3]))
        >>> ragged.tolist()
        [[1, 2], [], [3]]
        >>> ragged.padded(value=-1)
        tensor([[ 1,  2],
                [-1, -1],
                [ 3, -1]])
    """

    values: Tensor
    offsets: Tensor
    is_null: Tensor | None = None

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or len(self.offsets) == 0:
            raise ValueError(f"offsets must be int64[b + 1], found {self.offsets.dtype}{list(self.offsets.shape)}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor | None:
        """Returns row ``index`` as a view of ``values``; None where the row is null."""
        row = range(len(self))[index]
        if self.is_null is not None and bool(self.is_null[row]):
            return None
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[Tensor | None]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.values.dtype})"

    @property
    def lengths(self) -> Tensor:
        """``int64[b]``: the number of values of each row; 0 for null rows."""
        return self.offsets[1:] - self.offsets[:-1]

    def padded(self, value: float = 0, length: int | None = None, side: str = "right") -> Tensor:
        """Returns the rows as one tensor.

        Args:
            value: Fills what the rows do not.
            length: Width of the result; default the longest row. Longer rows keep their first ``length`` values.
            side: Where the filling goes, "right" or "left".

        Returns:
            ``[b, length]`` of the dtype of ``values``.

        Example:
            >>> Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).padded(length=3, side="left")
            tensor([[0, 1, 2],
                    [0, 0, 3]])
        """
        width = self._width(length)
        if width == 0 or len(self.values) == 0:
            return torch.full((len(self), width), value, dtype=self.values.dtype, device=self.values.device)
        filled = self.filled_mask(width, side)
        column = torch.arange(width, device=self.offsets.device).expand(len(self), width)
        if side == "left":
            column = column - (width - self.lengths.clamp(max=width))[:, None]
        source = (self.offsets[:-1, None] + column).clamp(0, len(self.values) - 1)
        # torch.where and not masked assignment: the latter does not know unsigned dtypes.
        filling = torch.full((), value, dtype=self.values.dtype, device=self.values.device)
        return torch.where(filled, self.values[source], filling)

    def filled_mask(self, length: int | None = None, side: str = "right") -> Tensor:
        """Returns ``bool[b, length]``: True where ``padded`` with the same arguments holds a value of the row.

        Raises:
            ValueError: ``side`` is neither "right" nor "left".

        Example:
            >>> Ragged(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).filled_mask()
            tensor([[ True,  True],
                    [ True, False]])
        """
        if side not in ("right", "left"):
            raise ValueError(f"side must be 'right' or 'left', found {side!r}")
        width = self._width(length)
        column = torch.arange(width, device=self.offsets.device)
        return (column if side == "right" else width - 1 - column) < self.lengths[:, None]

    def _width(self, length: int | None) -> int:
        if length is not None:
            return length
        return int(self.lengths.max()) if len(self) else 0

    def nested(self) -> Tensor:
        """Returns a ``torch.nested`` tensor (jagged layout) over the same memory; null rows are empty there."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def tolist(self) -> list[list[Any] | None]:
        """Returns the rows as Python lists; None where the row is null."""
        return [None if row is None else row.tolist() for row in self]

    def to(
        self, device: Device | None = None, dtype: torch.dtype | None = None, *, non_blocking: bool = False
    ) -> Ragged:
        """Returns it on another device; ``dtype`` converts ``values`` only."""
        return Ragged(
            self.values.to(device=device, dtype=dtype, non_blocking=non_blocking),
            self.offsets.to(device=device, non_blocking=non_blocking),
            None if self.is_null is None else self.is_null.to(device=device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Ragged:
        """Returns it in page-locked memory; itself where there is no accelerator."""
        return Ragged(
            _pinned(self.values), _pinned(self.offsets), None if self.is_null is None else _pinned(self.is_null)
        )


@dataclass(frozen=True)
class Place:
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

    Example:
        >>> place = Place(position=8, cursor=None, window_index=2, micro_index=0, is_last_in_window=True)
        >>> ids, padding = torch.tensor([5, 3]), torch.tensor([False, True])
        >>> batch = Batch({"x": torch.ones(2)}, sample_ids=ids, is_padding=padding, valid_tokens={}, place=place)
        >>> len(batch), batch.position, batch.model_inputs()
        (2, 8, {'x': tensor([1., 1.])})
    """

    __slots__ = ("_columns", "_on_touch", "_sample_ids", "is_padding", "origin_token", "place", "valid_tokens")

    def __init__(
        self,
        columns: Mapping[str, Any],
        *,
        sample_ids: Tensor,
        is_padding: Tensor,
        valid_tokens: Mapping[str, Tensor],
        place: Place,
        origin_token: int | None = None,
    ) -> None:
        self._columns = dict(columns)
        self._sample_ids = sample_ids
        self.is_padding = is_padding
        self.valid_tokens = dict(valid_tokens)
        self.place = place
        self.origin_token = origin_token
        self._on_touch: Touch | None = None

    def __len__(self) -> int:
        return len(self._sample_ids)

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
        return self._mapped(_pinned)

    def replace(self, columns: Mapping[str, Any]) -> Batch:
        """Returns the batch with other columns and everything else kept."""
        return self._rebuilt(columns, self.is_padding)

    def _mapped(self, function: Callable[[Any], Any]) -> Batch:
        return self._rebuilt(_each(self._columns, function), function(self.is_padding))

    def _rebuilt(self, columns: Mapping[str, Any], is_padding: Tensor) -> Batch:
        batch = Batch(
            columns,
            sample_ids=self._sample_ids,
            is_padding=is_padding,
            valid_tokens=self.valid_tokens,
            place=self.place,
            origin_token=self.origin_token,
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


def _receive(state: dict[str, Any]) -> Batch:
    batch = Batch.__new__(Batch)
    batch.__setstate__(state)
    receiver = None if batch.origin_token is None else ARRIVALS.get(batch.origin_token)
    if receiver is not None:
        receiver.arrived(batch)
    return batch


# Registered for the pickler of queues and pipes alone: a copy of an old batch, or one read from a file, must not count
# as consumed now.
ForkingPickler.register(Batch, lambda batch: (_receive, (batch.__getstate__(),)))


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies ``function`` to every tensor and Ragged in plain dicts, lists and tuples; leaves the rest alone."""
    if isinstance(value, Tensor | Ragged):
        return function(value)
    if type(value) is dict:
        return {key: _each(entry, function) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(entry, function) for entry in value)
    return value


def _pinned(value: Any) -> Any:
    # A tensor's own method raises where there is no accelerator, and a batch must work the same there.
    return value.pin_memory() if torch.accelerator.is_available() else value
