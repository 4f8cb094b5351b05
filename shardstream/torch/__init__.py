"""shardstream for PyTorch: micro-batches of the one order, for any number of ranks and workers."""

from __future__ import annotations

from shardstream.torch.batch import Batch, Ragged
from shardstream.torch.collate import pad_tokens
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.decode import decode
from shardstream.torch.loader import StreamingLoader
from shardstream.torch.rendezvous import init_process_group
from shardstream.torch.topology import Topology, resolve_topology
from shardstream.torch.verify import verify_ranks

__all__ = [
    "Batch",
    "Ragged",
    "StreamingDataset",
    "StreamingLoader",
    "Topology",
    "decode",
    "init_process_group",
    "pad_tokens",
    "resolve_topology",
    "verify_ranks",
]
