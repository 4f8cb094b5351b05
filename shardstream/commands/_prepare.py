"""What ``reshard`` and ``tokenize`` share: options, progress, what is printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardstream.commands._options import (
    allow_url,
    as_json,
    engine,
    print_json,
    storage_options,
    warnings_shown,
    workers_of,
)

if TYPE_CHECKING:
    from shardstream.prepare import Outline, Prepared, PrepareProgress, Step

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
INTERRUPTED = 130


if TYPE_CHECKING:
    _Param = click.ParamType[int]
else:
    _Param = click.ParamType  # generic since click 8.2


class Size(_Param):
    """A number of bytes, with or without a unit of 1,024, of 1,024 squared, ...: ``256MiB``, ``1g``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the number of bytes.

        Example:
            >>> Size().convert("1.5KiB", None, None), Size().convert("7", None, None)
            (1536, 7)
        """
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value.strip())
        num_bytes = 0 if found is None else int(float(found[1]) * _UNITS[found[2].lower()])
        if num_bytes < 1:
            self.fail(f"{value!r} is not a size such as 256MiB", param, ctx)
        return num_bytes


_OPTIONS = (
    click.option(
        "--shard-size", "shard_num_bytes", type=Size(), default="256MiB", show_default=True,
        help="Size of an output shard that is aimed at.",
    ),
    click.option(
        "--block-size", "block_num_bytes", type=Size(), default="4MiB", show_default=True,
        help="Decoded size of a row group, or of a zstd frame: what is opened at a time.",
    ),
    click.option("--level", type=click.IntRange(1, 22), default=3, show_default=True, help="Level of zstd."),
    click.option("--shuffle", is_flag=True, help="Shuffle all samples, in bounded memory; the disk holds them once."),
    click.option("--seed", type=int, help="Of the shuffle.  [default: 0]"),
    click.option(
        "--memory", "memory_num_bytes", type=Size(), default="1GiB", show_default=True,
        help="What a process may take for a shuffle.",
    ),
    click.option(
        "--spill-dir", metavar="FOLDER", type=click.Path(file_okay=False),
        help="Local folder for a shuffle.  [default: in OUTPUT, or the temporary folder if that is remote]",
    ),
    click.option("-o", "--manifest", metavar="MANIFEST", help="Where to write it.  [default: OUTPUT/manifest.parquet]"),
    click.option("--workers", "num_workers", type=click.IntRange(0), help="Processes; 0 works in this one."),
    engine,
    click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing."),
    storage_options,
    allow_url,
    as_json,
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
)  # fmt: skip


def prepare_options(command: _F) -> _F:
    """Adds the options that both commands have."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def run_prepare(
    inputs: tuple[str, ...], output: str, step: Callable[[], Step], options: dict[str, Any], **more: Any
) -> None:
    """Writes, or says what would be written, and prints what came of it.

    Args:
        inputs: As given.
        output: As given.
        step: Makes the step, late: it may load a library.
        options: Those of ``prepare_options``.
        **more: Further settings.

    Raises:
        click.UsageError: If options do not go together.
        click.exceptions.Exit: If it is interrupted.
    """
    from shardstream.prepare import Outline, PrepareSettings, outline, prepare

    quiet, is_json, is_dry = (options.pop(name) for name in ("quiet", "as_json", "dry_run"))
    if not options["shuffle"] and (options["seed"] is not None or options["spill_dir"] is not None):
        raise click.UsageError("--seed and --spill-dir are for --shuffle")
    options["seed"] = options["seed"] or 0
    try:
        with (
            warnings_shown(quiet=quiet) as shown,
            workers_of(options.pop("engine"), options["num_workers"]) as executor,
            _progress(hidden=quiet) as progress,
        ):
            settings = PrepareSettings(progress=progress, executor=executor, **options, **more)
            found = (outline if is_dry else prepare)(inputs, output, step(), settings)
    except KeyboardInterrupt:
        click.echo("\nInterrupted; shards that are whole stay, and the same command goes on.", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    if isinstance(found, Outline):
        _print_outline(found, is_json=is_json)
    elif is_json:
        print_json({**_summary(found), "warnings": shown})
    elif not quiet:
        _print_done(found)


def _print_outline(planned: Outline, *, is_json: bool) -> None:
    about: dict[str, Any] = {
        "output": planned.output,
        "format": planned.format,
        "num_samples": planned.num_samples,
        "num_input_shards": planned.num_input_shards,
        "num_input_bytes": planned.num_input_bytes,
        "num_shards": planned.num_shards,
        "num_whole_already": planned.num_done,
        "samples_per_shard": list(planned.shard_num_samples),
        "num_output_bytes_about": planned.num_output_bytes,
        "num_spill_bytes_about": planned.spill_num_bytes,
        "num_tasks": planned.tasks,
        "schema": dict(planned.schema),
    }
    if is_json:
        print_json(about)
        return
    from shardstream.commands._tables import stdout, table

    rows = [(name.replace("_", " "), _shown(value)) for name, value in about.items()]
    stdout().print(table("would be written (nothing was)", ("", ""), rows))


def _shown(value: object) -> object:
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {kind}" for name, kind in value.items())
    return " to ".join(f"{number:,}" for number in value) if isinstance(value, list) else value


def _summary(done: Prepared) -> dict[str, Any]:
    from shardstream.errors import shown_url

    return {
        "manifest": shown_url(str(done.manifest.path)),
        "num_shards": done.manifest.num_shards,
        "num_blocks": done.manifest.num_blocks,
        "num_samples": done.manifest.num_samples,
        "num_tokens": done.num_tokens,
        "num_bytes": sum(part.num_bytes for part in done.parts),
        "num_resumed": done.num_resumed,
        "fingerprint": done.manifest.fingerprint,
        "input_fingerprint": done.input.fingerprint,
        "origin": shown_url(done.origin),
    }


def _print_done(done: Prepared) -> None:
    about = _summary(done)
    tokens = "" if done.num_tokens is None else f"{done.num_tokens:,} tokens of "
    resumed = f", {done.num_resumed:,} of which were whole already" if done.num_resumed else ""
    click.echo(f"{tokens}{about['num_samples']:,} samples in {about['num_shards']:,} shards{resumed}")
    click.echo(f"{about['num_blocks']:,} blocks, {about['num_bytes']:,} bytes\nfingerprint {about['fingerprint']}")
    click.echo(f"manifest {about['manifest']}\nwhere samples came from: {about['origin']}")


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Callable[[PrepareProgress], None]]:
    """A bar with samples, shards, bytes and time left on standard error, if that is a terminal."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,}/{task.total:,} {task.fields[unit]}"),
        bars.TextColumn("{task.fields[shards]}"),
        bars.TextColumn("{task.fields[size]}"),
        bars.TimeRemainingColumn(compact=True),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as bar:
        task = bar.add_task("", total=0, unit="", shards="", size="")
        phase = ""

        def show(done: PrepareProgress) -> None:
            nonlocal phase
            if done.phase != phase:
                phase = done.phase
                bar.reset(task, description=phase)
            bar.update(
                task,
                completed=done.num_done,
                total=done.num_all,
                unit="samples" if done.num_parts else "shards",
                shards=f"{done.num_parts_done:,}/{done.num_parts:,} shards" if done.num_parts else "",
                size=f"{done.num_bytes / 1e6:,.0f} MB" if done.num_parts else "",
            )

        yield show
