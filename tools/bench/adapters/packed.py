"""Packed sequences: shardstream, LitData's ``TokensLoader``, and a memory map with a document index as Megatron has it.

Every reader delivers ``SEQUENCE_LENGTH`` tokens a sample, and makes its labels, which a training loop needs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tools.bench.adapters.litdata import LitData
from tools.bench.adapters.shardstream_reader import ShardstreamReader
from tools.bench.case import Case
from tools.bench.contract import Contract
from tools.bench.measuring import Reader
from tools.bench.workloads import Workload, raw_shard, workload

if TYPE_CHECKING:
    from torch import Tensor

    from shardstream.torch import Batch

SEQUENCE_LENGTH = 2048


class ShardstreamPacked(ShardstreamReader):
    """Packs while it reads; ``packing`` and ``columns`` are options of a case."""

    def dataset_options(self, case: Case) -> dict[str, Any]:
        """Returns the sequence length, and the columns if not all are made."""
        options = {"sequence_length": SEQUENCE_LENGTH, "packing": case.options.get("packing", "tokens")}
        return {**options, "columns": case.options.get("columns")}

    def manifest(self, name: str) -> Path:
        """Returns the manifest that knows token counts."""
        return super().manifest(f"{name}-tokens")

    def convert(self, case: Case) -> Callable[[Batch], Contract]:
        """Returns what puts a batch under the contract."""
        del case
        return _from_sequences


def _from_sequences(batch: Batch) -> Contract:
    return _contract(batch.sample_ids, batch["input_ids"], batch["labels"])


def _contract(ids: Tensor, inputs: Tensor, labels: Tensor) -> Contract:
    import torch

    if inputs.shape != labels.shape or inputs.shape[1] != SEQUENCE_LENGTH or labels.dtype != torch.int64:
        raise ValueError(f"sequences must be {SEQUENCE_LENGTH} inputs and labels, found {inputs.shape}, {labels.shape}")
    return {"ids": ids, "lengths": torch.full((len(ids),), SEQUENCE_LENGTH), "data": inputs.flatten()}


def _cut(rows: Tensor) -> Contract:
    """Inputs and labels of T + 1 tokens, as most training loops cut them."""
    import torch

    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].to(torch.int64).contiguous()  # as losses want labels
    return _contract(torch.arange(len(rows)), inputs, labels)


class LitDataTokens(LitData):
    """``optimize`` with ``TokensLoader``: documents end to end in chunks of whole sequences, in the order written."""

    def prepare(self, load: Workload) -> None:
        """Writes its chunks."""
        import litdata
        from litdata.streaming.item_loader import TokensLoader

        output = self.folder(load.name, "litdata-tokens")
        if not (output / "index.json").exists():
            litdata.optimize(
                partial(_documents, load=load),
                list(range(load.num_shards)),
                str(output),
                chunk_size=(SEQUENCE_LENGTH + 1) * 8192,
                item_loader=TokensLoader(),
                num_workers=1,
            )

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import litdata
        from litdata.streaming.item_loader import TokensLoader

        dataset = litdata.StreamingDataset(
            str(self.folder(case.workload, "litdata-tokens")),
            item_loader=TokensLoader(block_size=SEQUENCE_LENGTH + 1),
            shuffle=True,
            drop_last=True,
            seed=7,
        )
        loader: Iterable[Tensor] = litdata.StreamingDataLoader(
            dataset, batch_size=case.batch_size, num_workers=case.num_workers
        )
        return _Cut(loader)


def _documents(shard: int, load: Workload) -> Iterator[Tensor]:
    import torch

    for _, values in raw_shard(load, shard).samples():
        yield torch.from_numpy(values.copy())


class _Cut:
    """Batches of T + 1 tokens under the contract; each iteration is a pass of the loader."""

    def __init__(self, loader: Iterable[Tensor]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Contract]:
        return map(_cut, self._loader)


class _SequencesOfMap:
    """Documents of a memory map in a shuffled order, and where in them each sequence begins.

    Three indices are made beforehand and held in memory: orders of documents and sequences, begins of sequences.
    """

    def __init__(self, folder: Path, dtype: npt.DTypeLike, seed: int) -> None:
        self._offsets = np.load(folder / "offsets.npy")
        self._values = np.memmap(folder / "flat.bin", dtype=dtype, mode="r")
        rng = np.random.default_rng(seed)
        self._documents = rng.permutation(len(self._offsets) - 1)
        ends = np.cumsum(np.diff(self._offsets)[self._documents])
        begins = np.arange((int(ends[-1]) - 1) // SEQUENCE_LENGTH) * SEQUENCE_LENGTH
        self._first = np.searchsorted(ends, begins, side="right")
        self._skipped = begins - np.concatenate(([0], ends))[self._first]
        self._order = rng.permutation(len(begins))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Tensor:
        import torch

        sequence = self._order[index]
        place, skipped = int(self._first[sequence]), int(self._skipped[sequence])
        parts, missing = [], SEQUENCE_LENGTH + 1
        while missing:
            document = self._documents[place]
            begin = int(self._offsets[document]) + skipped
            parts.append(self._values[begin : min(int(self._offsets[document + 1]), begin + missing)])
            missing -= len(parts[-1])
            place, skipped = place + 1, 0
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))


class MegatronMap(Reader):
    """A memory map with three indices, a ``DistributedSampler`` and a ``DataLoader``: the bespoke way to pretrain."""

    repeats = True

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        from torch.utils.data import DataLoader, Dataset, DistributedSampler

        folder = self.folder(case.workload, "memmap")
        mapped: Dataset[Any] = _SequencesOfMap(folder, workload(case.workload).dtype, 7)  # type: ignore[assignment]
        order: Any = DistributedSampler(mapped, case.world_size, case.rank, shuffle=False)
        loader: Iterable[Tensor] = DataLoader(mapped, case.batch_size, sampler=order, num_workers=case.num_workers)
        return _Cut(loader)
