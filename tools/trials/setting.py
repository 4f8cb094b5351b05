"""What trials train on: a corpus and a model so small that a step takes milliseconds, in a folder of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.training.launch import ROOT, call

NUM_DOCUMENTS = 96
GLOBAL_BATCH = 12
NUM_STEPS = NUM_DOCUMENTS // GLOBAL_BATCH
"""Steps of an epoch."""

_DATA = {"global_batch": GLOBAL_BATCH, "max_micro_batch": 3}
_MODEL = {"context_length": 48, "width": 8, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class Setting:
    """Where a trial works.

    Attributes:
        folder: Holds everything else.
        manifest: Of the corpus: ``NUM_DOCUMENTS`` short documents in three shards.
        config: A config file of ``tools/train.py``: float64, checkpoints every three steps.
        temporary: ``TMPDIR`` of all that is started, so that whatever it leaves there is found.
    """

    folder: Path
    manifest: Path
    config: Path
    temporary: Path

    @classmethod
    def make(cls, folder: Path, *, timeout_s: float, dropout: float = 0.0, more: Mapping[str, Any] = {}) -> Setting:
        """Writes corpus, manifest and config, and sets ``TMPDIR`` for what this process starts.

        Args:
            folder: An empty or a new folder.
            timeout_s: The run's deadline.
            dropout: Of the model.
            more: Other entries of the config.
        """
        setting = cls(folder, folder / "corpus.manifest.parquet", folder / "trial.yaml", folder / "tmp")
        setting.temporary.mkdir(parents=True)
        os.environ["TMPDIR"] = str(setting.temporary)
        corpus = folder / "corpus"
        options = ["--formats", "parquet", "--num-documents", str(NUM_DOCUMENTS), "--max-document-bytes", "48"]
        call([ROOT / "tools" / "make_corpus.py", corpus, *options, "--num-shards", "3"])
        call(["-m", "shardstream", "index", corpus / "parquet", "-o", setting.manifest, "--tokens-column", "tokens"])
        config = {
            "run": str(folder / "run"),
            "seed": 3,
            "num_epochs": 100_000,  # a trial stops it; the learning rate must not depend on when
            "precision": "float64",
            "timeout_s": timeout_s,
            "data": {"manifest": str(setting.manifest), **_DATA},
            "model": {**_MODEL, "dropout": dropout},
            "checkpoint": {"every_num_steps": 3, "num_kept": 3},
            **more,
        }
        setting.config.write_text(yaml.safe_dump(config))
        return setting

    @property
    def run(self) -> Path:
        """The run folder of the job that is disturbed."""
        return self.folder / "run"
