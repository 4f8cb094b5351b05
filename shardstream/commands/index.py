"""``shardstream index``: make a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._options import (
    as_json,
    engine,
    pairs,
    print_json,
    storage_options,
    warnings_shown,
    workers_of,
)
from shardstream.commands._tables import print_manifest, summary_of

if TYPE_CHECKING:
    from shardstream.index import IndexProgress


@click.command()
@click.argument("shards", nargs=-1, required=True)
@click.option(
    "-o", "--output", required=True, metavar="MANIFEST", help="Where to write it, e.g. corpus.manifest.parquet."
)
@click.option("--tokens-column", metavar="COLUMN", help="List column whose lengths are the token counts.")
@click.option("--tokens-dtype", metavar="TYPE", help="In tars: the tokens column is raw numbers of this type (uint16).")
@click.option(
    "--pack",
    type=click.IntRange(1),
    multiple=True,
    metavar="T",
    help='Count the sequences of T tokens that documents make, for packing="whole" and "unpacked". Repeatable.',
)
@click.option(
    "--targets",
    callback=pairs,
    multiple=True,
    metavar="NAME=COLUMN",
    help="Loss head and the column of its labels; counts valid targets per sample. Repeatable.",
)
@click.option("--ignore-index", type=int, help="The label that is no target.  [default: -100]")
@click.option("--keep-order", is_flag=True, help="Keep the shards in the order named, not sorted by full path.")
@click.option(
    "--checksum",
    is_flag=True,
    help="Hash every byte, so that `shardstream verify` can prove the content.  [default: as with --update]",
)
@click.option("--update", metavar="OLD", help="Older manifest: re-read only changed shards, append new ones.")
@click.option("--allow-vanished", is_flag=True, help="With --update: leave out shards that are not named any more.")
@click.option("--overwrite", is_flag=True, help="Replace another manifest at OUTPUT.")
@click.option("--workers", "num_workers", type=click.IntRange(0), help="Processes; 0 works in this one.")
@engine
@storage_options
@as_json
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def index(shards: tuple[str, ...], output: str, **options: Any) -> None:
    """Index SHARDS and write a manifest.

    SHARDS are paths, folders, fsspec URLs, glob patterns ('data/*.parquet'), brace patterns
    ('data-{000000..000099}.tar'), several of them joined with '::', or @FILE with one of them a line. A path that
    exists is never read as a pattern.

    If a shard cannot be used, all are looked at, every bad one is named, and nothing is written.
    """
    from shardstream.index import IndexSettings, build_manifest

    if (options["pack"] or options["tokens_dtype"]) and not (options["tokens_column"] or options["update"]):
        raise click.UsageError("--pack and --tokens-dtype need --tokens-column")
    quiet, print_as_json, engine = (options.pop(name) for name in ("quiet", "as_json", "engine"))
    options["targets"] = options["targets"] or None
    given = {name: options.pop(name) for name in ("ignore_index", "allow_vanished", "tokens_dtype", "pack")}
    given["pack"] = given["pack"] or None
    given["checksum"] = options.pop("checksum") or None
    with (
        warnings_shown(quiet=quiet) as shown,
        workers_of(engine, options["num_workers"]) as executor,
        _progress(hidden=quiet) as progress,
    ):
        settings = IndexSettings(progress=progress, executor=executor, **given)
        manifest = build_manifest(shards, output, settings=settings, **options)
    if print_as_json:
        print_json({**summary_of(manifest), "warnings": shown})
    elif not quiet:
        print_manifest(manifest)


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[IndexProgress], None]]:
    """A bar with shards, samples, bytes, rate and time left on standard error, if that is a terminal."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        bars.TextColumn("indexing"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,}/{task.total:,} shards"),
        bars.TextColumn("{task.fields[samples]:,} samples"),
        bars.TextColumn("{task.fields[size]}"),
        bars.TextColumn("{task.fields[rate]}"),
        bars.TimeRemainingColumn(compact=True),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task("index", total=0, samples=0, size="", rate="")

        def show(done: IndexProgress) -> None:
            elapsed_s = bar.tasks[0].elapsed or 0.0
            bar.update(
                task,
                completed=done.num_done,
                total=done.num_shards,
                samples=done.num_samples,
                size=f"{done.num_bytes / 1e6:,.0f} MB",
                rate=f"{done.num_bytes / 1e6 / elapsed_s:,.0f} MB/s" if elapsed_s else "",
            )

        yield show
