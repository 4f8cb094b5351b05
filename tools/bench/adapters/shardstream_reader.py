"""shardstream itself: Parquet, tar and ``.tar.zst``, in the rank's process or with workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.case import Case
from tools.bench.contract import Contract
from tools.bench.measuring import Reader
from tools.bench.workloads import workload

if TYPE_CHECKING:
    from shardstream.torch import Batch, StreamingDataset


class ShardstreamReader(Reader):
    """What a case's options may hold.

    ``form`` ("parquet"), ``manifest`` (another one, below the data's folder), ``loader`` ("none", "torch" or
    "streaming"), ``resume_at`` (a share of the epoch), ``fields`` (a tar's values as the list of bytes that the library
    delivers by default, instead of the contract's flat tensor); ``dataset``, ``reading`` and
    ``loader_options`` are passed on as keywords.
    """

    package = "shardstream.torch"
    lazy_packages = (
        *("pyarrow.parquet", "fsspec", "tenacity", "zstandard"),
        *("shardstream.manifest_file", "shardstream.formats.parquet"),
    )
    repeats = True

    def manifest(self, name: str) -> Path:
        """Returns where a manifest lies, such as that of "T/parquet"."""
        return self.folders.data / f"{name}.manifest.parquet"

    def dataset(self, case: Case) -> StreamingDataset:
        """Returns the dataset of a case."""
        from shardstream.fetch import Reading
        from shardstream.torch import StreamingDataset, Topology

        form = case.options.get("form", "parquet")
        dataset = StreamingDataset(
            self.manifest(case.options.get("manifest", f"{case.workload}/{form}")),
            batch_size=case.batch_size,
            seed=7,
            topology=Topology(case.rank, case.world_size),
            reading=Reading(num_threads=case.num_threads or None, **case.options.get("reading", {})),
            **self.dataset_options(case),
            **case.options.get("dataset", {}),
        )
        if "resume_at" in case.options:
            plan = dataset.plan
            num_windows = int(plan.num_positions * case.options["resume_at"]) // plan.global_batch
            dataset.load_state_dict(plan.cursor(0, num_windows * plan.global_batch))
        return dataset

    def dataset_options(self, case: Case) -> dict[str, Any]:
        """Returns which columns the dataset reads."""
        load = workload(case.workload)
        if case.options.get("form", "parquet") == "parquet":
            return {"columns": ["id", load.column]}
        dtypes = {} if case.options.get("fields", False) else {load.suffix: np.dtype(load.dtype).name}
        return {"columns": [load.suffix], "dtypes": dtypes}

    def convert(self, case: Case) -> Callable[[Batch], Contract]:
        """Returns what puts a batch under the contract."""
        load, is_parquet = workload(case.workload), case.options.get("form", "parquet") == "parquet"
        if is_parquet and case.workload == "T":
            return _from_ragged
        if is_parquet or case.options.get("fields", False):
            column = load.column if is_parquet else load.suffix
            return _Bytes(column, case.workload, keeps_fields=not is_parquet)
        return partial(_from_numbers, column=load.suffix)

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the rank's batches under the contract."""
        from torch.utils.data import DataLoader

        from shardstream.torch import StreamingLoader

        dataset = self.dataset(case)
        batches: Iterable[Batch] = dataset
        options: dict[str, Any] = {"num_workers": case.num_workers, **case.options.get("loader_options", {})}
        loader = case.options.get("loader", "none")
        if loader == "streaming":
            batches = StreamingLoader(dataset, **options)
        elif loader == "torch":
            batches = DataLoader(dataset, batch_size=None, **options)
        return _Converted(batches, self.convert(case))


@dataclass(frozen=True)
class _Converted:
    """Batches under the contract; each iteration is a pass of the dataset or loader."""

    batches: Iterable[Batch]
    convert: Callable[[Batch], Contract]

    def __iter__(self) -> Iterator[Contract]:
        return map(self.convert, self.batches)


def _from_ragged(batch: Batch) -> Contract:
    tokens = batch["tokens"]
    return {"ids": batch["id"], "lengths": tokens.lengths, "data": tokens.values}


def _from_numbers(batch: Batch, column: str) -> Contract:
    """Ids are ordinals in manifest order, as they are in the data."""
    return {"ids": batch.sample_ids, "lengths": batch[column].lengths, "data": batch[column].values}


@dataclass(frozen=True)
class _Bytes:
    """Joins a list of bytes into the flat tensor. Ids are ordinals in manifest order, as they are in the data."""

    column: str
    workload: str
    keeps_fields: bool

    def __call__(self, batch: Batch) -> Contract:
        import torch

        values: list[bytes] = batch[self.column]
        dtype = torch.int32 if self.workload == "T" else torch.uint8
        lengths = torch.from_numpy(np.array([len(value) // dtype.itemsize for value in values]))  # as numpy is quicker
        if self.keeps_fields:
            return {"ids": batch.sample_ids, "lengths": lengths}
        data = torch.frombuffer(bytearray().join(values), dtype=dtype)
        return {"ids": batch.sample_ids, "lengths": lengths, "data": data}
