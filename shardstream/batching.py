"""Batch sizes: how a global batch is written as ranks x micro-batch x accumulation. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

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
    if (global_batch % step if accumulate is None else global_batch != step) == 0:
        return global_batch // (world_size * batch_size)
    product = f"{world_size} ranks x {batch_size} per micro-batch" + (
        f" x accumulate {accumulate}" if accumulate else ""
    )
    raise PlanError(
        f"a global batch of {global_batch} is not a multiple of {product} = {step}"
        if accumulate is None
        else f"a global batch of {global_batch} is not {product} = {step}",
        hint=_ways_out(global_batch, world_size, batch_size, step),
    )


def _ways_out(global_batch: int, world_size: int, batch_size: int, step: int) -> str:
    near = sorted({max(1, global_batch // step) * step, -(-global_batch // step) * step})
    ways = [f"a global batch of {_either(near)}"]
    if global_batch % world_size == 0:
        share = global_batch // world_size
        fits = [size for size in range(1, share + 1) if share % size == 0]
        ways.append(f"batch_size={_either(sorted(fits, key=lambda size: abs(size - batch_size))[:2])}")
    else:
        ways.append(f"a world size of {_either(nearest_world_sizes(global_batch, world_size))}")
    return "use " + ", or ".join(ways)


def nearest_world_sizes(global_batch: int, world_size: int) -> list[int]:
    """Returns the nearest world sizes below and above that divide the global batch.

    Example:
        >>> nearest_world_sizes(512, 7)
        [4, 8]
    """
    below = next(p for p in range(min(world_size, global_batch), 0, -1) if global_batch % p == 0)
    above = next((p for p in range(max(world_size, 1), global_batch + 1) if global_batch % p == 0), below)
    return sorted({below, above})


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
