"""Files that are written: modes are the user's, a name appears with what is whole, crashes lose nothing promised."""

from __future__ import annotations

import os
import stat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardstream.consumed import ConsumedLog
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.plan import Plan
from tools.training.checkpoint import Checkpoints


@pytest.mark.parametrize("mask", [0o077, 0o027])
def test_modes_are_those_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
        build_manifest(tmp_path / "a.parquet", tmp_path / "m", num_workers=0)
        Checkpoints(tmp_path / "run", 1).save(1, {"x": torch.zeros(1)})
        plan = Plan.make(Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=2), batch_size=2)
        with ConsumedLog(tmp_path / "log", 0, 1, 0, plan.cursor(), plan) as log:
            log.window(epoch=0, position=0, ids=[0, 1])
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".parquet", "", ".pt", ".jsonl"}
    assert [path for path in files if stat.S_IMODE(path.stat().st_mode) & (mask | 0o111)] == []


def test_a_name_appears_when_its_file_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(os, "fsync", lambda number, real=os.fsync: (done.append("sync"), real(number)))
    monkeypatch.setattr(os, "replace", lambda *names, real=os.replace: (done.append("name"), real(*names)))
    monkeypatch.setattr(os, "rename", lambda *names, real=os.rename: (done.append("name"), real(*names)))
    Checkpoints(tmp_path, 1).save(1, {"x": torch.zeros(1)})
    Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=2).save(tmp_path / "m")
    assert done == ["sync", "name", "sync"] * 2  # the file, its name, the folder
