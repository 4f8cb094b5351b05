"""Pictures of an audit; needs matplotlib."""

from __future__ import annotations

import os

import numpy as np

from shardstream.errors import PlanError
from shardstream.mixture_plan import MixturePlan

_POINTS = 400


def plot_shares(plan: MixturePlan, path: str | os.PathLike[str], *, num_windows: int, first: int = 0) -> None:
    """Draws how much of the stream each source has over the steps: so far, and in the windows since the last point.

    Args:
        plan: The plan.
        path: File to write; its suffix says of which kind.
        num_windows: How many steps.
        first: Position of the first of them.

    Raises:
        PlanError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install 'shardstream[plot]'"
        raise PlanError("plots need matplotlib, which is not installed", hint=hint) from None
    steps = np.unique(np.linspace(0, num_windows, min(num_windows, _POINTS) + 1).astype(np.int64))
    counts = plan.shares.counts(first + steps * plan.global_batch)
    since = np.diff(counts, axis=0)
    so_far = (counts - counts[0])[1:]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(plan.names):
        (line,) = axes.plot(steps[1:], so_far[:, index] / so_far.sum(axis=1), label=f"{name}, so far")
        axes.step(steps[1:], since[:, index] / since.sum(axis=1), where="pre", color=line.get_color(), alpha=0.35)
    axes.set(xlabel="step", ylabel="share of samples", ylim=(0, 1))
    axes.set_title(f"Shares over steps of {plan.global_batch} samples; pale: since the point before")
    axes.legend()
    figure.savefig(path)
