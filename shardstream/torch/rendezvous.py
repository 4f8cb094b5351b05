"""The start of a job: all ranks come, or every rank that did is told who is missing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardstream.errors import TopologyError, listed
from shardstream.torch.deadline import NoAnswerError, PatientStore, patience, within
from shardstream.torch.gloo_exit import let_gloo_finish
from shardstream.torch.topology import Topology, number_of, topology_from_environ

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOK_EVERY_S = 0.1
_ANSWER_S = 30.0  # a store that is asked when a job starts is busy with all its ranks


def init_process_group(
    backend: str | None = None,
    *,
    timeout_s: float = 300.0,
    topology: Topology | None = None,
    store: Store | None = None,
    environ: Mapping[str, str] = os.environ,
    **kwargs: Any,
) -> Topology:
    """Initialises ``torch.distributed``, all ranks or none, within a deadline.

    The ranks meet in a store before any of them opens a connection to another, so a rank that never starts is named.
    Keys carry the number of the restart: torchrun keeps one store over restarts, and without it gloo would connect to
    the addresses of processes that are gone.

    Args:
        backend: As in ``torch.distributed.init_process_group``.
        timeout_s: Until all ranks must have come. For the timeout of collectives give ``timeout=``.
        topology: Rank and world size over *all* processes; default what the launcher says.
        store: Where to meet; default a TCP store at ``MASTER_ADDR:MASTER_PORT``, hosted by rank 0 or torchrun's agent.
        environ: The environment variables.
        **kwargs: Anything else that ``torch.distributed.init_process_group`` takes.

    Returns:
        The topology of the process group.

    Raises:
        TopologyError: A rank did not come in time (says which), a rank came twice, or the address is not known.
    """
    topology = topology if topology is not None else topology_from_environ(environ)
    deadline = time.monotonic() + timeout_s
    store = store if store is not None else _make_store(topology, deadline, environ)
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    attempt = prefixed(f"attempt{restart}/{topology.world_size}", store)
    met = _meet(attempt, topology, deadline, environ)
    rank, world_size = topology.rank, topology.world_size
    dist.init_process_group(backend, store=met, rank=rank, world_size=world_size, **kwargs)
    let_gloo_finish()
    return topology


def _make_store(topology: Topology, deadline: float, environ: Mapping[str, str]) -> Store:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        if topology.world_size == 1:
            return dist.HashStore()  # type: ignore[attr-defined]
        raise TopologyError(
            f"{topology.world_size} ranks ({topology.source}) do not know where to meet",
            expected="MASTER_ADDR and MASTER_PORT",
            hint="set them to the host of rank 0 and a free port, the same on every rank",
        )
    hosts = topology.rank == 0 and not _agent_hosts(environ)
    number = number_of(environ, "MASTER_PORT")

    def make() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            number,
            world_size=topology.world_size,
            is_master=hosts,
            timeout=timedelta(seconds=max(deadline - time.monotonic(), 0.001)),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        if hosts:
            return make()
        _wait_for_host(host, number, deadline)
        # Who listens there may be stopped, or no store at all.
        return within(patience(deadline - time.monotonic()), make)
    except (dist.DistError, RuntimeError, OSError, UnicodeError, NoAnswerError) as error:
        what = "rank 0 cannot host the store" if hosts else "nobody hosts the store; rank 0 has not come"
        hint = (
            "two processes may call themselves rank 0, or the port is taken" if hosts else "look at the log of rank 0"
        )
        raise TopologyError(what, url=f"{host}:{port}", found=str(error).split("\n")[0], hint=hint) from error


def _wait_for_host(host: str, port: int, deadline: float) -> None:
    """Returns once somebody listens there: a store that finds nobody tries twice as long as it is told to."""
    from tenacity import Retrying, retry_if_exception_type, stop_before_delay, wait_fixed

    tries = Retrying(
        stop=stop_before_delay(deadline - time.monotonic()),
        wait=wait_fixed(_LOOK_EVERY_S),
        retry=retry_if_exception_type(OSError),
        reraise=True,
    )
    tries(lambda: socket.create_connection((host, port), max(deadline - time.monotonic(), 0.001)).close())


def _agent_hosts(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meet(store: Store, topology: Topology, deadline: float, environ: Mapping[str, str]) -> Store:
    """Waits until every rank has come; returns the store with a prefix that only this meeting uses."""
    try:
        return _met(store, topology, deadline, environ)
    except NoAnswerError as error:
        hint = "the host of rank 0 (or of torchrun's first agent) is gone, stopped or cut off"
        raise TopologyError("the store of rank 0 does not answer", found=error, hint=hint) from error
    except dist.DistError as error:
        hint = "rank 0 hosts it: look at its log"
        raise TopologyError("the store of rank 0 went away", found=str(error).split("\n")[0], hint=hint) from error


def _met(store: Store, topology: Topology, deadline: float, environ: Mapping[str, str]) -> Store:
    rank, world_size = topology.rank, topology.world_size
    asked = PatientStore(store, min(deadline - time.monotonic(), _ANSWER_S))
    visit = asked.add(f"visit{rank}", 1)
    if visit > 1 and not _agent_hosts(environ):
        hint = "every process needs a rank of its own"
        raise TopologyError(f"rank {rank} has come {visit} times", expected="once", hint=hint)
    # torchrun's agent keeps its store when hosts leave or join, without counting that as a restart.
    store, asked = prefixed(f"visit{visit}", store), asked.prefixed(f"visit{visit}")
    keys = [f"here{peer}" for peer in range(world_size)]
    asked.set(keys[rank], "")
    # The host leaves last, or the others would learn of a lost connection instead of who is missing.
    grace_s = 2.0 if rank == 0 else 0.0
    try:
        asked.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001) + grace_s))
    except dist.DistStoreError:
        missing = [peer for peer in range(world_size) if not asked.check([keys[peer]])]
        raise TopologyError(
            f"{world_size - len(missing)} of {world_size} ranks came before the deadline",
            expected=f"all ranks; missing {listed(missing)}",
            hint="look at their logs, start them, or give a longer timeout_s",
        ) from None
    return store


def prefixed(prefix: str, store: Store) -> Store:
    """Returns a view of a store whose keys begin with ``prefix``."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
