"""Data sets in memory for tests of packing: manifests of any layout, whose tokens say where they come from."""

from __future__ import annotations

import numpy as np

from shardstream.columns import Rows, Slices
from shardstream.order import EpochOrder
from shardstream.packed_run import packed_run
from shardstream.packing import Packed, PackedOrder, num_runs

TOKENS_A_SAMPLE = 1000


def tokens_of(sample_id, num_tokens):
    """Tokens that name their sample and their place in it."""
    return sample_id * TOKENS_A_SAMPLE + np.arange(num_tokens)


def rows_of_run(manifest, lengths, block, run):
    """A run as a format reads it."""
    first = int(manifest.block_start[block]) + run * int(manifest.block_run_rows[block])
    end = min(first + int(manifest.block_run_rows[block]), int(manifest.block_start[block + 1]))
    here = lengths[first:end]
    sizes = np.array([num or 0 for num in here], np.int64)
    values = np.concatenate([np.zeros(0, np.int64), *[tokens_of(first + k, num or 0) for k, num in enumerate(here)]])
    nulls = np.array([num is None for num in here])
    column = Slices(values, np.cumsum(sizes) - sizes, sizes, "list", nulls if nulls.any() else None)
    return first, Rows(len(here), {"tokens": column})


def run_of(order: EpochOrder, lengths, packing, block, run):
    first, rows = rows_of_run(order.manifest, lengths, block, run)
    return packed_run(rows, order.run_rows(block, run), first, packing)


def order_of(manifest, lengths, packing, *, seed=0, epoch=0, lanes=1, shuffle=True):
    """The packed order of an epoch, its runs counted by reading them."""
    rows = EpochOrder(manifest, seed, epoch, lanes, shuffle)
    runs = [(block, run) for block, num in enumerate(num_runs(manifest).tolist()) for run in range(num)]
    counts = [run_of(rows, lengths, packing, block, run).num_places for block, run in runs]
    return PackedOrder(rows, Packed(packing, np.array(counts, np.int64)))


def sequences_of(order: PackedOrder, lengths, sequence_ids):
    """For each sequence the tokens it holds, as the column's numbers (and ends of documents)."""
    pieces = order.pieces(np.asarray(sequence_ids, np.int64))
    found = [[] for _ in sequence_ids]
    for sequence, block, run, begin, end in zip(*(array.tolist() for array in pieces), strict=True):
        packed = run_of(order.samples, lengths, order.packed.packing, block, run)
        if packed.sequence_start is not None:
            begin, end = packed.sequence_start[[begin, end]].tolist()  # noqa: PLW2901 - from sequences to tokens
        found[sequence] += packed.tokens[begin:end].tolist()
    return found
