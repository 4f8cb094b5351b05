"""Keyed permutations: the arithmetic that the order stands on. Numpy only, no library's random generator.

Version 1 of the order; never changed without a new ``ORDER_VERSION``.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1

_MASK = (1 << 64) - 1
_FEISTEL_ROUNDS = 8
_SMALL = 65536  # below this a full permutation is sorted, from here on it is walked in O(1) memory

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]


def mix64(x: UInt64Array) -> UInt64Array:
    """Mixes 64-bit words bijectively (the finaliser of SplitMix64).

    Args:
        x: uint64 array of at least one dimension.

    Returns:
        uint64 array of the same shape.

    Example:
        >>> hex(int(mix64(np.array([1], np.uint64))[0]))
        '0x5692161d100b05e5'
    """
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def key64(seed: int, epoch: int, purpose: str, *ids: int) -> int:
    """Derives the 64-bit key of one purpose from the seed and the epoch; never from their sum.

    Args:
        seed: The job's seed; any integer, taken modulo 2^64.
        epoch: The epoch.
        purpose: What the key is for; at most 16 bytes.
        *ids: What it is for in particular (a block, a run).

    Returns:
        An integer in [0, 2^64).

    Raises:
        TypeError: If the seed or the epoch is not an integer.

    Example:
        >>> hex(key64(42, 0, "blocks"))
        '0xfb7a2ffcb3ec0919'
    """
    numbers = [operator.index(number) & _MASK for number in (seed, epoch, *ids)]
    data = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=purpose.encode()).digest(), "little")


def keyed_permutation(n: int, key: int) -> Int64Array:
    """Permutes 0..n-1: the indices sorted by ``mix64(mix64(i + 1) ^ key)``, which are distinct.

    Args:
        n: How many.
        key: 64-bit key.

    Returns:
        int64[n].

    Example:
        >>> keyed_permutation(10, key64(42, 0, "blocks")).tolist()
        [0, 3, 5, 7, 9, 4, 2, 6, 8, 1]
    """
    words = mix64(np.arange(1, n + 1, dtype=np.uint64))
    words ^= np.uint64(key)
    return np.argsort(mix64(words)).astype(np.int64, copy=False)


def full_positions(positions: npt.NDArray[np.integer[Any]], n: int, seed: int, epoch: int) -> Int64Array:
    """Maps positions to sample ids by one bijection of 0..n-1, in O(1) memory (``shuffle="full"``).

    Below 65,536 it is ``keyed_permutation``; from there on eight Feistel rounds on an even number of bits, walked
    until they fall below n (cycle walking: a bijection of the larger range, restricted to the smaller one).

    Args:
        positions: Integers in [0, n).
        n: Number of samples.
        seed: The job's seed.
        epoch: The epoch.

    Returns:
        int64 array of the shape of ``positions``.

    Example:
        >>> full_positions(np.arange(3), 100003, 7, 1).tolist()
        [49096, 30303, 77011]
    """
    if n < _SMALL:
        return keyed_permutation(n, key64(seed, epoch, "full"))[np.asarray(positions, np.int64)]
    return _walk(positions, n, _feistel_keys(seed, epoch), _feistel)


def full_places(sample_ids: npt.NDArray[np.integer[Any]], n: int, seed: int, epoch: int) -> Int64Array:
    """Maps sample ids back to positions: the inverse of ``full_positions``.

    Args:
        sample_ids: Integers in [0, n).
        n: Number of samples.
        seed: The job's seed.
        epoch: The epoch.

    Returns:
        int64 array of the shape of ``sample_ids``.

    Example:
        >>> full_places(np.array([49096, 30303, 77011]), 100003, 7, 1).tolist()
        [0, 1, 2]
    """
    if n < _SMALL:
        places = np.empty(n, np.int64)
        places[keyed_permutation(n, key64(seed, epoch, "full"))] = np.arange(n)
        return places[np.asarray(sample_ids, np.int64)]
    return _walk(sample_ids, n, _feistel_keys(seed, epoch)[::-1], _feistel_back)


def _feistel_keys(seed: int, epoch: int) -> list[np.uint64]:
    return [np.uint64(key64(seed, epoch, "full", i)) for i in range(_FEISTEL_ROUNDS)]


def _walk(
    numbers: npt.NDArray[np.integer[Any]],
    n: int,
    keys: list[np.uint64],
    step: Callable[[UInt64Array, np.uint64, list[np.uint64]], UInt64Array],
) -> Int64Array:
    """Walks each number along its cycle until it is below n."""
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    given = np.asarray(numbers)
    x = step(given.astype(np.uint64).reshape(-1), half, keys)
    while (outside := x >= np.uint64(n)).any():
        x[outside] = step(x[outside], half, keys)
    return x.astype(np.int64).reshape(given.shape)


def _feistel(x: UInt64Array, half: np.uint64, keys: list[np.uint64]) -> UInt64Array:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << half) | right


def _feistel_back(x: UInt64Array, half: np.uint64, keys: list[np.uint64]) -> UInt64Array:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right ^ (mix64(left ^ key) & mask), left
    return (left << half) | right
