"""Memory of the process tree above the imports, at defaults."""

from __future__ import annotations

from tools.bench.case import Case
from tools.bench.subjects import PEERS

_ONE_LANE = {"lanes": 1}
_WHOLE = {"stop_s": 60}  # a leak shows only in a long pass


def memory() -> list[Case]:
    """Returns the cases that need no large files."""
    cases = [
        Case("memory T", "shardstream", num_threads=0),
        Case("memory T, ten times", "shardstream", num_threads=0, options={"manifest": "T-tenfold/parquet", **_WHOLE}),
        Case("memory T, 2 workers", "shardstream", num_workers=2, num_threads=0, options={"loader": "streaming"}),
        Case("memory I, tar", "shardstream", "I", num_threads=0, options={"form": "tar"}),
    ]
    for peer in PEERS:
        cases += [Case(f"memory T, {peer}", peer), Case(f"memory T, {peer}, 2 workers", peer, num_workers=2)]
    return cases


def memory_large() -> list[Case]:
    """Returns the cases of large blocks, which ``prepare --large`` writes."""
    group = {"manifest": "large/big-group", "dataset": _ONE_LANE, **_WHOLE}
    frame = {"manifest": "large/big-frame", "form": "tar.zst", "dataset": _ONE_LANE, **_WHOLE}
    return [
        Case("memory, one row group of 10^6 rows", "shardstream", num_threads=0, options=group),
        Case("memory, one zstd frame of 2 GB", "shardstream", "I", num_threads=0, options=frame),
    ]
