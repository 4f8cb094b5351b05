"""Which rank is this, of how many? Asked once, in the main process, and refused where the answers contradict.

The variables of every known launcher are rows of one table (``_ALL``), the first that speaks wins. What
``resolve_topology`` returns counts data-parallel ranks: peers that share data (tensor, context, pipeline parallel)
share a rank, which only a device mesh or the user can say.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardstream.errors import TopologyError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Topology:
    """A data-parallel rank.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: Number of data-parallel ranks.
        local_rank: Rank among the processes of this host, or None if unknown.
        local_world_size: Number of processes of this host, or None if unknown.
        source: Where it is known from.

    Raises:
        TopologyError: There is no such rank.

    Example:
        >>> Topology(rank=1, world_size=4)
        Topology(rank=1, world_size=4, local_rank=None, local_world_size=None, source='explicit')
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    source: str = "explicit"

    def __post_init__(self) -> None:
        _check_range("rank", self.rank, "world_size", self.world_size, self.source)
        if self.local_rank is not None and self.local_world_size is not None:
            _check_range("local_rank", self.local_rank, "local_world_size", self.local_world_size, self.source)


def _check_range(index_name: str, index: int, count_name: str, count: int, source: str) -> None:
    if count < 1:
        raise TopologyError(f"{count_name} ({source}) must be at least 1", found=count)
    if not 0 <= index < count:
        expected = f"0 to {count - 1}, since {count_name} is {count}"
        raise TopologyError(f"{index_name} ({source}) does not exist", expected=expected, found=index)


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher; of several names for one thing the first that is set counts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_world_size: str | None = None


