"""LitData: ``optimize`` into chunks of 64 MB, ``StreamingDataset`` and ``StreamingDataLoader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from tools.bench.case import Case
from tools.bench.contract import Contract, collate_image_rows, collate_text_rows
from tools.bench.measuring import Reader
from tools.bench.workloads import Workload, label, raw_shard


class LitData(Reader):
    """Reads its own format, written from the same samples."""

    package = "litdata"
    is_peer = True

    def variables(self, case: Case) -> Mapping[str, str]:
        """Returns what it finds its rank in: not ``RANK`` alone, as long as there is no process group."""
        rank, world_size = str(case.rank), str(case.world_size)
        return {"GLOBAL_RANK": rank, "RANK": rank, "WORLD_SIZE": world_size, "NNODES": "1"}

    def prepare(self, load: Workload) -> None:
        """Writes its chunks."""
        import litdata

        output = self.folder(load.name, "litdata")
        if not (output / "index.json").exists():
            shards = list(range(load.num_shards))
            litdata.optimize(partial(_rows, load=load), shards, str(output), chunk_bytes="64MB", num_workers=1)

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import litdata

        dataset = litdata.StreamingDataset(str(self.folder(case.workload, "litdata")), shuffle=True, seed=7)
        collate = collate_text_rows if case.workload == "T" else collate_image_rows
        loader: Iterable[Contract] = litdata.StreamingDataLoader(
            dataset, batch_size=case.batch_size, num_workers=case.num_workers, collate_fn=collate
        )
        return loader


def _rows(shard: int, load: Workload) -> Iterator[dict[str, Any]]:
    import torch

    for sample_id, values in raw_shard(load, shard).samples():
        if load.name == "T":
            yield {"id": sample_id, "tokens": torch.from_numpy(values.copy())}
        else:
            yield {"id": sample_id, "image": values.tobytes(), "label": label(sample_id)}
