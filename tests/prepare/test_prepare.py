from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardstream.errors import DecodeError, ManifestError, PlanError, ReadError, ShardStreamWarning
from shardstream.formats import RUN_NUM_BYTES
from shardstream.formats._decompress import ZstdStream
from shardstream.index import build_manifest
from shardstream.manifest import Manifest
from shardstream.permutation import full_positions
from shardstream.prepare import Copy, PrepareSettings, outline, prepare, run
from shardstream.prepare.journal import Journal
from tests.formats.conformance import read_all
from tests.formats.tars import tar_bytes
from tests.prepare.conftest import bytes_of


def origin_of(output):
    table = pq.read_table(output / ".shardstream" / "origin.parquet")
    return table.column("sample_ids").combine_chunks().values.to_pylist()


def test_every_row_is_there_in_order_in_several_shards_of_small_row_groups(lines, rows, write, tmp_path):
    done = write(lines, tmp_path / "out")
    assert read_all(done.manifest) == rows
    assert done.manifest.num_shards > 3
    assert done.manifest.num_blocks > done.manifest.num_shards
    assert done.input.num_samples == 300
    assert Manifest.load(tmp_path / "out" / "manifest.parquet").fingerprint == done.manifest.fingerprint
    assert origin_of(tmp_path / "out") == list(range(300))
    assert build_manifest(tmp_path / "out").urls == done.manifest.urls  # nothing else in the folder looks like a shard


@pytest.mark.parametrize("memory_num_bytes", [1 << 30, 40_000])
@pytest.mark.parametrize("name", ["parquet", "tar", "tar.zst"])
def test_a_shuffle_is_the_full_shuffle_of_its_seed(name, memory_num_bytes, lines, rows, write, tmp_path):
    shuffled = {"shuffle": True, "seed": 7, "memory_num_bytes": memory_num_bytes}
    done = write(lines, tmp_path / "out", format=name, **shuffled)
    ids = full_positions(np.arange(300), 300, 7, 0).tolist()
    read = read_all(done.manifest)
    assert [int(row["id"]) for row in read] == ids
    if name == "parquet":
        assert read == [rows[k] for k in ids]
    assert origin_of(tmp_path / "out") == ids
    assert not list((tmp_path / "out" / ".shardstream").glob("*spill*"))


