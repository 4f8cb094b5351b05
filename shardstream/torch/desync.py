"""Whether all ranks are about to do the same, told by sums alone. Pure arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

NUM_SLOTS = 9
_NUM_LIMBS, _LIMB_BITS = 4, 16  # squares of 16 bits, summed over up to 2^31 ranks, are exact in int64


def fingerprint(text: str) -> str:
    """Returns 64 bits of a text, in hexadecimal: the same in every process.

    Example:
        >>> fingerprint("window 3")
        '29c3e62b31179c16'
    """
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"rounds").hexdigest()


def equality_slots(text: str) -> list[int]:
    """Returns what a rank adds to a sum over ranks, so that ``all_equal`` tells whether they all have this text.

    A one that counts the ranks, then four limbs h of the text's fingerprint, each with its square.

    Returns:
        ``NUM_SLOTS`` numbers below 2^32.
    """
    number = int(fingerprint(text), 16)
    limbs = [number >> _LIMB_BITS * index & (1 << _LIMB_BITS) - 1 for index in range(_NUM_LIMBS)]
    return [1, *(slot for limb in limbs for slot in (limb, limb * limb))]


def all_equal(sums: Sequence[int]) -> bool:
    """Tells from the sums of ``equality_slots`` over W ranks whether all of them had the same fingerprint.

    By Cauchy and Schwarz W Σh² >= (Σh)², with equality exactly where all h are equal. In whole numbers nothing is lost.

    Example:
        >>> def sums_of(*texts):
        ...     return [sum(slots) for slots in zip(*map(equality_slots, texts))]
        >>> all_equal(sums_of("a", "a", "a")), all_equal(sums_of("a", "a", "b"))
        (True, False)
    """
    num_ranks, *limbs = map(int, sums)
    return all(num_ranks * squares == h * h for h, squares in zip(limbs[::2], limbs[1::2], strict=True))
