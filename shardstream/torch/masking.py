"""Batches of which some rows cannot be decoded: those rows become padding, and hold the values of others.

What stands in for a row are the values of the nearest sound row before it in its micro-batch, or else behind it. In a
micro-batch without any, it is the first sample of the epoch's order that can be decoded. So shapes stay what they are,
and what a rank sees depends on neither the number of workers nor what was read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardstream.columns import Objects, Rows
from shardstream.deal import BoolArray
from shardstream.errors import DecodeError, shown_url
from shardstream.faults import is_of_data, rows_at_fault, stand_ins
from shardstream.fetch import Fetched, Reading, fetch
from shardstream.manifest import Manifest
from shardstream.mixture_plan import AnyPlan, MixturePlan
from shardstream.packed_faults import FAULTS
from shardstream.plan import PlannedBatch
from shardstream.quarantine import MaskedSample
from shardstream.torch.assemble import Assembly, is_packed
from shardstream.torch.mixed import without_source

_Columns: TypeAlias = dict[str, Any]
_Make: TypeAlias = Callable[[Sequence[int]], _Columns]

_MOST_TRIED = 4096  # samples at the beginning of an epoch
_TRIED_TOGETHER = 16
_MOST_TEXT = 2000


class MadeBatch(NamedTuple):
    """What a batch is made of."""

    columns: _Columns
    valid_tokens: dict[str, Tensor]
    is_padding: Tensor
    masked: list[MaskedSample]


class MaskingMaker:
    """Makes batches whatever is wrong with their rows.

    Args:
        assembly: What is done to rows.
        plan: The plan.
        rank: Data-parallel rank.
        columns: Columns to read; None for all.
        reading: Threads, storage options.
    """

    def __init__(
        self, assembly: Assembly, plan: AnyPlan, rank: int, columns: Sequence[str] | None, reading: Reading
    ) -> None:
        self._assembly, self._plan, self._columns, self._reading = assembly, plan, columns, reading
        self._names = _Names(plan, rank)
        self._first: dict[int, Callable[[int], _Columns]] = {}

    def made(self, fetched: Fetched) -> MadeBatch:
        """Makes a batch.

        Args:
            fetched: The batch, without the columns of sources and faults.

        Raises:
            Exception: What rows fail with together although each is fine by itself, or what is not of the data.
        """
        num_rows = len(fetched.sample_ids)
        faults = dict(fetched.faults)
        columns = self._sound(fetched, faults)
        if columns is None:
            columns = self._stand_in(fetched.batch.epoch)(num_rows)
        is_padding = torch.from_numpy(fetched.batch.is_padding | np.isin(np.arange(num_rows), list(faults)))
        valid_tokens = self._assembly.count_targets(columns, is_padding)
        told = ((row, int(fetched.sample_ids[row]), faults[row]) for row in sorted(faults))
        return MadeBatch(columns, valid_tokens, is_padding, self._names.masked(fetched.batch, told))

    def told(self, fetched: Fetched, documents: Objects | None) -> list[MaskedSample]:
        """Returns which documents are masked that begin in the sequences of a batch, of its column ``FAULTS``."""
        found = () if documents is None else enumerate(documents.values)
        sound = ((row, each) for row, told in found if row not in fetched.faults for each in told or ())
        return self._names.masked(fetched.batch, ((row, *document) for row, document in sound))

    def _sound(self, fetched: Fetched, faults: dict[int, Exception]) -> _Columns | None:
        """The columns of a batch; None if no row is sound. Adds to ``faults`` what else is at fault."""
        num_rows = len(fetched.sample_ids)
        if len(faults) == num_rows:
            return None
        make = self._maker(fetched, faults)
        chosen = stand_ins(num_rows, faults)
        if not chosen:
            return None
        try:
            return make(chosen)
        except Exception as error:
            if not is_of_data(error) or is_packed(self._plan):  # documents are masked, and no one of them is to blame
                raise
            found = rows_at_fault([row for row in range(num_rows) if row not in faults], make)
            if not found:  # they fail together only: no row is to blame
                raise
        faults |= found
        chosen = stand_ins(num_rows, faults)
        return make(chosen) if chosen else None

    def _maker(self, fetched: Fetched, faults: dict[int, Exception]) -> _Make:
        """What makes columns of some rows. Adds to ``faults`` what cannot be transformed."""
        assembly, rows = self._assembly, fetched.rows
        samples = assembly.samples(fetched, self._plan, faults) if assembly.takes_samples else []

        def make(chosen: Sequence[int]) -> _Columns:
            columns = assembly.of_chosen(rows, samples, chosen)
            assembly.count_targets(dict(columns), torch.zeros(len(chosen), dtype=torch.bool))
            return columns

        return make

    def _stand_in(self, epoch: int) -> Callable[[int], _Columns]:
        """What makes columns of a number of rows, all being the first sample of an epoch that can be decoded."""
        if epoch not in self._first:
            self._first = {epoch: self._find_first(epoch)}
        return self._first[epoch]

    def _find_first(self, epoch: int) -> Callable[[int], _Columns]:
        layout = self._assembly.layout(self._plan, self._columns, finds_faults=True)
        reading = replace(self._reading, num_threads=1, look_ahead=1, gather_rows=_TRIED_TOGETHER)
        num_tried = min(self._plan.num_positions, _MOST_TRIED)
        batches = _batches(epoch, num_tried)
        with closing(fetch(self._plan, batches, layout=layout, reading=reading, finds_faults=True)) as gathers:
            for fetched in (each for gathered in gathers for each in gathered.micro_batches()):
                faults = dict(fetched.faults)
                plain = fetched._replace(rows=without_faults(without_source(fetched.rows)[0])[0])
                num_rows = len(fetched.sample_ids)
                if len(faults) == num_rows:
                    continue
                make = self._maker(plain, faults)
                for row in (row for row in range(num_rows) if row not in faults):
                    if not rows_at_fault([row], make):
                        return lambda wanted, make=make, row=row: make([row] * wanted)  # type: ignore[misc]
        raise DecodeError(
            f"no sample can be decoded of the first {num_tried} of epoch {epoch}: nothing can stand for those masked",
            hint="look at transform=, and at the first shards; on_error='raise' shows the first error",
        )


def without_faults(rows: Rows) -> tuple[Rows, Objects | None]:
    """Takes the column ``FAULTS`` out of packed rows; None where there is none, or nothing is at fault."""
    told = rows.columns.get(FAULTS)
    if not isinstance(told, Objects):
        return rows, None
    columns = {name: column for name, column in rows.columns.items() if name != FAULTS}
    return replace(rows, columns=columns), told if any(told.values) else None


def _batches(epoch: int, num_positions: int) -> Iterator[PlannedBatch]:
    for begin in range(0, num_positions, _TRIED_TOGETHER):
        positions = np.arange(begin, min(begin + _TRIED_TOGETHER, num_positions))
        is_padding: BoolArray = np.zeros(len(positions), np.bool_)
        yield PlannedBatch(0, epoch, begin, 0, 0, positions, is_padding, is_last_in_window=True, is_last_in_epoch=False)


class _Names:
    """Says where masked samples are."""

    def __init__(self, plan: AnyPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._keys: tuple[tuple[int, int], Sequence[bytes]] = ((-1, -1), ())

    def masked(self, batch: PlannedBatch, told: Iterable[tuple[int, int, Exception]]) -> list[MaskedSample]:
        """Names samples of a batch by row, sample id and what is wrong; rows that only fill it are left out."""
        return [self._sample(batch, *each) for each in told if not batch.is_padding[each[0]]]

    def _sample(self, batch: PlannedBatch, row: int, sample_id: int, error: Exception) -> MaskedSample:
        plan, position = self._plan, int(batch.positions[row])
        source, name, epoch = 0, None, batch.epoch
        if isinstance(plan, MixturePlan):
            source = int(plan.sources(batch.positions[row : row + 1]).source[0])
            name, manifest = plan.names[source], plan.plans[source].manifest
        else:
            manifest = plan.manifest
            epoch, position = divmod(epoch * plan.num_positions + position, plan.num_positions)
        shard = int(manifest.shard_of_sample(np.array(sample_id)))
        row_in_shard = sample_id - int(manifest.first_sample[shard])
        return MaskedSample(
            epoch=epoch,
            position=position,
            sample_id=sample_id,
            url=shown_url(manifest.url(shard)),
            shard=shard,
            block=int(np.searchsorted(manifest.block_start, sample_id, "right")) - 1,
            row=row_in_shard,
            reason=_text_of(error),
            rank=self._rank,
            key=self._key(source, manifest, shard, row_in_shard),
            source=name,
        )

    def _key(self, source: int, manifest: Manifest, shard: int, row: int) -> str | None:
        """The key of a sample in a tar, from the manifest: also where its block cannot be decoded."""
        if manifest.lists is None or "sample_keys" not in manifest.lists.names:
            return None
        if not manifest.formats[shard].startswith("tar"):
            return None
        if self._keys[0] != (source, shard):
            self._keys = ((source, shard), manifest.lists.read(shard, ("sample_keys",))["sample_keys"])
        return bytes(self._keys[1][row]).decode("utf-8", "backslashreplace")


def _text_of(error: Exception) -> str:
    text = str(error) if isinstance(error, DecodeError) else f"{type(error).__name__}: {error}"
    return shown_url(text)[:_MOST_TEXT]
