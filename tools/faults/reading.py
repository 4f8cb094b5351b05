"""Reading a whole epoch, to compare what came with what should have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardstream.columns import python_values
from shardstream.fetch import ReadStats, fetch
from shardstream.layout import RowsLayout
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from shardstream.reading import Reading


def all_rows(
    manifest: Manifest, *, columns: Sequence[str] | None = None, stats: ReadStats | None = None, **options: Any
) -> list[tuple[object, ...]]:
    """Returns the rows of an epoch in its order: the sample id and the value of each column.

    Args:
        manifest: What to read.
        columns: Names, or None for all.
        stats: Is counted up.
        options: Of ``Reading``.
    """
    plan = Plan.make(manifest, batch_size=5, accumulate=2, lanes=5, seed=1)
    batches = plan.micro_batches(0, plan.cursor())
    rows: list[tuple[object, ...]] = []
    for gathered in fetch(plan, batches, layout=RowsLayout(plan, columns), stats=stats, reading=Reading(**options)):
        values = [python_values("", column) for column in gathered.rows.columns.values()]
        shown = ([v.tolist() if isinstance(v, np.ndarray) else v for v in column] for column in values)
        rows += zip(gathered.sample_ids.tolist(), *shown, strict=True)
    return rows
