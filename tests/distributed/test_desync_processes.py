"""Ranks that are not in step, started as users start them: they end by themselves, and nothing is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from shardstream.rounds import read_rounds
from tests.support.corpora import parquet_manifest

pytestmark = pytest.mark.distributed

BOUND_S = 90.0  # most of it is torch's import on a loaded machine

SCRIPT = """
import os, sys
from shardstream.manifest import Manifest
from shardstream.torch import init_process_group
from tests.distributed.test_desync import SkipsABackward

init_process_group("gloo", timeout_s=30)
SkipsABackward(int(os.environ["RANK"])).go(Manifest.load(sys.argv[1]), sys.argv[2])
"""


def test_processes_end_by_themselves(tmp_path):
    """Three synchronous steps, in the second of which one rank takes another branch: nobody has to end them."""
    parquet_manifest(tmp_path / "corpus", [17, 18], 4).save(tmp_path / "manifest.parquet")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "manifest.parquet"), str(tmp_path / "ledger")]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stderr=subprocess.PIPE, start_new_session=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=BOUND_S)[1].decode() for rank in ranks]
        for rank, error in zip(ranks, errors, strict=True):
            assert "DesyncError: ranks are not in step" in error, error
            with pytest.raises(ProcessLookupError):
                os.killpg(rank.pid, 0)  # no stray process
    finally:
        for rank in ranks:
            rank.kill()
    assert all(log.desyncs for log in read_rounds(tmp_path / "ledger"))
    assert len(read_rounds(tmp_path / "ledger")) == 2
