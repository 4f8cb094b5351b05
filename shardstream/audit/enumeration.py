"""The proof by enumeration: every micro-batch of every rank and worker is dealt and every sample counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardstream.audit.report import EpochCounts, RankCounts
from shardstream.audit.simulate import Dealt, columns, deal_out, passes
from shardstream.audit.tails import expected_reads, expected_tail
from shardstream.cursor import Cursor
from shardstream.deal import BoolArray
from shardstream.packing import PackedOrder
from shardstream.permutation import Int64Array
from shardstream.plan import EpochPlan, Plan

NUM_NAMED = 10  # of what is wrong, this many are named, the rest is counted


class Findings(NamedTuple):
    """What one way of proving found."""

    violations: list[str]
    proofs: list[str]
    epochs: list[EpochCounts]
    ranks: list[RankCounts]


def named(texts: Iterable[str], num_texts: int) -> Iterator[str]:
    """Yields the first few texts, and how many more there are."""
    for _, text in zip(range(NUM_NAMED), texts, strict=False):
        yield text
    if num_texts > NUM_NAMED:
        yield f"... and {num_texts - NUM_NAMED} more of the same kind"


def check_by_enumeration(plan: Plan, start: Cursor, num_epochs: int, num_readers: int) -> Findings:
    """Deals out everything and counts it.

    Args:
        plan: The plan; whatever its orders and deals return is what is checked.
        start: Where the audit begins.
        num_epochs: How many epochs.
        num_readers: Workers of each rank, 1 for none.
    """
    walked = list(passes(plan, start, num_epochs))
    dealt = columns(plan, deal_out(plan, start, num_epochs, num_readers))
    violations = [
        *(text for here in walked for text in check_order(here)),
        *_check_reads(plan, start, walked, dealt),
        *_check_windows(plan, start, dealt),
        *_check_workers(plan, dealt, num_readers),
        *_check_steps(plan, walked, dealt),
    ]
    proofs = [
        f"order: all {plan.num_positions} positions of {len(walked)} epoch(s) located, each sample found once",
        f"deal: all {len(dealt.rank)} micro-batches of {plan.world_size} rank(s) x {num_readers} reader(s) enumerated",
    ]
    return Findings(violations, proofs, _epoch_counts(plan, walked, dealt), _rank_counts(plan, dealt))


def check_order(here: EpochPlan) -> list[str]:
    """Locates every position of an epoch and finds the samples that are not there exactly once."""
    num_positions = here.deal.num_positions
    try:
        ids = here.order.sample_ids(np.arange(num_positions))
    except (IndexError, ValueError) as error:
        return [f"epoch {here.epoch}: the order cannot be followed: {error}"]
    if len(ids) != num_positions or (len(ids) and not 0 <= ids.min() <= ids.max() < num_positions):
        return [f"epoch {here.epoch}: the order leads outside the {num_positions} samples"]
    times = np.bincount(ids, minlength=num_positions)
    wrong = np.flatnonzero(times != 1)
    texts = (
        f"epoch {here.epoch}: the order is no bijection: {sample_name(here, k)} stands at {times[k]} positions"
        for k in wrong.tolist()
    )
    return list(named(texts, len(wrong)))


def sample_name(here: EpochPlan, sample_id: int) -> str:
    """Returns a sample's id, shard and row for messages."""
    if isinstance(here.order, PackedOrder):
        return f"sequence {sample_id}"
    manifest = here.order.manifest
    shard = int(manifest.shard_of_sample(np.array([sample_id]))[0])
    return f"sample {sample_id} ({manifest.urls[shard]}:{sample_id - int(manifest.first_sample[shard])})"


def _check_reads(plan: Plan, start: Cursor, walked: list[EpochPlan], dealt: Dealt) -> list[str]:
    """Every position once, apart from what the tail leaves out or repeats; padding as much as it should be."""
    num_positions, first = plan.num_positions, start.epoch * plan.num_positions
    expected = np.concatenate([expected_reads(here.deal, 0, num_positions) for here in walked])
    num_padding = sum(expected_tail(here.deal).num_padding for here in walked)
    if plan.tail == "continue":
        last = walked[-1]
        end = last.epoch * num_positions + last.deal.start + last.deal.num_windows * plan.global_batch - first
        expected = (np.arange(end) >= start.position).astype(np.int64)
    real = dealt.positions[~dealt.is_padding] - first
    inside = (real >= 0) & (real < len(expected))
    times = np.bincount(real[inside], minlength=len(expected))
    wrong = np.flatnonzero(times != expected)
    epochs = {here.epoch: here for here in walked}

    def text(place: int) -> str:
        epoch, position = divmod(place + first, num_positions)
        here = epochs.get(epoch, walked[-1]) if epoch in epochs else plan.epoch(epoch)
        sample = sample_name(here, int(here.order.sample_ids(np.array([position]))[0]))
        what = f"epoch {epoch}, position {position}, {sample}: read {times[place]} times, expected {expected[place]}"
        return what + _readers(dealt, place + first)

    texts = list(named(map(text, wrong.tolist()), len(wrong)))
    if not inside.all():
        texts.append(f"{int((~inside).sum())} rows were dealt from outside the audited epochs")
    if int(dealt.is_padding.sum()) != num_padding:
        texts.append(f"padding: {int(dealt.is_padding.sum())} rows flagged, expected {num_padding}")
    return texts


