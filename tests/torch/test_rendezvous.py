from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from shardstream.errors import TopologyError
from shardstream.torch.rendezvous import init_process_group
from shardstream.torch.topology import Topology
from tests.support.processes import CONTEXT

pytestmark = pytest.mark.distributed


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def environ(rank, size, port, **more):
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **address, **more}


def _join(rank, variables, timeout_s, results):
    """One rank: comes, sums its rank over all, and reports; an error is reported instead."""
    try:
        topology = init_process_group("gloo", timeout_s=timeout_s, environ=variables)
        total = torch.tensor([topology.rank])
        dist.all_reduce(total)
        results.put((rank, int(total)))
        dist.barrier()
        dist.destroy_process_group()
    except TopologyError as error:
        results.put((rank, str(error)))


def run(environs, timeout_s):
    """Starts one process per (rank, environment) and returns what they report, by rank."""
    results = CONTEXT.Queue()
    processes = [CONTEXT.Process(target=_join, args=(rank, env, timeout_s, results)) for rank, env in environs]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
        assert not process.is_alive()
    return found


def test_all_come():
    port = free_port()
    assert run([(rank, environ(rank, 2, port)) for rank in range(2)], 30) == [(0, 1), (1, 1)]


def test_a_missing_rank_is_named_by_all_that_came():
    port = free_port()
    found = run([(rank, environ(rank, 3, port)) for rank in (0, 2)], 3)
    assert [rank for rank, _ in found] == [0, 2]
    for _, text in found:
        assert text.startswith("2 of 3 ranks came before the deadline: expected all ranks; missing 1")


def test_a_missing_host_is_named():
    port = free_port()
    ((rank, text),) = run([(1, environ(1, 2, port))], 2)
    assert rank == 1
    assert text.startswith(f"nobody hosts the store; rank 0 has not come [localhost:{port}]")


def test_a_missing_host_is_not_waited_for_twice(monkeypatch):
    """Found by tools/chaos.py: a rank whose torchrun was killed while it imported lived for twice its deadline."""

    def store(*_args, **_options):
        raise AssertionError("torch's store tries again when its timeout has passed")

    monkeypatch.setattr(dist, "TCPStore", store)
    port = free_port()
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(TopologyError, match=f"nobody hosts the store.*localhost:{port}.*refused"):
        init_process_group("gloo", timeout_s=0.3, environ=environ(0, 1, port, **agents))


def test_two_processes_of_one_rank():
    port = free_port()
    found = run([(0, environ(0, 3, port)), (1, environ(1, 3, port)), (1, environ(1, 3, port))], 3)
    texts = [text for rank, text in found if rank == 1]
    assert sum(text.startswith("rank 1 has come 2 times: expected once") for text in texts) == 1


def test_two_processes_that_host():
    port = free_port()
    with socket.socket() as listener:
        listener.bind(("localhost", port))
        listener.listen()
        ((_, text),) = run([(0, environ(0, 2, port))], 2)
    assert text.startswith(f"rank 0 cannot host the store [localhost:{port}]")
    assert "two processes may call themselves rank 0" in text


def elastic(rank, size, port, restart):
    return environ(rank, size, port, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=str(restart))


def test_the_store_of_an_agent_serves_restarts_and_new_memberships():
    """One store, as torchrun's agent keeps it: gloo must never meet the addresses of an earlier start."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for size, restart in ((2, 0), (2, 0), (2, 1), (3, 1), (2, 1)):
        found = run([(rank, elastic(rank, size, store.port, restart)) for rank in range(size)], 30)
        assert found == [(rank, size * (size - 1) // 2) for rank in range(size)]


def test_a_single_process_needs_no_address():
    topology = init_process_group("gloo", environ={})
    try:
        assert topology == Topology(0, 1, source="single process")
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_an_explicit_topology_and_store():
    store = dist.HashStore()
    topology = init_process_group("gloo", topology=Topology(0, 1), store=store, environ={})
    assert topology.source == "explicit"
    dist.destroy_process_group()


def test_an_unknown_address_is_told():
    variables = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(
        TopologyError, match=r"2 ranks \(Slurm\) do not know where to meet.*MASTER_ADDR and MASTER_PORT"
    ):
        init_process_group("gloo", environ=variables)
