"""The plan that ``audit`` and ``report`` look at: options of its topology, and what they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardstream.commands._options import allow_url, as_json, storage_options

if TYPE_CHECKING:
    from shardstream.manifest import Manifest
    from shardstream.packing import PackingMode
    from shardstream.plan import Plan

_Function = TypeVar("_Function", bound=Callable[..., Any])

SHUFFLES = {"true": True, "false": False, "full": "full", "torch": "torch"}
_PLAN_OPTIONS = ("world_size", "batch_size", "global_batch", "accumulate", "lanes", "tail", "seed")


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int, int] | None:
    """Reads ``SHARDSxBLOCKSxROWS``; a click callback."""
    if value is None:
        return None
    numbers = value.lower().split("x")
    if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):  # noqa: PLR2004
        raise click.BadParameter(f"{value!r} is not of the form SHARDSxBLOCKSxROWS, as 1000x100x1000", ctx, param)
    shards, blocks, rows = map(int, numbers)
    return shards, blocks, rows


_OPTIONS = (
    click.argument("manifest_path", metavar="[MANIFEST]", required=False),
    click.option("--synthetic", callback=_sizes, metavar="SHARDSxBLOCKSxROWS", help="Shards that do not exist yet."),
    click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks."),
    click.option(
        "--num-workers", type=click.IntRange(0), default=0, show_default=True, help="DataLoader workers a rank."
    ),
    click.option(
        "--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Samples of a micro-batch."
    ),
    click.option("--global-batch", type=click.IntRange(1), help="Samples of an optimizer step over all ranks."),
    click.option("--accumulate", type=click.IntRange(1), help="Micro-batches of a rank in an optimizer step."),
    click.option("--lanes", type=click.IntRange(1), help="Blocks read side by side. [default: chosen]"),
    click.option("--shuffle", type=click.Choice(list(SHUFFLES)), default="true", show_default=True),
    click.option(
        "--tail",
        type=click.Choice(["pad", "drop", "uneven", "continue", "repeat", "truncate"]),
        default="pad",
        show_default=True,
        help="What happens to an epoch's last, partial window.",
    ),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--epochs", type=click.IntRange(1), default=1, show_default=True, help="How many to look at."),
    click.option(
        "--sequence-length", type=click.IntRange(1), metavar="T", help="Samples are packed sequences of T tokens."
    ),
    click.option("--eos-id", type=click.IntRange(0), help="With --sequence-length: the token after each document."),
    click.option("--whole", is_flag=True, help="With --sequence-length: documents are not cut."),
    click.option("--unpacked", is_flag=True, help="With --sequence-length: one document a sequence."),
    click.option(
        "--label", metavar="COLUMN", help="Count the classes of this column per batch; reads it from all shards."
    ),
    click.option("--windows", type=click.IntRange(1), metavar="N", help="Of a mixture: how many to look at."),
    storage_options,
    allow_url,
    as_json,
)


def plan_options(function: _Function) -> _Function:
    """Adds the options that say what is looked at, and under which topology."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_plan_options(options: dict[str, Any]) -> None:
    """Refuses options that contradict each other.

    Raises:
        click.UsageError: If some do.
    """
    if (options["manifest_path"] is None) == (options["synthetic"] is None):
        raise click.UsageError("give either MANIFEST or --synthetic")
    if options["label"] and options["synthetic"]:
        raise click.UsageError("--label reads shards, which --synthetic has none of")
    if options["sequence_length"] is None and (packing_mode(options) != "tokens" or options["eos_id"] is not None):
        raise click.UsageError("--whole, --unpacked and --eos-id need --sequence-length")
    if options["sequence_length"] is not None and options["label"]:
        raise click.UsageError("packed sequences have no label")


def packing_mode(options: dict[str, Any]) -> PackingMode:
    """Returns the packing that ``--whole`` and ``--unpacked`` ask for."""
    if options["whole"] and options["unpacked"]:
        raise click.UsageError("give either --whole or --unpacked")
    return "whole" if options["whole"] else "unpacked" if options["unpacked"] else "tokens"


def manifest_of(options: dict[str, Any]) -> Manifest:
    """Returns the manifest that is looked at."""
    from shardstream.manifest import Manifest

    if options["synthetic"] is None:
        about = {name: options[name] for name in ("storage_options", "allow_url")}
        return Manifest.load(options["manifest_path"], **about)
    shards, blocks, rows = options["synthetic"]
    return Manifest.synthetic(num_shards=shards, blocks_per_shard=blocks, rows_per_block=rows)


def plan_of(options: dict[str, Any]) -> Plan:
    """Returns the plan that is looked at."""
    from shardstream.packing import Packing
    from shardstream.plan import Plan

    settings = {name: options[name] for name in _PLAN_OPTIONS}
    manifest, length = manifest_of(options), options["sequence_length"]
    packing = None
    if length is not None:
        packing = Packing(length, manifest.tokens_column or "tokens", options["eos_id"], packing_mode(options))
    return Plan.make(manifest, shuffle=SHUFFLES[options["shuffle"]], packing=packing, **settings)  # type: ignore[arg-type]
