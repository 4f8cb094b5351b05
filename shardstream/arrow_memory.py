"""Arrow arrays as numpy arrays: views of their memory.

Not by pyarrow's ``to_numpy``, which imports pandas where that is installed: 0.3 s, of the 50 ms that a first batch may
take. Nor by ``pyarrow.compute``, whose import takes 40 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_FLOATS = {"halffloat": np.float16, "float": np.float32, "double": np.float64}


def number_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """Returns the numpy dtype of an Arrow type of integers, floats or bool.

    Example:
        >>> number_dtype(pa.uint16()), number_dtype(pa.float32())
        (dtype('uint16'), dtype('float32'))
    """
    return np.dtype(_FLOATS.get(str(kind), str(kind)))


def numbers(array: pa.Array) -> npt.NDArray[Any]:
    """Returns the values of an array of numbers, whatever its null mask says; a view, but for bool.

    Args:
        array: Of integers, floats or bool.

    Returns:
        n values; anything where the row is null.

    Example:
        >>> numbers(pa.array([1, 2, 3], pa.int16()).slice(1)), numbers(pa.array([True, False]))
        (array([2, 3], dtype=int16), array([ True, False]))
    """
    _, data = array.buffers()
    if pa.types.is_boolean(array.type):
        return _bits(data, array.offset, len(array))
    dtype = number_dtype(array.type)
    if data is None or len(array) == 0:
        return np.empty(0, dtype)
    values: npt.NDArray[Any] = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    return values


def nulls(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Returns bool[n], True where a row is null; None if no row is.

    Example:
        >>> nulls(pa.array([1, None])), nulls(pa.array([1, 2]))
        (array([False,  True]), None)
    """
    if not array.null_count:
        return None
    if pa.types.is_null(array.type):
        return np.ones(len(array), np.bool_)
    return ~_bits(array.buffers()[0], array.offset, len(array))


def _bits(data: pa.Buffer | None, offset: int, count: int) -> npt.NDArray[np.bool_]:
    """Arrow packs eight rows into a byte, the first one into its lowest bit."""
    if data is None or count == 0:
        return np.zeros(0, np.bool_)
    packed = np.frombuffer(data, np.uint8)[offset // 8 : (offset + count + 7) // 8]
    return np.unpackbits(packed, count=offset % 8 + count, bitorder="little")[offset % 8 :].view(np.bool_)
