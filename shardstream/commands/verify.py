"""``shardstream verify``: whether shards are those that were indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._options import allow_url, as_json, engine, print_json, storage_options, workers_of
from shardstream.commands._tables import print_verdict, stdout

if TYPE_CHECKING:
    from shardstream.verify import VerifyProgress, VerifyReport

_FAULT, _INTERRUPTED = 1, 130
_LAYOUT_ONLY = (
    "Contents were not proven: the manifest has no checksums, so only sizes and versions were compared, and the layout "
    "of what was written again. Index with --checksum to prove content."
)


def _sample(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Reads ``100``, ``5%`` or ``0.05``."""
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text) if "." in text else int(text)
    except ValueError:
        value = 0
    if not value > 0 or (isinstance(value, float) and value > 1):
        raise click.BadParameter(f"{text!r} is neither a number of shards nor a part of them (5%, 0.05)", ctx, param)
    return value


@click.command()
@click.argument("manifest_path", metavar="MANIFEST")
@click.option("--sample", callback=_sample, metavar="N|PART", help="Check N shards, or a part of them (5%, 0.05).")
@click.option("--seed", default=0, show_default=True, help="Which shards a sample takes.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Note good shards there; after an interruption the same command goes on where it was.",
)
@click.option("--workers", "num_workers", type=click.IntRange(0), help="Processes; 0 works in this one.")
@engine
@storage_options
@allow_url
@as_json
@click.option("-q", "--quiet", is_flag=True, help="Print faults only.")
def verify(manifest_path: str, **options: Any) -> None:
    """Compare the shards of MANIFEST with what was indexed: every byte, if it was indexed with --checksum.

    Exits with 1 if a shard is missing, unreadable, cut, or holds other bytes; each is named with its blocks.
    """
    from shardstream.errors import shown_url
    from shardstream.manifest import Manifest
    from shardstream.verify import verify_manifest

    quiet, print_as_json, allowed = options.pop("quiet"), options.pop("as_json"), options.pop("allow_url")
    manifest = Manifest.load(manifest_path, storage_options=options["storage_options"], allow_url=allowed)
    workers = workers_of(options.pop("engine"), options["num_workers"])
    with workers as executor, _progress(hidden=quiet or print_as_json) as progress:
        try:
            report = verify_manifest(manifest, progress=progress, executor=executor, **options)
        except KeyboardInterrupt:
            hint = "the same command goes on from here" if options["state"] else "with --state FILE it could go on"
            click.echo(f"\nInterrupted; {hint}.", err=True)
            raise click.exceptions.Exit(_INTERRUPTED) from None
    if print_as_json:
        print_json({"manifest": shown_url(str(manifest.path)), **report.to_dict()})
    else:
        _show(report, quiet=quiet)
    if not report.is_good:
        raise click.exceptions.Exit(_FAULT)


def _show(report: VerifyReport, *, quiet: bool) -> None:
    if quiet:
        for fault in report.faults:
            click.echo(str(fault))
        return
    resumed = f", {report.num_resumed:,} of them by an earlier run" if report.num_resumed else ""
    click.echo(
        f"{report.num_chosen:,} of {report.num_shards:,} shards checked{resumed}; {report.num_bytes:,} bytes compared"
    )
    if report.num_rewritten:
        click.echo(f"{report.num_rewritten:,} were written again or moved since they were indexed, and are the same")
    if not report.proves_content:
        click.echo(_LAYOUT_ONLY)
    good = "all bytes are those that were indexed" if report.proves_content else "no difference was found"
    print_verdict(stdout(), [str(fault) for fault in report.faults], good)


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[VerifyProgress], None]]:
    """A bar with shards, bytes, rate and time left on standard error, if that is a terminal."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        bars.TextColumn("verifying"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,}/{task.total:,} shards"),
        bars.TextColumn("{task.fields[about]}"),
        bars.TimeRemainingColumn(compact=True),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task("verify", total=0, about="")

        def show(done: VerifyProgress) -> None:
            elapsed_s = bar.tasks[0].elapsed or 0.0
            rate = f", {done.num_bytes / 1e6 / elapsed_s:,.0f} MB/s" if elapsed_s else ""
            about = f"{done.num_bytes / 1e6:,.0f} MB{rate}, {done.num_faults:,} faults"
            bar.update(task, completed=done.num_done, total=done.num_shards, about=about)

        yield show
