from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardstream.errors import TopologyError
from shardstream.torch.topology import Topology, check_device, resolve_topology, topology_from_environ
from tests.support.processes import run_ranks


def torchrun(rank=1, size=4, **more):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **more}


def slurm(rank=1, size=4, **more):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        **more,
    }


def open_mpi(rank=1, size=4, **more):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), **more}


def pmi(rank=1, size=4, **more):
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


RIGHT = {
    "nobody": ({}, Topology(0, 1, source="single process")),
    "torchrun": (
        torchrun(5, 8, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4"),
        Topology(5, 8, 1, 4, "torchrun"),
    ),
    "RANK and WORLD_SIZE alone": (torchrun(), Topology(1, 4, source="torchrun")),
    "Slurm": (slurm(), Topology(1, 4, 1, source="Slurm")),
    "Slurm, step smaller than the job": (slurm(1, 2, SLURM_NTASKS="8"), Topology(1, 2, 1, source="Slurm")),
    "Slurm, rank above 0 needs no step": (
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3"},
        Topology(3, 4, 3, source="Slurm"),
    ),
    "shell of srun --pty": (slurm(0, 1, SLURM_LOCALID="0"), Topology(0, 1, 0, source="Slurm")),
    "batch shell of one task": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"},
        Topology(0, 1, source="single process"),
    ),
    "Open MPI": (
        open_mpi(OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="2"),
        Topology(1, 4, 1, 2, "Open MPI"),
    ),
    "MPICH": (pmi(), Topology(1, 4, source="MPICH or Intel MPI")),
    "Intel MPI": (pmi(MPI_LOCALRANKID="0", MPI_LOCALNRANKS="2"), Topology(1, 4, 0, 2, "MPICH or Intel MPI")),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_LOCAL_RANK": "2"},
        Topology(2, 3, 2, source="MVAPICH"),
    ),
    "torchrun inside srun: Slurm describes the agents": (
        {**slurm(1, 2), **torchrun(5, 8, LOCAL_RANK="1")},
        Topology(5, 8, 1, source="torchrun"),
    ),
    "torchrun of one inside a step of one": ({**slurm(0, 1), **torchrun(0, 1)}, Topology(0, 1, source="torchrun")),
    "torchrun in a batch shell": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", **torchrun()},
        Topology(1, 4, source="torchrun"),
    ),
    "srun with PMI": ({**slurm(), **pmi()}, Topology(1, 4, 1, source="Slurm")),
    "mpirun over srun: Slurm describes the daemons": (
        {**slurm(0, 1), **open_mpi(5, 8)},
        Topology(5, 8, source="Open MPI"),
    ),
    "Open MPI with PMI": ({**open_mpi(), **pmi()}, Topology(1, 4, source="Open MPI")),
}

WRONG = {
    "world size 0": (torchrun(0, 0), "WORLD_SIZE .torchrun. must be at least 1: found 0"),
    "rank = world size": (
        torchrun(4, 4),
        r"RANK .torchrun. does not exist: expected 0 to 3, .*WORLD_SIZE is 4, found 4",
    ),
    "negative rank": (torchrun(-1, 4), "RANK .torchrun. does not exist"),
    "Slurm rank too large": (slurm(4, 4), r"SLURM_PROCID .Slurm. does not exist.*SLURM_STEP_NUM_TASKS is 4"),
    "local rank too large": (torchrun(LOCAL_RANK="2", LOCAL_WORLD_SIZE="2"), "local_rank .torchrun. does not exist"),
    "RANK alone": ({"RANK": "1"}, "torchrun's variables are half set: expected WORLD_SIZE, found RANK only"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, "half set: expected RANK, found WORLD_SIZE only"),
    "OMPI rank alone": ({"OMPI_COMM_WORLD_RANK": "1"}, "Open MPI's .* expected OMPI_COMM_WORLD_SIZE"),
    "Slurm without a count": ({"SLURM_PROCID": "1"}, "Slurm's variables are half set: expected SLURM_STEP_NUM_TASKS"),
    "no number": (torchrun("one", 2), "RANK is not a number: found 'one'"),
    "empty": (torchrun("", 2), "RANK is not a number: found ''"),
    "local rank no number": (torchrun(LOCAL_RANK="x"), "LOCAL_RANK is not a number"),
    "a world of one in each of 4 tasks": (
        {**slurm(), **torchrun(0, 1)},
        r"torchrun and launcher differ: expected rank 1 of 4 from Slurm .SLURM_PROCID.*found rank 0 of 1 from torchrun",
    ),
    "a world of one in each MPI rank": ({**open_mpi(), **torchrun(0, 1)}, "torchrun and launcher differ"),
    "MPI of one in each Slurm task": ({**slurm(), **open_mpi(0, 1)}, "two launchers differ.*SLURM_PROCID.*OMPI_COMM"),
    "Slurm and MPI number otherwise": ({**slurm(1, 4), **pmi(2, 4)}, "two launchers differ"),
}


