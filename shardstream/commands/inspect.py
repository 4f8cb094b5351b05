"""``shardstream inspect``: what a manifest holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardstream.commands._options import allow_url, as_json, print_json, storage_options
from shardstream.commands._tables import escaped, table

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from shardstream.manifest import Manifest


@click.command()
@click.argument("manifest_path", metavar="MANIFEST")
@click.option("--shards", "with_shards", is_flag=True, help="List every shard.")
@storage_options
@allow_url
@as_json
def inspect(
    manifest_path: str,
    storage_options: dict[str, Any],
    allow_url: tuple[str, ...],
    *,
    with_shards: bool,
    as_json: bool,
) -> None:
    """Show what MANIFEST holds: totals, schema, shards, blocks and runs, and what makes it dear to read."""
    from shardstream.manifest import Manifest

    manifest = Manifest.load(manifest_path, storage_options=storage_options, allow_url=allow_url)
    described = describe(manifest, with_shards=with_shards)
    if as_json:
        print_json(described)
        return
    from rich.console import Console

    console = Console()
    for each in _tables(described):
        console.print(each)
    for text in described["warnings"]:
        console.print(f"[yellow]Warning:[/] {escaped(text)}", soft_wrap=True)


def describe(manifest: Manifest, *, with_shards: bool = False) -> dict[str, Any]:
    """Returns what a manifest holds as JSON-able values.

    Args:
        manifest: The manifest.
        with_shards: Whether to list every shard.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> described = describe(Manifest.synthetic(num_shards=2, blocks_per_shard=3, rows_per_block=10, run_rows=4))
        >>> described["totals"]["num_samples"], described["blocks"]["rows"]["max"], described["blocks"]["runs"]["max"]
        (60, 10, 3)
    """
    import numpy as np

    from shardstream.errors import shown_url
    from shardstream.index import advice

    num_runs = -(-manifest.block_rows // np.maximum(manifest.block_run_rows, 1))
    formats, counts = np.unique(np.array(manifest.formats, dtype=str), return_counts=True)
    described: dict[str, Any] = {
        "manifest": None if manifest.path is None else shown_url(manifest.path),
        "root": shown_url(manifest.root),
        "fingerprint": manifest.fingerprint,
        "totals": {
            "num_shards": manifest.num_shards,
            "num_empty_shards": int(np.count_nonzero(manifest.shard_num_samples == 0)),
            "num_blocks": manifest.num_blocks,
            "num_runs": int(num_runs.sum()),
            "num_samples": manifest.num_samples,
            "num_bytes": int(manifest.num_bytes.sum()),
            **_num_tokens(manifest),
        },
        "formats": dict(zip(formats.tolist(), counts.tolist(), strict=True)),
        "tokens_column": manifest.tokens_column,
        "settings": manifest.metadata,
        "lists": sorted(manifest.lists.names) if manifest.lists is not None else [],
        "schema": [{"name": c.name, "type": c.type, "num_missing": c.num_missing} for c in manifest.columns],
        "blocks": {
            "rows": _spread(manifest.block_rows),
            "num_bytes": _spread(manifest.block_num_bytes),
            "runs": _spread(num_runs),
        },
        "samples_per_shard": _spread(manifest.shard_num_samples),
        "warnings": advice(manifest),
    }
    if with_shards:
        described["shards"] = [_shard(manifest, shard) for shard in range(manifest.num_shards)]
    return described


def _num_tokens(manifest: Manifest) -> dict[str, int]:
    names = ("run_num_tokens", "run_num_documents")
    if manifest.lists is None or not manifest.lists.names.issuperset(names):
        return {}
    lists = manifest.lists.read_all([*names, "token_lengths"])
    counts = {name.removeprefix("run_"): int(lists[name].sum()) for name in names}
    return {**counts, "num_without_tokens": int((lists["token_lengths"] == 0).sum())}


def _shard(manifest: Manifest, shard: int) -> dict[str, Any]:
    from shardstream.errors import shown_url

    return {
        "url": shown_url(manifest.urls[shard]),
        "format": manifest.formats[shard],
        "num_samples": int(manifest.shard_num_samples[shard]),
        "num_blocks": int(manifest.shard_first_block[shard + 1] - manifest.shard_first_block[shard]),
        "num_bytes": int(manifest.num_bytes[shard]),
        "version_tag": manifest.version_tags[shard],
        "digest": manifest.digests[shard],
    }


def _spread(values: np.ndarray[Any, Any]) -> dict[str, int]:
    """Least, middle, greatest."""
    import numpy as np

    if not len(values):
        return {"min": 0, "median": 0, "max": 0}
    return {"min": int(values.min()), "median": int(np.median(values)), "max": int(values.max())}


# --------------------------------------------------------------------------------------------------------- for people


def _tables(described: dict[str, Any]) -> list[Table]:
    totals = {name.removeprefix("num_").replace("_", " "): f"{value:,}" for name, value in described["totals"].items()}
    formats = ", ".join(f"{name} ({count:,})" for name, count in described["formats"].items())
    about = {"manifest": described["manifest"], "root": described["root"], "fingerprint": described["fingerprint"]}
    settings = {"tokens column": described["tokens_column"] or "-", **described["settings"]}
    facts = {**about, **totals, "formats": formats, **{name: str(value) for name, value in settings.items()}}
    spreads = {f"block: {name.replace('num_', '')}": spread for name, spread in described["blocks"].items()}
    spreads["shard: samples"] = described["samples_per_shard"]
    columns = [
        [column["name"], column["type"], "unknown" if column["num_missing"] < 0 else column["num_missing"]]
        for column in described["schema"]
    ]
    tables = [
        table("Manifest", ["", ""], list(facts.items())),
        table("Schema", ["column", "type", "missing"], columns),
        table("Sizes", ["", "min", "median", "max"], [[name, *spread.values()] for name, spread in spreads.items()]),
    ]
    if "shards" in described:
        names = ["shard", "format", "samples", "blocks", "bytes", "version", "digest"]
        tables.append(table("Shards", names, [shard.values() for shard in described["shards"]]))
    return tables
