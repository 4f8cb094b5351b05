"""shardstream: one provable order of all samples, dealt to any number of ranks and workers, resumable anywhere.

Everything here is loaded when it is first used: ``import shardstream`` loads neither torch nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardstream._version import __version__
from shardstream.errors import (
    CursorError,
    DecodeError,
    DesyncError,
    ManifestError,
    PlanError,
    ReadError,
    ShardChangedError,
    ShardStreamError,
    ShardStreamWarning,
    TopologyError,
)

if TYPE_CHECKING:
    from shardstream.batching import BatchPlan, plan_batch, replan
    from shardstream.cursor import Cursor
    from shardstream.index import build_manifest
    from shardstream.manifest import Manifest
    from shardstream.mixing import Mixture
    from shardstream.order import EpochOrder
    from shardstream.packing import Packing
    from shardstream.quarantine import MaskedSample, read_quarantine
    from shardstream.reading import Reading
    from shardstream.torch import Batch, Ragged, StreamingDataset, StreamingLoader, Topology
else:
    # In the else branch, so that type checkers see the names above only and find typos.
    from shardstream._lazy import attributes

    __getattr__, __dir__ = attributes(
        __name__,
        {
            "Batch": "shardstream.torch",
            "BatchPlan": "shardstream.batching",
            "Cursor": "shardstream.cursor",
            "EpochOrder": "shardstream.order",
            "Manifest": "shardstream.manifest",
            "MaskedSample": "shardstream.quarantine",
            "Mixture": "shardstream.mixing",
            "Packing": "shardstream.packing",
            "Ragged": "shardstream.torch",
            "Reading": "shardstream.reading",
            "StreamingDataset": "shardstream.torch",
            "StreamingLoader": "shardstream.torch",
            "Topology": "shardstream.torch",
            "build_manifest": "shardstream.index",
            "plan_batch": "shardstream.batching",
            "read_quarantine": "shardstream.quarantine",
            "replan": "shardstream.batching",
        },
    )


__all__ = [
    "Batch",
    "BatchPlan",
    "Cursor",
    "CursorError",
    "DecodeError",
    "DesyncError",
    "EpochOrder",
    "Manifest",
    "ManifestError",
    "MaskedSample",
    "Mixture",
    "Packing",
    "PlanError",
    "Ragged",
    "ReadError",
    "Reading",
    "ShardChangedError",
    "ShardStreamError",
    "ShardStreamWarning",
    "StreamingDataset",
    "StreamingLoader",
    "Topology",
    "TopologyError",
    "__version__",
    "build_manifest",
    "plan_batch",
    "read_quarantine",
    "replan",
]
