"""Cost as the work grows: samples from 10^5 to 10^9, ranks from 1 to 1,024, beside the orders of others."""

from __future__ import annotations

from tools.bench.case import Case

NUM_SAMPLES = tuple(10**power for power in range(5, 10))
NUM_RANKS = (1, 32, 1024)
_MOST = {"distributed-sampler": 10**8, "mds": 10**8, "litdata": 10**8, "litdata-elastic": 10**7, "grain": 10**8}


def scale() -> list[Case]:
    """Returns our cases, by samples and ranks."""
    return [
        Case(scale_name(num_samples, ranks), "growth", world_size=ranks, options={"num_samples": num_samples})
        for num_samples in NUM_SAMPLES
        for ranks in NUM_RANKS
    ]


def orders() -> list[Case]:
    """Returns the cases of others; where 10^9 would not fit into memory, fewer samples."""
    return [
        Case(order_name(what, num_samples), f"order-{what}", world_size=8, options={"num_samples": num_samples})
        for what, most in _MOST.items()
        for num_samples in NUM_SAMPLES
        if num_samples <= most
    ]


def scale_name(num_samples: int, ranks: int) -> str:
    """Returns the name of a case of ``scale``.

    Example:
        >>> scale_name(100_000, 8)
        'scale 1e+05, 8 ranks'
    """
    return f"scale {num_samples:.0e}, {ranks} rank{'s' * (ranks > 1)}"


def order_name(what: str, num_samples: int) -> str:
    """Returns the name of a case of ``orders``."""
    return f"order {num_samples:.0e}, {what}"
