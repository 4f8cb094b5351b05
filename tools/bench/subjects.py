"""All subjects, by name. They are loaded when they are used: each needs other packages."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from tools.bench.case import Folders
from tools.bench.measuring import Subject

SUBJECTS = {
    "shardstream": "tools.bench.adapters.shardstream_reader:ShardstreamReader",
    "shardstream-packed": "tools.bench.adapters.packed:ShardstreamPacked",
    "litdata-tokens": "tools.bench.adapters.packed:LitDataTokens",
    "megatron-map": "tools.bench.adapters.packed:MegatronMap",
    "import": "tools.bench.costs.imports:ImportCost",
    "store": "tools.bench.costs.store:Store",
    "loop": "tools.bench.costs.loop:Loop",
    "growth": "tools.bench.costs.growth:Growth",
    "order-distributed-sampler": "tools.bench.costs.orders:DistributedSamplerOrder",
    "order-mds": "tools.bench.costs.orders:MdsOrder",
    "order-litdata": "tools.bench.costs.orders:LitDataOrder",
    "order-litdata-elastic": "tools.bench.costs.orders:LitDataElastic",
    "order-grain": "tools.bench.costs.orders:GrainOrder",
    "limit-parquet": "tools.bench.limits.parquet:ParquetLimit",
    "limit-tar": "tools.bench.limits.tar:TarLimit",
    "limit-zstd": "tools.bench.limits.tar:ZstdLimit",
    "limit-transport": "tools.bench.limits.transport:TransportLimit",
}
PEERS = {
    "mds": "tools.bench.adapters.mds:Mds",
    "litdata": "tools.bench.adapters.litdata:LitData",
    "webdataset": "tools.bench.adapters.webdataset:WebDataset",
    "hf-streaming": "tools.bench.adapters.hf:HfStreaming",
    "hf-map": "tools.bench.adapters.hf:HfMap",
    "grain": "tools.bench.adapters.grain:Grain",
    "energon": "tools.bench.adapters.energon:Energon",
    "torchdata": "tools.bench.adapters.memmap:TorchdataMemmap",
    "torch": "tools.bench.adapters.memmap:TorchMemmap",
}
STREAMING_PEERS = ("mds", "litdata", "webdataset", "hf-streaming", "grain", "energon")


def load_subject(name: str, folders: Folders) -> Subject:
    """Returns a subject; its own packages are imported only when it measures or prepares."""
    module, _, attribute = {**SUBJECTS, **PEERS}[name].partition(":")
    subject = getattr(import_module(module), attribute)(folders)
    if not isinstance(subject, Subject):
        raise TypeError(f"{name} is no subject: {subject!r}")
    return subject


def interpreter(subject: Subject, root: Path) -> str:
    """Returns the Python that runs a subject: the peers' environment where there is one, else this one."""
    if subject.is_peer:
        python = root / (subject.environment_name or "venv") / "bin" / "python"
        if python.exists():
            return str(python)
    return sys.executable
