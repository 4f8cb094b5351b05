"""``shardstream merge``: one manifest of several."""

from __future__ import annotations

from typing import Any

import click

from shardstream.commands._options import allow_url, as_json, print_json, storage_options, warnings_shown
from shardstream.commands._tables import print_manifest, summary_of


@click.command()
@click.argument("parts", nargs=-1, required=True, metavar="PART...")
@click.option("-o", "--output", required=True, metavar="MANIFEST", help="Where to write it.")
@click.option("--overwrite", is_flag=True, help="Replace another manifest at OUTPUT.")
@storage_options
@allow_url
@as_json
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def merge(parts: tuple[str, ...], output: str, *, quiet: bool, as_json: bool, **options: Any) -> None:
    """Make one manifest of the manifests PART, which were indexed apart from each other.

    Samples are in the order of the parts as named, and within each in its own: where that is the order of the shards'
    paths, the manifest's fingerprint is that of indexing all shards at once. Shards are not read. Parts must have been
    indexed with the same options, and no shard may be in two of them.
    """
    from shardstream.index import merge_manifests

    with warnings_shown(quiet=quiet) as shown:
        manifest = merge_manifests(parts, output, **options)
    if as_json:
        print_json({**summary_of(manifest), "num_parts": len(parts), "warnings": shown})
    elif not quiet:
        print_manifest(manifest)