def test_another_seed_is_another_order_and_the_same_one_the_same_bytes(lines, write, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write(lines, tmp_path / name, shuffle=True, seed=seed)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b") != bytes_of(tmp_path / "c")


@pytest.mark.rest
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_number_of_workers_does_not_matter(shuffle, lines, write, tmp_path):
    write(lines, tmp_path / "a", shuffle=shuffle, memory_num_bytes=40_000)
    write(lines, tmp_path / "b", shuffle=shuffle, memory_num_bytes=40_000, num_workers=2)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


# ------------------------------------------------------------------------------------------------------- formats


def test_types_of_parquet_are_kept(write, tmp_path):
    when = datetime(2020, 5, 17, 1, 2, 3, tzinfo=timezone.utc)
    table = pa.table(
        {
            "when": pa.array([when, None], pa.timestamp("ns", "UTC")),
            "price": pa.array([Decimal("1.10"), Decimal("-2.00")]),
            "nested": pa.array([{"a": [1, None]}, None]),
            "name": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    done = write(tmp_path / "a.parquet", tmp_path / "out")
    read = pq.read_table(done.manifest.url(0))
    assert read.schema.field("when").type == pa.timestamp("ns", "UTC")
    assert read.to_pylist() == table.to_pylist()


def test_tar_and_back(write, tmp_path):
    members = [(f"d/{k:03d}.{name}", b"%d" % k * 50) for k in range(40) for name in ("bin", "txt")[: 1 + k % 2]]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    first = write(tmp_path / "a.tar", tmp_path / "parquet", format="parquet")
    second = write(tmp_path / "parquet" / "manifest.parquet", tmp_path / "zst", format="tar.zst", block_num_bytes=9000)
    assert read_all(first.manifest) == read_all(build_manifest(tmp_path / "a.tar")) == read_all(second.manifest)
    with (tmp_path / "zst" / "00000.tar.zst").open("rb") as file:
        stream = ZstdStream(file)
        stream.read(1 << 30)
    assert len(stream.frames) > 3


def test_the_format_is_that_of_the_input(write, tmp_path):
    import gzip

    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_bytes([("1.x", b"1"), ("2.x", b"2")])))
    assert write(tmp_path / "a.tar.gz", tmp_path / "out").manifest.urls == ["00000.tar.zst"]


def test_equal_keys_of_several_tars_are_told_apart(write, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes([("0.x", name.encode()), ("0-1.x", b"")]))
    with pytest.warns(ShardStreamWarning, match="2 samples had the key of another"):
        done = prepare([tmp_path / "{a,b}.tar"], tmp_path / "out", settings=PrepareSettings(num_workers=0))
    assert [(row["__key__"], row["x"]) for row in read_all(done.manifest)] == [
        ("0", b"a"),
        ("0-1", b""),
        ("0-2", b"b"),
        ("0-1-3", b""),
    ]


def test_rows_become_members(write, tmp_path):
    table = pa.table({"k": ["a", "b"], "n": [1, None], "l": [[1.5], []], "raw": [b"\0", b""], "s": ["ä", None]})
    pq.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "a.parquet", tmp_path / "out", format="tar", key_column="k", shard_num_bytes=1 << 20)
    with tarfile.open(tmp_path / "out" / "00000.tar") as archive:
        read = {name: archive.extractfile(name).read() for name in archive.getnames()}
    assert read == {
        "a.k": b"a",
        "a.n": b"1",
        "a.l": b"[1.5]",
        "a.raw": b"\0",
        "a.s": "ä".encode(),
        "b.k": b"b",
        "b.l": b"[]",
        "b.raw": b"",
    }


@pytest.mark.parametrize(
    ("table", "key_column", "message"),
    [
        ({"a/b": [1]}, None, "'a/b' cannot be a field"),
        ({"a": [1], "A": [1]}, None, "'a' cannot be a field"),
        ({"a": [1, None]}, None, "no values"),
        ({"a": ["x.jpg"]}, "a", "cannot hold the key 'x.jpg'"),
        ({"a": ["._x"]}, "a", "cannot hold the key"),
        ({"a": [1]}, "a", "no text as its key"),
        ({"a": [1]}, "b", "no column 'b' for keys"),
        ({"a": [{"x": b"1"}]}, None, "cannot be written as JSON"),
    ],
)
def test_what_a_tar_cannot_hold_is_refused(table, key_column, message, write, tmp_path):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises((PlanError, DecodeError), match=message):
        write(tmp_path / "a.parquet", tmp_path / "out", format="tar", key_column=key_column)


def test_columns_are_chosen(lines, write, tmp_path):
    done = write(lines, tmp_path / "out", Copy(["n", "id"]))
    assert [column.name for column in done.manifest.columns] == ["n", "id"]
    with pytest.raises(ManifestError, match="no column 'nope'"):
        write(lines, tmp_path / "other", Copy(["nope"]))


def test_row_groups_are_of_one_run_by_default(write, tmp_path):
    table = pa.table({"x": pa.array(np.random.default_rng(0).bytes(1 << 16) for _ in range(200))})
    pq.write_table(table, tmp_path / "a.parquet")
    done = write(tmp_path / "a.parquet", tmp_path / "out", shard_num_bytes=1 << 30, block_num_bytes=RUN_NUM_BYTES)
    assert done.manifest.num_blocks == 4
    assert (done.manifest.block_rows == done.manifest.block_run_rows).all()


