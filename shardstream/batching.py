"""Batch sizes: how a global batch is written as ranks x micro-batch x accumulation. Pure arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from typing import Any

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
    needed = {"world_size": world_size, "batch_size": batch_size}
    for name, number in {**needed, "accumulate": accumulate, "global_batch": global_batch}.items():
        if number is None and name not in needed:
            continue
        if not isinstance(number, Integral):  # a config's 1e3 is a float
            raise PlanError(f"{name} must be a whole number", found=repr(number))
        if number < 1:
            raise PlanError(f"{name} must be at least 1", found=number)
    if global_batch is None:
        return accumulate or 1
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


# ---------------------------------------------------------------------------------------------------------- the planner

STATE_BYTES_PER_PARAMETER = 16
"""Weights and gradients in bfloat16 (2 + 2), and in float32 the master weights and Adam's two moments (4 + 4 + 4)."""


def training_state_bytes(num_parameters: int) -> int:
    """Returns the bytes of weights, gradients and optimizer state: 16 a parameter; activations come on top.

    Example:
        >>> training_state_bytes(7 * 10**9)  # 112 GB
        112000000000
    """
    if num_parameters < 0:
        raise PlanError("the number of parameters must not be negative", found=num_parameters)
    return STATE_BYTES_PER_PARAMETER * num_parameters


