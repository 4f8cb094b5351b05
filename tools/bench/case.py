"""A case: what one fresh process measures; and where a bench keeps its things."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Folders:
    """Where things lie.

    Attributes:
        root: Results, reports and the peers' environments.
        data: One folder a workload, in it one a form (``T/parquet``).
    """

    root: Path
    data: Path

    @property
    def results(self) -> Path:
        """One file of JSON lines a suite."""
        return self.root / "results"


@dataclass(frozen=True)
class Case:
    """One subject under one setting.

    Attributes:
        name: How tables and targets call it; unique in its suite.
        subject: Name in ``subjects.SUBJECTS``.
        workload: "T" or "I".
        num_workers: DataLoader workers.
        num_threads: Threads that read; 0 for the subject's own choice.
        rank: Data-parallel rank.
        world_size: Number of ranks.
        batch_size: Samples of a batch.
        options: What only this subject knows.
    """

    name: str
    subject: str
    workload: str = "T"
    num_workers: int = 0
    num_threads: int = 1
    rank: int = 0
    world_size: int = 1
    batch_size: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns it as text, for the process that runs it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Reads what ``to_json`` wrote.

        Example:
            >>> case = Case("ours", "shardstream", options={"form": "tar"})
            >>> Case.from_json(case.to_json()) == case
            True
        """
        return cls(**json.loads(text))
