"""The proof by arithmetic, for what is too large to enumerate: what repeats is checked once, and that it repeats.

It says on how much of the data each claim was checked. A fault in a place that was not looked at is not found; a fault
in a rule is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import gcd

import numpy as np

from shardstream.audit.enumeration import Findings, named, sample_name, unequal, wrong_claims
from shardstream.audit.report import EpochCounts, RankCounts
from shardstream.audit.simulate import passes
from shardstream.audit.tails import expected_reads, expected_tail
from shardstream.cursor import Cursor
from shardstream.deal import Deal
from shardstream.order import EpochOrder, lane_sizes
from shardstream.packing import PackedOrder
from shardstream.permutation import Int64Array
from shardstream.plan import EpochPlan, Plan

_MOST_POSITIONS = 1 << 28  # dealt in full up to here, in slices beyond
_MOST_LANE_POSITIONS = 1 << 27  # lanes inverted in full up to here, in slices beyond
_MOST_CLASS_POSITIONS = 1 << 24
_MOST_LOCATED = 1 << 23  # located in full up to here by shuffle="full", in slices beyond
_SLICE = 1 << 20
_NUM_SAMPLES = 64  # runs, windows and slices looked at where not all are


def check_by_arithmetic(plan: Plan, start: Cursor, num_epochs: int, num_readers: int) -> Findings:
    """Proves coverage and disjointness from the structure of order and deal.

    Args:
        plan: The plan; whatever its orders and deals return is what is checked.
        start: Where the audit begins.
        num_epochs: How many epochs.
        num_readers: Workers of each rank, 1 for none.
    """
    violations: list[str] = []
    proofs: dict[str, None] = {}  # in order, each once
    epochs, ranks = [], np.zeros((plan.world_size, 5), np.int64)
    walked = list(passes(plan, start, num_epochs))
    for here in walked:
        for faults, proof in (
            check_epoch_order(here),
            _check_whole_windows(here),
            _check_tail(here),
            _check_workers(plan, here, num_readers),
        ):
            violations += [f"epoch {here.epoch}: {fault}" for fault in faults]
            proofs[proof] = None
        violations += wrong_claims(here)
        rank_counts = _rank_counts(here.deal)
        violations += unequal(here, rank_counts[:, 1], rank_counts[:, 2] + rank_counts[:, 3])
        ranks += rank_counts
        epochs.append(_epoch_counts(here, rank_counts))
    by_rank = [RankCounts(rank, *row) for rank, row in enumerate(ranks.tolist())]
    return Findings(violations, list(proofs), epochs, by_rank)


def _evenly(num_things: int, at_most: int = _NUM_SAMPLES) -> list[int]:
    """Returns up to ``at_most`` indices below ``num_things``, evenly spread, the first and the last among them."""
    return sorted(set(np.linspace(0, num_things - 1, min(num_things, at_most)).astype(np.int64).tolist()))


# ------------------------------------------------------------------------------------------------------------- order


def check_epoch_order(here: EpochPlan) -> tuple[list[str], str]:
    """Shows that the order of an epoch is a bijection, without locating every position.

    Args:
        here: The epoch.

    Returns:
        What is wrong, and what was shown.
    """
    if isinstance(here.order.shuffle, str):
        return _check_order_without_blocks(here)
    faults = _check_line(here)
    lane_faults, num_inverted = _check_lanes(here)
    is_sound = not faults and not lane_faults
    run_faults, num_runs = _check_runs(here, here.order) if is_sound and isinstance(here.order, EpochOrder) else ([], 0)
    runs = -(-here.order.manifest.block_rows // here.order.manifest.block_run_rows)
    proof = (
        f"order: bijection by construction: all {here.order.manifest.num_blocks} blocks stand on the line once; the "
        f"cut into {here.order.lanes} lane(s) was inverted at {num_inverted} of {here.deal.num_positions} positions; "
        f"{num_runs} of {int(runs.sum())} runs located row by row, the others are sorted indices by the same rule"
    )
    return faults + lane_faults + run_faults, proof


def _check_line(here: EpochPlan) -> list[str]:
    """Each block once, end to end."""
    manifest, blocks, line_start = here.order.manifest, here.order.line_blocks, here.order.line_start
    if len(blocks) != manifest.num_blocks or blocks.min() < 0 or blocks.max() >= manifest.num_blocks:
        return ["the order is no bijection: the line does not hold the manifest's blocks"]
    times = np.bincount(blocks, minlength=manifest.num_blocks)
    wrong = np.flatnonzero(times != 1)
    texts = (f"the order is no bijection: block {b} stands on the line {times[b]} times" for b in wrong.tolist())
    faults = list(named(texts, len(wrong)))
    if isinstance(here.order, PackedOrder):
        return faults  # sequences are cut from the line of tokens, wherever its blocks begin
    if line_start[0] != 0 or (np.diff(line_start) != manifest.block_rows[blocks]).any():
        faults.append("the order is no bijection: blocks do not stand end to end on the line")
    return faults


def _lane_turns(here: EpochPlan, line_index: Int64Array) -> Int64Array:
    """Returns the position that must stand at each place of the line: the lanes' cut, inverted."""
    lanes, phases = here.order.lanes, here.order.lane_cut.phases
    sizes = lane_sizes(here.deal.num_positions, lanes)
    begin = np.cumsum(sizes) - sizes
    lane = np.searchsorted(begin, line_index, side="right") - 1
    turn = line_index - begin[lane]
    if phases is not None:
        turn = (turn - phases[lane]) % sizes[lane]
    return turn * lanes + lane


