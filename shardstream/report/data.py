"""What a manifest holds: sizes of shards and blocks, lengths of documents."""

from __future__ import annotations

import numpy as np

from shardstream.errors import shown_url
from shardstream.manifest import Manifest
from shardstream.report.binning import histogram, size
from shardstream.report.page import Figure, Section, Table, evenly

_MOST_SHARDS = 20
_MOST_LENGTHS = 20_000_000  # in one piece: 80 MB


def data_section(manifest: Manifest, *, name: str = "data", title: str = "Data") -> Section:
    """Returns the section of one manifest.

    Args:
        manifest: The manifest.
        name: Anchor of the section, and beginning of its figures' anchors.
        title: Its heading.
    """
    facts = (
        ("manifest", shown_url(manifest.path or "not saved")),
        ("root", shown_url(manifest.root)),
        ("fingerprint", manifest.fingerprint),
        ("shards", manifest.num_shards),
        ("blocks", manifest.num_blocks),
        ("samples", manifest.num_samples),
        ("bytes", size(int(manifest.num_bytes.sum()))),
        ("formats", ", ".join(sorted(set(manifest.formats)))),
    )
    return Section(name, title, facts=facts, figures=tuple(_figures(manifest, name)), tables=(_largest(manifest),))


def _figures(manifest: Manifest, name: str) -> list[Figure]:
    figures = []
    if manifest.num_bytes.any():
        figures.append(histogram(f"{name}-shards", "Sizes of shards", manifest.num_bytes, of="shards", unit="bytes"))
    if manifest.block_num_bytes.any():
        sizes = manifest.block_num_bytes
        figures.append(histogram(f"{name}-block-bytes", "Sizes of blocks", sizes, of="blocks", unit="bytes"))
    if manifest.num_blocks:
        rows = manifest.block_rows
        figures.append(histogram(f"{name}-block-rows", "Samples of blocks", rows, of="blocks", unit="samples"))
    lengths = _token_lengths(manifest)
    if lengths is not None:
        of = "documents" if len(lengths) == manifest.num_samples else "documents of some shards"
        figures.append(histogram(f"{name}-tokens", "Lengths of documents", lengths, of=of, unit="tokens"))
    return figures


def _token_lengths(manifest: Manifest) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    lists = manifest.lists
    if lists is None or "token_lengths" not in lists.names or manifest.num_samples == 0:
        return None
    if manifest.num_samples <= _MOST_LENGTHS:
        return lists.read_all(["token_lengths"])["token_lengths"]
    chosen = evenly(manifest.num_shards, max(1, manifest.num_shards * _MOST_LENGTHS // manifest.num_samples))
    return np.concatenate([lists.read(shard, ["token_lengths"])["token_lengths"] for shard in chosen])


def _largest(manifest: Manifest) -> Table:
    """The largest shards, which decide how long the slowest reader takes."""
    samples = manifest.shard_num_samples
    order = np.lexsort((np.arange(manifest.num_shards), -samples, -manifest.num_bytes))[:_MOST_SHARDS].tolist()
    blocks = np.diff(manifest.shard_first_block)
    rows = tuple(
        (manifest.urls[k], manifest.formats[k], size(int(manifest.num_bytes[k])), int(samples[k]), int(blocks[k]))
        for k in order
    )
    which = f"The {len(order)} largest of {manifest.num_shards:,} shards" if order else "No shards"
    return Table(which, ("shard", "format", "size", "samples", "blocks"), rows)