def test_output_in_a_store(lines, rows, write, tmp_path):
    output = f"memory://{uuid4().hex}/out"
    done = write(lines, output, shuffle=True, spill_dir=str(tmp_path / "spill"))
    assert sorted(read_all(done.manifest), key=lambda row: row["id"]) == rows
    assert build_manifest(output, num_workers=0).urls == done.manifest.urls
    assert not list((tmp_path / "spill").iterdir())
    fsspec.filesystem("memory").rm(done.manifest.url(2))
    again = write(lines, output, shuffle=True, spill_dir=str(tmp_path / "spill"))
    assert again.num_resumed == len(done.parts) - 1
    assert again.manifest.fingerprint == done.manifest.fingerprint


# ------------------------------------------------------------------------------------------------------- going on


class StopError(Exception):
    """As good as a kill for what is on disk."""


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", ["parquet", "tar.zst"])
def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(name, shuffle, lines, write, tmp_path, monkeypatch):
    settings = {"format": name, "shuffle": shuffle, "memory_num_bytes": 40_000}
    write(lines, tmp_path / "whole", **settings)
    add, num_added = Journal.add, 0

    def add_or_stop(journal, record):
        nonlocal num_added
        num_added += 1
        if num_added % 3 == 0:
            raise StopError
        add(journal, record)

    monkeypatch.setattr(Journal, "add", add_or_stop)
    num_stops = 0
    while True:
        try:
            done = write(lines, tmp_path / "parts", **settings)
            break
        except StopError:
            num_stops += 1
    assert num_stops > 1
    assert done.num_resumed > 1
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")
    assert origin_of(tmp_path / "parts") == origin_of(tmp_path / "whole")


def test_a_part_that_is_gone_cut_or_without_record_is_written_again(lines, write, tmp_path):
    output = tmp_path / "out"
    done = write(lines, output)
    before = bytes_of(output)
    (output / "00001.parquet").unlink()
    (output / "00003.parquet").write_bytes(b"cut")
    (output / ".shardstream" / "parts" / "4.json").unlink()
    (output / ".shardstream" / "writing" / "5.1").write_bytes(b"half written by a killed run")
    again = write(lines, output)
    assert again.num_resumed == len(done.parts) - 3
    assert bytes_of(output) == before
    assert list((output / ".shardstream" / "writing").iterdir()) == []


def test_a_scattered_input_is_not_scattered_again(lines, write, tmp_path, monkeypatch):
    settings = {"shuffle": True, "memory_num_bytes": 40_000}
    write(lines, tmp_path / "whole", **settings)
    acts = []
    do_all = run.do_all

    def count_and_stop(job, act, tasks, *rest):
        acts.append((act.__name__, len(tasks)))
        if act.__name__ == "write_parts" and len(acts) < 3:
            raise StopError
        do_all(job, act, tasks, *rest)

    monkeypatch.setattr(run, "do_all", count_and_stop)
    with pytest.raises(StopError):
        write(lines, tmp_path / "parts", **settings)
    write(lines, tmp_path / "parts", **settings)
    assert acts[0][1] > 1
    assert acts[2] == ("scatter", 0)
    assert bytes_of(tmp_path / "parts") == bytes_of(tmp_path / "whole")


def test_spills_of_another_shuffle_are_not_taken_for_these(lines, write, tmp_path, monkeypatch):
    settings = {"shuffle": True, "spill_dir": str(tmp_path / "spill")}
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", lambda *_: (_ for _ in ()).throw(StopError))
        with pytest.raises(StopError):
            write(lines, tmp_path / "out", seed=1, **settings)
    shutil.rmtree(tmp_path / "out")
    done = write(lines, tmp_path / "out", seed=2, **settings)
    assert [row["id"] for row in read_all(done.manifest)] == full_positions(np.arange(300), 300, 2, 0).tolist()


def test_a_damaged_spill_is_an_error(lines, write, tmp_path, monkeypatch):
    real = run.do_all

    def damage_before_writing(job, act, tasks, *rest):
        if act.__name__ == "write_parts":
            for path in (tmp_path / "out" / ".shardstream").glob("*spill*/*.data"):
                path.write_bytes(b"\0" * path.stat().st_size)
        real(job, act, tasks, *rest)

    monkeypatch.setattr(run, "do_all", damage_before_writing)
    with pytest.raises(ReadError, match="spill cannot be read"):
        write(lines, tmp_path / "out", shuffle=True)


