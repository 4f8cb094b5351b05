"""Packed sequences: every token of every run is in them, each a target once; and how much of them is padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardstream.fitting import num_best_fit, num_first_fit
from shardstream.manifest import Manifest
from shardstream.packing import Packed, PackedOrder
from shardstream.plan import EpochPlan, Plan

_SLICE = 1 << 18
_MOST_SLICES = 16
_MOST_SHARDS = 8


@dataclass(frozen=True)
class PackingFigures:
    """What packing makes of a data set.

    Attributes:
        num_sequences: Sequences of an epoch.
        num_tokens: Tokens in them, ends of documents included; where the parts of a long document overlap by one, that
            is not counted.
        num_without_tokens: Rows without tokens: empty documents and nulls; None where they were not counted.
        padding: Share of the sequences' places that hold no token.
        padding_best_fit: In whole mode: the same in the shards that were looked at.
        padding_first_fit: What first fit would leave empty in these shards.
    """

    num_sequences: int
    num_tokens: int
    num_without_tokens: int | None
    padding: float
    padding_best_fit: float | None = None
    padding_first_fit: float | None = None


def check_tokens(here: EpochPlan) -> tuple[list[str], str]:
    """Follows the line from sequence to sequence: each goes on where the one before ended, through whole runs.

    Args:
        here: An epoch of packed sequences; what its order returns as pieces is what is checked.

    Returns:
        What is wrong, and what was shown.
    """
    order = here.order
    assert isinstance(order, PackedOrder)  # noqa: S101 - it is for such epochs
    num_sequences = here.deal.num_positions
    starts = np.arange(0, num_sequences, _SLICE)
    if len(starts) > _MOST_SLICES:
        starts = starts[np.linspace(0, len(starts) - 1, _MOST_SLICES).astype(np.int64)]
    faults: list[str] = []
    num_followed = 0
    for start in starts.tolist():
        end = min(start + _SLICE, num_sequences)
        num_followed += end - start
        faults += _follow(order, start, end, is_whole=end - start == num_sequences)
    unit = "tokens" if order.packed.packing.is_line else "sequences"
    what = (
        f"tokens: {num_followed} of {num_sequences} sequences followed along the line, {unit} of every run there once"
    )
    return [f"epoch {here.epoch}: {fault}" for fault in faults], what


def _follow(order: PackedOrder, start: int, end: int, *, is_whole: bool) -> list[str]:
    pieces = order.pieces(np.arange(start, end))
    run = (pieces.block << 32) | pieces.run
    begin, stop = pieces.begin.copy(), pieces.end
    if order.packed.packing.is_line:  # the first token of a sequence is the last target of the one before
        begin[np.flatnonzero(np.diff(pieces.sequence, prepend=-1))] += 1
    kept = begin < stop
    run, begin, stop, block = run[kept], begin[kept], stop[kept], pieces.block[kept]
    if not len(run):
        return []
    length = order.packed.run_lengths[order.block_first_run[block] + pieces.run[kept]]
    changes = run[1:] != run[:-1]
    faults = []
    if np.any(np.where(changes, stop[:-1] != length[:-1], stop[:-1] != begin[1:])):
        faults.append("a sequence does not begin where the one before ended: tokens are lost or come twice")
    if np.any(changes & (begin[1:] != 0)):
        faults.append("a run is entered behind its first token")
    if 1 + int(changes.sum()) != len(np.unique(run)):
        faults.append("a run is met twice on the line")
    if is_whole and int((stop - begin).sum()) != order.packed.num_places - order.packed.packing.is_line:
        faults.append("not every token of the line is a target once")
    return faults


# -------------------------------------------------------------------------------------------------------- figures


def packing_figures(plan: Plan) -> PackingFigures | None:
    """Returns what packing makes of a plan's data; None if nothing is packed."""
    packed, manifest = plan.packed, plan.manifest
    if packed is None:
        return None
    names = ["run_num_tokens", "run_num_documents", "token_lengths"]
    lists = {} if manifest.lists is None else manifest.lists.read_all(names)
    num_tokens, num_without = packed.num_places, None
    if lists:
        num_tokens = int(lists["run_num_tokens"].sum())
        num_tokens += int(lists["run_num_documents"].sum()) * (packed.packing.eos_id is not None)
        num_without = int((lists["token_lengths"] == 0).sum())
    places = packed.num_sequences * (packed.packing.sequence_length + 1)
    if packed.packing.is_line:  # sequences overlap by one token
        places = packed.num_sequences * packed.packing.sequence_length + 1
    best, first = _fits(manifest, packed) if packed.packing.mode == "whole" and lists else (None, None)
    padding = 1.0 - num_tokens / max(places, 1)
    return PackingFigures(packed.num_sequences, num_tokens, num_without, max(0.0, padding), best, first)


def _fits(manifest: Manifest, packed: Packed) -> tuple[float, float]:
    """Padding of best fit decreasing and of first fit, run by run, in some shards spread over the data."""
    assert manifest.lists is not None  # noqa: S101 - the caller has looked
    length, eos = packed.packing.sequence_length, packed.packing.eos_id is not None
    num_tokens = best = first = 0
    for shard in np.unique(np.linspace(0, manifest.num_shards - 1, _MOST_SHARDS).astype(np.int64)).tolist():
        lists = manifest.lists.read(shard, ["token_lengths", "run_num_documents"])
        lengths, num_documents = lists["token_lengths"].astype(np.int64), iter(lists["run_num_documents"].tolist())
        begin = 0
        blocks = slice(*manifest.shard_first_block[shard : shard + 2].tolist())
        sizes = zip(manifest.block_rows[blocks].tolist(), manifest.block_run_rows[blocks].tolist(), strict=True)
        for rows, run_rows in sizes:
            for row in range(begin, begin + rows, run_rows):
                run = lengths[row : min(row + run_rows, begin + rows)]
                filled = run[run > 0]
                run = np.concatenate((filled, np.zeros(next(num_documents) - len(filled), np.int64))) + eos
                num_tokens += int(run.sum())
                best += num_best_fit(run, length)
                first += num_first_fit(run, length)
            begin += rows
    return tuple(1.0 - num_tokens / max(num * (length + 1), 1) for num in (best, first))  # type: ignore[return-value]
