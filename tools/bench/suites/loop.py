"""What denominators cost a training loop, and what an object store gives."""

from __future__ import annotations

from tools.bench.case import Case

MODES = ("none", "blocking", "overlapped", "constant")


def denominators() -> list[Case]:
    """Returns the cases: each way of counting, on 2 and 4 processes."""
    return [
        Case(f"loop, counts {mode}, {ranks} ranks", "loop", world_size=ranks, options={"mode": mode})
        for ranks in (2, 4)
        for mode in MODES
    ]


def store() -> list[Case]:
    """Returns the cases: shardstream at defaults beside the same ranges undecoded, and its first batch."""
    cases = []
    for load in "TI":
        cases += [
            Case(f"store {load}", "store", load, num_threads=0),
            Case(f"store {load}, first batch", "store", load, num_threads=0, options={"stop_s": 0}),
        ]
    return cases
