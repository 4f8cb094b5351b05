"""Hugging Face datasets: streaming Parquet, and map-style over memory-mapped Arrow, both with torchdata's loader."""

from __future__ import annotations

from collections.abc import Iterable

from tools.bench.case import Case
from tools.bench.contract import Contract, collate_image_rows, collate_text_rows
from tools.bench.measuring import Reader
from tools.bench.workloads import Workload


class HfStreaming(Reader):
    """``load_dataset(streaming=True)``, ``shuffle(buffer_size=1000)``, ``split_dataset_by_node``."""

    package = "datasets"
    is_peer = True

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import datasets
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        # It sleeps 5 s at the end of every shuffled epoch, in each process; that would be counted as reading.
        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
        files = [str(path) for path in self.files(case.workload, "parquet")]
        rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        if case.workload == "T":
            rows = rows.with_format("torch")
        rows = rows.shuffle(seed=7, buffer_size=1000)
        if case.world_size > 1:
            rows = split_dataset_by_node(rows, rank=case.rank, world_size=case.world_size)
        collate = collate_text_rows if case.workload == "T" else collate_image_rows
        loader: Iterable[Contract] = StatefulDataLoader(
            rows, batch_size=case.batch_size, num_workers=case.num_workers, collate_fn=collate
        )
        return loader


class HfMap(Reader):
    """``save_to_disk``, ``load_from_disk``, ``StatefulDistributedSampler``."""

    package = "datasets"
    is_peer = True

    def prepare(self, load: Workload) -> None:
        """Writes its Arrow files from the Parquet ones."""
        import datasets

        output = self.folder(load.name, "hf-arrow")
        if not output.exists():
            files = [str(path) for path in self.files(load.name, "parquet")]
            cache = str(self.folder(load.name, "hf-cache"))
            datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache).save_to_disk(str(output))

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import datasets
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        rows = datasets.load_from_disk(str(self.folder(case.workload, "hf-arrow")))
        if case.workload == "T":
            rows = rows.with_format("torch")
        order = StatefulDistributedSampler(rows, num_replicas=case.world_size, rank=case.rank, shuffle=True, seed=7)
        collate = collate_text_rows if case.workload == "T" else collate_image_rows
        loader: Iterable[Contract] = StatefulDataLoader(
            rows, batch_size=case.batch_size, sampler=order, num_workers=case.num_workers, collate_fn=collate
        )
        return loader
