"""``on_error="mask"``: samples that cannot be decoded become padding rows, are named, and nothing else changes."""

from __future__ import annotations

import errno
import io
import os
import pickle
import tarfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardstream.columns import Objects, Rows
from shardstream.errors import DecodeError, PlanError, ReadError, ShardStreamWarning
from shardstream.faults import is_of_data
from shardstream.fetch import Fetched, Reading
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.plan import Plan
from shardstream.quarantine import MaskedSample, read_quarantine, write_masked
from shardstream.torch import Evaluation, StreamingDataset, StreamingLoader, Topology, decode, pad_tokens, windows
from shardstream.torch.assemble import Assembly
from shardstream.torch.masking import MaskingMaker
from tests.support.corpora import manifest_of_files, parquet_manifest, text_of, tokens_of, with_runs
from tests.support.streams import loader_of, real_ids

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUM_SAMPLES = 57


def masking(manifest, rank=0, world_size=1, **options):
    options = {"batch_size": 4, "seed": 2, "on_error": "mask", "max_masked_fraction": 1.0, **options}
    return StreamingDataset(manifest, topology=Topology(rank, world_size), **options)


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("sound"), [23, 0, 34])


class Refuse:
    """A transform that raises for some samples, and rejects others."""

    def __init__(self, raises=(), rejects=(), error=ValueError):
        self.raises, self.rejects, self.error = frozenset(raises), frozenset(rejects), error

    def __call__(self, sample):
        if sample["uid"] in self.raises:
            raise self.error("no good")
        return None if sample["uid"] in self.rejects else sample


def check_epoch(batches_of_ranks, num_samples, bad, report):
    """Equal steps, sound samples once, bad ones flagged and named once."""
    assert len({len(batches) for batches in batches_of_ranks}) == 1
    batches = [batch for rank in batches_of_ranks for batch in rank]
    ids = Counter(real_ids(batches))
    assert ids == Counter(set(range(num_samples)) - set(bad))
    masked = [sample for batch in batches for sample in batch.masked]
    assert Counter(sample.sample_id for sample in masked) == Counter(bad)
    assert sorted(masked, key=lambda sample: sample.position) == report
    for batch in batches:
        for sample in batch.masked:  # the row keeps its id, and is padding
            row = batch.sample_ids.tolist().index(sample.sample_id)
            assert batch.is_padding[row]
            assert batch["uid"][row] not in bad
            assert all(int(counts[row]) == 0 for counts in batch.valid_tokens.values())


# ------------------------------------------------------------------------------------------------ the promise


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bad=st.sets(st.integers(0, NUM_SAMPLES - 1), max_size=56),
    world_size=st.sampled_from([1, 2, 4]),
    batch_size=st.integers(1, 5),
)
def test_steps_do_not_depend_on_what_is_bad(sound, tmp_path, bad, world_size, batch_size):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    refuse = Refuse(raises=[uid for uid in bad if uid % 2], rejects=[uid for uid in bad if not uid % 2])
    options = {"transform": refuse, "batch_size": batch_size, "quarantine": folder}
    seen = [list(StreamingLoader(masking(sound, rank, world_size, **options))) for rank in range(world_size)]
    check_epoch(seen, NUM_SAMPLES, bad, read_quarantine(folder) if bad else [])


@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_workers_change_nothing(sound, tmp_path, kind):
    bad = {3, 17, 18, 19, 40, 56}
    refuse, seen = Refuse(raises=[3, 17, 18], rejects=[19, 40, 56]), {}
    for num_workers in (0, 2):
        folder = tmp_path / str(num_workers)
        ranks = []
        for rank in range(2):
            dataset = masking(sound, rank, 2, transform=refuse, quarantine=folder)
            loader = loader_of(kind, dataset, num_workers)
            ranks.append([])
            for batch in loader:
                _ = batch.sample_ids
                ranks[-1].append(batch)
        check_epoch(ranks, NUM_SAMPLES, bad, read_quarantine(folder))
        seen[num_workers] = [(b["uid"].tolist(), b.is_padding.tolist(), b.masked) for r in ranks for b in r]
    assert seen[0] == seen[2]


