"""What a plan does with the data: who reads which shard when, how it mixes, the tail, what reading costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shardstream.audit import AuditReport, ShuffleQuality
from shardstream.audit.amplification import estimated_amplification
from shardstream.deal import Deal
from shardstream.errors import listed
from shardstream.packing import PackedOrder
from shardstream.permutation import Int64Array
from shardstream.plan import EpochPlan, Plan
from shardstream.report.binning import size, span, stretches
from shardstream.report.page import Bars, Cell, Figure, HeatMap, Section, Table, evenly, shown

_MOST_RANKS = 8  # panels of the heat map
_MOST_BARS = 64
_NUM_ROWS = 32
_NUM_COLUMNS = 48
_MOST_POSITIONS = 1 << 20  # looked up for the heat map
_WORKERS = (0, 2, 4, 8)


def plan_section(report: AuditReport) -> Section:
    """Returns the section of a plan's settings and proofs."""
    names = (
        "world_size",
        "num_workers",
        "batch_size",
        "accumulate",
        "global_batch",
        "lanes",
        "shuffle",
        "tail",
        "seed",
    )
    facts: list[tuple[str, Cell]] = [(name.replace("_", " "), report.settings[name]) for name in names]
    if report.packing is not None:
        figures = report.packing
        facts.append(("sequences", figures.num_sequences))
        facts.append(("tokens", figures.num_tokens))
        facts.append(("share of places without a token", figures.padding))
    notes = tuple(f"Proof: {proof}." for proof in report.proofs)
    return Section("plan", "Plan", notes=notes, facts=tuple(facts))


def order_section(plan: Plan, report: AuditReport) -> Section:
    """Returns the section of who reads what when, and of how well it mixes."""
    figures = list(_heat(plan, report.settings["start"]["epoch"]))
    if report.quality is not None:
        figures += _quality(report.quality)
    notes = () if figures else ("There is no step to show.",)
    return Section("order", "Order", notes=notes, figures=tuple(figures))


def tail_section(plan: Plan, report: AuditReport) -> Section:
    """Returns the section of epochs and their tails, and of what each rank gets."""
    epochs = Table(
        "Each epoch, and what its tail adds or leaves out",
        ("epoch", "steps", "samples", "padding", "dropped", "repeated", "of the next epoch"),
        tuple(map(_values, report.epochs)),
    )
    chosen = [report.ranks[k] for k in evenly(len(report.ranks), _MOST_BARS)]
    table = Table(
        "Samples of ranks: numbers of the figure",
        ("rank", "steps", "micro-batches", "samples", "padding", "repeated"),
        tuple(map(_values, chosen)),
    )
    bars = Bars("rank", "samples", tuple(str(r.rank) for r in chosen), tuple(r.num_samples for r in chosen))
    samples, steps = [r.num_samples for r in report.ranks], [r.num_steps for r in report.ranks]
    summary = (
        f"{len(samples):,} rank(s) read {span(min(samples), max(samples), shown)} samples each, padding not counted, "
        f"in {span(min(steps), max(steps), shown)} steps."
    )
    figure = Figure("tails-ranks", "Samples of ranks", summary, bars, table)
    return Section("tails", "Epochs and tails", (f"Tail: {plan.tail}.",), figures=(figure,), tables=(epochs,))


def reading_section(plan: Plan, report: AuditReport) -> Section:
    """Returns the section of what reading costs."""
    cost = report.reading
    if cost is None:
        return Section("reading", "Reading", notes=("Promises are broken: what reading costs means nothing.",))
    facts: list[tuple[str, Cell]] = [
        ("read amplification", cost.amplification),
        ("blocks", cost.num_blocks),
        ("opens of an epoch", cost.num_opens),
        ("how it was found", cost.how),
        ("runs a reader holds open", cost.open_runs),
        ("their compressed bytes, at most", None if cost.open_num_bytes is None else size(cost.open_num_bytes)),
    ]
    if report.memory is not None:
        facts.append(("memory of a reader, about", size(report.memory.num_bytes)))
    notes = tuple(f"Lower with {text}." for text in cost.advice)
    return Section("reading", "Reading", notes, tuple(facts), (_by_workers(plan, report.settings["num_workers"]),))


def _by_workers(plan: Plan, num_workers: int) -> Figure:
    """What more worker processes would cost."""
    counts = sorted({*_WORKERS, num_workers})
    values = tuple(round(estimated_amplification(plan, max(each, 1)), 3) for each in counts)
    labels = tuple(map(str, counts))
    summary = "Estimated opens of each block in an epoch: " + ", ".join(
        f"{shown(value)} with {label} workers" for label, value in zip(labels, values, strict=True)
    )
    bars = Bars("DataLoader workers of a rank", "times each block is opened", labels, values)
    table = Table(
        "Read amplification by workers: numbers of the figure",
        ("workers of a rank", "opens of a block, estimated"),
        tuple(zip(labels, values, strict=True)),
    )
    return Figure("reading-workers", "Read amplification by workers", summary + ".", bars, table)


