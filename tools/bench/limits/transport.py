"""Transport: DataLoader workers that hand over batches made beforehand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tools.bench.case import Case
from tools.bench.measuring import Metrics, Subject

_NUM_VALUES = {"T": (600, torch.int32), "I": (50_000, torch.uint8)}
_NUM_BATCHES = {"T": 1500, "I": 300}


class _Ready(IterableDataset[list[Tensor]]):
    def __init__(self, num_batches: int, num_values: int, dtype: torch.dtype, num_tensors: int) -> None:
        super().__init__()
        self.shape = (num_batches, num_values, dtype, num_tensors)

    def __iter__(self) -> Iterator[list[Tensor]]:
        num_batches, num_values, dtype, num_tensors = self.shape
        for _ in range(num_batches):
            small = [torch.zeros(32, dtype=torch.int64) for _ in range(num_tensors - 1)]
            yield [torch.zeros(num_values, dtype=dtype), *small]


class TransportLimit(Subject):
    """Moves ready batches of ``num_tensors`` tensors each from ``num_workers`` workers."""

    def measure(self, case: Case) -> Metrics:
        """Measures from the first batch to the last, as with readers."""
        values, dtype = _NUM_VALUES[case.workload]
        num_batches = int(case.options.get("num_batches", _NUM_BATCHES[case.workload]))
        ready = _Ready(num_batches, values * case.batch_size, dtype, case.options["num_tensors"])
        batches = iter(DataLoader(ready, batch_size=None, num_workers=case.num_workers, collate_fn=_as_is))
        next(batches)
        began = time.perf_counter()
        num_samples = sum(1 for _ in batches) * case.batch_size
        samples_per_s = num_samples / (time.perf_counter() - began)
        return {"samples_per_s": samples_per_s, "bytes_per_s": samples_per_s * values * dtype.itemsize}


def _as_is(batch: list[Tensor]) -> list[Tensor]:
    return batch
