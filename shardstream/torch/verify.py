"""``verify_ranks``: one question to all ranks after the start, which finds those that do not fit the others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardstream.errors import PlanError, TopologyError, listed
from shardstream.torch.dataset import StreamingDataset
from shardstream.torch.loader import StreamingLoader
from shardstream.torch.meeting import agree
from shardstream.torch.topology import Topology, is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What every rank must have alike, in the order in which differences are told.
_SETTINGS = (
    "fingerprint", "seed", "epoch", "position", "grid_start", "shuffle", "lanes", "tail", "global_batch",
    "batch_size", "accumulate", "packing", "mixture", "columns", "heads", "on_error",
)  # fmt: skip


def verify_ranks(
    dataset: StreamingDataset | StreamingLoader,
    *,
    group: ProcessGroup | None = None,
    timeout_s: float = 60.0,
    may_share_device: bool = False,
) -> None:
    """Checks that all ranks read the same order from the same place, each its own part of it, on its own device.

    Call it once on every rank, after ``init_process_group``, ``torch.cuda.set_device`` and ``load_state_dict``. No
    collective is run; every rank raises the same error, or none does.

    Args:
        dataset: This rank's dataset, or a loader over it.
        group: The ranks that are compared; default all.
        timeout_s: Until all must have come.
        may_share_device: Accept ranks on one device, as tests have them.

    Raises:
        TopologyError: If a rank does not come in time, two ranks are on one device, world sizes differ, or data ranks
            are not 0 .. P-1 each once (tensor-, context- and pipeline-parallel peers share one).
        PlanError: If ranks differ in manifest, seed, epoch, position, order or batch. Both errors name ranks and
            values.
    """
    streaming = dataset.streaming_dataset if isinstance(dataset, StreamingLoader) else dataset
    offer = {**_identity(streaming.topology), "settings": _settings(streaming)}
    if may_share_device:
        offer["device"] = None
    agree("verify_ranks", offer, compare_ranks, group=group, timeout_s=timeout_s)


def compare_ranks(offers: Mapping[int, Mapping[str, Any]]) -> None:
    """Compares what ranks say of themselves; the decision of ``verify_ranks``, without communication.

    Args:
        offers: Global rank → ``rank``, ``world_size``, ``source``, ``num_processes``, ``device`` (None if unknown),
            ``settings`` (name → value) and ``manifest`` (where it is).

    Raises:
        TopologyError: If devices or data ranks do not fit.
        PlanError: If settings differ.
    """
    faults = [*_shared_devices(offers), *_data_ranks(offers)]
    if faults:
        hint = "start every process with a rank and a device of its own, and call torch.cuda.set_device first"
        raise TopologyError("; ".join(faults), hint=hint)
    faults = []
    for name in _SETTINGS:
        shown = {rank: _shown(name, offer) for rank, offer in offers.items()}
        values = {rank: offer["settings"][name] for rank, offer in offers.items()}
        if any(value != values[next(iter(values))] for value in values.values()):
            faults.append(f"{name}: {_by_value(shown)}{_peers(values, offers)}")
    if faults:
        hint = "start all ranks with the same configuration, manifest and checkpoint"
        raise PlanError("ranks differ in " + "; ".join(faults), hint=hint)


def _identity(topology: Topology) -> dict[str, Any]:
    num_processes = dist.get_world_size() if is_initialized() else 1
    return {
        "rank": topology.rank,
        "world_size": topology.world_size,
        "source": topology.source,
        "num_processes": num_processes,
        "device": _device(topology),
    }


def _device(topology: Topology) -> str | None:
    """What only one rank may have: the device in use, or the place on the host that decides on it; None if unknown."""
    if torch.cuda.is_initialized() or _backend_is_nccl():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        place = f"{index} of {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"  # before torch 2.5 there is no uuid
        return f"device {getattr(properties, 'uuid', place)} of {_host()}"
    # torchrun may run twice on a host; Slurm and MPI number the tasks of a host themselves.
    if topology.local_rank is not None and "LOCAL_RANK" not in os.environ:
        return f"local rank {topology.local_rank} of {_host()}"
    return None


def _backend_is_nccl() -> bool:
    return is_initialized() and "nccl" in str(dist.get_backend())


def _host() -> str:
    """Host name and what tells hosts of one name apart: containers are often all called the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (f" ({boot.read_text().strip()[:8]})" if boot.exists() else "")


