"""``shardstream reshard``: write shards again as shards that stream well."""

from __future__ import annotations

from typing import Any

import click

from shardstream.commands._prepare import prepare_options, run_prepare


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("output")
@click.option(
    "--format",
    type=click.Choice(["parquet", "tar", "tar.zst"]),
    help="Of the output.  [default: as INPUT; Parquet for JSON lines, tar.zst for tar.gz]",
)
@click.option("--column", "columns", multiple=True, metavar="NAME", help="Keep only this column or field. Repeatable.")
@click.option(
    "--key-column", metavar="COLUMN", help="In tars: keys of samples.  [default: __key__, or numbers without one]"
)
@prepare_options
def reshard(inputs: tuple[str, ...], output: str, columns: tuple[str, ...], **options: Any) -> None:
    """Write INPUT again as shards that stream well, in the folder OUTPUT.

    INPUT is shards as `shardstream index` takes them (Parquet, tar, tar.zst, tar.gz, JSON lines and what else is
    installed), or a manifest. Row groups and zstd frames get about --block-size, shards about --shard-size.

    A run that was killed goes on when the same command is given again, and its result is the same, byte for byte,
    for any number of workers. Which input sample each output sample is stands in OUTPUT/.shardstream/origin.parquet.
    """
    from shardstream.prepare import Copy

    run_prepare(inputs, output, lambda: Copy(list(columns) or None), options)
