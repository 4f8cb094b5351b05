"""The plots of the report: throughput as bars, growth as curves."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tools.bench.subjects import PEERS
from tools.bench.suites.growth import NUM_RANKS, NUM_SAMPLES, order_name, scale_name
from tools.bench.targets import Values

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _PEER, _LIMIT = "tab:blue", "tab:gray", "tab:green"


def plot_throughput(values: Values, folder: Path) -> Path | None:
    """Draws samples/s of every case as bars, T beside I; returns the file, or None without values."""
    rates = {case: median(found) for (case, metric), found in values.items() if metric == "samples_per_s"}
    rates = {
        case: rate for case, rate in rates.items() if not case.startswith(("memory", "store", "packed", "unpacked"))
    }
    if not rates:
        return None
    from matplotlib.figure import Figure

    cases = sorted(rates, key=rates.__getitem__)
    figure = Figure(figsize=(9, 1 + 0.24 * len(cases)), layout="constrained")
    axes = figure.subplots()
    axes.barh(cases, [rates[case] for case in cases], color=[_color(case) for case in cases])
    axes.set_xscale("log")
    axes.set_xlabel("samples/s (green: limits, blue: shardstream, gray: peers)")
    axes.tick_params(axis="y", labelsize=7)
    path = folder / "throughput.png"
    figure.savefig(path, dpi=120)
    return path


def _color(case: str) -> str:
    if case.startswith("limit"):
        return _LIMIT
    return _PEER if case.startswith(tuple(PEERS)) else _OURS


def plot_growth(values: Values, folder: Path) -> Path | None:
    """Draws cost against the number of samples, beside the orders of others; None without values."""
    names = {
        "plan_s": "plan build, s",
        "resume_s": "resume, s",
        "locate_s": "locate 10^6, s",
        "growth_mb": "memory, MB",
    }
    if not any(metric == "plan_s" for _, metric in values):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (metric, name) in zip(figure.subplots(2, 2).flat, names.items(), strict=True):
        for ranks in NUM_RANKS:
            _curve(axes, values, {n: scale_name(n, ranks) for n in NUM_SAMPLES}, metric, f"shardstream, {ranks} ranks")
        theirs = "seconds" if metric == "plan_s" else metric
        if metric in ("plan_s", "growth_mb"):
            for what in ("distributed-sampler", "mds", "litdata", "litdata-elastic", "grain"):
                _curve(axes, values, {n: order_name(what, n) for n in NUM_SAMPLES}, theirs, what, "--")
        axes.set(xscale="log", yscale="log", xlabel="samples", title=name)
        axes.legend(fontsize=6)
    path = folder / "growth.png"
    figure.savefig(path, dpi=120)
    return path


def _curve(axes: Axes, values: Values, cases: dict[int, str], metric: str, label: str, style: str = "-") -> None:
    points = [(n, median(found)) for n, case in cases.items() if (found := values.get((case, metric)))]
    if points:
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=label)