def _settings(dataset: StreamingDataset) -> dict[str, Any]:
    plan = dataset.plan
    settings = {**dataset.start.state_dict(), "batch_size": plan.batch_size, "accumulate": plan.accumulate}
    settings["columns"] = None if dataset.columns is None else list(dataset.columns)
    settings["heads"] = sorted(dataset._assembly.targets)  # noqa: SLF001 - counts are summed in this order
    settings["on_error"] = dataset.on_error  # it decides whether targets of packed data are summed over the ranks
    return {name: settings[name] for name in (*_SETTINGS, "manifest")}


# ---------------------------------------------------------------------------------------------------------- comparing


def _shared_devices(offers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    devices = _grouped({rank: offer["device"] for rank, offer in offers.items() if offer["device"] is not None})
    return [f"ranks {listed(ranks)} share {device}" for device, ranks in devices.items() if len(ranks) > 1]


def _data_ranks(offers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Finds data ranks that are missing or there too often."""
    sizes = {rank: offer["world_size"] for rank, offer in offers.items()}
    if len(set(sizes.values())) > 1:
        return [f"world sizes differ: {_by_value(sizes)}"]
    for rank, offer in offers.items():
        # Only a mesh or the user can say that processes share a data rank.
        says_so = offer["source"] == "explicit" or offer["source"].startswith("device mesh")
        if not says_so and offer["world_size"] != offer["num_processes"]:
            who = f"rank {rank} reads as {offer['rank']} of {offer['world_size']} ({offer['source']})"
            return [f"{who} in a process group of {offer['num_processes']}"]
    world_size = next(iter(sizes.values()))
    holders = _grouped({rank: offer["rank"] for rank, offer in offers.items()})
    num_peers, rest = divmod(len(offers), world_size)
    if rest or not num_peers:
        return [f"{len(offers)} processes cannot be {world_size} data ranks with as many peers each"]
    wrong = {rank: holders.get(rank, []) for rank in range(world_size) if len(holders.get(rank, [])) != num_peers}
    texts = [f"data rank {rank} is read by {f'ranks {listed(by)}' if by else 'no rank'}" for rank, by in wrong.items()]
    more = [f"and {len(texts) - 8} more"] if len(texts) > 8 else []  # noqa: PLR2004 - as many as one reads
    return [f"every data rank must have {num_peers}: {', '.join(texts[:8] + more)}"] if texts else []


def _peers(values: Mapping[int, Any], offers: Mapping[int, Mapping[str, Any]]) -> str:
    """Says where ranks differ that are to read the same samples."""
    for data_rank, ranks in _grouped({rank: offer["rank"] for rank, offer in offers.items()}).items():
        if any(values[rank] != values[ranks[0]] for rank in ranks):
            return f" (ranks {listed(ranks)} are peers of data rank {data_rank})"
    return ""


def _shown(name: str, offer: Mapping[str, Any]) -> str:
    value = offer["settings"][name]
    if name != "fingerprint":
        return repr(value)
    return f"{value[:12]} ({offer['settings']['manifest'] or 'not saved'})"


def _by_value(values: Mapping[int, Any]) -> str:
    groups = _grouped(values)
    return ", ".join(f"{value} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}" for value, ranks in groups.items())


def _grouped(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Returns value → ranks that have it, the most frequent value first."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return dict(sorted(groups.items(), key=_size_then_first))


def _size_then_first(group: tuple[Any, list[int]]) -> tuple[int, int]:
    return -len(group[1]), group[1][0]