def _quality(quality: ShuffleQuality) -> Iterator[Figure]:
    where = f"{quality.num_windows:,} of {quality.num_windows_in_epoch:,} global batches looked at"
    yield _beside(
        "order-neighbours",
        "Neighbours that stay together",
        "% of neighbours in a shard that meet in one global batch",
        [("this order", 100 * quality.neighbours), ("uniform shuffle", 100 * quality.uniform_neighbours)],
        where,
    )
    if quality.num_classes is None:
        return
    for batch in ("global batch", "micro-batch"):
        name = batch.replace(" ", "_").replace("-", "_")
        found, uniform = (getattr(quality, f"{prefix}classes_per_{name}") for prefix in ("", "uniform_"))
        yield _beside(
            f"order-classes-{name.replace('_', '-')}",
            f"Classes in a {batch}",
            f"of {quality.num_classes:,} classes, on average",
            [("this order", found), ("uniform shuffle", uniform)],
            where,
        )


def _beside(name: str, title: str, unit: str, pairs: list[tuple[str, float]], where: str) -> Figure:
    labels, values = zip(*pairs, strict=True)
    summary = "; ".join(f"{label}: {shown(value)}" for label, value in pairs) + f" ({unit}; {where})."
    table = Table(f"{title}: numbers of the figure", ("", unit), tuple(pairs))
    return Figure(name, title, summary, Bars("", unit, labels, values), table)


# ------------------------------------------------------------------------------------------------------ the heat map


def _heat(plan: Plan, epoch: int) -> Iterator[Figure]:
    """Which shard feeds which rank when."""
    here = plan.epoch(epoch)
    num_windows, manifest = here.deal.num_windows, plan.manifest
    if num_windows == 0:
        return
    ranks = evenly(plan.world_size, _MOST_RANKS)
    num_rows = min(_NUM_ROWS, manifest.num_shards)
    num_columns = max(8, min(_NUM_COLUMNS, _MOST_POSITIONS // plan.global_batch))
    columns = stretches(num_windows, num_columns)
    at_most = max(1, _MOST_POSITIONS // plan.global_batch // len(columns))
    counts = np.zeros((len(ranks), num_rows, len(columns)), np.int64)
    for column, (begin, end) in enumerate(columns):
        for panel, rank in enumerate(ranks):
            blocks = _blocks_read(here, rank, begin, min(end, begin + at_most))
            row = manifest.shard_of_block(blocks) * num_rows // manifest.num_shards
            counts[panel, :, column] = np.bincount(row, minlength=num_rows)
    yield _heat_figure(plan, epoch, ranks, columns, counts, at_most)


def _heat_figure(
    plan: Plan, epoch: int, ranks: Sequence[int], columns: list[tuple[int, int]], counts: Int64Array, at_most: int
) -> Figure:
    manifest, num_rows = plan.manifest, counts.shape[1]
    shards = stretches(manifest.num_shards, num_rows)
    panels = tuple((f"rank {rank}", tuple(map(tuple, rows))) for rank, rows in zip(ranks, counts.tolist(), strict=True))
    unit = "samples" if plan.packed is None else "sequences that begin there"
    chart = HeatMap("step", "shards", ("0", str(columns[-1][1] - 1)), ("0", str(manifest.num_shards - 1)), panels, unit)
    in_column = (counts > 0).sum(axis=1)
    in_epoch = (counts.sum(axis=2) > 0).sum(axis=1)
    each = "shards" if num_rows == manifest.num_shards else f"groups of {manifest.num_shards / num_rows:.1f} shards"
    longest = max(end - begin for begin, end in columns)
    looked = (
        "all steps" if longest <= at_most else f"{at_most} of up to {longest} steps in each of {len(columns)} stretches"
    )
    summary = (
        f"Epoch {epoch}, {looked}, ranks {listed(ranks)} of {plan.world_size}: a rank reads from "
        f"{in_column.mean():.1f} of {num_rows} {each} at a time on average, and from {in_epoch.min()} to "
        f"{in_epoch.max()} of them in the epoch."
    )
    names = tuple(span(a, b - 1) for a, b in shards)
    rows = tuple((name, *row) for name, row in zip(names, counts.sum(axis=2).T.tolist(), strict=True))
    caption = f"Which shard feeds which rank: {unit} in the steps looked at"
    table = Table(caption, ("shard", *(f"rank {rank}" for rank in ranks)), rows)
    return Figure("order-heat", "Which shard feeds which rank when", summary, chart, table)


def _blocks_read(here: EpochPlan, rank: int, begin: int, end: int) -> Int64Array:
    """The block of each sample of this epoch that a rank reads in some windows; of sequences, where they begin."""
    positions = _positions(here.deal, rank, begin, end)
    positions = positions[positions < here.deal.num_positions]
    if isinstance(here.order, PackedOrder):
        pieces = here.order.pieces(here.order.sample_ids(positions))
        return pieces.block[np.flatnonzero(np.diff(pieces.sequence, prepend=-1))]
    if isinstance(here.order.shuffle, str):
        return here.order.rows(positions).block
    # Not ``rows``, which also shuffles the rows of every run that is met: a minute for 10^8 samples.
    line_index = here.order.lane_cut.line_index(positions)
    return here.order.line_blocks[np.searchsorted(here.order.line_start, line_index, side="right") - 1]


def _positions(deal: Deal, rank: int, begin: int, end: int) -> Int64Array:
    """The positions of a rank's real samples in windows ``begin`` .. ``end - 1``."""
    num_whole = max(0, min(end, deal.num_whole_windows) - begin)
    whole = deal.parts(rank, begin, num_whole).ravel() if num_whole else np.empty(0, np.int64)
    if end <= deal.num_whole_windows:
        return whole
    last = deal.part(deal.num_whole_windows, rank)
    return np.concatenate((whole, last.positions[~last.is_padding]))


def _values(counts: object) -> tuple[Cell, ...]:
    return tuple(vars(counts).values())
