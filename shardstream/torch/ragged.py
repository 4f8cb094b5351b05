"""``Ragged``: columns whose rows differ in length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Device: TypeAlias = torch.device | str | int

# torch.accelerator came with torch 2.6.
_HAS_ACCELERATOR = torch.accelerator.is_available if hasattr(torch, "accelerator") else torch.cuda.is_available


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
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or self.offsets.numel() == 0:
            raise ValueError(f"offsets must be int64[b + 1], found {self.offsets.dtype}{list(self.offsets.shape)}")

    def __len__(self) -> int:
        return self.offsets.numel() - 1

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
        if not self.offsets.is_cpu:
            return self.offsets[1:] - self.offsets[:-1]
        # In numpy: every operation of torch lets threads that read take the interpreter's lock, and waits for it.
        offsets = self.offsets.numpy()
        return torch.from_numpy(offsets[1:] - offsets[:-1])

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
        return Ragged(pinned(self.values), pinned(self.offsets), None if self.is_null is None else pinned(self.is_null))


def each_tensor(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies ``function`` to every tensor and Ragged in plain dicts, lists and tuples; leaves the rest alone."""
    if isinstance(value, Tensor | Ragged):
        return function(value)
    if type(value) is dict:
        return {key: each_tensor(entry, function) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(each_tensor(entry, function) for entry in value)
    return value


def pinned(value: Any) -> Any:
    """Returns a tensor or ``Ragged`` in page-locked memory; itself where there is no accelerator.

    A tensor's own method raises there, and a batch must work the same.
    """
    return value.pin_memory() if _HAS_ACCELERATOR() else value
