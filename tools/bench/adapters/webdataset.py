"""WebDataset: shard shuffle and a buffer of 1,000 samples, ``split_by_node`` and ``split_by_worker``, ``WebLoader``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from tools.bench.case import Case
from tools.bench.contract import Contract, collate_arrays, tar_sample
from tools.bench.measuring import Reader


class WebDataset(Reader):
    """Reads the same tars as shardstream."""

    package = "webdataset"
    is_peer = True

    def variables(self, case: Case) -> Mapping[str, str]:
        """Returns what it finds its rank in."""
        return {"RANK": str(case.rank), "WORLD_SIZE": str(case.world_size)}

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import webdataset as wds

        urls = [str(path) for path in self.files(case.workload, "tar")]
        samples = wds.WebDataset(
            urls, shardshuffle=len(urls), seed=7, nodesplitter=wds.split_by_node, empty_check=False
        ).shuffle(1000, seed=7)
        batches = samples.map(partial(tar_sample, workload=case.workload)).batched(
            case.batch_size, collation_fn=collate_arrays, partial=True
        )
        loader: Iterable[Contract] = wds.WebLoader(batches, batch_size=None, num_workers=case.num_workers)
        return loader
