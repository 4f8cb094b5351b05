"""What an audit found: frozen values, for people and for scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardstream.audit.amplification import ReadCost
from shardstream.audit.quality import ShuffleQuality
from shardstream.audit.tokens import PackingFigures
from shardstream.memory import MemoryNeed


@dataclass(frozen=True)
class EpochCounts:
    """Counts of one epoch over all ranks.

    Attributes:
        epoch: The epoch.
        num_steps: Optimizer steps that begin in it.
        num_samples: Samples read, repeated ones included, padding not.
        num_padding: Rows that only fill micro-batches.
        num_dropped: Samples that no rank reads.
        num_repeated: Samples read twice and counted as real.
        num_ahead: Samples of the next epoch in the last window (``tail="continue"``).
    """

    epoch: int
    num_steps: int
    num_samples: int
    num_padding: int
    num_dropped: int
    num_repeated: int
    num_ahead: int


@dataclass(frozen=True)
class RankCounts:
    """Counts of one rank over all audited epochs.

    Attributes:
        rank: The rank.
        num_steps: Windows of which it reads something.
        num_micro_batches: Micro-batches, over all its workers.
        num_samples: Samples read, repeated ones included, padding not.
        num_padding: Rows that only fill micro-batches.
        num_repeated: Samples that some rank reads a second time here.
    """

    rank: int
    num_steps: int
    num_micro_batches: int
    num_samples: int
    num_padding: int
    num_repeated: int


@dataclass(frozen=True)
class AuditReport:
    """What ``audit`` found.

    Attributes:
        settings: The plan in plain values: samples, blocks, ranks, workers, batch, lanes, tail, seed.
        violations: Each broken promise, in words; empty if everything holds.
        proofs: How each promise was shown, and on how much of the data.
        epochs: Counts of each epoch.
        ranks: Counts of each rank.
        reading: How often blocks are opened, and what would lower it; None if promises are broken.
        quality: How well the order mixes; None if promises are broken or nothing is read.
        packing: What packing makes of the data; None if samples are not packed.
        memory: About how much memory a process needs that reads at defaults; None where sizes are unknown.
    """

    settings: dict[str, Any]
    violations: tuple[str, ...]
    proofs: tuple[str, ...]
    epochs: tuple[EpochCounts, ...]
    ranks: tuple[RankCounts, ...]
    reading: ReadCost | None
    quality: ShuffleQuality | None
    packing: PackingFigures | None = None
    memory: MemoryNeed | None = None

    @property
    def holds(self) -> bool:
        """Whether nothing is violated."""
        return not self.violations

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {"holds": self.holds, **asdict(self)}
