"""shardstream for PyTorch: micro-batches of the one order, for any number of ranks and workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardstream.torch.batch import Batch
from shardstream.torch.collate import pad_tokens
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.decode import decode
from shardstream.torch.loader import StreamingLoader
from shardstream.torch.ragged import Ragged
from shardstream.torch.topology import Topology, resolve_topology
from shardstream.torch.uneven import UnevenInputs
from shardstream.torch.window import Window
from shardstream.torch.windows import windows

if TYPE_CHECKING:
    from shardstream.torch.evaluation import Evaluation
    from shardstream.torch.evaluation_report import EvaluationReport
    from shardstream.torch.ledger import Ledger
    from shardstream.torch.rendezvous import init_process_group
    from shardstream.torch.verify import verify_ranks
else:
    from shardstream._lazy import attributes

    __getattr__, __dir__ = attributes(
        __name__,
        {
            "Evaluation": "shardstream.torch.evaluation",
            "EvaluationReport": "shardstream.torch.evaluation_report",
            "Ledger": "shardstream.torch.ledger",
            "init_process_group": "shardstream.torch.rendezvous",
            "verify_ranks": "shardstream.torch.verify",
        },
    )

__all__ = [
    "Batch",
    "Evaluation",
    "EvaluationReport",
    "Ledger",
    "Ragged",
    "StreamingDataset",
    "StreamingLoader",
    "Topology",
    "UnevenInputs",
    "Window",
    "decode",
    "init_process_group",
    "pad_tokens",
    "resolve_topology",
    "verify_ranks",
    "windows",
]
