"""Process groups of the library's own: its small sums travel there, in no order against the job's collectives."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardstream.errors import TopologyError
from shardstream.torch.gloo_exit import let_gloo_finish
from shardstream.torch.meeting import agree

MAX_GLOO_RANKS = 256  # every rank of a gloo group opens a socket to every other one

# By the job's process group: a second pass over the data makes no second group.
_GROUPS: WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def default_backend(world_size: int) -> str:
    """Returns the backend of a group of so many ranks: gloo, which waits for no device, where its sockets are few."""
    if world_size <= MAX_GLOO_RANKS and dist.is_gloo_available():
        return "gloo"
    return str(dist.get_backend())


def device_for(backend: str) -> torch.device:
    """Returns where tensors must be that a backend communicates."""
    if backend == "gloo":
        return torch.device("cpu")
    if hasattr(torch, "accelerator"):  # since torch 2.6
        return torch.device(torch.accelerator.current_accelerator() or "cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def own_group(ranks: Sequence[int], backend: str, timeout_s: float, purpose: str) -> Any:
    """Returns a group of these ranks, the same whenever they ask for it; no other rank need come.

    ``torch.distributed.new_group`` would want all ranks of the job, or name the group by how many groups a rank is in
    already: ranks of which one has a group more (a pipeline's, an evaluation's) would never meet.

    Args:
        ranks: Global ranks; ``ranks[k]`` has rank k in the group.
        backend: Its backend.
        timeout_s: Until all must have come, and until each of its collectives must be done.
        purpose: What it is for. Each purpose has a group of its own.

    Raises:
        TopologyError: If a rank does not come in time (says which), or ranks want different backends.
    """
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    key = (tuple(ranks), backend, timeout_s, purpose)
    if key not in groups:
        name = agree(f"the group of {purpose}", backend, _new_name, ranks=ranks, timeout_s=timeout_s)
        groups[key] = _make(list(ranks), backend, timeout_s, name, purpose)
        let_gloo_finish()  # also where another library initialised the job's group
    return groups[key]


def _new_name(backends: Mapping[int, str]) -> str:
    if len(set(backends.values())) > 1:
        raise TopologyError("ranks want a group of different backends", found=dict(backends))
    return f"shardstream-{uuid.uuid4().hex}"


def _make(ranks: list[int], backend: str, timeout_s: float, name: str, purpose: str) -> Any:
    """What ``new_group`` does once it has named a group."""
    group, _ = c10d._new_process_group_helper(  # noqa: SLF001
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        c10d._get_default_store(),  # noqa: SLF001
        name,  # type: ignore[arg-type]
        timeout=timedelta(seconds=timeout_s),
        device_id=c10d._get_default_group().bound_device_id,  # noqa: SLF001
        group_desc=f"shardstream {purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}  # noqa: SLF001
    return group
