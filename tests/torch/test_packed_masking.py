"""Packed documents that cannot be decoded: same sequences, their targets masked, each named once."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardstream.errors import DecodeError
from shardstream.formats import IndexOptions
from shardstream.packing import Packing
from shardstream.quarantine import read_quarantine
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, windows
from tests.support.streams import loader_of
from tests.support.token_files import indexed_files, mask_of, token_manifest, tokens_of
from tests.torch.test_masking import damage

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore::shardstream.errors.ShardStreamWarning"),  # of lanes: there are few blocks
]
EOS, LENGTH = 0, 8
LENGTHS = [3, 0, None, 17, 1, 2, 40, None, 5, 0, 11, 4, 6, 1, 1, 30, 2, 8, None, 3, 21, 7, 0, 5, 9, 13, 2, 30, 4, 6]
HOLES, SHORT_MASKS = {6, 8, 24}, {11, 27}


def write(folder, holes=(), short_masks=(), pack=(LENGTH,)):
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [None if length is None else tokens_of(k, length) for k, length in enumerate(LENGTHS)]
    masks = [None if row is None else mask_of(row) for row in tokens]
    for k in holes:
        tokens[k][len(tokens[k]) // 2] = None
    for k in short_masks:
        masks[k] = masks[k][:-1]
    path = folder / "a.parquet"
    table = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32())), "mask": pa.array(masks, pa.list_(pa.int8()))})
    pq.write_table(table, path, row_group_size=10)
    return indexed_files([path], IndexOptions("tokens", run_num_bytes=60, pack=tuple(pack)))


def dataset_of(manifest, rank=0, world_size=1, *, mask="mask", mode="tokens", **options):
    packing = Packing(LENGTH, eos_id=EOS, mode=mode, loss_mask_column=mask)
    options = {"batch_size": 2, "seed": 3, "packing": packing, "topology": Topology(rank, world_size), **options}
    return StreamingDataset(manifest, **options)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def holed(tmp_path_factory):
    return write(tmp_path_factory.mktemp("holed"), HOLES, SHORT_MASKS)


@pytest.mark.parametrize(
    ("mode", "world_size", "num_workers"),
    [("tokens", 1, 0), ("tokens", 2, 2), ("whole", 2, 0), ("unpacked", 2, 0)],
)
def test_documents_keep_their_length_and_have_no_targets(sound, holed, tmp_path, world_size, mode, num_workers):
    bad = HOLES | SHORT_MASKS
    with pytest.raises(DecodeError, match=r"sample (6|8|24|11|27)"):
        list(dataset_of(holed, mode=mode))
    num_steps = set()
    for rank in range(world_size):
        options = {"mode": mode, "on_error": "mask", "max_masked_fraction": 1.0, "quarantine": tmp_path}
        masking = list(loader_of("streaming", dataset_of(holed, rank, world_size, **options), num_workers))
        plain = list(dataset_of(sound, rank, world_size, mode=mode))
        num_steps.add(len(masking))
        for found, expected in zip(masking, plain, strict=True):
            assert found.sample_ids.tolist() == expected.sample_ids.tolist()
            assert found.is_padding.tolist() == expected.is_padding.tolist()
            assert found["span_sample_ids"].tolist() == expected["span_sample_ids"].tolist()
            assert torch.equal(found["position_ids"], expected["position_ids"])
            of_bad = torch.zeros_like(found["labels"], dtype=torch.bool)
            for row, (spans, lengths) in enumerate(
                zip(found["span_sample_ids"].tolist(), found["span_lengths"].tolist(), strict=True)
            ):
                place = 0
                for document, length in zip(spans, lengths, strict=True):
                    # A token is the label of the place before it.
                    of_bad[row, max(place - 1, 0) : place + length - 1] = document in bad
                    place += length
            inside = torch.ones_like(of_bad)
            inside[:, -1] = False  # the token behind the last place is of a document that may not be among the spans
            assert bool((found["labels"][of_bad & inside] == -100).all())
            kept = ~of_bad & inside
            assert torch.equal(found["labels"][kept], expected["labels"][kept])
            assert torch.equal(
                found.valid_tokens["lm"], torch.where(found.is_padding, 0, (found["labels"] != -100).sum(1))
            )
    assert len(num_steps) == 1
    report = read_quarantine(tmp_path)
    assert sorted(sample.sample_id for sample in report) == sorted(bad)
    reasons = {sample.sample_id: sample.reason for sample in report}
    assert "a null is in it" in reasons[6]
    assert "needs one number a token: expected 4, found 3" in reasons[11]
    assert {sample.sample_id: (sample.block, sample.row) for sample in report}[24] == (2, 24)


@pytest.mark.parametrize("mode", ["tokens", "whole"])
def test_a_run_that_cannot_be_decoded_is_padding_of_its_length(sound, tmp_path, mode):
    manifest = write(tmp_path / "data")
    path = tmp_path / "data" / "a.parquet"
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(0)
    damage(path, chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset + 12)
    options = {"mode": mode, "on_error": "mask", "max_masked_fraction": 1.0, "mask": None}
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        for rank in range(world_size):
            found = list(StreamingLoader(dataset_of(manifest, rank, world_size, quarantine=folder, **options)))
            plain = list(dataset_of(sound, rank, world_size, mode=mode, mask=None))
            for mine, its in zip(found, plain, strict=True):
                assert mine.sample_ids.tolist() == its.sample_ids.tolist()
                assert mine.is_padding.tolist() == its.is_padding.tolist()
                is_target = mine["labels"] != -100
                assert torch.equal(mine["labels"][is_target], its["labels"][is_target])
        report = read_quarantine(folder)
        named = sorted(sample.sample_id for sample in report)
        assert len(set(named)) == len(named)
        # Which rows of it have no list cannot be known; but a run without tokens is not read at all.
        assert {k for k in range(10, 20) if LENGTHS[k] is not None} <= set(named) <= set(range(10, 20))
        assert {sample.block for sample in report} == {1}


def test_counts_are_not_claimed_to_be_constant(sound, holed, tmp_path):
    plain, masking = (
        dataset_of(manifest, mask=None, **options)
        for manifest, options in (
            (sound, {}),
            (holed, {"on_error": "mask", "max_masked_fraction": 1.0, "quarantine": tmp_path}),
        )
    )
    expected = [window.targets["lm"] for window in windows(StreamingLoader(plain))]
    found = []
    for window in windows(StreamingLoader(masking)):
        found.append(window.targets["lm"])
        assert found[-1] == sum(int((batch["labels"] != -100).sum()) for batch in window.batches)
    place = next(iter(plain)).place
    assert plain.constant_targets(place) == {"lm": 2 * LENGTH}
    assert masking.constant_targets(place) is None
    lost = sum(LENGTHS[k] + 1 for k in HOLES)
    assert lost - 1 <= sum(expected) - sum(found) <= lost  # the line's first token is no target anyway


def test_data_without_faults_is_as_without_masking(tmp_path):
    manifest = token_manifest(tmp_path / "data", LENGTHS)
    masking = dataset_of(manifest, on_error="mask", quarantine=tmp_path / "q")
    for found, expected in zip(masking, dataset_of(manifest), strict=True):
        assert found.keys() == expected.keys()
        assert torch.equal(found["labels"], expected["labels"])
    assert not (tmp_path / "q").exists()


def test_what_collate_cannot_do_with_a_sequence_is_no_fault_of_a_document(sound, tmp_path):
    def collate(columns):
        raise ValueError("no such sequence")

    collate.takes_columns = True
    with pytest.raises(ValueError, match="no such sequence"):
        list(dataset_of(sound, on_error="mask", collate=collate, quarantine=tmp_path))
    assert not list(tmp_path.iterdir())