_TORCHRUN = _Launcher("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = _Launcher("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID")
_CLUSTER = (
    _SLURM,
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("MPICH or Intel MPI", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        ("MV2_COMM_WORLD_SIZE",),
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
)
_ALL = (_TORCHRUN, *_CLUSTER)


def resolve_topology(
    topology: Topology | None = None,
    mesh: DeviceMesh | None = None,
    mesh_dim: str | Sequence[str] = "dp",
    environ: Mapping[str, str] = os.environ,
) -> Topology:
    """Returns the data-parallel rank of this process.

    Asked in turn: ``topology``; ``mesh``; the initialised process group; the variables of torchrun, Slurm, Open MPI,
    MPICH or Intel MPI, MVAPICH; a process that nobody launched is rank 0 of 1. No collective is run.

    Args:
        topology: The answer, where the caller knows it.
        mesh: A device mesh; ranks that differ only in other dimensions share a data rank.
        mesh_dim: The data-parallel dimension; several (``("dp_replicate", "dp_shard")``) count as one.
        environ: The environment variables.

    Raises:
        TopologyError: Launchers and process group contradict each other, variables are missing or not numbers, there
            is no such rank, mesh dimension or device.

    Example:
        >>> resolve_topology(environ={"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).rank
        3
    """
    if topology is not None:
        resolved = topology
    elif mesh is not None:
        resolved = _from_mesh(mesh, [mesh_dim] if isinstance(mesh_dim, str) else list(mesh_dim), environ)
    elif is_initialized():
        resolved = _from_group(dist.get_rank(), dist.get_world_size(), environ)
    else:
        resolved = topology_from_environ(environ)
    check_device(resolved, torch.cuda.device_count())
    return resolved


def data_parallel_ranks(
    group: ProcessGroup | None = None, mesh: DeviceMesh | None = None, mesh_dim: str | Sequence[str] = "dp"
) -> list[int]:
    """Returns the global ranks that hold different data and step together; ``[0]`` without a process group.

    Raises:
        TopologyError: If both a group and a mesh are given, or the mesh has no such dimension.
    """
    if group is not None and mesh is not None:
        raise TopologyError("both group= and mesh= are given", hint="give the one that says who is data-parallel")
    if mesh is not None:
        resolve_topology(mesh=mesh, mesh_dim=mesh_dim, environ={})  # refuses what does not exist
        names = mesh.mesh_dim_names or ()
        coordinate = list(mesh.get_coordinate() or [])
        dims = [mesh_dim] if isinstance(mesh_dim, str) else list(mesh_dim)
        index = tuple(slice(None) if name in dims else coordinate[axis] for axis, name in enumerate(names))
        kept = [name for name in names if name in dims]
        ranks: list[int] = mesh.mesh[index].permute([kept.index(dim) for dim in dims]).flatten().tolist()
        return ranks
    if not is_initialized():
        return [0]
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def is_initialized() -> bool:
    """Returns whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def topology_from_environ(environ: Mapping[str, str] = os.environ) -> Topology:
    """Returns the rank that the launcher's variables give; rank 0 of 1 where there is no launcher.

    Raises:
        TopologyError: As ``resolve_topology``.

    Example:
        >>> topology_from_environ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).source
        'Open MPI'
    """
    inner, outer = _read(_TORCHRUN, environ), _read_cluster(environ)
    if inner is not None:
        _check_against(inner, outer, is_nested=True)
        return inner
    if outer is not None:
        return outer
    if environ.get("SLURM_NTASKS", "1") != "1":
        warnings.warn(
            f"this process is in a Slurm allocation of {environ['SLURM_NTASKS']} tasks but in no step (srun), "
            "so it is taken for a single process: rank 0 of 1",
            stacklevel=2,
        )
    return Topology(0, 1, source="single process")


def check_device(topology: Topology, num_devices: int) -> None:
    """Refuses a local rank without a device of its own.

    Args:
        topology: The rank.
        num_devices: Devices that this process sees. One is right for every local rank (a launcher gives each task its
            own), none is a job on CPUs.

    Raises:
        TopologyError: There are several devices, but fewer than the local rank needs.

    Example:
        >>> check_device(Topology(rank=3, world_size=4, local_rank=3), num_devices=4)
    """
    if topology.local_rank is not None and 1 < num_devices <= topology.local_rank:
        raise TopologyError(
            f"local rank {topology.local_rank} ({topology.source}) has no device of its own",
            expected=f"a local rank below {num_devices}, the number of visible devices",
            hint="start one process per device, or make more devices visible (CUDA_VISIBLE_DEVICES, --gpus-per-task)",
        )


def _from_mesh(mesh: DeviceMesh, dims: list[str], environ: Mapping[str, str]) -> Topology:
    names = mesh.mesh_dim_names or ()
    missing = [dim for dim in dims if dim not in names]
    if missing:
        raise TopologyError(f"the device mesh has no dimension {missing}", expected=f"one of {list(names)}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TopologyError(
            "this process is not in the device mesh", hint="give a mesh that holds every rank that reads"
        )
    rank, world_size = 0, 1
    for dim in dims:  # row-major, as a mesh numbers its ranks
        axis = names.index(dim)
        rank, world_size = rank * mesh.size(axis) + coordinate[axis], world_size * mesh.size(axis)
    group = _from_group(dist.get_rank(), dist.get_world_size(), environ)
    local = group.local_rank, group.local_world_size
    return Topology(rank, world_size, *local, source=f"device mesh {'*'.join(dims)}")


def _from_group(rank: int, world_size: int, environ: Mapping[str, str]) -> Topology:
    group = Topology(rank, world_size, *_local(rank, world_size, environ), source="process group")
    for name, value in ((_TORCHRUN.rank, rank), (_TORCHRUN.world_size[0], world_size)):
        # Compared one by one: some frameworks set WORLD_SIZE alone and number the ranks themselves.
        if name in environ and number_of(environ, name) != value:
            found = f"{name}={environ[name]}"
            raise TopologyError("process group and launcher differ", expected=_shown(group), found=found, hint=_SAY_IT)
    _check_against(group, _read_cluster(environ), is_nested=_TORCHRUN.rank in environ)
    return group


def _local(rank: int, world_size: int, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Local rank and local world size of a process of the group, as far as a launcher tells them."""
    if _TORCHRUN.local_rank in environ:
        return number_of(environ, _TORCHRUN.local_rank), _optional(environ, _TORCHRUN.local_world_size)
    launched = _read_cluster(environ)
    if launched is None or (launched.rank, launched.world_size) != (rank, world_size):
        return None, None  # it launched the agents of these processes
    return launched.local_rank, launched.local_world_size


def _check_against(inner: Topology, outer: Topology | None, *, is_nested: bool) -> None:
    """Refuses a topology that what launched it contradicts.

    torchrun inside srun (``is_nested``) is right: Slurm's tasks are the agents then. A world of one in each of several
    tasks never is: every task would train on everything.
    """
    if outer is None or outer.world_size == 1 or (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        return
    if not is_nested or inner.world_size == 1:
        raise TopologyError(
            f"{inner.source} and launcher differ", expected=_shown(outer), found=_shown(inner), hint=_SAY_IT
        )


_SAY_IT = (
    "unset the variables that are left over, or say which is right with topology=Topology(rank=..., world_size=...)"
)


def _shown(topology: Topology) -> str:
    launcher = next((launcher for launcher in _ALL if launcher.name == topology.source), None)
    names = f" ({launcher.rank}, {launcher.world_size[0]})" if launcher else ""
    return f"rank {topology.rank} of {topology.world_size} from {topology.source}{names}"


def _read_cluster(environ: Mapping[str, str]) -> Topology | None:
    """What Slurm or MPI say.

    mpirun starts its daemons with srun: of the two, the larger world is the job then, and Slurm's tasks the daemons.
    """
    found = [launched for launcher in _CLUSTER if (launched := _read(launcher, environ)) is not None]
    if len(found) > 1 and found[0].source == _SLURM.name and found[1].world_size > found[0].world_size:
        found = found[1:]
    for other in found[1:]:
        if (other.rank, other.world_size) != (found[0].rank, found[0].world_size):
            expected, seen = _shown(found[0]), _shown(other)
            raise TopologyError("two launchers differ", expected=expected, found=seen, hint=_SAY_IT)
    return found[0] if found else None


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> Topology | None:
    """What one launcher says; None where it did not launch this process."""
    size = next((name for name in launcher.world_size if name in environ), None)
    has_rank = launcher.rank in environ
    if launcher is _SLURM and not (_in_step(environ) and has_rank):
        return None  # a shell of salloc or sbatch knows SLURM_NTASKS, but is none of the tasks
    if not has_rank and size is None:
        return None
    if size is None or not has_rank:
        missing, there = (launcher.world_size[0], launcher.rank) if has_rank else (launcher.rank, str(size))
        raise TopologyError(
            f"{launcher.name}'s variables are half set", expected=missing, found=f"{there} only", hint=_SAY_IT
        )
    rank, world_size = number_of(environ, launcher.rank), number_of(environ, size)
    _check_range(launcher.rank, rank, size, world_size, launcher.name)
    local_rank = _optional(environ, launcher.local_rank)
    return Topology(rank, world_size, local_rank, _optional(environ, launcher.local_world_size), launcher.name)


def _in_step(environ: Mapping[str, str]) -> bool:
    if any(name in environ for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_STEPID")):
        return True
    return environ.get("SLURM_PROCID", "0") != "0"  # a batch shell is always 0


def _optional(environ: Mapping[str, str], name: str | None) -> int | None:
    return number_of(environ, name) if name is not None and name in environ else None


def number_of(environ: Mapping[str, str], name: str) -> int:
    """Returns a variable's value; raises ``TopologyError`` if it is not a number."""
    try:
        return int(environ[name])
    except ValueError:
        raise TopologyError(f"{name} is not a number", found=repr(environ[name]), hint=_SAY_IT) from None