@pytest.mark.parametrize(("environ", "expected"), RIGHT.values(), ids=RIGHT.keys())
def test_environ_that_is_right(environ, expected):
    assert topology_from_environ(environ) == expected
    assert resolve_topology(environ=environ) == expected


@pytest.mark.parametrize(("environ", "message"), WRONG.values(), ids=WRONG.keys())
def test_environ_that_is_refused(environ, message):
    with pytest.raises(TopologyError, match=message):
        resolve_topology(environ=environ)


@pytest.mark.parametrize("environ", [{"SLURM_NTASKS": "4"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}])
def test_a_shell_in_an_allocation_is_one_process_and_says_so(environ):
    with pytest.warns(UserWarning, match=r"Slurm allocation of 4 tasks but in no step \(srun\)"):
        assert topology_from_environ(environ) == Topology(0, 1, source="single process")


def test_the_environment_of_this_process_is_asked_by_default(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert resolve_topology() == Topology(2, 3, source="torchrun")


def test_explicit_wins():
    mine = Topology(0, 2)
    assert resolve_topology(mine, environ=torchrun(3, 4)) is mine
    assert pickle.loads(pickle.dumps(mine)) == mine


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (0, -1), (-1, 2), (2, 2), (5, 2)])
def test_ranks_that_do_not_exist(rank, size):
    with pytest.raises(TopologyError):
        Topology(rank, size)


@pytest.mark.parametrize(("local_rank", "num_devices"), [(0, 0), (3, 0), (3, 1), (3, 4), (None, 2)])
def test_devices_that_suffice(local_rank, num_devices):
    check_device(Topology(3, 4, local_rank), num_devices)


@pytest.mark.parametrize(("local_rank", "num_devices"), [(2, 2), (7, 4)])
def test_a_local_rank_without_device(local_rank, num_devices):
    with pytest.raises(TopologyError, match=rf"local rank {local_rank} .*below {num_devices}.*CUDA_VISIBLE_DEVICES"):
        check_device(Topology(7, 8, local_rank), num_devices)


# ------------------------------------------------------------------------------------------------- process groups


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_is_asked_before_the_launcher(group_of_one):
    assert resolve_topology(environ={}) == Topology(0, 1, source="process group")
    found = resolve_topology(environ=torchrun(0, 1, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"))
    assert found == Topology(0, 1, 0, 1, "process group")
    assert resolve_topology(environ=slurm(0, 1, SLURM_LOCALID="0")) == Topology(0, 1, 0, source="process group")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            torchrun(0, 4),
            "process group and launcher differ: expected rank 0 of 1 from process group, found WORLD_SIZE=4",
        ),
        ({"WORLD_SIZE": "2"}, "found WORLD_SIZE=2"),
        (slurm(1, 4), r"process group and launcher differ: expected rank 1 of 4 from Slurm \(SLURM_PROCID"),
        ({**slurm(1, 4), **torchrun(0, 1)}, "process group and launcher differ: expected rank 1 of 4 from Slurm"),
        (open_mpi(0, 2), "process group and launcher differ.*OMPI_COMM_WORLD_RANK"),
    ],
)
def test_a_group_that_the_launcher_contradicts(group_of_one, environ, message):
    with pytest.raises(TopologyError, match=message):
        resolve_topology(environ=environ)


def _resolve_in_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    named = resolve_topology(mesh=mesh, environ=slurm(rank, 4))
    both = resolve_topology(mesh=mesh, mesh_dim=("dp", "tp"), environ={})
    part = resolve_topology(mesh=mesh["tp"], mesh_dim="tp", environ={})
    try:
        resolve_topology(mesh=mesh, mesh_dim="data", environ={})
        message = ""
    except TopologyError as error:
        message = str(error)
    spawned = resolve_topology(environ={**slurm(0, 1), **torchrun(rank, 4)})
    inside = resolve_topology(environ={**slurm(rank // 2, 2), **torchrun(rank, 4)})
    return rank, named.rank, both.rank, part.rank, named.world_size, both.world_size, message, spawned, inside


@pytest.mark.distributed
def test_peers_in_a_mesh_share_a_data_rank():
    found = run_ranks(_resolve_in_mesh, 4)
    assert [row[:6] for row in found] == [
        (0, 0, 0, 0, 2, 4),
        (1, 0, 1, 1, 2, 4),
        (2, 1, 2, 0, 2, 4),
        (3, 1, 3, 1, 2, 4),
    ]
    for rank, row in enumerate(found):
        assert row[6] == "the device mesh has no dimension ['data']: expected one of ['dp', 'tp']"
        assert row[7] == row[8] == Topology(rank, 4, source="process group")
    assert not torch.cuda.is_initialized()
