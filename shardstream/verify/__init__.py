"""Verifying: whether shards are, byte by byte, those that were indexed. In parallel, and resumable."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Any

from shardstream.checksums import BLOCK_LIST, REST_LIST
from shardstream.errors import PlanError, shown_url
from shardstream.index._look import Fault, default_num_workers, look_at_all
from shardstream.manifest import Int64Array, Manifest
from shardstream.permutation import key64, keyed_permutation
from shardstream.verify._shard import Checks, ShardFault
from shardstream.verify._state import VerifyState

__all__ = ["ShardFault", "VerifyProgress", "VerifyReport", "verify_manifest"]


@dataclass(frozen=True)
class VerifyProgress:
    """How far verifying is.

    Attributes:
        num_done: Shards checked, those of an interrupted run included.
        num_shards: Shards to check.
        num_bytes: Bytes read by this run.
        num_faults: Faults found.
    """

    num_done: int
    num_shards: int
    num_bytes: int
    num_faults: int


@dataclass(frozen=True)
class VerifyReport:
    """What verifying found.

    Attributes:
        fingerprint: Of the manifest.
        proves_content: Whether every byte was compared. Without checksums in the manifest only sizes, version tags
            and what indexing read of the layout are: bytes may differ all the same.
        num_shards: Shards of the manifest.
        num_chosen: Shards that were to be checked.
        num_resumed: Of those, shards that an interrupted run had found good.
        num_bytes: Bytes read by this run.
        num_rewritten: Shards with another version tag than when they were indexed, and the same content as far as
            could be told: copied or written again.
        faults: What is wrong, in the order of the manifest.
    """

    fingerprint: str
    proves_content: bool
    num_shards: int
    num_chosen: int
    num_resumed: int
    num_bytes: int
    num_rewritten: int
    faults: tuple[ShardFault, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON-able values, ``is_good`` included."""
        return {**asdict(self), "faults": [asdict(fault) for fault in self.faults], "is_good": self.is_good}


def verify_manifest(
    manifest: Manifest,
    *,
    sample: float | None = None,
    seed: int = 0,
    state: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    num_workers: int | None = None,
    executor: Executor | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyReport:
    """Compares shards with what a manifest knows of them: every byte, if it was indexed with checksums.

    Each shard is read once, front to back. Processes are used for many or large shards; a script then must call this
    under ``if __name__ == "__main__":`` or with ``num_workers=0``.

    Args:
        manifest: The manifest.
        sample: Check only so many shards (an int), or such a part of them (a float up to 1); None for all.
        seed: Which ones; the same for the same number of shards.
        state: A local file in which shards found good are noted, so that the same call after an interruption goes on
            there. Shards at fault are checked again. A finished file is begun anew.
        storage_options: Given to fsspec.
        num_workers: Processes; 0 works in this one; default: by the number and size of shards.
        executor: Any ``concurrent.futures.Executor``, used instead; it is left running.
        progress: Called after each shard.

    Returns:
        What was found. It does not raise for what is wrong with shards.

    Raises:
        PlanError: If the sample is not a positive number.
        ManifestError: If the state is of another manifest or choice, or no state at all.

    Example:
        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> from shardstream.index import IndexSettings, build_manifest
        >>> path = tempfile.mkdtemp() + "/a.parquet"
        >>> pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2, 3]}), path)
        >>> manifest = build_manifest(path, settings=IndexSettings(checksum=True))
        >>> report = verify_manifest(manifest)
        >>> report.is_good, report.proves_content
        (True, True)
        >>> with open(path, "r+b") as file:
        ...     _ = file.seek(10), file.write(b"?")
        >>> [(fault.kind, fault.block) for fault in verify_manifest(manifest).faults]
        [('block', 0)]
    """
    shards = chosen_shards(manifest.num_shards, sample, seed)
    has_checksums = manifest.lists is not None and manifest.lists.names.issuperset((BLOCK_LIST, REST_LIST))
    about = {"fingerprint": manifest.fingerprint, "checksums": has_checksums, "sample": repr(sample), "seed": seed}
    faults: list[ShardFault] = []
    num_bytes = num_rewritten = 0
    with VerifyState.opened(state, about) as noted:
        left = [shard for shard in shards.tolist() if shard not in noted.good]
        num_resumed = len(shards) - len(left)
        if executor is None and num_workers is None:
            num_workers = default_num_workers([manifest.url(shard) for shard in left]) if left else 0
        checks = Checks(manifest, left, has_checksums=has_checksums, storage_options=dict(storage_options or {}))
        for place, found in enumerate(look_at_all(checks, num_workers, executor)):
            if isinstance(found, Fault):
                faults.append(
                    ShardFault(
                        left[place], shown_url(manifest.url(left[place])), "unreadable", None, None, found.reason
                    )
                )
            else:
                faults += found.faults
                num_bytes += found.num_bytes
                num_rewritten += found.is_rewritten and not found.faults
                if not found.faults:
                    noted.add(left[place])
            if progress is not None:
                progress(VerifyProgress(num_resumed + place + 1, len(shards), num_bytes, len(faults)))
        noted.finish()
    return VerifyReport(
        fingerprint=manifest.fingerprint,
        proves_content=has_checksums,
        num_shards=manifest.num_shards,
        num_chosen=len(shards),
        num_resumed=num_resumed,
        num_bytes=num_bytes,
        num_rewritten=num_rewritten,
        faults=tuple(faults),
    )


def chosen_shards(num_shards: int, sample: float | None, seed: int) -> Int64Array:
    """Returns the shards of a sample, in order; a larger sample of the same seed holds a smaller one.

    Args:
        num_shards: Shards there are.
        sample: So many (an int), such a part (a float up to 1), or None for all.
        seed: Which ones.

    Raises:
        PlanError: If the sample is not positive, or a part above 1.

    Example:
        >>> (
        ...     chosen_shards(10, 3, seed=0).tolist(),
        ...     len(chosen_shards(10, 0.25, seed=0)),
        ...     len(chosen_shards(10, 99, seed=0)),
        ... )
        ([1, 4, 6], 3, 10)
    """
    is_part = isinstance(sample, float)
    if sample is not None and not (0 < sample <= (1 if is_part else math.inf)):
        raise PlanError(
            "a sample is a number of shards, or a part of them", expected="1, 2, … or 0 < part <= 1", found=sample
        )
    num_chosen = num_shards if sample is None else math.ceil(sample * num_shards) if is_part else int(sample)
    order = keyed_permutation(num_shards, key64(seed, 0, "verify"))
    order = order[:num_chosen]
    order.sort()
    return order
