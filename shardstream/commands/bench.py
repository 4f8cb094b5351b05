"""``shardstream bench``: how fast a data set can feed a job here, and what limits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._options import allow_url, as_json, print_json, storage_options, warnings_shown
from shardstream.commands._tables import stdout, table

if TYPE_CHECKING:
    from shardstream.torch.speed import SpeedReport, StageSpeed

_NUM_STAGES = 5
_SETTINGS = ("batch_size", "world_size", "lanes", "num_threads", "num_cores")


@click.command()
@click.argument("manifest_path", metavar="MANIFEST")
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Samples of a micro-batch.")
@click.option("--accumulate", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches of a step.")
@click.option("--world-size", type=click.IntRange(1), default=1, show_default=True, help="Read as rank 0 of so many.")
@click.option("--lanes", type=click.IntRange(1), help="Blocks read side by side. [default: chosen]")
@click.option("--column", "columns", multiple=True, metavar="NAME", help="Read this column only. Repeatable.")
@click.option("--no-shuffle", is_flag=True, help="Read in file order.")
@click.option("--num-threads", type=click.IntRange(1), help="Threads that read and decode. [default: up to 4]")
@click.option("--num-workers", type=click.IntRange(0), default=0, show_default=True, help="Measure with workers, too.")
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=15.0, show_default=True, help="In all, about."
)
@storage_options
@allow_url
@as_json
def bench(manifest_path: str, **options: Any) -> None:
    """Measure how fast MANIFEST can feed a job on this machine, and say what limits it.

    Storage, decoding, gathering rows and the whole loader are measured one after the other. What was read once may come
    from the system's page cache after that: then "storage alone" is the speed of memory.
    """
    from shardstream.manifest import Manifest
    from shardstream.plan import Plan

    try:
        from shardstream.torch.speed import SpeedTest
    except ImportError as error:
        raise click.UsageError(f"bench needs torch ({error})") from error
    from shardstream.fetch import Reading

    with warnings_shown(quiet=options["as_json"]):
        about = {name: options[name] for name in ("storage_options", "allow_url")}
        manifest = Manifest.load(manifest_path, **about)
        plan = Plan.make(
            manifest,
            batch_size=options["batch_size"],
            accumulate=options["accumulate"],
            world_size=options["world_size"],
            lanes=options["lanes"],
            shuffle=not options["no_shuffle"],
        )
        report = SpeedTest(
            plan,
            columns=options["columns"] or None,
            reading=Reading(num_threads=options["num_threads"], storage_options=options["storage_options"]),
            num_workers=options["num_workers"],
            seconds=options["seconds"] / (_NUM_STAGES + (options["num_workers"] > 0)),
        ).run()
    if options["as_json"]:
        print_json(report.to_dict())
    else:
        _show(report)


def _show(report: SpeedReport) -> None:
    console, about = stdout(), report.settings
    facts = ", ".join(f"{name.replace('_', ' ').removeprefix('num ')} {about[name]}" for name in _SETTINGS)
    names = ["stage", "samples/s", "tokens/s", "MB/s", "first batch"]
    console.print(table(f"Speed ({facts})", names, map(_row, report.stages)))
    console.print(f"Limit: {report.limit}", markup=False, soft_wrap=True, style="bold")
    for text in report.advice:
        console.print(f"  - {text}", markup=False, soft_wrap=True)


def _row(stage: StageSpeed) -> tuple[object, ...]:
    tokens = "" if stage.tokens_per_s is None else round(stage.tokens_per_s)
    first = "" if stage.first_batch_s is None else f"{stage.first_batch_s * 1e3:,.0f} ms"
    return stage.stage, round(stage.samples_per_s), tokens, f"{stage.bytes_per_s / 1e6:,.1f}", first
