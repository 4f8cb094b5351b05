"""Calls that never return, and a store whose host was stopped: every wait ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from shardstream.errors import TopologyError
from shardstream.torch import Topology, deadline, init_process_group
from shardstream.torch.deadline import NoAnswerError, within
from shardstream.torch.meeting import agree

_HOST = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def host(monkeypatch):
    """A process that hosts a store, and the store; an answer is waited for half a second."""
    monkeypatch.setattr(deadline, "_LEAST_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, dist.TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False)
        finally:
            process.kill()


def test_a_call_that_fails_fails_here_and_one_that_hangs_is_left():
    def fails():
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        within(10, fails)
    hangs = threading.Event()
    with pytest.raises(NoAnswerError, match=r"no answer within 0.05 s"):
        within(0.05, hangs.wait)
    hangs.set()


@pytest.mark.distributed
def test_a_store_whose_host_was_stopped_is_given_up(host):
    """Found by tools/two_hosts.py: the side without the store waited for it until TCP gave up."""
    process, store = host
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        with pytest.raises(TopologyError, match="1 of 2 ranks came to lunch"):
            agree("lunch", 1, sum, ranks=[0, 1], timeout_s=0.5)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TopologyError, match="the store of the process group does not answer; asked about tea"):
            agree("tea", 1, sum, ranks=[0, 1], timeout_s=0.5)
    finally:
        process.kill()
        dist.destroy_process_group()


@pytest.mark.distributed
def test_a_meeting_at_a_store_whose_host_was_stopped_is_given_up(host):
    process, store = host
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TopologyError, match="the store of rank 0 does not answer: found no answer within"):
        init_process_group("gloo", timeout_s=0.5, topology=Topology(1, 2), store=store, environ={})


@pytest.mark.distributed
def test_somebody_else_who_listens_at_the_stores_address_is_given_up(monkeypatch):
    monkeypatch.setattr(deadline, "_LEAST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(TopologyError, match=rf"nobody hosts the store.*127.0.0.1:{port}.*no answer within"):
            init_process_group("gloo", timeout_s=0.5, environ=variables)
