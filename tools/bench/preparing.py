"""Prepares everything that cases read: forms of the workloads, manifests, and the peers' own formats."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench import data
from tools.bench.adapters.packed import SEQUENCE_LENGTH
from tools.bench.case import Case, Folders
from tools.bench.child import PREPARE
from tools.bench.range_server import RangeServer
from tools.bench.runs import run_fresh
from tools.bench.workloads import workload

MANIFEST_FORMS = ("parquet", "tar", "tar.zst")


def prepare_data(folders: Folders, loads: Sequence[str], scale: float, say: Callable[[str], None]) -> None:
    """Writes the common forms and shardstream's manifests; what is there is left alone."""
    for name in loads:
        load = workload(name, scale)
        for form in data.FORMS:
            folder = folders.data / name / form
            if form == "tar.zst" and name == "I":
                continue  # random bytes do not shrink
            if data.write_form(load, form, folder):
                say(f"wrote {name} as {form}")
            if form in MANIFEST_FORMS:
                write_manifest(str(folder), folders.data / name / f"{form}.manifest.parquet", say)
    if "T" in loads:
        tenfold = folders.data / "T-tenfold" / "parquet"  # ten times the same data: memory must not differ
        data.write_tenfold(folders.data / "T" / "parquet", tenfold)
        write_manifest(str(tenfold), folders.data / "T-tenfold" / "parquet.manifest.parquet", say)
        whole, pack = str(folders.data / "T" / "parquet"), (SEQUENCE_LENGTH,)
        write_manifest(whole, folders.data / "T" / "parquet-tokens.manifest.parquet", say, tokens="tokens", pack=pack)


def write_manifest(
    shards: str | list[str],
    manifest: Path,
    say: Callable[[str], None],
    storage_options: Mapping[str, Any] | None = None,
    *,
    tokens: str | None = None,
    pack: Sequence[int] = (),
) -> None:
    """Indexes shards, and counts a column of tokens if one is named, unless a manifest of this version is there."""
    from shardstream import Manifest, ManifestError, ShardStreamWarning, build_manifest
    from shardstream.index import IndexSettings

    try:
        Manifest.load(manifest)
    except ManifestError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardStreamWarning)  # large blocks are what some cases are about
            built = build_manifest(
                shards,
                manifest,
                tokens_column=tokens,
                overwrite=True,
                num_workers=0,
                storage_options=storage_options,
                settings=IndexSettings(pack=pack),
            )
        name = manifest.relative_to(manifest.parents[1])
        say(f"indexed {name}: {built.num_samples:,} samples, {built.num_blocks:,} blocks")


def prepare_large(folders: Folders, scale: float, say: Callable[[str], None]) -> None:
    """Writes the two large blocks of the memory suite: 1.2 GB and 2 GB."""
    for name, write in (("big-group", data.write_big_group), ("big-frame", data.write_big_frame)):
        if write(folders.data / "large" / name, scale):
            say(f"wrote {name}")
        write_manifest(str(folders.data / "large" / name), folders.data / "large" / f"{name}.manifest.parquet", say)


def prepare_many(folders: Folders, scale: float, say: Callable[[str], None]) -> None:
    """Writes the 10,000 shards of 100 blocks for the time to the first batch."""
    if data.write_many(folders.data / "many" / "parquet", scale):
        say("wrote the many shards")
    write_manifest(str(folders.data / "many" / "parquet"), folders.data / "many" / "parquet.manifest.parquet", say)


def prepare_store(folders: Folders, loads: Sequence[str], say: Callable[[str], None]) -> None:
    """Indexes the Parquet shards as the bench's own object store shows them."""
    with RangeServer(folders.data, latency_s=0.0) as server:
        for name in loads:
            shards = sorted((folders.data / name / "parquet").glob("*.parquet"))
            urls = [f"s3://bench/{name}/parquet/{path.name}" for path in shards]
            write_manifest(urls, folders.data / name / "store.manifest.parquet", say, server.storage_options)


def prepare_peers(
    folders: Folders, peers: Sequence[str], loads: Sequence[str], scale: float, say: Callable[[str], None]
) -> None:
    """Writes each installed peer's own format, in its own environment."""
    for peer in [*peers, "litdata-tokens"]:
        for name in loads if peer in peers else set(loads) & {"T"}:
            outcome = run_fresh(Case(f"prepare {peer} {name}", peer, name, options={PREPARE: scale}), folders)
            seconds = outcome.get("metrics", {}).get("prepare_s")
            say(f"{peer} {name}: {outcome.get('skipped') or outcome.get('error') or f'{seconds:.1f} s'}")
