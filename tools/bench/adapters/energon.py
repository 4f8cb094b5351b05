"""Megatron Energon: the same tars, indexed by ``energon prepare``; a buffer of 1,000, sequences of 100, one epoch.

Optional, in an environment of its own: ROOT/venv-energon.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from tools.bench.case import Case
from tools.bench.contract import Contract, collate_arrays, tar_sample
from tools.bench.measuring import Reader
from tools.bench.workloads import Workload


class Energon(Reader):
    """Reads hard links to the tars, since its index lies beside them."""

    package = "megatron.energon"
    is_peer = True
    environment_name = "venv-energon"

    def prepare(self, load: Workload) -> None:
        """Links the tars and indexes them."""
        output = self.folder(load.name, "energon")
        if (output / ".nv-meta" / "dataset.yaml").exists():
            return
        output.mkdir(parents=True, exist_ok=True)
        for path in self.files(load.name, "tar"):
            if not (output / path.name).exists():
                os.link(path, output / path.name)
        command = [str(Path(sys.executable).parent / "energon"), "prepare", str(output), "--non-interactive"]
        options = ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "2", "--no-progress"]
        subprocess.run([*command, *options], check=True)

    def open(self, case: Case) -> Iterable[Contract]:
        """Returns the loader."""
        import megatron.energon as me

        workload = case.workload

        @me.stateless  # type: ignore[untyped-decorator]
        def cook(sample: Any) -> Any:
            return sample

        class Encoder(me.TaskEncoder):  # type: ignore[misc]
            decoder = None
            cookers: ClassVar[list[Any]] = [me.Cooker(cook)]

            @me.stateless  # type: ignore[untyped-decorator]
            def encode_sample(self, sample: Any) -> Any:
                return sample

            def batch(self, samples: list[dict[str, Any]]) -> Contract:
                return collate_arrays([tar_sample(sample, workload) for sample in samples])

            def encode_batch(self, batch: Contract) -> Contract:
                return batch

        workers = me.WorkerConfig(
            rank=case.rank, world_size=case.world_size, num_workers=case.num_workers, seed_offset=7
        )
        dataset = me.get_train_dataset(
            str(self.folder(workload, "energon")),
            worker_config=workers,
            batch_size=case.batch_size,
            shuffle_buffer_size=1000,
            max_samples_per_sequence=100,
            task_encoder=Encoder(),
            repeat=False,
        )
        loader: Iterable[Contract] = me.get_savable_loader(dataset)
        return loader