@dataclass(frozen=True)
class BatchPlan:
    """A global batch as a product: ``global_batch = world_size * micro_batch * accumulate``.

    Attributes:
        world_size: Number of data-parallel ranks.
        micro_batch: Samples of one forward on one rank: ``StreamingDataset(batch_size=)``.
        accumulate: Micro-batches of a rank in a step.
        max_micro_batch: The most samples that fit into one forward.
        sequence_length: Tokens of a sample, or None if samples are not sequences.

    Raises:
        PlanError: If a number is not positive, or the micro-batch is larger than what fits.

    Example:
        >>> plan = BatchPlan(world_size=64, micro_batch=1, accumulate=4, max_micro_batch=1, sequence_length=4096)
        >>> plan.global_batch, plan.tokens
        (256, 1048576)
    """

    world_size: int
    micro_batch: int
    accumulate: int
    max_micro_batch: int
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            number = getattr(self, f.name)
            if number is not None and number < 1:
                raise PlanError(f"{f.name} must be at least 1", found=number)
        if self.micro_batch > self.max_micro_batch:
            raise PlanError(
                "the micro-batch does not fit", expected=f"<= {self.max_micro_batch}", found=self.micro_batch
            )

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.world_size * self.micro_batch * self.accumulate

    @property
    def tokens(self) -> int | None:
        """Tokens of one optimizer step, or None if samples are not sequences."""
        return None if self.sequence_length is None else self.global_batch * self.sequence_length

    @property
    def alternatives(self) -> tuple[tuple[int, int], ...]:
        """The other (micro_batch, accumulate) that fit and keep the global batch, the largest micro-batch first."""
        share = self.micro_batch * self.accumulate
        fits = range(min(share, self.max_micro_batch), 0, -1)
        return tuple((micro, share // micro) for micro in fits if share % micro == 0 and micro != self.micro_batch)

    @property
    def fuller_batches(self) -> tuple[int, ...]:
        """The nearest global batches whose micro-batch is the largest that fits; empty where more than half fits now.

        Example:
            >>> plan_batch(global_batch=4 * 509, world_size=4, max_micro_batch=8).fuller_batches
            (2016, 2048)
        """
        if 2 * self.micro_batch > self.max_micro_batch:
            return ()
        step = self.world_size * self.max_micro_batch
        below = self.global_batch // step * step
        return tuple(batch for batch in (below, below + step) if batch)

    def at(self, world_size: int) -> BatchPlan:
        """Returns what a resize alone gives: micro-batch and accumulation stay, and the global batch changes."""
        return replace(self, world_size=world_size)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        lists = {"alternatives": list(map(list, self.alternatives)), "fuller_batches": list(self.fuller_batches)}
        return {**asdict(self), "global_batch": self.global_batch, "tokens": self.tokens, **lists}


def plan_batch(
    *, global_batch: int, world_size: int, max_micro_batch: int, sequence_length: int | None = None
) -> BatchPlan:
    """Writes a global batch as ranks x micro-batch x accumulation, with the largest micro-batch that fits.

    Args:
        global_batch: Samples of one optimizer step over all ranks.
        world_size: Number of data-parallel ranks; tensor, context and pipeline peers count as one.
        max_micro_batch: The most samples that fit into one forward.
        sequence_length: Tokens of a sample, to have the plan in tokens.

    Raises:
        PlanError: If the ranks cannot share the global batch; it names the nearest world sizes and batches that fit.

    Example:
        >>> plan = plan_batch(global_batch=512, world_size=48, max_micro_batch=8)
        Traceback (most recent call last):
        shardstream.errors.PlanError: a global batch of 512 cannot be shared by 48 ranks: expected a multiple of 48;
            use a world size of 32 or 64, or global_batch=480 or 528
        >>> plan = plan_batch(global_batch=512, world_size=32, max_micro_batch=8)
        >>> plan.micro_batch, plan.accumulate, plan.alternatives
        (8, 2, ((4, 4), (2, 8), (1, 16)))
    """
    numbers = {"global_batch": global_batch, "world_size": world_size, "max_micro_batch": max_micro_batch}
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name} must be at least 1", found=number)
    share, rest = divmod(global_batch, world_size)
    if rest:
        sizes = " or ".join(map(str, nearest_world_sizes(global_batch, world_size)))
        batches = " or ".join(str(k * world_size) for k in (share, share + 1) if k)
        raise PlanError(
            f"a global batch of {global_batch} cannot be shared by {world_size} ranks",
            expected=f"a multiple of {world_size}",
            hint=f"use a world size of {sizes}, or global_batch={batches}",
        )
    micro_batch = next(micro for micro in range(min(share, max_micro_batch), 0, -1) if share % micro == 0)
    return BatchPlan(world_size, micro_batch, share // micro_batch, max_micro_batch, sequence_length)


def replan(previous: BatchPlan, world_size: int) -> BatchPlan:
    """Returns the plan after a resize that keeps the global batch, and with it learning rate and warm-up.

    Args:
        previous: The plan before.
        world_size: Number of data-parallel ranks now.

    Raises:
        PlanError: If so many ranks cannot share the global batch; it names the nearest world sizes that can.

    Example:
        >>> previous = plan_batch(global_batch=4096, world_size=64, max_micro_batch=1)
        >>> replan(previous, 32).accumulate / previous.accumulate
        2.0
    """
    return plan_batch(
        global_batch=previous.global_batch,
        world_size=world_size,
        max_micro_batch=previous.max_micro_batch,
        sequence_length=previous.sequence_length,
    )


def sequences_in(global_tokens: int, sequence_length: int) -> int:
    """Returns the global batch, in sequences, that has so many tokens.

    Raises:
        PlanError: If it is no whole number of sequences; it names the nearest token counts that are.

    Example:
        >>> sequences_in(16 * 2**20, 4096)
        4096
    """
    if sequence_length < 1 or global_tokens < 1:
        raise PlanError("tokens and sequence length must be at least 1", found=(global_tokens, sequence_length))
    sequences, rest = divmod(global_tokens, sequence_length)
    if rest:
        nearest = " or ".join(str(k * sequence_length) for k in (sequences, sequences + 1) if k)
        raise PlanError(
            f"{global_tokens} tokens are no whole number of sequences of {sequence_length}", hint=f"use {nearest}"
        )
    return sequences


def data_parallel_size(num_devices: int, *, tensor: int = 1, pipeline: int = 1, context: int = 1) -> int:
    """Returns how many data-parallel ranks so many devices are; peers of the other dimensions share a rank.

    Raises:
        PlanError: If the devices are no multiple of what one rank needs.

    Example:
        >>> data_parallel_size(8192, tensor=8, pipeline=16)
        64
    """
    numbers = {"num_devices": num_devices, "tensor": tensor, "pipeline": pipeline, "context": context}
    for name, number in numbers.items():
        if number < 1:
            raise PlanError(f"{name} must be at least 1", found=number)
    per_rank = tensor * pipeline * context
    world_size, rest = divmod(num_devices, per_rank)
    if rest or not world_size:
        nearest = " or ".join(str(k * per_rank) for k in (world_size, world_size + 1) if k)
        raise PlanError(
            f"{num_devices} devices are no whole number of data-parallel ranks",
            expected=f"a multiple of {tensor} tensor x {pipeline} pipeline x {context} context = {per_rank}",
            hint=f"use {nearest} devices",
        )
    return world_size
