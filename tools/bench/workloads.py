"""The two workloads: T, tokenised text; I, opaque "images". Seeded, and scalable so that tests can use tiny ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SEED = 1234
VOCABULARY = 50_257


@dataclass(frozen=True)
class Workload:
    """What is read.

    Attributes:
        name: "T" or "I".
        num_shards: Files of each form.
        shard_rows: Samples of each file.
        group_rows: Rows of a Parquet row group.
        dtype: Of a sample's values.
        column: Its column in Parquet.
        suffix: Its member's suffix in tars.
    """

    name: str
    num_shards: int
    shard_rows: int
    group_rows: int
    dtype: npt.DTypeLike
    column: str
    suffix: str

    @property
    def num_samples(self) -> int:
        """Samples over all shards."""
        return self.num_shards * self.shard_rows


_FULL = {
    "T": Workload("T", 32, 6250, 1000, np.int32, "tokens", "bin"),
    "I": Workload("I", 20, 1000, 100, np.uint8, "image", "jpg"),
}


def workload(name: str, scale: float = 1.0) -> Workload:
    """Returns a workload.

    Args:
        name: "T": 200,000 documents of 600 tokens on average; "I": 20,000 blobs of 50 KB.
        scale: Fraction of the samples; small ones have fewer shards and smaller row groups as well.

    Example:
        >>> workload("T").num_samples, workload("I", 0.01).num_samples
        (200000, 200)
    """
    full = _FULL[name]
    if scale == 1:
        return full
    num_shards = max(4, min(full.num_shards, round(full.num_shards * scale)))
    shard_rows = max(8, round(full.num_samples * scale / num_shards))
    group_rows = max(2, min(full.group_rows, shard_rows // 5))
    return Workload(name, num_shards, shard_rows, group_rows, full.dtype, full.column, full.suffix)


class RawShard(NamedTuple):
    """The samples of one shard, before they take a form.

    Attributes:
        ids: int64[n], ordinals over all shards.
        offsets: int64[n + 1]; sample i is ``values[offsets[i] : offsets[i + 1]]``.
        values: int32 tokens or uint8 bytes.
    """

    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    values: npt.NDArray[Any]

    def samples(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yields id and values of each sample."""
        for i, sample_id in enumerate(self.ids.tolist()):
            yield sample_id, self.values[self.offsets[i] : self.offsets[i + 1]]


def raw_shard(load: Workload, shard: int) -> RawShard:
    """Makes one shard: T has log-normal lengths (mean 600) and a skewed vocabulary, I random bytes."""
    rng = np.random.default_rng([SEED, 1 if load.name == "T" else 2, shard])
    rows = load.shard_rows
    if load.name == "T":
        lengths = np.clip(rng.lognormal(np.log(600) - 0.32, 0.8, rows), 16, 8192).astype(np.int64)
    else:
        lengths = rng.integers(40_000, 60_000, rows)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    values: npt.NDArray[Any]
    if load.name == "T":
        values = (VOCABULARY * rng.random(total) ** 3).astype(np.int32)
    else:
        values = np.frombuffer(rng.bytes(total), np.uint8)
    return RawShard(np.arange(shard * rows, (shard + 1) * rows), offsets, values)


def raw_samples(load: Workload) -> Iterator[tuple[int, int, npt.NDArray[Any]]]:
    """Yields shard, id and values of every sample, in order: what the writers of the peers' own formats take."""
    for shard in range(load.num_shards):
        for sample_id, values in raw_shard(load, shard).samples():
            yield shard, sample_id, values


def label(sample_id: int) -> int:
    """Returns the sample's label."""
    return sample_id % 1000
