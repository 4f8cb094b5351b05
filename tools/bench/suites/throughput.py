"""Samples per second: limits, shardstream and peers."""

from __future__ import annotations

from tools.bench.case import Case
from tools.bench.subjects import PEERS


def throughput() -> list[Case]:
    """Returns all cases of the suite."""
    return [*_parquet_text(), *_workers(), *_tars(), *_peers()]


def _peers() -> list[Case]:
    cases = [Case(f"{peer} {load}", peer, load) for load in "TI" for peer in PEERS]
    return [*cases, *(Case(f"{peer} T, 2 workers", peer, num_workers=2) for peer in PEERS)]


def _parquet_text() -> list[Case]:
    cases = []
    for threads in (1, 2):
        name = f"{threads} thread{'s' * (threads > 1)}"
        cases += [
            Case(f"limit: Parquet decoded, {name}", "limit-parquet", num_threads=threads, options={"kind": "decode"}),
            Case(f"limit: Parquet shuffled, {name}", "limit-parquet", num_threads=threads, options={"kind": "shuffle"}),
            Case(f"shardstream Parquet, {name}", "shardstream", num_threads=threads),
            Case(f"shardstream Parquet, {name}, 1 of 8 ranks", "shardstream", num_threads=threads, world_size=8),
        ]
    return cases


def _workers() -> list[Case]:
    cases = [
        Case(f"limit: transport {load}, {n} tensor{'s' * (n > 1)}", "limit-transport", load, 2, options=_tensors(n))
        for load in "TI"
        for n in (1, 3)
    ]
    for loader, name in (("torch", "DataLoader"), ("streaming", "StreamingLoader")):
        # Lanes of each worker's own, as the library itself advises at start-up: else every worker decodes every block.
        options = {"loader": loader, "dataset": {"lanes": 64}}
        cases.append(Case(f"shardstream Parquet, {name}, 2 workers", "shardstream", "T", 2, options=options))
    return cases


def _tensors(num_tensors: int) -> dict[str, int]:
    return {"num_tensors": num_tensors}


def _tars() -> list[Case]:
    tar, fields = {"form": "tar"}, {"form": "tar", "fields": True}
    cases = [
        Case("limit: tar T sliced", "limit-tar", "T"),
        Case("limit: tar I sliced", "limit-tar", "I"),
        Case("shardstream tar T", "shardstream", "T", options=tar),
        Case("shardstream tar I", "shardstream", "I", options=tar),
        Case("shardstream tar I, as bytes", "shardstream", "I", options=fields),
    ]
    for threads in (1, 2):
        name = f"{threads} thread{'s' * (threads > 1)}"
        zst = {"form": "tar.zst"}
        cases += [
            Case(f"limit: zstd frames, {name}", "limit-zstd", "T", num_threads=threads),
            Case(f"shardstream tar.zst T, {name}", "shardstream", "T", num_threads=threads, options=zst),
        ]
    return cases
