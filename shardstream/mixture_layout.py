"""Rows of a mixture: each source's rows as its own layout makes them, put together in the order of the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardstream.columns import Dense, Rows
from shardstream.errors import DecodeError, PlanError
from shardstream.gathering import gather
from shardstream.layout import Layout, Planned, RowsLayout, RunKey
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.packed_layout import PackedLayout
from shardstream.permutation import Int64Array
from shardstream.plan import PlannedBatch

SOURCE = "__source__"
"""Column with the index of each row's source: int64[n]."""


def manifests_of(plan: AnyPlan) -> tuple[Manifest, ...]:
    """Returns the manifests that a plan's shards are of; several of a mixture."""
    return plan.mixture.manifests if isinstance(plan, MixturePlan) else (plan.manifest,)


def shared_columns(mixture: Mixture, wanted: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the columns to read of every source.

    Args:
        mixture: The sources.
        wanted: Columns that were asked for; None for all that the sources share.

    Returns:
        The columns, in the order of the first source; None if no manifest knows its columns.

    Raises:
        PlanError: If there is none, a source lacks one that was asked for, or a column's type differs.
    """
    known = {
        name: {column.name: column.type for column in manifest.columns}
        for name, manifest in zip(mixture.names, mixture.manifests, strict=True)
        if manifest.columns
    }
    if not known:
        return None if wanted is None else tuple(wanted)
    for name, types in known.items():
        if missing := [column for column in wanted or () if column not in types and column != "__key__"]:
            raise PlanError(f"source {name!r} has no column {missing[0]!r}", expected=" or ".join(types))
    first, *others = known.values()
    shared = tuple(wanted or (column for column in first if all(column in types for types in others)))
    if not shared:
        found = "; ".join(f"{name}: {', '.join(types)}" for name, types in known.items())
        raise PlanError("the sources have no column in common", found=found, hint="name them alike when writing shards")
    for column in shared:
        types_of = {name: types.get(column, "") for name, types in known.items()}
        if len({_same_in_memory(text) for text in types_of.values()}) > 1:
            found = ", ".join(f"{text} in {name}" for name, text in types_of.items())
            hint = "write it alike in every source, or leave it out with columns="
            raise PlanError(f"column {column!r} is not of one type", found=found, hint=hint)
    return shared


def _same_in_memory(type_text: str) -> str:
    """An Arrow type without what makes no difference to a batch: sizes of offsets, names of entries, nullability."""
    return re.sub(r"large_|\b\w+: | not null", "", type_text)


class _Part(NamedTuple):
    """The rows of one source in a gather."""

    source: int
    rows: Int64Array
    """int64[n]: where they are in the gather."""
    planned: Planned


@dataclass(frozen=True, eq=False)
class MixtureLayout:
    """Rows of several sources.

    Attributes:
        plan: The plan.
        layouts: One a source, in the order of names; all make the same columns.
    """

    plan: MixturePlan
    layouts: tuple[Layout, ...]

    def source(self, key: RunKey) -> tuple[Manifest, Sequence[str] | None]:
        """Returns the manifest that a run is of, and the columns to read of it; None for all."""
        return self.layouts[key.source].source(key)

    @property
    def row_num_bytes(self) -> int:
        """The most that a source's rows take."""
        return max(layout.row_num_bytes for layout in self.layouts)

    def planned(self, batches: list[PlannedBatch]) -> Planned:
        """Lets each source plan its rows."""
        places = self.plan.sources(np.concatenate([batch.positions for batch in batches]))
        ids, parts = np.empty(len(places.source), np.int64), []
        for source in np.unique(places.source).tolist():
            rows = np.flatnonzero(places.source == source)
            # A source counts its positions over all passes: those behind its first epoch are the next one's.
            own = self.layouts[source].planned([batches[0]._replace(epoch=0, positions=places.position[rows])])
            ids[rows] = own.sample_ids
            parts.append(_Part(source, rows, own))
        keys = [key._replace(source=part.source) for part in parts for key in part.planned.keys]
        returning = frozenset(key._replace(source=part.source) for part in parts for key in part.planned.returning)
        return Planned(batches, ids, keys, partial(self._made, parts=parts), returning)

    def prepared(self, key: RunKey, rows: Rows) -> Any:
        """Returns what the source's layout holds of a run."""
        return self.layouts[key.source].prepared(key, rows)

    def undecodable(self, key: RunKey, error: DecodeError) -> Any:
        """Returns what the source's layout has for a run that cannot be decoded, or raises the error."""
        return self.layouts[key.source].undecodable(key, error)

    def _made(self, runs: Sequence[Any], *, parts: list[_Part]) -> Rows:
        made, used = [], 0
        for part in parts:
            num_runs = len(part.planned.keys)
            made.append(part.planned.make(runs[used : used + num_runs]))
            used += num_runs
        num_rows = sum(rows.num_rows for rows in made)
        part_of_row, row_in_part, source = (np.empty(num_rows, np.int64) for _ in range(3))
        for index, part in enumerate(parts):
            part_of_row[part.rows], row_in_part[part.rows] = index, np.arange(len(part.rows))
            source[part.rows] = part.source
        joined = made[0] if len(made) == 1 else gather(made, part_of_row, row_in_part)
        return replace(joined, columns={**joined.columns, SOURCE: Dense(source)})


def layout_of(
    plan: AnyPlan,
    columns: Sequence[str] | None,
    ignore_index: int = -100,
    *,
    finds_faults: bool = False,
    dtypes: Mapping[str, np.dtype[Any]] = MappingProxyType({}),
) -> Layout:
    """Returns what the rows of a plan's batches are.

    Args:
        plan: The plan.
        columns: Columns to read, or of packed sequences those to make; None for all.
        ignore_index: The label of what is no target.
        finds_faults: Whether packed sequences are made of documents that cannot be decoded, too, their targets masked.
        dtypes: Columns of bytes that are raw numbers, and of which type; of unpacked rows.
    """
    if isinstance(plan, MixturePlan):
        of_source = partial(layout_of, finds_faults=finds_faults, dtypes=dtypes)
        return MixtureLayout(plan, tuple(of_source(each, columns, ignore_index) for each in plan.plans))
    if plan.packed is None:
        return RowsLayout(plan, columns, dtypes)
    return PackedLayout(plan, ignore_index, columns, finds_faults)
