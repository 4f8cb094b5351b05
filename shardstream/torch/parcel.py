"""What goes to another process: a value with the numbers of its tensors beside it, all in one piece.

torch sends each tensor as a shared-memory segment of its own, whose descriptor is fetched over a socket: 0.8 ms of
processor time on both sides together, and every page of it is a page fault. So a small parcel goes through the queue's
pipe with the rest of its message (77 KB: a quarter of that time). Of a large one each byte would be copied four times
there, so it is written into an anonymous file, which the receiver maps. Neither lies in ``/dev/shm``, which is small in
containers.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy

_ALIGNED = 16  # of the largest dtype, complex128
_MOST_IN_PIPE = 512 << 10
_ZEROS = bytes(_ALIGNED)


class Parcel(NamedTuple):
    """A value that was taken apart."""

    rest: bytes
    """The value, pickled without its numbers."""
    numbers: Sequence[memoryview]
    """Those of its tensors (and numpy arrays), in order."""


def pack(value: Any) -> Parcel:
    """Takes a value apart; nothing is copied before the parcel is sent, by a queue or pipe of ``multiprocessing``.

    Example:
        >>> parcel = pack({"x": torch.tensor([1, 2]), "name": ["a", "b"]})
        >>> unpack(parcel)
        {'x': tensor([1, 2]), 'name': ['a', 'b']}
    """
    rest, numbers = BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(rest, numbers.append).dump(value)
    return Parcel(rest.getvalue(), [piece.raw() for piece in numbers])


def unpack(parcel: Parcel) -> Any:
    """Returns the value again; its tensors are views of the parcel's numbers."""
    return pickle.loads(parcel.rest, buffers=parcel.numbers)  # noqa: S301 - from a process of ours


class _Pickler(ForkingPickler):
    """Pickles as queues do, but for tensors with numbers in plain memory."""

    def __init__(self, file: BytesIO, take: Callable[[pickle.PickleBuffer], object]) -> None:
        super().__init__(file, 5, True, take)  # noqa: FBT003 - its arguments have no names

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad:
            return NotImplemented
        return _tensor, (pickle.PickleBuffer(_in_numpy(value)), value.dtype, tuple(value.shape))


def _in_numpy(tensor: Tensor) -> Any:
    plain = tensor.resolve_conj().resolve_neg()
    if plain.dtype not in _OF_NUMPY:
        plain = plain.view(_OF_SIZE[plain.element_size()])
    return np.ascontiguousarray(plain.numpy())


_OF_NUMPY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensor(numbers: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if len(numbers) == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(numbers, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


# ------------------------------------------------------------------------------------------------------------- the way


def _shares_descriptors() -> bool:
    strategy: str = get_sharing_strategy()  # type: ignore[no-untyped-call]
    return strategy == "file_descriptor"


def _sent(parcel: Parcel) -> tuple[Any, ...]:
    sizes = [len(piece) for piece in parcel.numbers]
    num_bytes = sum(map(_padded, sizes))
    # Who asked torch for named segments wants no descriptors.
    if num_bytes > _MOST_IN_PIPE and hasattr(os, "memfd_create") and _shares_descriptors():
        try:
            with os.fdopen(os.memfd_create("shardstream"), "wb") as file:
                file.writelines(_pieces(parcel.numbers))
                file.flush()
                return _from_file, (parcel.rest, sizes, DupFd(file.fileno()))
        except OSError:  # too many are open, or files may not be that large
            pass
    return _from_pipe, (parcel.rest, sizes, b"".join(_pieces(parcel.numbers)))


def _from_pipe(rest: bytes, sizes: list[int], numbers: bytes) -> Parcel:
    return Parcel(rest, _cut(memoryview(bytearray(numbers)), sizes))  # a copy, because tensors can be written to


def _from_file(rest: bytes, sizes: list[int], descriptor: Any) -> Parcel:
    own = descriptor.detach()
    try:
        return Parcel(rest, _cut(memoryview(mmap.mmap(own, 0)), sizes))
    finally:
        os.close(own)


def _pieces(numbers: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
    for piece in numbers:
        yield piece
        yield _ZEROS[: _padded(len(piece)) - len(piece)]


def _cut(memory: memoryview, sizes: list[int]) -> list[memoryview]:
    pieces, begin = [], 0
    for size in sizes:
        pieces.append(memory[begin : begin + size])
        begin += _padded(size)
    return pieces


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


ForkingPickler.register(Parcel, _sent)
