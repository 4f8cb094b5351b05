"""One epoch under each fault: is it exact, or refused within the deadline? For ``python -m tools.reliability``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shardstream.errors import ShardStreamError
from shardstream.index import IndexSettings, build_manifest
from shardstream.manifest import Manifest
from tools.faults.kinds import LYING, PASSING, Faults
from tools.faults.origins import Folder
from tools.faults.reading import all_rows
from tools.faults.server import FaultyServer

_NUM_SHARDS, _SHARD_ROWS, _GROUP_ROWS = 8, 140, 7
_STALL_TIMEOUT_S = 0.3
_DEADLINE_S = 30.0
_DEAD_DEADLINE_S = 2.0
_GRACE_S = 2.0  # an attempt that is under way when the first error comes takes a second at least, and is waited for


@dataclass(frozen=True)
class FaultRound:
    """An epoch that was read from a failing store.

    Attributes:
        kinds: What failed.
        share: Part of the requests that were to fail.
        num_requests: Requests for data.
        num_faults: Of those, how many failed.
        outcome: ``"exact"``, ``"refused"`` or ``"wrong"``.
        seconds: How long it took.
        message: Why it was refused, or "".
        is_good: Whether the outcome is one that is promised.
    """

    kinds: tuple[str, ...]
    share: float
    num_requests: int
    num_faults: int
    outcome: str
    seconds: float
    message: str
    is_good: bool


def fault_rounds(folder: Path, *, share: float = 0.2, seed: int = 0) -> Iterator[FaultRound]:
    """Yields an epoch with each passing fault, one with all of them, one of lies, and those of dead stores.

    Args:
        folder: An empty folder, for 8 small shards.
        share: Part of the requests that fail; of lies a quarter of that.
        seed: Of the choice.
    """
    for shard in range(_NUM_SHARDS):
        uids = range(shard * _SHARD_ROWS, (shard + 1) * _SHARD_ROWS)
        table = pa.table({"uid": list(uids), "text": [f"document {uid} " * (uid % 7) for uid in uids]})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=_GROUP_ROWS)
    settings = IndexSettings(checksum=True)
    right = all_rows(build_manifest(str(folder), num_workers=0))
    with FaultyServer(Folder(folder)) as server:
        urls = [f"{server.url}/{shard}.parquet" for shard in range(_NUM_SHARDS)]
        manifest = build_manifest(urls, num_workers=0, settings=settings)
        for kinds in (*((kind,) for kind in PASSING), PASSING):
            yield _round(server, manifest, right, Faults(share, kinds, seed))
        yield _round(server, manifest, right, Faults(share / 4, LYING, seed), verify=True)
        for kind in ("503", "silent", "drip", "reset", "expired"):
            yield _round(server, manifest, right, Faults(1.0, (kind,), seed), deadline_s=_DEAD_DEADLINE_S)


def _round(
    server: FaultyServer,
    manifest: Manifest,
    right: list[tuple[object, ...]],
    faults: Faults,
    *,
    verify: bool = False,
    deadline_s: float = _DEADLINE_S,
) -> FaultRound:
    from aiohttp import ClientTimeout

    server.faults = faults
    server.counts.clear()
    is_dead = faults.share == 1.0
    limits = {} if is_dead else {"client_kwargs": {"timeout": ClientTimeout(sock_read=_STALL_TIMEOUT_S)}}
    options = {"retry_timeout_s": deadline_s, **limits}
    begun, message = time.monotonic(), ""
    try:
        rows = all_rows(manifest, storage_options=options, verify_checksums=verify)
        outcome = "exact" if rows == right else "wrong"
    except ShardStreamError as error:
        outcome, message = "refused", str(error)
    seconds = time.monotonic() - begun
    is_refused = outcome == "refused" and seconds < deadline_s + _GRACE_S and ".parquet" in message
    num_faults = sum(server.counts[kind] for kind in faults.kinds)
    return FaultRound(
        kinds=faults.kinds,
        share=faults.share,
        num_requests=server.counts["good"] + num_faults,
        num_faults=num_faults,
        outcome=outcome,
        seconds=round(seconds, 2),
        message=message,
        is_good=is_refused if is_dead else outcome == "exact",
    )
