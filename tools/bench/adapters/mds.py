"""mosaicml-streaming: MDS shards of 64 MiB, uncompressed, ``StreamingDataset`` (py1e) and its ``StreamingDataLoader``.

It depends on torchvision, which we never install, so it lives in an environment of its own: ROOT/venv-mds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tools.bench.case import Case
from tools.bench.contract import Contract, collate_arrays, collate_image_rows
from tools.bench.measuring import Reader
from tools.bench.workloads import Workload, label, raw_samples


class Mds(Reader):
    """Each rank is measured as its own host, with the process group that it would start patched out."""

    package = "streaming"
    is_peer = True
    environment_name = "venv-mds"

    def variables(self, case: Case) -> Mapping[str, str]:
        """Returns what it finds its rank in."""
        rank, world_size = str(case.rank), str(case.world_size)
        return {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def prepare(self, load: Workload) -> None:
        """Writes its shards."""
        from streaming import MDSWriter

        output = self.folder(load.name, "mds")
        if (output / "index.json").exists():
            return
        text, images = {"id": "int", "tokens": "ndarray:int32"}, {"id": "int", "image": "bytes", "label": "int"}
        with MDSWriter(out=str(output), columns=text if load.name == "T" else images, size_limit=1 << 26) as writer:
            for _, sample_id, values in raw_samples(load):
                if load.name == "T":
                    writer.write({"id": sample_id, "tokens": values})
                else:
                    writer.write({"id": sample_id, "image": values.tobytes(), "label": label(sample_id)})

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import streaming
        import streaming.base.dataset
        import streaming.base.shared.prefix

        streaming.base.dataset.maybe_init_dist = lambda: False
        streaming.base.shared.prefix.dist = streaming.base.dataset.dist
        dataset = streaming.StreamingDataset(
            local=str(self.folder(case.workload, "mds")), shuffle=True, shuffle_seed=7, batch_size=case.batch_size
        )
        collate = _collate_text if case.workload == "T" else collate_image_rows
        loader: Iterable[Contract] = streaming.StreamingDataLoader(
            dataset, batch_size=case.batch_size, num_workers=case.num_workers, collate_fn=collate
        )
        return loader


def _collate_text(rows: list[dict[str, object]]) -> Contract:
    return collate_arrays([(row["id"], row["tokens"]) for row in rows])  # type: ignore[misc]
