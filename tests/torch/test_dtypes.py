"""Raw numbers in fields of tars and binary columns: the same values as their bytes, in batches and transforms."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from shardstream import Mixture
from shardstream.errors import DecodeError, PlanError
from shardstream.index import build_manifest
from shardstream.torch import Ragged, StreamingDataset, StreamingLoader, Topology
from tests.formats.tars import tar_bytes

NUM_SAMPLES = 24


def tokens(row, num_bytes=None):
    data = np.random.default_rng(row).integers(0, 60_000, row % 5).astype("<u2").tobytes()
    return data if num_bytes is None else bytes(num_bytes)


def members(odd=()):
    for row in range(NUM_SAMPLES):
        yield f"{row:04}.tok", tokens(row, 3 if row in odd else None)
        yield f"{row:04}.txt", f"text {row}".encode()


def written(folder, kind, odd=()):
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        columns = {"tok": [tokens(row) for row in range(NUM_SAMPLES)], "n": list(range(NUM_SAMPLES))}
        pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=5)
    elif kind == "tar":
        (folder / "a.tar").write_bytes(tar_bytes(members(odd)))
    else:
        data = tar_bytes(members(odd))
        parts = [zstandard.compress(data[begin : begin + 9000]) for begin in range(0, len(data), 9000)]
        (folder / "a.tar.zst").write_bytes(b"".join(parts))
    return build_manifest(folder, num_workers=0)


def dataset(manifest, **options):
    return StreamingDataset(manifest, batch_size=4, seed=3, topology=Topology(rank=0, world_size=1), **options)


def values_of(batches):
    return [[None if row is None else row.tolist() for row in batch["tok"]] for batch in batches]


@pytest.mark.parametrize("kind", ["tar", "tar.zst", "parquet"])
def test_numbers_are_what_the_bytes_say(tmp_path, kind):
    manifest = written(tmp_path, kind)
    raw = list(dataset(manifest))
    expected = [[np.frombuffer(value, "<u2").tolist() for value in batch["tok"]] for batch in raw]
    batches = list(dataset(manifest, dtypes={"tok": "uint16"}))
    assert values_of(batches) == expected
    for batch, other in zip(batches, raw, strict=True):
        assert isinstance(batch["tok"], Ragged)
        assert batch["tok"].values.dtype == torch.uint16
        assert batch.sample_ids.tolist() == other.sample_ids.tolist()
        assert batch.cursor == other.cursor
        assert all(isinstance(value, bytes) for value in other["tok"])
    transformed = list(dataset(manifest, dtypes={"tok": "uint16"}, transform=dict))
    assert values_of(transformed) == expected


def test_values_of_bytes_are_the_members(tmp_path):
    batches = list(dataset(written(tmp_path, "tar")))
    assert {
        id_: value for batch in batches for id_, value in zip(batch.sample_ids.tolist(), batch["tok"], strict=True)
    } == {row: tokens(row) for row in range(NUM_SAMPLES)}


def test_they_can_be_targets_and_mixed(tmp_path):
    manifests = {"one": (written(tmp_path / "1", "tar"), 0.5), "other": (written(tmp_path / "2", "tar.zst"), 0.5)}
    mixed = dataset(
        Mixture(manifests),
        columns=["tok"],
        dtypes={"tok": "uint16"},
        targets={"lm": "tok"},
        shifted=True,
    )
    batch = next(iter(mixed))
    assert batch.valid_tokens["lm"].tolist() == batch["tok"].lengths.tolist()
    assert [np.array(row).astype("<u2").tobytes() for row in batch["tok"].tolist()] == [
        tokens(row) for row in batch.sample_ids.tolist()
    ]


def test_what_is_no_whole_number_is_told_or_masked(tmp_path):
    manifest = written(tmp_path, "tar", odd=(7,))
    with pytest.raises(DecodeError, match=r"no uint16.*a\.tar.*found 3"):
        list(dataset(manifest, dtypes={"tok": "uint16"}))
    masked = list(dataset(manifest, dtypes={"tok": "uint16"}, on_error="mask", quarantine=tmp_path / "told"))
    assert [each.sample_id for batch in masked for each in batch.masked] == [7]
    real = {
        id_: row.tolist() for batch in masked for id_, row in zip(batch.sample_ids.tolist(), batch["tok"], strict=True)
    }
    assert all(real[row] == np.frombuffer(tokens(row), "<u2").tolist() for row in range(NUM_SAMPLES) if row != 7)


def test_what_does_not_fit_is_refused_before_reading(tmp_path):
    manifest = written(tmp_path, "parquet")
    with pytest.raises(PlanError, match=r"no column 'tox'.*did you mean 'tok'"):
        dataset(manifest, dtypes={"tox": "uint16"})
    with pytest.raises(PlanError, match=r"'n' holds no bytes.*int64"):
        dataset(manifest, dtypes={"n": "int64"})
    for wrong in ("token", "object", "bool", "S4", ">u2", "longdouble", None):
        with pytest.raises(PlanError, match="unknown type of numbers for column 'tok'"):
            dataset(manifest, dtypes={"tok": wrong})
    with pytest.raises(PlanError, match="not for packed sequences"):
        dataset(manifest, dtypes={"tok": "uint16"}, sequence_length=8, tokens_column="tok")


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [None, {"tok": "uint16"}])
def test_workers_send_the_same(tmp_path, dtypes):
    manifest = written(tmp_path, "tar")
    batches = [list(StreamingLoader(dataset(manifest, dtypes=dtypes), num_workers=workers)) for workers in (0, 2)]
    here, there = (
        [[list(map(bytes, batch["tok"])) if dtypes is None else batch["tok"].tolist(), batch["txt"]] for batch in each]
        for each in batches
    )
    assert here == there
