"""What the numbers were measured on: no host names, no paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("shardstream", "torch", "numpy", "pyarrow", "zstandard", "fsspec", "s3fs", "obstore")
_PEERS = ("webdataset", "litdata", "datasets", "torchdata", "mosaicml-streaming", "grain", "megatron-energon")


def describe_machine() -> dict[str, str]:
    """Returns the processor, its cores, the memory, and versions of what was run here."""
    with_versions = {name: _version(name) for name in _PACKAGES}
    return {
        "processor": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
        **{name: found for name, found in with_versions.items() if found},
    }


def describe_peers(root: Path) -> dict[str, str]:
    """Returns the versions of the peers that are installed below the bench's root, or here."""
    found = {name: _version(name) for name in _PEERS}
    for environment in ("venv", "venv-mds", "venv-energon"):
        for name in _PEERS:
            pattern = f"{environment}/lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
            for folder in root.glob(pattern):
                found[name] = folder.name.removesuffix(".dist-info").rpartition("-")[2]
    return {name: text for name, text in found.items() if text}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
