"""Option types and output that commands share."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import click


def pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Reads repeated ``NAME=VALUE`` options; a click callback.

    Raises:
        click.BadParameter: If one is not of that form, or a name comes twice.
    """
    read: dict[str, str] = {}
    for value in values:
        name, _, text = value.partition("=")
        if not name or not text:
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE", ctx, param)
        if name in read:
            raise click.BadParameter(f"{name!r} is given twice", ctx, param)
        read[name] = text
    return read


def json_pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, Any]:
    """Reads repeated ``NAME=VALUE`` options; values that are JSON are read as such (``anon=true``)."""
    read: dict[str, Any] = {}
    for name, text in pairs(ctx, param, values).items():
        try:
            read[name] = json.loads(text)
        except ValueError:
            read[name] = text
    return read


storage_options = click.option(
    "--storage-option",
    "storage_options",
    callback=json_pairs,
    multiple=True,
    metavar="NAME=VALUE",
    help='Given to fsspec, e.g. anon=true or client_kwargs={"endpoint_url": "…"}. Repeatable.',
)
allow_url = click.option(
    "--allow-url",
    multiple=True,
    metavar="PATTERN",
    help="Accept shards of the manifest that are elsewhere, e.g. 's3://bucket/*'. Repeatable.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")


def _engine(ctx: click.Context, param: click.Parameter, text: str) -> str:
    from shardstream.errors import PlanError
    from shardstream.executors import parse_engine

    try:
        parse_engine(text)
    except PlanError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    return text


engine = click.option(
    "--engine",
    callback=_engine,
    default="local",
    show_default=True,
    metavar="local|ray[:ADDRESS]|dask[:ADDRESS]",
    help="Whose workers do it: processes of this machine, or those of Ray or Dask, here or at an address.",
)


@contextmanager
def workers_of(engine: str, num_workers: int | None) -> Iterator[Executor | None]:
    """Gives the workers of ``--engine``; see ``executor_of``. What an engine prints goes to standard error."""
    from shardstream.executors import executor_of

    is_own = engine == "local"
    with nullcontext() if is_own else redirect_stdout(sys.stderr), executor_of(engine, num_workers) as executor:
        yield executor


@contextmanager
def warnings_shown(*, quiet: bool = False) -> Iterator[list[str]]:
    """Shows the package's warnings as lines on standard error; gives the list that they are also put into."""
    from shardstream.errors import ShardStreamWarning

    shown: list[str] = []

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, ShardStreamWarning):
            shown.append(str(message))
            if not quiet:
                click.echo(f"Warning: {message}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", ShardStreamWarning)
        warnings.showwarning = show
        yield shown


def print_json(value: object) -> None:
    """Prints a JSON text on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
