"""Tokens per second of packed sequences: shardstream beside its own unpacked rate, LitData's and a memory map's."""

from __future__ import annotations

from functools import partial

from tools.bench.case import Case

_BATCH_SIZE = 8  # of 2,048 tokens; 32 documents of the workload are about as many
UNPACKED, PACKED = "unpacked documents", "packed 2048"
MINIMAL, WHOLE = f"{PACKED}, inputs and labels", f"{PACKED}, whole documents"
WITH_WORKERS = f"{PACKED}, 2 workers"
PACKED_PEERS = {
    "litdata-tokens": "packed 2048, LitData TokensLoader",
    "megatron-map": "packed 2048, Megatron-style map",
}


def packed() -> list[Case]:
    """Returns all cases of the suite; sources lie in memory, and one thread reads."""
    ours = partial(Case, subject="shardstream-packed", batch_size=_BATCH_SIZE)
    two_columns = {"columns": ["input_ids", "labels"]}
    cases = [
        Case(UNPACKED, "shardstream", options={"manifest": "T/parquet-tokens"}),
        ours(PACKED),
        ours(MINIMAL, options=two_columns),
        ours(WHOLE, options={"packing": "whole"}),
        ours(WITH_WORKERS, num_workers=2, options={"loader": "streaming"}),
    ]
    for peer, name in PACKED_PEERS.items():
        cases += [
            Case(name, peer, batch_size=_BATCH_SIZE),
            Case(f"{name}, 2 workers", peer, num_workers=2, batch_size=_BATCH_SIZE),
        ]
    return cases
