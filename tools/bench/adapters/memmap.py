"""A map-style dataset over a memory map, with the DataLoader of torch or torchdata: the bespoke way, no streaming."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tools.bench.case import Case
from tools.bench.contract import Contract, collate_arrays
from tools.bench.measuring import Reader
from tools.bench.workloads import workload


class _Mapped:
    def __init__(self, folder: Path, dtype: npt.DTypeLike) -> None:
        self.offsets = np.load(folder / "offsets.npy")
        self.values = np.memmap(folder / "flat.bin", dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, npt.NDArray[Any]]:
        return index, np.asarray(self.values[self.offsets[index] : self.offsets[index + 1]])


class TorchMemmap(Reader):
    """``DistributedSampler`` and ``DataLoader``."""

    is_peer = True
    repeats = True
    modules: ClassVar[tuple[str, str]] = ("torch.utils.data", "torch.utils.data")
    names: ClassVar[tuple[str, str]] = ("DataLoader", "DistributedSampler")

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        from importlib import import_module

        loader, sampler = (getattr(import_module(m), n) for m, n in zip(self.modules, self.names, strict=True))
        mapped = _Mapped(self.folder(case.workload, "memmap"), workload(case.workload).dtype)
        order = sampler(mapped, num_replicas=case.world_size, rank=case.rank, shuffle=True, seed=7)
        batches: Iterable[Contract] = loader(
            mapped, batch_size=case.batch_size, sampler=order, num_workers=case.num_workers, collate_fn=collate_arrays
        )
        return batches


class TorchdataMemmap(TorchMemmap):
    """``StatefulDistributedSampler`` and ``StatefulDataLoader``."""

    package = "torchdata.stateful_dataloader"
    modules = ("torchdata.stateful_dataloader", "torchdata.stateful_dataloader.sampler")
    names = ("StatefulDataLoader", "StatefulDistributedSampler")
