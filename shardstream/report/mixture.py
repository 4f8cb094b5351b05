"""What a mixture takes of its sources."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from shardstream.audit import MixtureReport
from shardstream.mixture_plan import MixturePlan
from shardstream.report.binning import NUM_POINTS, span
from shardstream.report.page import Cell, Figure, Lines, Section, Table, shown


def mixture_section(plan: MixturePlan, report: MixtureReport) -> Section:
    """Returns the section of a mixture's plan, sources and shares."""
    names = ("world_size", "num_workers", "batch_size", "accumulate", "global_batch", "seed", "stop")
    facts: list[tuple[str, Cell]] = [(name.replace("_", " "), report.settings[name]) for name in names]
    columns = ("source", "share", "samples", "given", "passes")
    rows = tuple(
        (each.name, " → ".join(f"{w:.4g}" for w in each.weights), each.num_samples, each.num_given, each.num_passes)
        for each in report.sources
    )
    notes = tuple(f"Proof: {proof}." for proof in report.proofs)
    tables = (Table("What is taken of each source", columns, rows),)
    return Section("mixture", "Mixture", notes, tuple(facts), (_shares(plan, report),), tables)


def _shares(plan: MixturePlan, report: MixtureReport) -> Figure:
    first, global_batch = report.settings["start"], plan.global_batch
    num_windows = max(1, (report.settings["end"] - first) // global_batch)
    steps = np.unique(np.linspace(0, num_windows, min(num_windows, NUM_POINTS) + 1).astype(np.int64))
    since = np.diff(plan.shares.counts(first + steps * global_batch), axis=0)
    shares = 100 * since / np.maximum(since.sum(axis=1, keepdims=True), 1)
    series = tuple((name, tuple(shares[:, k].tolist())) for k, name in enumerate(plan.names))
    all_of_it = 100 * since.sum(axis=0) / max(int(since.sum()), 1)
    summary = f"Over {num_windows:,} steps of {global_batch:,} samples: " + ", ".join(
        f"{name} {shown(share)} %" for name, share in zip(plan.names, all_of_it.tolist(), strict=True)
    )
    names = [span(a, b - 1) for a, b in pairwise(steps.tolist())]
    rows = tuple((name, *counts) for name, counts in zip(names, since.tolist(), strict=True))
    table = Table("Samples of each source: numbers of the figure", ("steps", *plan.names), rows)
    chart = Lines("step", "% of the samples", tuple(map(float, steps[:-1])), series)
    return Figure("mixture-shares", "Shares over steps", f"{summary}.", chart, table)
