"""Time to the first batch in a fresh process, after imports; and what importing costs."""

from __future__ import annotations

from typing import Any

from tools.bench.case import Case
from tools.bench.subjects import PEERS

_OF_8 = {"world_size": 8}
_ALONE = {"dataset": {"lanes": 64}}
RESUMED_AT = (0.5, 0.95)


def first_batch() -> list[Case]:
    """Returns all cases of the suite."""
    cold = {"stop_s": 0, "cold": True}
    cases = [
        Case("import shardstream.torch", "import"),
        Case(
            "first batch, rank 0 of 8, pyarrow not imported", "shardstream", num_threads=0, world_size=8, options=cold
        ),
    ]
    cases += _with_resumes("first batch, rank 0 of 8", 8, {})
    cases += _with_resumes("first batch, only rank, 64 lanes", 1, _ALONE)
    cases += _with_resumes("first batch, 10,000 x 100 blocks", 1, {"manifest": "many/parquet", **_ALONE})
    for peer in PEERS:
        cases.append(Case(f"first batch, {peer}", peer, world_size=8, options={"stop_s": 0}))
    return cases


def _with_resumes(name: str, world_size: int, options: dict[str, Any]) -> list[Case]:
    cases = [Case(name, "shardstream", num_threads=0, world_size=world_size, options={"stop_s": 0, **options})]
    for share in RESUMED_AT:
        resumed = {"stop_s": 0, "resume_at": share, **options}
        cases.append(
            Case(
                f"{name}, resumed at {share:.0%}", "shardstream", num_threads=0, world_size=world_size, options=resumed
            )
        )
    return cases