def _check_lanes(here: EpochPlan) -> tuple[list[str], int]:
    """A map of 0..N-1 into itself that has a left inverse is a bijection."""
    num_positions = here.deal.num_positions
    slices: Sequence[int] = range(0, num_positions, _SLICE)
    if num_positions > _MOST_LANE_POSITIONS:
        slices = [slices[k] for k in _evenly(len(slices), _MOST_LANE_POSITIONS // _SLICE)]
    num_inverted = 0
    for first in slices:
        positions = np.arange(first, min(first + _SLICE, num_positions))
        num_inverted += len(positions)
        line_index = here.order.lane_cut.line_index(positions)
        if line_index.min() < 0 or line_index.max() >= num_positions:
            return [f"the order is no bijection: positions from {first} on leave the line"], num_inverted
        astray = np.flatnonzero(_lane_turns(here, line_index) != positions)
        if len(astray):
            what = f"the order is no bijection: the lanes' cut cannot be inverted at position {first + int(astray[0])}"
            return [what], num_inverted
    return [], num_inverted


def _check_runs(here: EpochPlan, order: EpochOrder) -> tuple[list[str], int]:
    """The positions of a run hold each of its rows once."""
    manifest = order.manifest
    faults, slots = [], _evenly(manifest.num_blocks)
    for k, slot in enumerate(slots):
        block = int(order.line_blocks[slot])
        run_rows, num_rows = int(manifest.block_run_rows[block]), int(manifest.block_rows[block])
        run = k % -(-num_rows // run_rows)
        rows = np.arange(run * run_rows, min((run + 1) * run_rows, num_rows))
        positions = _lane_turns(here, order.line_start[slot] + rows)
        located = order.rows(positions)
        ids = order.sample_ids(positions)
        if (located.block != block).any() or (located.run != run).any() or (np.sort(located.row) != rows).any():
            faults.append(f"the order is no bijection: run {run} of block {block} does not hold each of its rows once")
        elif (np.sort(ids) != manifest.block_start[block] + rows).any():
            faults.append(f"the order is no bijection: wrong sample ids in run {run} of block {block}")
    return faults, len(slots)


def _check_order_without_blocks(here: EpochPlan) -> tuple[list[str], str]:
    """For ``"full"`` and ``"torch"``: every sample once, in one mark a sample, or distinct in slices."""
    num_positions = here.deal.num_positions
    slices: Sequence[int] = range(0, num_positions, _SLICE)
    if num_positions > _MOST_LOCATED and here.order.shuffle == "full":
        slices = [slices[k] for k in _evenly(len(slices), _MOST_LOCATED // _SLICE)]
    seen = np.zeros(num_positions, np.bool_)
    num_located = 0
    for first in slices:
        ids = here.order.sample_ids(np.arange(first, min(first + _SLICE, num_positions)))
        num_located += len(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < num_positions:
            return [f"the order is no bijection: positions from {first} on lead outside the samples"], ""
        seen[ids] = True
    faults = []
    if (num_missing := num_located - int(seen.sum())) > 0:
        faults = [f"the order is no bijection: {num_located} positions hold {num_missing} samples a second time"]
    how = "each sample found once" if num_located == num_positions else "distinct there; a bijection by construction"
    return faults, f"order: {num_located} of {num_positions} positions located, {how}"


# -------------------------------------------------------------------------------------------------------------- deal


def _first(deal: Deal, window: int) -> int:
    return deal.start + window * deal.world_size * deal.batch_size * deal.accumulate


def _window(deal: Deal, window: int) -> Int64Array:
    """int64[world_size, batch_size * accumulate]: a whole window, from its first position on."""
    return np.concatenate([deal.parts(rank, window, 1) for rank in range(deal.world_size)]) - _first(deal, window)


def _check_whole_windows(here: EpochPlan) -> tuple[list[str], str]:
    """Windows whose first position is the same modulo the lanes are dealt alike; each such class is enumerated."""
    deal = here.deal
    global_batch = deal.world_size * deal.batch_size * deal.accumulate
    num_windows = (deal.num_positions - deal.start) // global_batch
    if deal.num_whole_windows != num_windows:
        return [f"{deal.num_whole_windows} whole windows, expected {num_windows}"], ""
    num_classes = min(deal.lanes // gcd(global_batch, deal.lanes), num_windows)
    if num_classes == 0:
        return [], "deal: no whole window"
    if num_classes > 1:
        return _check_classes(deal, num_windows, num_classes)
    faults = _permuted(deal, 0, pattern := _window(deal, 0))
    at_once = max(1, _SLICE // (deal.batch_size * deal.accumulate))
    slices: Sequence[int] = range(0, num_windows, at_once)
    if num_windows * global_batch > _MOST_POSITIONS:
        slices = [slices[k] for k in _evenly(len(slices), max(2, _MOST_POSITIONS // global_batch // at_once))]
    num_dealt = 0
    for rank in range(deal.world_size):
        for begin in slices:
            num_here = min(at_once, num_windows - begin)
            parts = deal.parts(rank, begin, num_here)
            first = _first(deal, begin) + np.arange(num_here)[:, None] * global_batch
            num_dealt += num_here
            if parts.shape != (num_here, pattern.shape[1]):
                faults.append(f"rank {rank} is dealt {parts.shape[1]} positions of a window, not {pattern.shape[1]}")
                continue
            astray = np.flatnonzero((parts - first != pattern[rank]).any(axis=1))
            texts = (_not_as_others(deal, begin + w, rank, parts[w], pattern[rank]) for w in astray.tolist())
            faults += named(texts, len(astray))
    return faults, _all_windows(deal, num_dealt // deal.world_size, num_windows)


def _all_windows(deal: Deal, num_dealt: int, num_windows: int) -> str:
    return (
        f"deal: {num_dealt} of {num_windows} whole windows enumerated for all {deal.world_size} ranks: each holds its "
        f"{deal.world_size * deal.batch_size * deal.accumulate} positions once"
    )


def _not_as_others(deal: Deal, window: int, rank: int, part: Int64Array, pattern: Int64Array) -> str:
    """Says which positions a rank is given that belong to others, and which of its own it is not given."""
    own = pattern + _first(deal, window)
    more, less = np.setdiff1d(part, own)[:3].tolist(), np.setdiff1d(own, part)[:3].tolist()
    return f"window {window}, rank {rank}: dealt positions {more} of others, and not its own {less}"


def _permuted(deal: Deal, window: int, offsets: Int64Array) -> list[str]:
    """Checks that a window's parts are its positions, each once."""
    num_positions = deal.world_size * deal.batch_size * deal.accumulate
    flat = offsets.ravel()
    if len(flat) and (flat.min() < 0 or flat.max() >= num_positions):
        return [f"window {window}: positions from outside it were dealt"]
    times = np.bincount(flat, minlength=num_positions)
    wrong = np.flatnonzero(times != 1)
    first = _first(deal, window)
    texts = (f"window {window}: position {first + k} is dealt {times[k]} times" for k in wrong.tolist())
    return list(named(texts, len(wrong)))


def _check_classes(deal: Deal, num_windows: int, num_classes: int) -> tuple[list[str], str]:
    global_batch = deal.world_size * deal.batch_size * deal.accumulate
    num_looked_at = max(1, _MOST_CLASS_POSITIONS // (global_batch * deal.world_size))
    if num_windows <= num_looked_at:
        faults = [fault for window in range(num_windows) for fault in _permuted(deal, window, _window(deal, window))]
        return faults, _all_windows(deal, num_windows, num_windows)
    classes = _evenly(num_classes, num_looked_at)
    faults = []
    for window in classes:
        offsets = _window(deal, window)
        faults += _permuted(deal, window, offsets)
        last = window + (num_windows - 1 - window) // num_classes * num_classes
        if (_window(deal, last) != offsets).any():
            faults.append(f"window {last} is not dealt like window {window}, {last - window} windows before it")
    proof = (
        f"deal: windows repeat after {num_classes}; {len(classes)} of these enumerated for all {deal.world_size} "
        f"ranks, each holds its {global_batch} positions once; the rest are translates (the last of each is compared)"
    )
    return faults, proof


def _check_tail(here: EpochPlan) -> tuple[list[str], str]:
    """The last, partial window is enumerated: what it adds and leaves out is what the design says."""
    deal = here.deal
    first = _first(deal, deal.num_whole_windows)
    parts = [deal.part(deal.num_whole_windows, rank) for rank in range(deal.world_size)]
    positions = np.concatenate([part.positions for part in parts])
    is_padding = np.concatenate([part.is_padding for part in parts])
    real = positions[~is_padding]
    low = min(first, deal.world_size)  # what "repeat" may read again
    last = max(deal.num_positions, first + deal.world_size * deal.batch_size * deal.accumulate)
    if ((real < 0) | ((real >= low) & (real < first)) | (real >= last)).any():
        return ["the last window was dealt positions from outside it"], ""
    place = np.concatenate((np.arange(low), np.arange(first, last)))
    times = np.bincount(np.searchsorted(place, real), minlength=len(place))
    expected = expected_reads(deal, 0, low) - (place[:low] >= deal.start)  # those were read in whole windows
    expected = np.concatenate((expected, expected_reads(deal, first, last)))
    wrong = np.flatnonzero(times != expected)
    texts = (
        f"last window: {_name(here, int(place[k]))} is dealt {times[k]} times, expected {expected[k]}"
        for k in wrong.tolist()
    )
    faults = list(named(texts, len(wrong)))
    if int(is_padding.sum()) != expected_tail(deal).num_padding:
        faults.append(f"padding: {int(is_padding.sum())} rows flagged, expected {expected_tail(deal).num_padding}")
    return faults, f"tail {deal.tail!r}: the last, partial window enumerated for all ranks"


def _name(here: EpochPlan, position: int) -> str:
    if position >= here.deal.num_positions:
        return f"position {position - here.deal.num_positions} of the next epoch"
    return f"position {position}, {sample_name(here, int(here.order.sample_ids(np.array([position]))[0]))},"


# ----------------------------------------------------------------------------------------------------------- workers


def _check_workers(plan: Plan, here: EpochPlan, num_readers: int) -> tuple[list[str], str]:
    """Micro-batches of all ranks and workers at some places, the end among them, are pieces of the deal, in turn."""
    faults, num_checked = [], 0
    num_at_once = 2 * max(num_readers, here.deal.accumulate)
    for rank in range(plan.world_size):
        num_batches = here.deal.num_micro_batches(rank)
        for begin in sorted({max(0, b) for b in (0, num_batches // 2 - 1, num_batches - num_at_once)}):
            for worker in range(num_readers):
                stretch = range(begin, min(begin + num_at_once, num_batches))
                found, num_found = _check_stretch(plan, here, rank, (worker, num_readers), stretch)
                faults += found
                num_checked += num_found
    proof = (
        f"workers: {num_checked} micro-batches at begin, middle and end of the epoch compared with the deal for all "
        f"{plan.world_size} ranks x {num_readers} reader(s); between these, index % {num_readers} decides"
    )
    return list(named(faults, len(faults))), proof


def _check_stretch(
    plan: Plan, here: EpochPlan, rank: int, reader: tuple[int, int], stretch: range
) -> tuple[list[str], int]:
    """Compares what one worker yields of a stretch of its rank's micro-batches with the deal."""
    worker, num_readers = reader
    start, who = plan.cursor(here.epoch, here.deal.start), f"rank {rank} worker {worker}"
    batches = plan.micro_batches(rank, start, worker=worker, num_workers=num_readers, first_index=stretch.start)
    ends = (
        stretch.stop == here.deal.num_micro_batches(rank) and plan.tail != "continue"
    )  # then batches end by themselves
    got = list(takewhile(lambda batch: ends or batch.batch_index < stretch.stop, batches))
    wanted = [index for index in stretch if index % num_readers == worker]
    if [batch.batch_index for batch in got] != wanted:
        return [f"{who}: micro-batches {[batch.batch_index for batch in got][:5]} ..., expected {wanted[:5]} ..."], len(
            got
        )
    faults = []
    for batch in got:
        right = here.deal.micro_batch(rank, batch.batch_index)
        same = np.array_equal(batch.positions, right.positions) and np.array_equal(batch.is_padding, right.is_padding)
        if not same or batch.is_last_in_window != right.is_last:
            faults.append(f"{who}: micro-batch {batch.batch_index} is not the deal's")
    return faults, len(got)


# ------------------------------------------------------------------------------------------------------------ counts


def _rank_counts(deal: Deal) -> Int64Array:
    """int64[world_size, 5]: the numbers of ``RankCounts``."""
    counts = np.empty((deal.world_size, 5), np.int64)
    share = deal.batch_size * deal.accumulate
    num_left = (deal.num_positions - deal.start) % (deal.world_size * share)
    for rank in range(deal.world_size):
        part = deal.part(deal.num_whole_windows, rank)
        num_padding = int(part.is_padding.sum())
        dealt_at = rank + deal.world_size * np.arange(len(part.positions))  # with one lane, as "repeat" has
        num_repeated = int((dealt_at >= num_left).sum()) if deal.tail == "repeat" else 0
        num_samples = deal.num_whole_windows * share + len(part.positions) - num_padding
        num_steps = deal.num_whole_windows + bool(len(part.positions))
        counts[rank] = num_steps, deal.num_micro_batches(rank), num_samples, num_padding, num_repeated
    return counts


def _epoch_counts(here: EpochPlan, ranks: Int64Array) -> EpochCounts:
    tail = expected_tail(here.deal)
    _, _, num_samples, num_padding, num_repeated = ranks.sum(axis=0).tolist()
    num_steps = int(ranks[:, 0].max())
    return EpochCounts(here.epoch, num_steps, num_samples, num_padding, tail.num_dropped, num_repeated, tail.num_ahead)
