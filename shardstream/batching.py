"""Batch sizes: how a global batch is written as ranks x micro-batch x accumulation. Pure arithmetic."""

from __future__ import annotations

from shardstream.errors import PlanError


def resolve_accumulate(
    *, world_size: int, batch_size: int, global_batch: int | None = None, accumulate: int | None = None
) -> int:
    """Returns the micro-batches of a rank in one window: ``global_batch = world_size * batch_size * accumulate``.

    Args:
        world_size: Number of data-parallel ranks.
        batch_size: Samples of a micro-batch.
        global_batch: Samples of one optimizer step over all ranks, or None.
        accumulate: Micro-batches of a rank in a step, or None; 1 when neither is given.

    Returns:
        The accumulation.

    Raises:
        PlanError: If a number is not positive, or the product does not fit; it names the nearest that do.

    Example:
        >>> resolve_accumulate(world_size=4, batch_size=8, global_batch=128)
        4
    """
    for name, number in (("world_size", world_size), ("batch_size", batch_size)):
        if number < 1:
            raise PlanError(f"{name} must be at least 1", found=number)
    if accumulate is not None and accumulate < 1:
        raise PlanError("accumulate must be at least 1", found=accumulate)
    if global_batch is None:
        return accumulate or 1
    if global_batch < 1:
        raise PlanError("global_batch must be at least 1", found=global_batch)
    step = world_size * batch_size * (accumulate or 1)
    if accumulate is None and global_batch % step == 0:
        return global_batch // step
    if global_batch == step:
        return accumulate or 1
    product = f"{world_size} ranks x {batch_size} per micro-batch"
    raise PlanError(
        f"a global batch of {global_batch} is not a multiple of {product} = {step}"
        if accumulate is None
        else f"a global batch of {global_batch} is not {product} x accumulate {accumulate} = {step}",
        hint=_ways_out(global_batch, world_size, batch_size, accumulate),
    )


def _ways_out(global_batch: int, world_size: int, batch_size: int, accumulate: int | None) -> str:
    """Names the nearest numbers that fit, one setting changed at a time."""
    if accumulate is None:
        step = world_size * batch_size
        below = global_batch // step * step
        ways = {"global_batch=": [number for number in (below, below + step) if number]}
        ways["batch_size="] = _nearest_divisors(global_batch, batch_size, others=world_size)
        ways["a world size of "] = _nearest_divisors(global_batch, world_size, others=batch_size)
    else:
        ways = {"global_batch=": [world_size * batch_size * accumulate]}
        ways["accumulate="] = _exact(global_batch, world_size * batch_size)
        ways["batch_size="] = _exact(global_batch, world_size * accumulate)
        ways["a world size of "] = _exact(global_batch, batch_size * accumulate)
    return "use " + ", or ".join(way + " or ".join(map(str, fits)) for way, fits in ways.items() if fits)


def _exact(global_batch: int, others: int) -> list[int]:
    return [global_batch // others] if global_batch % others == 0 else []


def _nearest_divisors(global_batch: int, number: int, *, others: int) -> list[int]:
    return [] if global_batch % others else nearest_world_sizes(global_batch // others, number)


def nearest_world_sizes(global_batch: int, world_size: int) -> list[int]:
    """Returns the nearest world sizes, at most one below and one above, that divide the global batch.

    Example:
        >>> nearest_world_sizes(512, 7)
        [4, 8]
    """
    below = next(p for p in range(min(world_size, global_batch), 0, -1) if global_batch % p == 0)
    above = next((p for p in range(world_size, global_batch + 1) if global_batch % p == 0), below)
    return sorted({below, above})
