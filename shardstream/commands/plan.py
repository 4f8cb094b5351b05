"""``shardstream plan``: a global batch as ranks x micro-batch x accumulation, and what a resize makes of it."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._options import as_json, print_json

if TYPE_CHECKING:
    from shardstream.batching import BatchPlan

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _counts(ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...] | None) -> Any:
    """Reads whole numbers from 1 on, with units if one likes: ``512``, ``7e9``, ``7B``, ``16Mi``; a click callback."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_counts(ctx, param, text) for text in value)
    parts = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([a-z]*)", value.replace("_", "").lower())
    number = Fraction(parts[1]) * _UNITS.get(parts[2], 0) if parts else Fraction(0)
    if number < 1 or number.denominator != 1:
        raise click.BadParameter(f"{value!r} is not a whole number such as 512, 16Mi, 7e9 or 7B", ctx, param)
    return int(number)


@click.command()
@click.option("--global-batch", callback=_counts, metavar="COUNT", help="Samples of an optimizer step over all ranks.")
@click.option("--global-tokens", callback=_counts, metavar="COUNT", help="The same in tokens; needs --sequence-length.")
@click.option("--sequence-length", callback=_counts, metavar="COUNT", help="Tokens of a sample.")
@click.option(
    "--max-micro-batch",
    callback=_counts,
    metavar="COUNT",
    default="1",
    show_default=True,
    help="Samples that fit into a forward.",
)
@click.option("--world-size", "--dp", "world_size", callback=_counts, metavar="COUNT", help="Data-parallel ranks.")
@click.option(
    "--num-devices",
    callback=_counts,
    metavar="COUNT",
    help="All devices, where data-parallel ranks are to be computed.",
)
@click.option(
    "--tp",
    callback=_counts,
    metavar="COUNT",
    default="1",
    show_default=True,
    help="Tensor-parallel peers that share a rank.",
)
@click.option(
    "--pp", callback=_counts, metavar="COUNT", default="1", show_default=True, help="Pipeline stages that share a rank."
)
@click.option(
    "--cp",
    callback=_counts,
    metavar="COUNT",
    default="1",
    show_default=True,
    help="Context-parallel peers that share a rank.",
)
@click.option(
    "--resize-to",
    callback=_counts,
    metavar="COUNT",
    multiple=True,
    help="Data-parallel ranks after a resize. Repeatable.",
)
@click.option(
    "--parameters",
    callback=_counts,
    metavar="COUNT",
    help="Parameters of the model, for the bytes of its training state.",
)
@as_json
def plan(*, as_json: bool, **options: Any) -> None:
    """Write a global batch as ranks x micro-batch x accumulation, now and after a resize.

    Numbers may have units (16Mi, 7B, 7e9). Exit code 1 if something does not fit; the message names what would.
    """
    planned = _planned(options)
    if as_json:
        print_json(planned)
    else:
        _print(planned)


def _planned(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the plan, its resizes and the training state as JSON values."""
    from shardstream.batching import plan_batch, replan, training_state_bytes

    per_rank = options["tp"] * options["pp"] * options["cp"]
    before = plan_batch(
        global_batch=_global_batch(options),
        world_size=_world_size(options),
        max_micro_batch=options["max_micro_batch"],
        sequence_length=options["sequence_length"],
    )
    num_devices = before.world_size * per_rank
    planned: dict[str, Any] = {"num_devices": num_devices, "devices_per_rank": per_rank, **before.to_dict()}
    planned["resizes"] = [_resize(before, replan(before, size)) for size in options["resize_to"]]
    if (parameters := options["parameters"]) is not None:
        state = training_state_bytes(parameters)
        on_one = {"split_over_tp_pp": state / (options["tp"] * options["pp"])}
        planned["training_state"] = {
            "num_parameters": parameters,
            "num_bytes": state,
            "num_bytes_per_device": {**on_one, "split_over_all_devices": state / num_devices},
        }
    return planned


def _resize(before: BatchPlan, after: BatchPlan) -> dict[str, Any]:
    unchanged = before.at(after.world_size)
    return {"unchanged": {"global_batch": unchanged.global_batch, "tokens": unchanged.tokens}, **after.to_dict()}


def _global_batch(options: dict[str, Any]) -> int:
    from shardstream.batching import sequences_in

    samples, tokens, length = (options[name] for name in ("global_batch", "global_tokens", "sequence_length"))
    if (samples is None) == (tokens is None):
        raise click.UsageError("give either --global-batch or --global-tokens")
    if tokens is None:
        return int(samples)
    if length is None:
        raise click.UsageError("--global-tokens needs --sequence-length")
    return sequences_in(tokens, length)


def _world_size(options: dict[str, Any]) -> int:
    from shardstream.batching import data_parallel_size

    world_size, num_devices = options["world_size"], options["num_devices"]
    if num_devices is None:
        if world_size is None:
            raise click.UsageError("give --world-size (--dp) or --num-devices")
        return int(world_size)
    computed = data_parallel_size(num_devices, tensor=options["tp"], pipeline=options["pp"], context=options["cp"])
    if world_size not in (None, computed):
        raise click.UsageError(f"--num-devices {num_devices} makes {computed} data-parallel ranks, not {world_size}")
    return computed


# --------------------------------------------------------------------------------------------------------- for people


def _print(planned: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title="Batch plan", title_justify="left")
    names = ["ranks", "micro-batch", "accumulate", "global batch", "tokens a step", "if nothing else changed"]
    for name in names[: 6 if planned["resizes"] else 5]:
        table.add_column(name, justify="right")
    table.add_row(*_cells(planned))
    for resize in planned["resizes"]:
        table.add_row(*_cells(resize), _size(resize["unchanged"]))
    console.print(table)
    if planned["devices_per_rank"] > 1:
        per_rank, ranks = planned["devices_per_rank"], planned["world_size"]
        console.print(f"{planned['num_devices']:,} devices = {ranks:,} data-parallel ranks x {per_rank:,} devices each")
    if planned["alternatives"]:
        pairs = ", ".join(f"{micro} x {accumulate}" for micro, accumulate in planned["alternatives"])
        console.print(f"The same global batch with other micro-batch x accumulate: {pairs}")
    if planned["fuller_batches"]:
        batches = " or ".join(f"{batch:,}" for batch in planned["fuller_batches"])
        console.print(
            f"[yellow]Of {planned['max_micro_batch']} samples that fit, {planned['micro_batch']} are used:[/] "
            f"a global batch of {batches} would use all"
        )
    if state := planned.get("training_state"):
        split, sharded = state["num_bytes_per_device"].values()
        console.print(
            f"Training state of {state['num_parameters']:,} parameters: {_gb(state['num_bytes'])} "
            f"(16 bytes each, activations not counted); {_gb(split)} a device split over TP x PP, "
            f"{_gb(sharded)} sharded over all"
        )


def _cells(plan: dict[str, Any]) -> list[str]:
    numbers = [plan[name] for name in ("world_size", "micro_batch", "accumulate", "global_batch", "tokens")]
    return ["-" if number is None else f"{number:,}" for number in numbers]


def _size(sizes: dict[str, Any]) -> str:
    tokens = sizes["tokens"]
    return f"{sizes['global_batch']:,} samples" if tokens is None else f"{tokens:,} tokens"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.4g} GB"
