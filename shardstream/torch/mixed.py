"""Mixtures in a ``StreamingDataset``: which plan is made of them, and what batches say of their sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardstream.columns import Dense, Rows
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.mixture_layout import SOURCE
from shardstream.mixture_plan import SOURCE_BITS, AnyPlan, MixturePlan
from shardstream.packing import Packed
from shardstream.permutation import Int64Array, key64
from shardstream.plan import Plan
from shardstream.torch.batch import Batch


def plan_maker(
    data: Manifest | Mixture, packed: Sequence[Packed | None], *, lanes: int | None, tail: str | None, **options: Any
) -> Callable[..., AnyPlan]:
    """Returns what makes the plan of a dataset, given ``world_size=``.

    Args:
        data: One data set, or a mixture.
        packed: How each is packed; None for rows.
        lanes: Lanes of one data set.
        tail: None for ``"pad"``, and for ``"continue"``, the only one that a mixture has.
        **options: Of both kinds of plans.

    Raises:
        PlanError: If something is asked for that a mixture cannot do.
    """
    if not isinstance(data, Mixture):
        return partial(Plan.make, data, packing=packed[0], lanes=lanes, tail=tail or "pad", **options)
    if lanes is not None:
        raise PlanError("the lanes of a mixture follow its quotas", found=f"lanes={lanes}", hint="leave lanes out")
    if tail not in (None, MixturePlan.tail):
        hint = "leave tail out; stop_after= of the mixture says where it ends"
        raise PlanError("a mixture is one stream without an end", expected="'continue'", found=repr(tail), hint=hint)
    return partial(MixturePlan.make, data, packing=packed, **options)


def source_heads(heads: Sequence[str], plan: AnyPlan) -> list[str]:
    """Returns the heads that count the targets of one source each: ``lm/code``, ``lm/web``.

    Example:
        >>> web = Manifest.synthetic(num_shards=1, blocks_per_shard=2, rows_per_block=50)
        >>> source_heads(["lm"], MixturePlan.make(Mixture({"web": (web, 1)}), batch_size=4))
        ['lm/web']
    """
    return [f"{head}/{name}" for head in heads for name in source_names(plan)]


def source_names(plan: AnyPlan) -> tuple[str, ...]:
    """Returns the names of a mixture's sources, which ``Batch.source_index`` counts; empty for one data set."""
    return plan.names if isinstance(plan, MixturePlan) else ()


def without_source(rows: Rows) -> tuple[Rows, Tensor | None]:
    """Takes the column of sources out of a mixture's rows; None if they are of one data set."""
    source = rows.columns.get(SOURCE)
    if not isinstance(source, Dense):
        return rows, None
    columns = {name: column for name, column in rows.columns.items() if name != SOURCE}
    return replace(rows, columns=columns), torch.from_numpy(source.values)


def by_source(
    valid_tokens: Mapping[str, Tensor], source_index: Tensor | None, names: Sequence[str]
) -> dict[str, Tensor]:
    """Returns heads with those of each source beside them, which count its rows only."""
    heads = dict(valid_tokens)
    if source_index is not None:
        for head, counts in valid_tokens.items():
            heads |= {f"{head}/{name}": counts * (source_index == index) for index, name in enumerate(names)}
    return heads


def logged_ids(batch: Batch) -> Tensor:
    """Returns what logs know a batch's samples by, int64[b]: their ids; of a mixture with the source's index before."""
    return batch.sample_ids if batch.source_index is None else batch.sample_ids | batch.source_index << SOURCE_BITS


class Origin(NamedTuple):
    """Where a sample comes from."""

    sample_id: int
    seed: int
    """For transforms: of the job, the source, the epoch and the sample."""
    url: str
    row: int
    """In the shard."""
    source: str | None = None


def origins(plan: AnyPlan, epoch: int, positions: Int64Array, ids: Int64Array) -> list[Origin]:
    """Returns where the samples at positions come from.

    Args:
        plan: The plan.
        epoch: The epoch that positions count from.
        positions: int64[n].
        ids: int64[n], their sample ids.
    """
    if isinstance(plan, Plan):
        return list(_origins(plan, epoch, positions, ids))
    places = plan.sources(positions)
    found: dict[int, Origin] = {}
    for source in np.unique(places.source).tolist():
        rows = np.flatnonzero(places.source == source)
        own = _origins(plan.plans[source], 0, places.position[rows], ids[rows])
        named = (origin._replace(source=plan.names[source]) for origin in own)
        found.update(zip(rows.tolist(), named, strict=True))
    return [found[row] for row in range(len(ids))]


def _origins(plan: Plan, epoch: int, positions: Int64Array, ids: Int64Array) -> Iterator[Origin]:
    manifest = plan.manifest
    shards = manifest.shard_of_sample(ids)
    epochs = epoch + positions // max(manifest.num_samples, 1)
    rows = ids - manifest.first_sample[shards]
    for sample_id, there, shard, row in zip(ids.tolist(), epochs.tolist(), shards.tolist(), rows.tolist(), strict=True):
        yield Origin(sample_id, key64(plan.seed, there, "sample", sample_id), manifest.url(shard), row)