def _readers(dealt: Dealt, position: int) -> str:
    rows = np.flatnonzero((dealt.positions == position) & ~dealt.is_padding)[:4]
    batches = dealt.batch_of_row[rows] if len(rows) else rows
    who = [f"rank {dealt.rank[k]} worker {dealt.worker[k]} in window {dealt.window[k]}" for k in batches.tolist()]
    return f" ({', '.join(who)})" if who else ""


def _check_windows(plan: Plan, start: Cursor, dealt: Dealt) -> list[str]:
    """A window holds the global batch's positions whatever the topology, and its end is flagged once a rank."""
    origin = start.epoch * plan.num_positions + start.position
    texts = []
    if plan.tail == "continue":
        astray = dealt.window_start != origin + dealt.window * plan.global_batch
    else:
        per_epoch = dealt.window_start % plan.num_positions
        first = np.where(dealt.window_start // plan.num_positions == start.epoch, start.position, 0)
        astray = per_epoch != first + dealt.window * plan.global_batch
    if astray.any():
        texts.append(f"{int(astray.sum())} micro-batches say that their window begins where it does not")
    window_start = dealt.window_start[dealt.batch_of_row]
    outside = (dealt.positions < window_start) | (dealt.positions >= window_start + plan.global_batch)
    if plan.tail == "repeat":  # repeats the epoch's first positions in its last window
        outside &= dealt.positions >= (window_start // plan.num_positions + 1) * plan.num_positions
    if outside.any():
        k = int(np.flatnonzero(outside)[0])
        batch = int(dealt.batch_of_row[k])
        texts.append(
            f"{int(outside.sum())} rows lie outside their window, the first at position {dealt.positions[k]} "
            f"in the window at {dealt.window_start[batch]} of rank {dealt.rank[batch]}"
        )
    order = np.lexsort((dealt.micro, dealt.window_start, dealt.rank))
    last = _last_of_group(dealt.rank[order], dealt.window_start[order])
    if (dealt.is_last_in_window[order] != last).any():
        texts.append("is_last_in_window is not set on exactly the last micro-batch of each rank's windows")
    return texts


def _last_of_group(*keys: Int64Array) -> BoolArray:
    """bool[n]: whether the next entry of sorted keys differs, or there is none."""
    last = np.ones(len(keys[0]), np.bool_)
    last[:-1] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return last


def _check_workers(plan: Plan, dealt: Dealt, num_readers: int) -> list[str]:
    """The i-th micro-batch of a rank is made by worker i % W; none is skipped, made twice or too large."""
    texts = []
    if (dealt.worker != dealt.batch_index % num_readers).any():
        texts.append("a micro-batch is made by another worker than index % num_workers")
    by_pass = (dealt.window_start // plan.num_positions) * (plan.tail != "continue")
    order = np.lexsort((dealt.batch_index, by_pass, dealt.rank))
    group = np.stack((dealt.rank, by_pass))[:, order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = np.any(group[:, 1:] != group[:, :-1], axis=0)
    since = np.arange(len(order)) - np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    if (dealt.batch_index[order] != since).any():
        texts.append("the micro-batches of a rank are not numbered 0, 1, 2 ... over its workers")
    if len(order) and not 1 <= dealt.num_rows.min() <= dealt.num_rows.max() <= plan.batch_size:
        texts.append(f"a micro-batch has not between 1 and {plan.batch_size} rows")
    return texts


def _check_steps(plan: Plan, walked: list[EpochPlan], dealt: Dealt) -> list[str]:
    """Every rank makes the same steps, and as many as the deal said beforehand."""
    texts = []
    epoch_of = dealt.window_start // plan.num_positions
    for here in walked:
        mine = epoch_of == here.epoch
        batches = np.bincount(dealt.rank[mine], minlength=plan.world_size)
        said = np.array([here.deal.num_micro_batches(rank) for rank in range(plan.world_size)])
        if (batches != said).any():
            rank = int(np.flatnonzero(batches != said)[0])
            texts.append(
                f"epoch {here.epoch}: rank {rank} has {batches[rank]} micro-batches, the deal said {said[rank]}"
            )
        rows = np.bincount(dealt.rank[mine], weights=dealt.num_rows[mine], minlength=plan.world_size).astype(np.int64)
        texts += unequal(here, batches, rows)
        texts += wrong_claims(here)
        num_steps = len(np.unique(dealt.window_start[mine]))
        if num_steps != here.deal.num_windows:
            texts.append(f"epoch {here.epoch}: {num_steps} steps, the deal said {here.deal.num_windows}")
    return texts


def unequal(here: EpochPlan, num_micro_batches: Int64Array, num_rows: Int64Array) -> list[str]:
    """Names ranks with unequal work: none may be, except that ``tail="uneven"`` allows a difference of one.

    Args:
        here: The epoch.
        num_micro_batches: int64[world_size].
        num_rows: int64[world_size], rows of each rank, padding included.
    """
    allowed = int(here.deal.tail == "uneven")
    texts = []
    for what, numbers in (("micro-batches", num_micro_batches), ("samples", num_rows)):
        low, high = int(numbers.argmin()), int(numbers.argmax())
        if numbers[high] - numbers[low] > allowed:
            texts.append(
                f"epoch {here.epoch}: unequal steps: rank {high} has {numbers[high]} {what}, rank {low} {numbers[low]}"
            )
    return texts


def wrong_claims(here: EpochPlan) -> list[str]:
    """Compares the tail's counts that a deal states with what the design says."""
    deal, tail = here.deal, expected_tail(here.deal)
    claims = (
        ("padding", deal.num_padding, tail.num_padding),
        ("dropped", deal.num_dropped, tail.num_dropped),
        ("repeated", deal.num_repeated, tail.num_repeated),
    )
    return [
        f"epoch {here.epoch}: {what}: the deal says {n}, expected {right}" for what, n, right in claims if n != right
    ]


# ------------------------------------------------------------------------------------------------------------ counts


def _repeated(plan: Plan, dealt: Dealt) -> BoolArray:
    """bool[num_rows]: whether this real sample was read before in the same epoch, in the order of the deal."""
    batch = dealt.batch_of_row
    first_row = np.cumsum(dealt.num_rows) - dealt.num_rows
    offset = dealt.micro[batch] * plan.batch_size + np.arange(len(batch)) - first_row[batch]
    order = np.lexsort((dealt.rank[batch], offset, dealt.window_start[batch], dealt.positions, dealt.is_padding))
    again = np.zeros(len(batch), np.bool_)
    positions = dealt.positions[order]
    again[order[1:]] = positions[1:] == positions[:-1]
    return (again | (dealt.positions < dealt.window_start[batch])) & ~dealt.is_padding


def _epoch_counts(plan: Plan, walked: list[EpochPlan], dealt: Dealt) -> list[EpochCounts]:
    batch, again = dealt.batch_of_row, _repeated(plan, dealt)
    epoch_of_row = dealt.window_start[batch] // plan.num_positions
    counts = []
    for here in walked:
        rows = epoch_of_row == here.epoch
        ahead = rows & (dealt.positions >= (here.epoch + 1) * plan.num_positions)
        steps = np.unique(dealt.window_start[dealt.window_start // plan.num_positions == here.epoch])
        counts.append(
            EpochCounts(
                epoch=here.epoch,
                num_steps=len(steps),
                num_samples=int((rows & ~dealt.is_padding).sum()),
                num_padding=int((rows & dealt.is_padding).sum()),
                num_dropped=expected_tail(here.deal).num_dropped,
                num_repeated=int((rows & again).sum()),
                num_ahead=int(ahead.sum()),
            )
        )
    return counts


def _rank_counts(plan: Plan, dealt: Dealt) -> list[RankCounts]:
    batch = dealt.batch_of_row
    windows = np.unique(np.stack((dealt.rank, dealt.window_start)), axis=1)[0]
    ranks_counted = [
        windows,
        dealt.rank,
        dealt.rank[batch][~dealt.is_padding],
        dealt.rank[batch][dealt.is_padding],
        dealt.rank[batch][_repeated(plan, dealt)],
    ]
    counts = np.stack([np.bincount(ranks, minlength=plan.world_size) for ranks in ranks_counted])
    return [RankCounts(rank, *counts[:, rank].tolist()) for rank in range(plan.world_size)]
