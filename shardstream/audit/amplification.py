"""Read amplification: how often blocks are opened, over all ranks and workers, for each block there is.

A reader is a worker of a rank (or the rank's main process without workers). It opens a block for each visit (a stretch
of a lane in one block) of which it reads a row, and keeps it open until its last one. So opens are the distinct pairs
of visit and reader. Where lanes and global batch divide each other the pairs are counted by arithmetic, exactly;
else by dealing everything, up to a size. Without blocks (``shuffle="full"``, ``"torch"``) nothing stays open from one
micro-batch to the next, and the distinct blocks of each micro-batch are counted, in some windows where there are many.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, expm1, gcd, log1p

import numpy as np

from shardstream.audit.simulate import window_rows
from shardstream.audit.visits import Visits
from shardstream.deal import Deal
from shardstream.permutation import Int64Array
from shardstream.plan import Plan

_MOST_POSITIONS = 1 << 22  # dealt one by one up to here
_SLICE = 1 << 20
_NUM_WINDOWS = 64


@dataclass(frozen=True)
class ReadCost:
    """What reading an epoch costs.

    Attributes:
        num_blocks: Blocks of the manifest.
        num_opens: How often they are opened over all ranks and workers; None where it is not known.
        amplification: ``num_opens / num_blocks``; 1.0 is best.
        how: How it was found.
        open_runs: Most runs that a reader holds open at a time: one for each lane that it reads from.
        open_num_bytes: Those runs' compressed bytes, were all as large as the largest; None where sizes are unknown.
        advice: What would lower the amplification, each with its figures.
    """

    num_blocks: int
    num_opens: float | None
    amplification: float | None
    how: str
    open_runs: int | None
    open_num_bytes: int | None
    advice: tuple[str, ...] = ()


def read_cost(plan: Plan, num_readers: int = 1, epoch: int = 0) -> ReadCost:
    """Computes how often a whole epoch opens blocks.

    Args:
        plan: The plan.
        num_readers: Workers of each rank; 1 for none.
        epoch: Which epoch; with ``tail="continue"`` as if it began with a window.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=9, blocks_per_shard=57, rows_per_block=128)
        >>> cost = read_cost(Plan.make(manifest, batch_size=8, world_size=8, lanes=64))
        >>> round(cost.amplification, 2), round(1 + (64 - 1) / manifest.num_blocks, 2)
        (1.12, 1.12)
    """
    here = plan.epoch(epoch)
    if isinstance(plan.shuffle, str):
        num_opens, how = _opens_without_blocks(plan, epoch)
        return _cost(plan, num_opens, how, open_runs=plan.batch_size)
    visits, steady = Visits(here.order), _steady_readers(here.deal, num_readers)
    if steady is not None:
        num_opens = _opens_by_arithmetic(visits, here.deal, num_readers, steady)
        return _cost(plan, num_opens, "exact, by arithmetic", open_runs=_most_lanes(here.deal, num_readers))
    if plan.num_positions <= _MOST_POSITIONS:
        pairs = _pairs(visits, here.deal, num_readers, 0, here.deal.num_whole_windows + 1)
        return _cost(plan, len(pairs), "exact, by dealing every row", open_runs=_most_lanes(here.deal, num_readers))
    how = f"unknown: neither of {plan.lanes} lanes and a global batch of {plan.global_batch} divides the other"
    return _cost(plan, None, how, open_runs=None)


def estimated_amplification(plan: Plan, num_readers: int = 1) -> float:
    """Estimates the amplification as if blocks were equal and lanes long: in no time, however many blocks there are.

    Args:
        plan: The plan.
        num_readers: Workers of each rank; 1 for none.

    Example:
        >>> from shardstream.manifest import Manifest
        >>> manifest = Manifest.synthetic(num_shards=9, blocks_per_shard=57, rows_per_block=128)
        >>> plan = Plan.make(manifest, batch_size=8, world_size=8, lanes=64)
        >>> round(estimated_amplification(plan), 2), round(estimated_amplification(plan, 2), 2)
        (1.12, 2.25)
    """
    num_blocks, num_positions = plan.manifest.num_blocks, plan.num_positions
    if isinstance(plan.shuffle, str):  # every micro-batch opens the blocks of its rows
        missed = plan.batch_size * log1p(-1 / num_blocks) if num_blocks > 1 else -float("inf")
        return ceil(num_positions / plan.batch_size) * -expm1(missed)
    cuts = plan.lanes - 1
    if plan.shuffle and plan.manifest.has_long_blocks:  # lanes have phases
        cuts += plan.lanes
    num_visits = num_blocks + cuts
    num_rows = num_positions / num_visits
    return (
        num_visits / num_blocks * max(1.0, min(num_rows, _readers_of_lane(plan.epoch(0).deal, num_readers, num_rows)))
    )


def _readers_of_lane(deal: Deal, num_readers: int, num_rows: float) -> float:
    """How many readers share a visit of so many rows, in the mean over lanes."""
    if deal.lanes == 1:
        return deal.world_size * min(num_readers, ceil(num_rows / (deal.world_size * deal.batch_size)))
    period = _steady_readers(deal, num_readers)
    if period is None:  # the borders of ranks, and of their micro-batches, cut lanes
        ranks, slots = (1 + (num - 1) / deal.lanes for num in (deal.world_size, deal.world_size * deal.accumulate))
        return min(ranks * num_readers, slots * num_readers / gcd(deal.accumulate, num_readers))
    if deal.lanes > deal.global_batch:
        return period * deal.global_batch / deal.lanes
    lane = np.arange(deal.lanes)
    return float(
        _distinct_readers(deal, num_readers, lane, 0 * lane, 0 * lane + period * deal.global_batch // deal.lanes).mean()
    )


def _cost(plan: Plan, num_opens: float | None, how: str, open_runs: int | None) -> ReadCost:
    manifest = plan.manifest
    amplification = None if num_opens is None else num_opens / manifest.num_blocks
    runs = -(-manifest.block_rows // manifest.block_run_rows)
    largest = int((manifest.block_num_bytes // runs).max(initial=0))
    num_bytes = open_runs * largest if open_runs is not None and largest else None
    opens = None if num_opens is None else float(num_opens)
    return ReadCost(manifest.num_blocks, opens, amplification, how, open_runs, num_bytes)


# ----------------------------------------------------------------------------------------------------- row by row


def _readers(deal: Deal, num_readers: int, begin: int, end: int) -> tuple[Int64Array, Int64Array]:
    """Deals windows ``begin`` .. ``end - 1``: each row's position, and its reader ``rank * num_readers + worker``."""
    rows = window_rows(deal, begin, end)
    new = rows.positions >= deal.start + rows.window * deal.global_batch  # "repeat" reads the first ones again
    return rows.positions[new], (rows.rank * num_readers + rows.batch_index % num_readers)[new]