def test_the_report_says_where_a_sample_is_and_why(sound, tmp_path):
    dataset = masking(sound, transform=Refuse(raises=[30], rejects=[5]), quarantine=tmp_path)
    loader = StreamingLoader(dataset)
    by_id = {sample.sample_id: (batch, sample) for batch in loader for sample in batch.masked}
    batch, raised = by_id[30]
    assert (raised.epoch, raised.shard, raised.row, raised.block) == (0, 2, 7, 5)
    assert raised.url == sound.url(2)
    assert "transform failed for sample 30: ValueError: no good" in raised.reason
    order = dataset.plan.sample_ids(0, np.arange(NUM_SAMPLES))
    assert order[raised.position] == 30
    assert raised.position - batch.position in range(4)
    assert "transform returned None for sample 5" in by_id[5][1].reason
    assert "sample 5 (block 0, row 5 of " in str(by_id[5][1])
    assert loader.stats().num_masked == 2


def test_each_epoch_is_reported_and_a_repeated_part_only_once(sound, tmp_path):
    options = {"transform": Refuse(raises=[3, 17, 40]), "quarantine": tmp_path}
    loader = StreamingLoader(masking(sound, **options))
    for _ in range(2):
        batches = list(loader)
    states = [batch.cursor for batch in batches]
    again = StreamingLoader(masking(sound, **options))
    again.load_state_dict(states[4])
    rest = list(again)
    assert [b.sample_ids.tolist() for b in rest] == [b.sample_ids.tolist() for b in batches[5:]]
    assert [b.is_padding.tolist() for b in rest] == [b.is_padding.tolist() for b in batches[5:]]
    report = read_quarantine(tmp_path)
    assert [(sample.epoch, sample.sample_id) for sample in report] == sorted(
        ((epoch, uid) for epoch in (0, 1) for uid in (3, 17, 40)),
        key=lambda pair: (pair[0], [s.position for s in report if (s.epoch, s.sample_id) == pair]),
    )


def test_a_report_that_was_cut_is_read_up_to_there_and_goes_on(sound, tmp_path):
    list(StreamingLoader(masking(sound, transform=Refuse(raises=[3, 17]), quarantine=tmp_path)))
    path = tmp_path / "rank-00000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert len(read_quarantine(tmp_path)) == 1
    list(StreamingLoader(masking(sound, transform=Refuse(raises=[3, 17]), quarantine=tmp_path)))
    assert {sample.sample_id for sample in read_quarantine(tmp_path)} == {3, 17}
    odd = whole.split(b"\n")[0].replace(b'"epoch": 0', b'"epoch": "0"')
    for line in (b'{"epoch": 0}', b'{"a":' * 100_000 + b"}", odd):
        path.write_bytes(line + b"\n" + whole)
        with pytest.raises(ReadError, match=r"a line of the quarantine is damaged .*row 0"):
            read_quarantine(tmp_path)
    with pytest.raises(ReadError, match="no quarantine report"):
        read_quarantine(tmp_path / "nothing")


def test_data_sets_that_report_to_one_folder_are_told_apart(tmp_path):
    train = MaskedSample(0, 1, 4, "train.tar", 0, 0, 4, "it is cut")
    for sample in (train, train, replace(train, url="valid.tar")):
        write_masked(tmp_path, 0, [sample])
    assert [sample.url for sample in read_quarantine(tmp_path)] == ["train.tar", "valid.tar"]


def test_a_report_shows_no_credentials():
    """Neither of the shard's url nor of one in what a transform said."""
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=4)
    plan = Plan.make(replace(manifest, root="s3://key:secret@bucket/data"), batch_size=2)
    (batch, *_) = plan.micro_batches(0, plan.cursor())
    error = ValueError("https://user:secret@host/a.png?signature=secret is no image")
    (masked,) = MaskingMaker(Assembly(None, None, {}, None, -100), plan, 0, None, Reading()).told(
        Fetched(batch, np.arange(2), Rows(2, {})), Objects([((3, error),), None])
    )
    assert masked.url.startswith("s3://bucket/data/")
    assert masked.reason == "ValueError: https://host/a.png?... is no image"
    assert "secret" not in str(masked)


# ------------------------------------------------------------------------------------------------ what is masked


def test_with_raise_a_rejected_sample_is_an_error_that_names_it(sound):
    dataset = masking(sound, on_error="raise", transform=Refuse(rejects=[30]))
    with pytest.raises(
        DecodeError, match=r"returned None for sample 30 \[.*part-00002.parquet, row 7\].*on_error='mask'"
    ):
        list(dataset)


def cells(tmp_path, *, num_rows=24, **columns):
    table = pa.table({"uid": pa.array(range(num_rows), pa.int64()), **columns})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    return manifest_of_files([tmp_path / "a.parquet"])


