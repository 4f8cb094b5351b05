"""From fetched rows to the columns of a batch: transform, collation, and how many targets of each sample count."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardstream.columns import Column, Objects, Rows, Scattered
from shardstream.errors import DecodeError, PlanError, ShardStreamError
from shardstream.faults import is_of_data, rows_at_fault, take
from shardstream.fetch import Fetched
from shardstream.layout import Layout
from shardstream.manifest import Manifest
from shardstream.mixture_layout import layout_of
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.torch.collate import collate_samples, columns_to_torch, count_valid, mask_padding, rows_to_samples
from shardstream.torch.mixed import Origin, origins

Sample: TypeAlias = dict[str, Any]
Target: TypeAlias = str | Callable[[Mapping[str, Any]], Tensor]

_BYTES = re.compile("^bytes$|binary")  # types of columns, as manifests name them
_OWN_KEYS = ("__id__", "__seed__", "__url__", "__source__")  # for transforms; a batch has sample_ids and the plan


@dataclass(frozen=True)
class Assembly:
    """What is done to rows on their way into a batch.

    Attributes:
        transform: Called with each sample, returns a sample; or None.
        collate: Called with the samples, or with the columns if it says ``takes_columns``; or None.
        targets: Head name → label column, or a callable of the columns that returns int64[b].
        shifted: Whether label columns are shifted already.
        ignore_index: The label that does not count.
        dtypes: Columns of bytes that are raw numbers, and of which type.
    """

    transform: Callable[[Sample], Any] | None
    collate: Callable[[Any], Mapping[str, Any]] | None
    targets: Mapping[str, Target]
    shifted: bool | None
    ignore_index: int
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)

    def layout(self, plan: AnyPlan, columns: Sequence[str] | None, *, finds_faults: bool) -> Layout:
        """Returns what the rows are that batches are made of; see ``layout_of``."""
        return layout_of(plan, columns, self.ignore_index, finds_faults=finds_faults, dtypes=self.dtypes)

    def check(self, manifest: Manifest, columns: Sequence[str] | None) -> None:
        """Refuses what can be known to fail before training.

        Raises:
            PlanError: If a column does not exist, one of ``dtypes`` holds no bytes, or it was not said whether label
                columns are shifted.
        """
        label_columns = [target for target in self.targets.values() if isinstance(target, str)]
        if label_columns and self.shifted is None:
            hint = "shifted=True if labels[t] is the target of position t, False if the model shifts them itself"
            raise PlanError("targets need shifted=: what counts is declared, never guessed", hint=hint)
        known = [column.name for column in manifest.columns] + ["__key__"]
        if not manifest.columns:
            return
        made_later = self.transform is not None or self.collate is not None
        for name in [*(columns or ()), *self.dtypes, *([] if made_later else label_columns)]:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                way_out = f"did you mean {near[0]!r}?" if near else None
                raise PlanError(f"there is no column {name!r}", expected=" or ".join(known), hint=way_out)
        for column in manifest.columns:
            if column.name in self.dtypes and not _BYTES.search(column.type):
                what = f"column {column.name!r} holds no bytes, which dtypes= says are numbers"
                raise PlanError(what, found=column.type, hint="leave it out of dtypes=: it comes as it is")

    @property
    def is_per_batch(self) -> bool:
        """Whether code of the user's must see each batch by itself."""
        counts = any(not isinstance(target, str) for target in self.targets.values())
        return self.transform is not None or self.collate is not None or counts

    def whole(
        self, rows: Rows, is_padding: Tensor, num_targets: Tensor | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns what ``columns`` does for the rows of several batches at once, where no code of the user's is called.

        Args:
            rows: The rows.
            is_padding: bool[n].
            num_targets: int64[n], the valid targets of each row for all heads, where they are known.

        Returns:
            The columns, those of bytes as ``Scattered``, and the counts.

        Raises:
            DecodeError: If a column cannot be a tensor.
        """
        targets = set(self.targets.values())
        late = {
            name: column.values
            for name, column in rows.columns.items()
            if isinstance(column, Objects) and isinstance(column.values, Scattered) and name not in targets
        }
        made = {name: column for name, column in rows.columns.items() if name not in late}
        columns: dict[str, Any] = dict(columns_to_torch(replace(rows, columns=made)))
        valid = self.count_targets(columns, is_padding, num_targets)
        return {name: late[name] if name in late else columns[name] for name in rows.columns}, valid

    def columns(self, fetched: Fetched, plan: AnyPlan) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the columns of a batch, and for each head its valid targets: int64[b], 0 in padding rows.

        Raises:
            DecodeError: If a sample cannot be transformed or collated, naming shard, row and sample id.
        """
        samples = self.samples(fetched, plan) if self.takes_samples else []

        def made(chosen: Sequence[int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
            columns = self.of_chosen(fetched.rows, samples, chosen)
            return columns, self.count_targets(columns, torch.from_numpy(fetched.batch.is_padding[list(chosen)]))

        try:
            return made(range(len(fetched.sample_ids)))
        except DecodeError as error:
            origin = _origin_at_fault(fetched, plan, made)
            if origin is None:
                raise
            raise DecodeError(f"sample {origin.sample_id}: {error}", url=origin.url, row=origin.row) from error

    @property
    def takes_samples(self) -> bool:
        """Whether code of the user's must see each sample by itself."""
        return self.transform is not None or not (self.collate is None or self._takes_columns)

    @property
    def _takes_columns(self) -> bool:
        return bool(getattr(self.collate, "takes_columns", False))

    def of_rows(self, rows: Rows) -> dict[str, Any]:
        """Returns the columns of a batch, of its rows."""
        columns: dict[str, Any] = dict(columns_to_torch(rows))
        return columns if self.collate is None else dict(self.collate(columns))

    def of_chosen(self, rows: Rows, samples: Sequence[Any], chosen: Sequence[int]) -> dict[str, Any]:
        """Returns the columns that some rows of a batch make; of ``samples``, if this takes samples."""
        if self.takes_samples:
            return self.of_samples([_copy(samples[row]) for row in chosen], rows.columns)
        are_all = list(chosen) == list(range(rows.num_rows))
        return self.of_rows(rows if are_all else take(rows, chosen))

    def of_samples(self, samples: Sequence[Any], source: Mapping[str, Column]) -> dict[str, Any]:
        """Returns the columns of a batch, of its samples; ``source`` are the columns that they were made of."""
        if self.collate is not None and not self._takes_columns:
            return dict(self.collate(samples))
        columns = dict(collate_samples([_without_own(sample) for sample in samples], source))
        return columns if self.collate is None else dict(self.collate(columns))

    def samples(self, fetched: Fetched, plan: AnyPlan, faults: dict[int, Exception] | None = None) -> list[Any]:
        """Returns the transformed samples of a batch.

        Args:
            fetched: The batch.
            plan: The plan that it is of.
            faults: Rows that are left out (None stands for them), to which those are added that cannot be transformed;
                without it, what they fail with is raised.
        """
        samples: list[Any] = rows_to_samples(fetched.rows)
        found = origins(plan, fetched.batch.epoch, fetched.batch.positions, fetched.sample_ids)
        for number, origin in enumerate(found):
            if faults is not None and number in faults:
                samples[number] = None
                continue
            sample = samples[number]
            sample.update({"__id__": origin.sample_id, "__seed__": origin.seed, "__url__": origin.url})
            if origin.source is not None:
                sample["__source__"] = origin.source
            if self.transform is None:
                continue
            try:
                samples[number] = self._transformed(sample, origin, is_hinting=faults is None)
            except DecodeError as error:
                if faults is None or not is_of_data(error):
                    raise
                samples[number], faults[number] = None, error
        return samples

    def _transformed(self, sample: Sample, origin: Origin, *, is_hinting: bool) -> Any:
        sample_id, url, row = origin.sample_id, origin.url, origin.row
        try:
            result = self.transform(sample)  # type: ignore[misc]  # the caller has looked
        except ShardStreamError as error:
            raise DecodeError(f"sample {sample_id}: {error}", url=url, row=row) from error
        except Exception as error:
            what = f"transform failed for sample {sample_id}: {type(error).__name__}: {error}"
            hint = "the traceback above shows where" if is_hinting else None
            raise DecodeError(what, url=url, row=row, hint=hint) from error
        if result is None:
            hint = "return a sample, or give on_error='mask': it then becomes a padding row, and ranks stay in step"
            what = f"transform returned None for sample {sample_id}"
            raise DecodeError(what, url=url, row=row, hint=hint if is_hinting else None)
        return result

    def count_targets(
        self, columns: dict[str, Any], is_padding: Tensor, num_targets: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Counts valid targets; label columns of padding rows are masked on the way, so that no loss sums them."""
        valid: dict[str, Tensor] = {}
        for head, target in self.targets.items():
            if isinstance(target, str):
                if target not in columns:
                    expected = " or ".join(map(str, columns))
                    raise PlanError(
                        f"head {head!r} counts column {target!r}, which is not in the batch", expected=expected
                    )
                _refuse_missing(target, columns[target])
                columns[target] = mask_padding(columns[target], is_padding, self.ignore_index)
                counts = num_targets
                if counts is None:
                    counts = count_valid(columns[target], self.ignore_index, shifted=bool(self.shifted))
            else:
                counts = torch.as_tensor(target(columns)).to(torch.int64)
                if counts.shape != is_padding.shape:
                    raise PlanError(
                        f"the targets of head {head!r} must be counts per sample",
                        expected=f"int64[{len(is_padding)}]",
                        found=list(counts.shape),
                    )
            valid[head] = torch.where(is_padding, 0, counts)
        return valid


def is_packed(plan: AnyPlan) -> bool:
    """Returns whether rows are packed sequences."""
    return any(each.packed is not None for each in (plan.plans if isinstance(plan, MixturePlan) else (plan,)))


def _origin_at_fault(fetched: Fetched, plan: AnyPlan, make: Callable[[Sequence[int]], Any]) -> Origin | None:
    """The first sample of a batch that cannot be made by itself; None where no single one is to blame, or can be."""
    if is_packed(plan):
        return None  # sequences are of several samples
    found = rows_at_fault(range(len(fetched.sample_ids)), make)
    if not found:
        return None
    return origins(plan, fetched.batch.epoch, fetched.batch.positions, fetched.sample_ids)[min(found)]


def _refuse_missing(name: str, column: Any) -> None:
    """Refuses targets that some samples do not have; a list of other things is no column of targets at all."""
    if isinstance(column, list) and None in column:
        what = f"the targets {name!r} of a sample have no value (first: row {column.index(None)} of this batch)"
        hint = "fill them in transform=, or let it return None with on_error='mask'"
        raise DecodeError(what, expected="numbers", hint=hint)


def _copy(sample: Any) -> Any:
    """Collation may be tried again: it must not find what it made of a dict before."""
    return dict(sample) if type(sample) is dict else sample


def _without_own(sample: Any) -> Any:
    if not isinstance(sample, Mapping):
        found = type(sample).__name__
        raise DecodeError("a transform must return a dict", found=found, hint="or give collate= for other samples")
    return {name: value for name, value in sample.items() if name not in _OWN_KEYS}