def _pairs(visits: Visits, deal: Deal, num_readers: int, begin: int, end: int) -> Int64Array:
    """Returns the distinct pairs of visit and reader in some windows, coded as one number each."""
    positions, readers = _readers(deal, num_readers, begin, end)
    here = positions < deal.num_positions  # what lies beyond is the next epoch's
    return np.unique(visits.of_positions(positions[here]) * (deal.world_size * num_readers) + readers[here])


# -------------------------------------------------------------------------------------------------- by arithmetic


def _steady_readers(deal: Deal, num_readers: int) -> int | None:
    """Returns after how many windows a lane meets the same readers again; None where no rule is known."""
    every = num_readers // gcd(deal.accumulate, num_readers)
    if deal.global_batch % deal.lanes == 0:
        return every
    if deal.lanes % deal.global_batch == 0:
        windows = deal.lanes // deal.global_batch
        return windows * (num_readers // gcd(windows * deal.accumulate, num_readers))
    return None


def _opens_by_arithmetic(visits: Visits, deal: Deal, num_readers: int, period: int) -> int:
    """Counts the pairs in whole windows by rule, and those that only the last, partial window adds, row by row."""
    num_whole = deal.num_whole_windows
    num_turns = (num_whole * deal.global_batch - visits.lane + deal.lanes - 1) // deal.lanes  # in whole windows
    begin = visits.first_turn
    end = np.minimum(begin + visits.num_rows, num_turns)
    inside = end > begin
    lane, begin, end = visits.lane[inside], begin[inside], end[inside]
    if deal.lanes == 1:
        opens = _opens_of_stride(deal, num_readers, begin, end)
    elif deal.lanes > deal.global_batch:
        opens = np.minimum(end - begin, period * deal.global_batch // deal.lanes)
    else:
        opens = _opens_of_shares(deal, num_readers, period, (lane, begin, end))
    # A visit of `period` windows has met all its readers: the windows before these add none.
    before = _pairs(visits, deal, num_readers, max(0, num_whole - period), num_whole)
    both = _pairs(visits, deal, num_readers, max(0, num_whole - period), num_whole + 1)
    return int(opens.sum()) + len(both) - len(before)


def _opens_of_stride(deal: Deal, num_readers: int, begin: Int64Array, end: Int64Array) -> Int64Array:
    """One lane, dealt in turn: micro-batch q of all ranks is a stretch of it, read by their workers q % W."""
    ranks, stretch = deal.world_size, deal.world_size * deal.batch_size
    first, last = begin // stretch, (end - 1) // stretch
    at_begin = np.minimum(ranks, np.minimum(end, (first + 1) * stretch) - begin)
    at_end = np.minimum(ranks, end - last * stretch)
    between = last - first - 1
    # With exactly W - 1 between, first and last are of one worker: ranks from the end and from the beginning meet.
    ends = np.where(between == num_readers - 1, np.minimum(ranks, at_begin + at_end), at_begin + at_end)
    opens = np.where(between < 0, at_begin, between * ranks + ends)
    return np.where(between >= num_readers, ranks * num_readers, opens)


def _opens_of_shares(
    deal: Deal, num_readers: int, period: int, stretches: tuple[Int64Array, Int64Array, Int64Array]
) -> Int64Array:
    """Lanes that divide the global batch: each has G/L consecutive places of a window, cut where micro-batches end."""
    lane, begin, end = stretches
    turns = deal.global_batch // deal.lanes
    whole = end - begin >= (period + 1) * turns - 1  # holds `period` whole windows
    opens = np.empty(len(lane), np.int64)
    all_lanes = np.arange(deal.lanes)
    of_lane = _distinct_readers(deal, num_readers, all_lanes, 0 * all_lanes, 0 * all_lanes + period * turns)
    opens[whole] = of_lane[lane[whole]]
    short = np.flatnonzero(~whole)
    at_once = max(1, _SLICE // ((period + 1) * (turns // deal.batch_size + 2)))
    for first in range(0, len(short), at_once):
        these = short[first : first + at_once]
        opens[these] = _distinct_readers(deal, num_readers, lane[these], begin[these], end[these])
    return opens


def _slots(deal: Deal, lane: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The micro-batches of a window, counted over all ranks, that read of a lane: the first, and how many."""
    turns = deal.global_batch // deal.lanes
    first = lane * turns // deal.batch_size
    return first, ((lane + 1) * turns - 1) // deal.batch_size - first + 1


def _piece(deal: Deal, lane: Int64Array, turn: Int64Array) -> Int64Array:
    """Numbers the stretches of a lane's turns that one micro-batch reads."""
    turns = deal.global_batch // deal.lanes
    window, place = np.divmod(turn, turns)
    first, per_window = _slots(deal, lane)
    return window * per_window + (lane * turns + place) // deal.batch_size - first


def _distinct_readers(deal: Deal, num_readers: int, lane: Int64Array, begin: Int64Array, end: Int64Array) -> Int64Array:
    """Counts the readers of each stretch of turns: int64[num_stretches]."""
    first_piece = _piece(deal, lane, begin)
    num_pieces = _piece(deal, lane, end - 1) - first_piece + 1
    stretch = np.repeat(np.arange(len(lane)), num_pieces)
    piece = first_piece[stretch] + np.arange(len(stretch)) - (np.cumsum(num_pieces) - num_pieces)[stretch]
    first_slot, per_window = _slots(deal, lane[stretch])
    window, place = np.divmod(piece, per_window)
    rank, micro = np.divmod(first_slot + place, deal.accumulate)
    reader = rank * num_readers + (window * deal.accumulate + micro) % num_readers
    num_all = deal.world_size * num_readers
    pairs = np.sort(stretch * num_all + reader)  # not np.unique, which imports numpy.ma: 12 ms before the first batch
    is_new = np.append(True, np.diff(pairs) != 0)[: len(pairs)]
    opens: Int64Array = np.bincount(pairs[is_new] // num_all, minlength=len(lane))
    return opens


def _most_lanes(deal: Deal, num_readers: int) -> int:
    """Returns from how many lanes a reader reads at most, looking at the windows after which readers recur."""
    period = _steady_readers(deal, num_readers) or deal.lanes * num_readers
    begin = min(_MOST_POSITIONS // deal.global_batch, period, deal.num_whole_windows)
    positions, readers = _readers(deal, num_readers, 0, max(begin, 1))
    pairs = np.unique(readers * deal.lanes + positions % deal.num_positions % deal.lanes)
    return int(np.bincount(pairs // deal.lanes).max(initial=0))


# ------------------------------------------------------------------------------------------------- without blocks


def _opens_without_blocks(plan: Plan, epoch: int) -> tuple[float, str]:
    """Counts the distinct blocks of each micro-batch."""
    deal = plan.epoch(epoch).deal
    at_once = max(1, _SLICE // plan.global_batch)
    stretches = [(begin, min(begin + at_once, deal.num_windows)) for begin in range(0, deal.num_windows, at_once)]
    if plan.num_positions > _MOST_POSITIONS:
        stretches = [(w, w + 1) for w in range(0, deal.num_windows, -(-deal.num_windows // _NUM_WINDOWS))]
    num_opens = 0
    for begin, end in stretches:
        rows = window_rows(deal, begin, end)
        block = plan.locate(epoch, rows.positions).block
        micro_batch = rows.batch_index * plan.world_size + rows.rank
        num_opens += len(np.unique(micro_batch * plan.manifest.num_blocks + block))
    num_seen = sum(end - begin for begin, end in stretches)
    if num_seen == deal.num_windows:
        return num_opens, "exact, by dealing every row"
    return num_opens * deal.num_windows / num_seen, f"estimated from {num_seen} of {deal.num_windows} windows"
