"""Merging manifests of parts: what comes out is what indexing everything at once gives."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream import Manifest, build_manifest
from shardstream.cli import main
from shardstream.errors import ManifestError, ShardStreamWarning
from shardstream.index import IndexSettings, merge_manifests
from tests.test_docs import blocks_of

ARRAYS = ("shard_first_block", "block_rows", "block_run_rows", "block_offset", "block_num_bytes", "num_bytes")
VALUES = ("root", "urls", "formats", "version_tags", "digests", "columns", "arrow_schema", "tokens_column", "metadata")


def assert_same(merged, at_once):
    assert merged.fingerprint == at_once.fingerprint
    for name in VALUES:
        assert getattr(merged, name) == getattr(at_once, name), name
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(merged, name), getattr(at_once, name), err_msg=name)
    assert merged.lists.names == at_once.lists.names
    for shard in range(merged.num_shards):
        ours, theirs = (one.lists.read(shard, sorted(one.lists.names)) for one in (merged, at_once))
        assert {k: list(v) for k, v in ours.items()} == {k: list(v) for k, v in theirs.items()}


def parquet(folder, place):
    kind = pa.int64() if place == 2 else pa.int32()
    num_rows = 0 if place == 3 else 20
    tokens = pa.array([[k] * (k % 4) for k in range(num_rows)], pa.list_(kind))
    labels = pa.array([-100 if k % 3 else k for k in range(num_rows)], kind)
    pq.write_table(pa.table({"t": tokens, "y": labels}), folder / f"{place}.parquet", row_group_size=6)


def tar(folder, place):
    with tarfile.open(folder / f"{place}.tar", "w") as archive:
        for key in range(5):
            for name in ("txt", "cls") if place == 2 else ("txt",):
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = 3
                archive.addfile(info, io.BytesIO(b"abc"))


def jsonl(folder, place):
    rows = [{"x": k, **({"y": k / 2} if place == 2 else {})} for k in range(9)]
    (folder / f"{place}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS = {"parquet": parquet, "tar": tar, "jsonl": jsonl}
OPTIONS = {"parquet": {"tokens_column": "t", "targets": {"lm": "y"}}}


@pytest.fixture(params=WRITERS)
def kind(request):
    return request.param


@pytest.fixture
def paths(tmp_path, kind):
    """Five shards in two folders: of Parquet one is empty; one has wider types or another field."""
    for place in range(5):
        folder = tmp_path / "data" / "ab"[place // 3]
        folder.mkdir(parents=True, exist_ok=True)
        WRITERS[kind](folder, place)
    return sorted(map(str, (tmp_path / "data").rglob("*.*")))


@pytest.mark.parametrize("cuts", [[0, 5], [0, 3, 5], [0, 1, 2, 5]])
def test_parts_are_the_whole(tmp_path, kind, paths, cuts):
    settings = IndexSettings(checksum=True, pack=[8] if kind == "parquet" else None)
    options = {"num_workers": 0, "settings": settings, **OPTIONS.get(kind, {})}
    parts = [build_manifest(paths[a:b], tmp_path / f"{a}.manifest.parquet", **options) for a, b in pairwise(cuts)]
    at_once = build_manifest(paths, tmp_path / "all.manifest.parquet", **options)
    merged = merge_manifests([part.path for part in parts], tmp_path / "merged.manifest.parquet")
    assert_same(merged, at_once)
    assert_same(Manifest.load(merged.path), at_once)
    assert_same(merge_manifests(parts), at_once)
    again = build_manifest(paths, update=merged, num_workers=0)
    assert again.fingerprint == at_once.fingerprint


def of(folder, place, writer=parquet, **options):
    folder.mkdir(exist_ok=True)
    writer(folder, place)
    return build_manifest(next(folder.glob(f"{place}.*")), num_workers=0, **options)


def test_the_order_is_that_of_the_arguments(tmp_path):
    one, other = of(tmp_path / "a", 0), of(tmp_path / "b", 1)
    assert merge_manifests([other, one]).urls == ["b/1.parquet", "a/0.parquet"]
    assert merge_manifests([merge_manifests([other]), one]).fingerprint == merge_manifests([other, one]).fingerprint


def test_what_does_not_fit_is_refused(tmp_path):
    one = of(tmp_path / "a", 0)
    with pytest.raises(ManifestError, match=r"named more than once.*0\.parquet"):
        merge_manifests([one, of(tmp_path / "a", 0)])
    with pytest.raises(ManifestError, match=r"other settings.*part 1.*tokens_column null.*found tokens_column \"t\""):
        merge_manifests([one, of(tmp_path / "a", 1, tokens_column="t")])
    with pytest.raises(ManifestError, match=r"checksum.*same options"):
        merge_manifests([one, of(tmp_path / "a", 1, settings=IndexSettings(checksum=True))])
    with pytest.raises(ManifestError, match=r"formats cannot be mixed.*part 1"):
        merge_manifests([one, of(tmp_path / "c", 1, tar)])
    pq.write_table(pa.table({"t": ["text"], "y": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ManifestError, match=r"'t' has another type"):
        merge_manifests([one, build_manifest(tmp_path / "x.parquet", num_workers=0)])
    with pytest.raises(ManifestError, match="nothing to merge"):
        merge_manifests([])


def test_parts_without_a_common_folder_say_what_to_allow(tmp_path):
    table = pa.table({"x": [1, 2]})
    memory = f"memory://{uuid4().hex}/0.parquet"
    with fsspec.open(memory, "wb") as file:
        pq.write_table(table, file)
    pq.write_table(table, tmp_path / "1.parquet")
    parts = [build_manifest(url, num_workers=0) for url in (memory, tmp_path / "1.parquet")]
    with pytest.warns(ShardStreamWarning, match="no common folder"):
        merged = merge_manifests(parts, tmp_path / "merged.manifest.parquet")
    assert merged.root == ""
    with pytest.raises(ManifestError, match="outside the folder"):
        Manifest.load(merged.path)
    assert Manifest.load(merged.path, allow_url="*").num_samples == 4


def test_the_command(tmp_path):
    parts = [of(tmp_path / name, place).save(tmp_path / f"{name}.manifest.parquet") for place, name in enumerate("ab")]
    arguments = ["merge", *(part.path for part in parts), "-o", str(tmp_path / "all.manifest.parquet")]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["num_parts"], told["num_samples"], told["num_shards"]) == (2, 40, 2)
    assert told["fingerprint"] == merge_manifests(parts).fingerprint
    assert "fingerprint " + told["fingerprint"] in CliRunner().invoke(main, arguments).stdout
    reverse = ["merge", parts[1].path, parts[0].path, "-o", arguments[-1]]
    refused = CliRunner().invoke(main, reverse)
    assert (refused.exit_code, "another manifest is there" in refused.output) == (1, True)
    assert CliRunner().invoke(main, [*reverse, "--overwrite", "-q"]).output == ""


# ---------------------------------------------------------------------------------------------------------- schedulers

SBATCH = """#!/bin/bash
# As Slurm would: every task of the array at once, and what depends on them afterwards.
case "$1" in
  --parsable) for k in 0 1 2; do SLURM_ARRAY_TASK_ID=$k SLURM_CPUS_PER_TASK=1 bash "$2" >&2 || echo $k >> failed & done
              wait; echo 7 ;;
  --dependency=afterok:7) test ! -e failed && bash -c "${2#--wrap=}" ;;
  *) exit 2 ;;
esac
"""


@pytest.mark.rest
def test_the_slurm_recipe(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text("utf-8")
    script, submit = (block.text for block in blocks_of(page) if "sbatch" in block.text.lower())
    (tmp_path / "index.sh").write_text(script.replace("0-63", "0-2").replace("num_parts=64", "num_parts=3"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    for place in range(5):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        parquet(tmp_path / "corpus", place)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", submit]
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    merged = Manifest.load(tmp_path / "corpus.manifest.parquet")
    at_once = build_manifest(tmp_path / "corpus", num_workers=0, tokens_column="t")
    assert (merged.fingerprint, merged.tokens_column) == (at_once.fingerprint, "t")
    assert len(list((tmp_path / "parts").glob("*.manifest.parquet"))) == 3
