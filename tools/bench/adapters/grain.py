"""Grain: ArrayRecord with random access, an index shuffle, and ``mp_prefetch`` workers."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.bench.case import Case
from tools.bench.contract import Contract, values_of
from tools.bench.measuring import Reader
from tools.bench.workloads import Workload, raw_shard


class Grain(Reader):
    """Reads its own format; a sample is its id as int64, then its values. Optional: ``grain`` and ``array_record``."""

    package = "grain.python"
    is_peer = True

    def prepare(self, load: Workload) -> None:
        """Writes its files."""
        from array_record.python.array_record_module import ArrayRecordWriter

        output = self.folder(load.name, "arrayrecord")
        if (output / ".complete").exists():
            return
        output.mkdir(parents=True, exist_ok=True)
        options = "group_size:1,zstd:3" if load.name == "T" else "group_size:1,uncompressed"
        for shard in range(load.num_shards):
            writer = ArrayRecordWriter(str(output / f"shard-{shard:05d}.arrayrecord"), options)
            for sample_id, values in raw_shard(load, shard).samples():
                writer.write(struct.pack("<q", sample_id) + values.tobytes())
            writer.close()
        (output / ".complete").touch()

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the iterator."""
        import grain.python as grain

        with contextlib.suppress(ImportError):  # its spawned workers need parsed flags
            from absl import flags

            flags.FLAGS.mark_as_parsed()
        files = [str(path) for path in self.files(case.workload, "arrayrecord")]
        samples = grain.MapDataset.source(grain.ArrayRecordDataSource(files)).shuffle(seed=7)
        if case.world_size > 1:
            samples = samples[case.rank :: case.world_size]
        decoded = samples.map(partial(_decode, workload=case.workload)).to_iter_dataset()
        batches = decoded.batch(case.batch_size, batch_fn=_collate)
        if case.num_workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=case.num_workers))
        return _tensors(batches)


def _decode(data: bytes, workload: str) -> tuple[int, npt.NDArray[Any]]:
    return struct.unpack_from("<q", data)[0], values_of(memoryview(data)[8:], workload)


def _collate(samples: Sequence[tuple[int, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    return {
        "ids": np.array([sample_id for sample_id, _ in samples], np.int64),
        "lengths": np.array([len(values) for _, values in samples], np.int64),
        "data": np.concatenate([values for _, values in samples]),
    }


def _tensors(batches: Iterable[dict[str, npt.NDArray[Any]]]) -> Iterator[Contract]:
    import torch

    for batch in batches:
        yield {name: torch.from_numpy(array) for name, array in batch.items()}