# ------------------------------------------------------------------------------------------------------- refusals


def test_an_output_of_something_else_is_refused(lines, write, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(PlanError, match=r"not empty.*notes\.txt"):
        write(lines, output)
    (output / "notes.txt").unlink()
    write(lines, output)
    with pytest.raises(PlanError, match="expected block size 2000, found block size 2001"):
        write(lines, output, block_num_bytes=2001)
    shutil.copy(lines / "0.jsonl", lines / "3.jsonl")
    with pytest.raises(PlanError, match="expected input"):
        write(lines, output)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="is a file"):
        write(lines, tmp_path / "file")


def test_an_output_among_the_inputs_is_refused(lines, write):
    for inputs in (lines, f"{lines}/"):
        with pytest.raises(PlanError, match="in an input folder"):
            write(inputs, lines / "out")
    write(f"{lines}/*.jsonl", lines / "out")
    with pytest.raises(PlanError, match="among the inputs"):
        write(f"{lines}/out/*.parquet", lines / "out")


def test_a_manifest_of_somebody_else_does_not_make_it_read_other_files(lines, tmp_path):
    manifest = build_manifest(lines, num_workers=0)
    hostile = lines / "share" / "a.manifest.parquet"
    hostile.parent.mkdir()
    elsewhere = [f"../{url}" for url in manifest.urls]
    replace(manifest, root=f"{manifest.root}/share", urls=elsewhere).save(hostile)
    with pytest.raises(ManifestError, match="outside the folder"):
        prepare([hostile], tmp_path / "out", settings=PrepareSettings(num_workers=0))
    allowing = PrepareSettings(num_workers=0, allow_url=f"{manifest.root}/*")
    assert prepare([hostile], tmp_path / "out", settings=allowing).manifest.num_samples == manifest.num_samples


def test_two_runs_at_a_time_are_refused(lines, write, tmp_path):
    with Journal(str(tmp_path / "out")).locked(), pytest.raises(PlanError, match="another run is writing"):
        write(lines, tmp_path / "out")


def test_a_shard_that_changed_meanwhile_is_an_error(lines, write, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda job: (lines / "2.jsonl").write_text('{"id": 1}\n') and measure(job))
    from shardstream.prepare.pilot import measure

    with pytest.raises(ManifestError, match=r"2\.jsonl.*not the one that was indexed|not the one.*2\.jsonl"):
        write(lines, tmp_path / "out")


@pytest.mark.parametrize("settings", [{"format": "zip"}, {"shard_num_bytes": 0}, {"memory_num_bytes": -1}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(PlanError):
        PrepareSettings(**settings)


# ------------------------------------------------------------------------------------------------------- outline


def test_an_outline_writes_nothing_and_is_about_right(lines, write, tmp_path):
    settings = PrepareSettings(num_workers=0, shard_num_bytes=4000, block_num_bytes=2000)
    planned = outline([lines], tmp_path / "out", settings=settings)
    assert not (tmp_path / "out").exists()
    done = write(lines, tmp_path / "out")
    assert planned.num_shards == done.manifest.num_shards
    assert planned.num_samples == 300
    size = sum(part.num_bytes for part in done.parts)
    assert size / 2 < planned.num_output_bytes < size * 2
    assert planned.schema["text"] == "string"
    assert outline([lines], tmp_path / "out", settings=settings).num_done == done.manifest.num_shards
    shuffled = outline([lines], tmp_path / "other", settings=replace(settings, shuffle=True))
    assert shuffled.spill_num_bytes > 10_000


def test_progress_is_told(lines, write, tmp_path):
    told = []
    write(lines, tmp_path / "out", shuffle=True, progress=told.append)
    for phase in ("scattering", "writing"):
        assert [news.num_done for news in told if news.phase == phase][-1] == 300
    assert told[-1].num_parts_done == told[-1].num_parts
    assert json.loads((tmp_path / "out" / ".shardstream" / "plan.json").read_text())["asked"]["shuffle"] is True
