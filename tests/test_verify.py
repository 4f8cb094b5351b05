"""Verifying: every kind of damage is found and named, and an interrupted run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from shardstream.cli import main
from shardstream.errors import ManifestError, PlanError
from shardstream.index import IndexSettings
from shardstream.verify import verify_manifest
from tests.support.corpora import manifest_of_files, parquet_manifest, tar_manifest
from tools.faults import Faults, FaultyServer, Folder

CHECKED = IndexSettings(checksum=True)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    parquet_manifest(folder / "parquet", [20, 30, 0, 14])
    tar_manifest(folder / "tar", [20, 30, 14])
    tar_manifest(folder / "tar.gz", [20, 30, 14], ".tar.gz")
    return folder


@pytest.fixture(params=["parquet", "tar", "tar.gz"])
def shards(request, originals, tmp_path):
    return sorted(Path(shutil.copytree(originals / request.param, tmp_path / "s")).iterdir())


def checked(paths, **options):
    return verify_manifest(manifest_of_files(paths, settings=CHECKED), num_workers=0, **options)


def flip(path, place):
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def test_good_shards_are_good(shards):
    manifest = manifest_of_files(shards, settings=CHECKED)
    for path in shards:
        os.utime(path, (1, 1))  # copied
    report = verify_manifest(manifest, num_workers=0)
    assert report.is_good
    assert report.proves_content
    assert report.num_bytes == manifest.num_bytes.sum()
    assert report.num_rewritten == report.num_chosen == manifest.num_shards


def test_every_kind_of_damage_is_named(shards):
    manifest = manifest_of_files(shards, settings=CHECKED)
    blocks = manifest.shard_first_block.tolist()
    last = manifest.num_blocks - 1
    flip(shards[0], int(manifest.block_offset[0]) + 20)
    shards[1].unlink()
    shards[-1].write_bytes(shards[-1].read_bytes()[: int(manifest.block_offset[last]) + 10])
    report = verify_manifest(manifest, num_workers=0)
    first, gone, cut = report.faults
    known = manifest.lists.read(0, ["block_checksum"])["block_checksum"][0].hex()
    assert (first.shard, first.url, first.kind, first.block) == (0, str(shards[0]), "block", 0)
    assert first.expected == known != first.found
    assert (gone.url, gone.kind) == (str(shards[1]), "missing")
    assert (cut.url, cut.kind, cut.block) == (str(shards[-1]), "size", last)
    assert blocks[-2] <= last
    assert f"{shards[0]}, block 0]: expected {known}, found {first.found}" in str(first)


def test_a_bit_outside_of_blocks_is_found(shards):
    manifest = manifest_of_files(shards, settings=CHECKED)
    if manifest.formats[0] == "tar.gz":
        pytest.skip("there is none: the shard is one block")
    flip(shards[0], -10 if manifest.formats[0] == "parquet" else 5)
    (fault,) = verify_manifest(manifest, num_workers=0).faults
    assert (fault.kind, fault.block) == ("rest", None)


def test_a_shard_that_was_replaced_by_one_of_the_same_layout(tmp_path):
    """Labels swapped inside a row group leave size and footer as they were."""
    path = Path(parquet_manifest(tmp_path, [40], 20).url(0))
    table = pq.read_table(path)
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "row_group_size": 20}
    pq.write_table(table, path, **options)
    without, manifest = manifest_of_files([path]), manifest_of_files([path], settings=CHECKED)
    swapped = table.take([*range(20), 21, 20, *range(22, 40)])
    pq.write_table(
        swapped.set_column(1, "tokens", table["tokens"]).set_column(2, "text", table["text"]), path, **options
    )
    assert verify_manifest(without, num_workers=0).is_good, "the reason for checksums"
    assert not verify_manifest(without, num_workers=0).proves_content
    assert [(fault.kind, fault.block) for fault in verify_manifest(manifest, num_workers=0).faults] == [("block", 1)]


def test_without_checksums_the_layout_is_compared(shards):
    manifest = manifest_of_files(shards)
    shutil.copyfile(shards[0], shards[0].with_suffix(".copy"))
    shards[0].with_suffix(".copy").rename(shards[0])
    assert verify_manifest(manifest, num_workers=0).num_rewritten == 1
    raw = shards[1].read_bytes()
    shards[1].write_bytes(b"\0" * len(raw))
    (fault,) = verify_manifest(manifest, num_workers=0).faults
    assert (fault.url, fault.kind) == (str(shards[1]), "layout")


def test_a_replaced_shard_of_many_blocks_names_some_and_counts_the_rest(tmp_path):
    manifest = parquet_manifest(tmp_path, [60], 2, settings=CHECKED)
    path = Path(manifest.url(0))
    path.write_bytes(b"\0" * path.stat().st_size)
    faults = verify_manifest(manifest, num_workers=0).faults
    assert [fault.block for fault in faults] == [*range(16), None, None]
    assert faults[-2].found == "14 more blocks of other bytes"


# ------------------------------------------------------------------------------------------------ stores, executors


def test_a_store_that_flips_bits_and_one_that_fails(originals, tmp_path):
    paths = sorted((originals / "parquet").iterdir())
    with FaultyServer(Folder(originals / "parquet")) as server:
        urls = [f"{server.url}/{path.name}" for path in paths]
        manifest = manifest_of_files(urls, settings=CHECKED)
        server.faults = Faults(0.3)
        report = verify_manifest(manifest, num_workers=0, storage_options={"retry_timeout_s": 10})
        assert report.is_good
        server.faults = Faults(1.0, ("flip",))
        report = verify_manifest(manifest, num_workers=0)
        assert [(fault.url, fault.kind in ("block", "rest")) for fault in report.faults] == [
            (url, True) for url in urls
        ]
        server.faults = Faults(1.0, ("503",))
        report = verify_manifest(manifest, num_workers=0, storage_options={"retry_timeout_s": 0.1})
        assert [fault.kind for fault in report.faults] == ["unreadable"] * 4
        assert "503" in report.faults[0].found


def test_any_executor(shards):
    manifest = manifest_of_files(shards, settings=CHECKED)
    flip(shards[1], int(manifest.block_offset[manifest.shard_first_block[1]]) + 20)
    with ThreadPoolExecutor(2) as executor:
        report = verify_manifest(manifest, executor=executor)
    assert [fault.url for fault in report.faults] == [str(shards[1])]


# ------------------------------------------------------------------------------------------------ samples, states


def test_a_sample_is_the_same_for_a_seed(tmp_path):
    manifest = parquet_manifest(tmp_path, [3] * 12, settings=CHECKED)
    for sample, num_chosen in ((3, 3), (0.5, 6), (0.01, 1), (99, 12), (1.0, 12), (1, 1)):
        assert verify_manifest(manifest, sample=sample, num_workers=0).num_chosen == num_chosen
    for shard in range(12):
        Path(manifest.url(shard)).unlink()
    found = [[f.shard for f in verify_manifest(manifest, sample=4, seed=s, num_workers=0).faults] for s in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert found[0] == sorted(found[0])
    for wrong in (0, -1, 1.5, 0.0, float("nan")):
        with pytest.raises(PlanError, match="sample"):
            verify_manifest(manifest, sample=wrong)


class StoppedError(Exception):
    pass


def interrupt_after(num_done):
    def progress(done):
        if done.num_done == num_done:
            raise StoppedError

    return progress


def test_an_interrupted_run_goes_on_and_checks_faults_again(tmp_path):
    manifest = parquet_manifest(tmp_path / "s", [20] * 6, settings=CHECKED)
    state = tmp_path / "state.jsonl"
    bad = Path(manifest.url(1))
    right = bad.read_bytes()
    flip(bad, 20)
    with pytest.raises(StoppedError):
        verify_manifest(manifest, state=state, num_workers=0, progress=interrupt_after(4))
    with state.open("a") as file:
        file.write('{"go')  # killed while it wrote
    seen = []
    report = verify_manifest(manifest, state=state, num_workers=0, progress=seen.append)
    assert (report.num_resumed, report.num_chosen, [fault.shard for fault in report.faults]) == (3, 6, [1])
    assert [done.num_done for done in seen] == [4, 5, 6]
    assert report.num_bytes == sum(int(manifest.num_bytes[shard]) for shard in (1, 4, 5))
    bad.write_bytes(right)
    report = verify_manifest(manifest, state=state, num_workers=0)
    assert (report.num_resumed, report.is_good) == (0, True), "the last one was finished: this one begins anew"


def test_a_state_of_something_else_is_refused(tmp_path):
    manifest = parquet_manifest(tmp_path / "s", [20, 20], settings=CHECKED)
    state = tmp_path / "state.jsonl"
    with pytest.raises(StoppedError):
        verify_manifest(manifest, state=state, num_workers=0, progress=interrupt_after(1))
    for changed in ({"sample": 1}, {"sample": 1.0}, {"seed": 5}):
        with pytest.raises(ManifestError, match=r"state\.jsonl.*instead of"):
            verify_manifest(manifest, state=state, num_workers=0, **changed)
    other = manifest_of_files([manifest.url(0)], settings=CHECKED)
    with pytest.raises(ManifestError, match="fingerprint"):
        verify_manifest(other, state=state, num_workers=0)
    (tmp_path / "notes.txt").write_text("my notes\n")
    with pytest.raises(ManifestError, match="will not be replaced"):
        verify_manifest(manifest, state=tmp_path / "notes.txt")
    with pytest.raises(ManifestError, match="cannot be written"):
        verify_manifest(manifest, state=tmp_path / "none" / "state")


# ------------------------------------------------------------------------------------------------ the command


def run(*arguments):
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_the_command(tmp_path):
    manifest = parquet_manifest(tmp_path / "s", [20, 20], settings=CHECKED).save(tmp_path / "m.manifest.parquet")
    done = run(manifest.path, "--workers", 0)
    assert (done.exit_code, "all bytes are those that were indexed" in done.output) == (0, True), done.output
    path = Path(manifest.url(1))
    flip(path, 20)
    done = run(manifest.path, "--workers", 0)
    assert done.exit_code == 1
    assert f"{path}, block 3]: expected " in done.output.replace("\n", "")
    done = run(manifest.path, "--json", "--workers", 0)
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [told["is_good"], told["proves_content"], told["faults"][0]["block"]] == [False, True, 3]
    assert run(manifest.path, "--sample", "150%").exit_code == 2
    assert run(manifest.path, "--sample", "50%", "--quiet").exit_code in (0, 1)
    plain = parquet_manifest(tmp_path / "p", [20]).save(tmp_path / "p.manifest.parquet")
    done = run(plain.path)
    assert (done.exit_code, "Contents were not proven" in done.output) == (0, True)


@pytest.mark.slow
def test_ctrl_c_and_going_on(tmp_path):
    """Interrupted by a real signal while a store drips; then the same command goes on where it was."""
    parquet_manifest(tmp_path / "s", [20] * 3)
    with FaultyServer(Folder(tmp_path / "s")) as server:
        urls = [f"{server.url}/part-0000{k}.parquet" for k in range(3)]
        manifest = manifest_of_files(urls, settings=CHECKED).save(tmp_path / "m.manifest.parquet")
        state = tmp_path / "state.jsonl"
        command = [
            sys.executable,
            "-m",
            "shardstream",
            "verify",
            manifest.path,
            "--workers",
            "0",
            "--state",
            str(state),
        ]
        command += ["--allow-url", f"{server.url}/*"]

        class DripsLater(Faults):
            left = 2

            def choose(self):
                self.left -= 1
                return "drip" if self.left < 0 else None

        server.faults = DripsLater()
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            while not server.counts["drip"]:
                assert process.poll() is None, process.communicate()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "goes on from here" in errors
        server.faults = Faults()
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert "3 of 3 shards checked, 2 of them by an earlier run" in done.stdout