@pytest.mark.parametrize("transform", [None, Refuse()])
def test_cells_that_do_not_fit_are_masked_row_by_row(tmp_path, transform):
    texts = [text_of(uid).encode() for uid in range(24)]
    texts[4] = b"\xff\xfe"
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    text = pa.Array.from_buffers(
        pa.string(), 24, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"".join(texts))]
    )
    number = pa.array([None if uid in (9, 10) else uid / 2 for uid in range(24)])
    tokens = pa.array([[uid] * 3 for uid in range(24)], pa.list_(pa.int32()))
    labels = pa.array([[uid] * (2 if uid == 20 else 3) for uid in range(24)], pa.list_(pa.int32()))
    manifest = cells(tmp_path, text=text, number=number, tokens=tokens, labels=labels)
    options = {"transform": transform, "collate": pad_tokens(labels="labels", length=4)}
    options |= {"targets": {"lm": "labels"}, "shifted": True}
    batches = list(StreamingLoader(masking(manifest, quarantine=tmp_path / "q", **options)))
    report = read_quarantine(tmp_path / "q")
    check_epoch([batches], 24, {4, 9, 10, 20}, report)
    reasons = {sample.sample_id: sample.reason for sample in report}
    assert "'text' holds text that is not UTF-8" in reasons[4]
    assert "column 'number' has no value" in reasons[9]
    assert "'tokens' and 'labels' differ in length" in reasons[20]
    for batch in batches:
        assert batch["input_ids"].shape == (4, 4)
        assert torch.equal(batch["labels"].ne(-100).sum(1), batch.valid_tokens["lm"])
        assert batch.valid_tokens["lm"].tolist() == [0 if padding else 2 for padding in batch.is_padding.tolist()]


def test_targets_that_a_sample_lacks(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for uid in range(12):
            for name in ("uid.cls", "label.cls") if uid != 7 else ("uid.cls",):
                member = tarfile.TarInfo(f"{uid:04d}.{name}")
                data = str(uid).encode()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    manifest = manifest_of_files([tmp_path / "a.tar"])
    options = {"transform": numbers_of, "targets": {"class": "label"}, "shifted": True}
    with pytest.raises(DecodeError, match="the targets 'label' of a sample have no value"):
        list(masking(manifest, on_error="raise", batch_size=1, **options))
    batches = list(StreamingLoader(masking(manifest, quarantine=tmp_path / "q", **options)))
    check_epoch([batches], 12, {7}, report := read_quarantine(tmp_path / "q"))
    assert (report[0].key, report[0].row) == ("0007", 7)


def numbers_of(sample):
    return {"uid": int(sample["uid.cls"]), "label": None if sample["label.cls"] is None else int(sample["label.cls"])}


def test_images_that_cannot_be_decoded(tmp_path):
    image = pytest.importorskip("PIL.Image")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for uid in range(12):
            out = io.BytesIO()
            image.new("RGB", (8, 8), (uid, 0, 0)).save(out, "png")
            data = out.getvalue() if uid not in (0, 5) else out.getvalue()[:40]
            for name, value in (("png", data), ("cls", str(uid).encode())):
                member = tarfile.TarInfo(f"{uid:04d}.{name}")
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))
    manifest = manifest_of_files([tmp_path / "a.tar"])
    dataset = masking(manifest, transform=decode("rgb8"), batch_size=1, shuffle=False, quarantine=tmp_path / "q")
    batches = list(StreamingLoader(dataset))
    assert all(batch["png"].shape == (1, 8, 8, 3) for batch in batches)  # the first one has no neighbour
    assert real_ids(batches) == [uid for uid in range(12) if uid not in (0, 5)]
    assert batches[0]["cls"].tolist() == batches[5]["cls"].tolist() == [1]
    report = read_quarantine(tmp_path / "q")
    assert [(sample.key, sample.sample_id) for sample in report] == [("0000", 0), ("0005", 5)]
    assert "field 'png' of sample '0000' cannot be decoded" in report[0].reason


def damage(path, begin, end):
    """Overwrites bytes, as a disk does: size and time of change stay."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[begin:end] = b"\xa5" * (end - begin)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("transform", [None, Refuse()])
def test_a_block_that_cannot_be_decoded(tmp_path, world_size, transform):
    tokens = pa.array([tokens_of(uid) for uid in range(24)], pa.list_(pa.int32()))
    manifest = cells(tmp_path, tokens=tokens, text=pa.array([text_of(uid) for uid in range(24)]))
    chunk = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
    damage(tmp_path / "a.parquet", chunk.dictionary_page_offset, chunk.dictionary_page_offset + 12)
    with pytest.raises(DecodeError, match=r"(?s)block cannot be decoded.*block 1\]"):
        list(masking(manifest, on_error="raise"))
    ranks = [
        list(StreamingLoader(masking(manifest, rank, world_size, transform=transform, quarantine=tmp_path / "q")))
        for rank in range(world_size)
    ]
    report = read_quarantine(tmp_path / "q")
    check_epoch(ranks, 24, set(range(8, 16)), report)
    assert {sample.block for sample in report} == {1}


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_frame_that_cannot_be_decoded_in_the_middle_of_a_stream(tmp_path, shuffle):
    """The runs before it are read, whoever comes first; those behind cannot be reached."""
    zstandard = pytest.importorskip("zstandard")
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for uid in range(40):
            data = np.random.default_rng(uid).bytes(20_000)
            for name, value in (("bin", data), ("cls", str(uid).encode())):
                member = tarfile.TarInfo(f"{uid:04d}.{name}")
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value))
    path = tmp_path / "a.tar.zst"
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(raw.getvalue()))
    manifest = with_runs(manifest_of_files([path]), 5)
    size = path.stat().st_size
    damage(path, size // 2, size // 2 + 200)
    masked = {}
    for world_size in (1, 2):
        folder = tmp_path / f"q{world_size}"
        ranks = [
            list(StreamingLoader(masking(manifest, rank, world_size, shuffle=shuffle, quarantine=folder, lanes=4)))
            for rank in range(world_size)
        ]
        report = read_quarantine(folder)
        masked[world_size] = {sample.sample_id for sample in report}
        assert sorted(real_ids([b for r in ranks for b in r])) == sorted(set(range(40)) - masked[world_size])
        assert len({len(batches) for batches in ranks}) == 1
        assert all(sample.key == f"{sample.sample_id:04d}" for sample in report)
    assert masked[1] == masked[2]
    assert 0 < len(masked[1]) < 40


@pytest.mark.parametrize(
    ("error", "of_data"),
    [
        (OSError("image file is truncated"), True),
        (FileNotFoundError(errno.ENOENT, "no caption"), True),
        (OSError(errno.EMFILE, "too many open files"), False),
        (OSError(errno.EIO, "the mount is gone"), False),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), False),
        (type("ReadTimeout", (OSError,), {})("as requests has it"), False),
        (type("ConnectionError", (OSError,), {})("as requests has it"), False),
    ],
)
def test_errors_of_libraries_and_the_machine_say_nothing_of_data(error, of_data):
    assert is_of_data(error) is of_data


@pytest.mark.parametrize("error", [ConnectionError, MemoryError, TimeoutError])
def test_what_is_not_of_the_data_is_raised(sound, error):
    with pytest.raises((DecodeError, MemoryError), match="no good"):
        list(masking(sound, transform=Refuse(raises=[30], error=error)))


def test_a_shard_that_is_gone_or_changed_is_raised(tmp_path):
    manifest = parquet_manifest(tmp_path / "data", [16, 16])
    gone = tmp_path / "data" / "part-00001.parquet"
    gone.rename(tmp_path / "kept")
    with pytest.raises(ReadError) as caught:
        list(masking(manifest))
    assert not isinstance(caught.value, DecodeError)


def fails_in_company(samples):
    if len(samples) > 1:
        raise ValueError("only one at a time")
    return {"uid": torch.tensor([samples[0]["uid"]])}


def test_what_fails_only_together_is_an_error(sound):
    with pytest.raises(ValueError, match="only one at a time"):
        list(masking(sound, collate=fails_in_company))


def test_a_data_set_in_which_nothing_can_be_decoded_is_an_error(sound):
    with pytest.raises(DecodeError, match="no sample can be decoded of the first 57 of epoch 0"):
        list(masking(sound, transform=Refuse(raises=range(NUM_SAMPLES))))


# ------------------------------------------------------------------------------------------------ how much is too much


@pytest.mark.parametrize(("kind", "num_workers"), [("plain", 0), ("plain", 1), ("streaming", 0), ("streaming", 1)])
def test_a_job_that_masks_too_much_stops(sound, tmp_path, kind, num_workers):
    refuse = Refuse(raises=range(20, 30))
    options = {"transform": refuse, "quarantine": tmp_path / "q"}
    loader = loader_of(kind, masking(sound, max_masked_fraction=0.0004, **options), num_workers)
    with pytest.raises(DecodeError, match=r"too many samples of rank 0 cannot be decoded.*no good") as error:
        [batch["uid"] for batch in loader]
    assert str(tmp_path / "q") in str(error.value)
    assert 5 <= len(read_quarantine(tmp_path / "q")) <= 8  # the batch with the fifth is the last
    allowed = loader_of(kind, masking(sound, max_masked_fraction=0.001, **options), num_workers)
    assert sum(len(batch.masked) for batch in allowed) == 10


def test_settings_that_make_no_sense_are_refused(sound):
    for options in ({"on_error": "skip"}, {"max_masked_fraction": 1.5}, {"on_error": "raise", "quarantine": "q"}):
        with pytest.raises(PlanError):
            masking(sound, **options)


def test_masking_without_a_report_warns_once(sound):
    with pytest.warns(ShardStreamWarning, match="no report names them.*sample 1[78]") as warned:
        list(StreamingLoader(masking(sound, transform=Refuse(raises=[17, 18]))))
    assert len([each for each in warned if "no report" in str(each.message)]) == 1


def test_a_copy_of_the_dataset_masks_too(sound, tmp_path):
    dataset = masking(sound, transform=Refuse(raises=[17]), quarantine=tmp_path)
    for batch in DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=None):
        _ = batch["uid"]
    assert [sample.sample_id for sample in read_quarantine(tmp_path)] == [17]


# ------------------------------------------------------------------------------------------------ what builds on it


def test_denominators_leave_masked_rows_out(sound, tmp_path):
    dataset = masking(sound, transform=Refuse(raises=[3, 4, 5]), quarantine=tmp_path, accumulate=2, targets={"n": ones})
    totals = [(window.targets["n"], window.num_samples) for window in windows(StreamingLoader(dataset), heads=("n",))]
    assert totals[-1] != totals[0]
    assert [sum(column) for column in zip(*totals, strict=True)] == [54, 54]


def ones(columns):
    return torch.ones(len(columns["uid"]), dtype=torch.int64)


def test_an_evaluation_names_masked_samples(sound, tmp_path):
    evaluation = Evaluation(sound)
    for batch in StreamingLoader(masking(sound, transform=Refuse(raises=[3], rejects=[44]), quarantine=tmp_path)):
        evaluation.add_batch(batch, metrics={"one": torch.ones(len(batch))})
    report = evaluation.result()
    assert (report.num_samples, report.missing.num_ids, report.masked.num_ids) == (55, 0, 2)
    assert report.masked.shown == ((3, "part-00000.parquet:3"), (44, "part-00002.parquet:21"))
    assert not report.is_complete
    assert report.to_dict()["masked"]["num_ids"] == 2


def test_a_mixture_masks_each_source_by_its_own(sound, tmp_path):
    other = parquet_manifest(tmp_path / "other", [30])
    mixture = Mixture({"a": (sound, 0.5), "b": (other, 0.5)}, stop_after=48)
    dataset = masking(mixture, transform=OnlyIn("b", 7), quarantine=tmp_path / "q", seed=1, batch_size=8)
    batches = list(StreamingLoader(dataset))
    report = read_quarantine(tmp_path / "q")
    assert {(sample.source, sample.sample_id) for sample in report} == {("b", 7)}
    assert sum(map(len, batches)) == 48
    assert sum(int(batch.is_padding.sum()) for batch in batches) == len(report)
    for batch in batches:
        sources = batch.source_index[batch.is_padding].tolist()
        assert [batch.source_names[index] for index in sources] == ["b"] * len(batch.masked)
    damaged = tmp_path / "other" / "part-00000.parquet"
    chunk = pq.ParquetFile(damaged).metadata.row_group(2).column(0)
    damage(damaged, chunk.dictionary_page_offset, chunk.dictionary_page_offset + 12)
    again = list(StreamingLoader(masking(mixture, quarantine=tmp_path / "r", seed=1, batch_size=8)))
    for before, after in zip(batches, again, strict=True):
        assert before.sample_ids.tolist() == after.sample_ids.tolist()
        assert before.source_index.tolist() == after.source_index.tolist()
    assert {(s.source, s.block) for s in read_quarantine(tmp_path / "r")} == {("b", 2)}


class OnlyIn:
    def __init__(self, source, uid):
        self.source, self.uid = source, uid

    def __call__(self, sample):
        return None if (sample["__source__"], sample["uid"]) == (self.source, self.uid) else sample
