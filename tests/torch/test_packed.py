"""Packed sequences through the dataset: the oracle's, whatever the topology, the workers and the storage."""

from __future__ import annotations

import warnings
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.cursor import Cursor
from shardstream.errors import CursorError, DecodeError, PlanError, ShardStreamWarning
from shardstream.fetch import Reading
from shardstream.packing import Packing
from shardstream.torch import StreamingDataset, StreamingLoader, Topology, windows
from tests.support import packing_reference as oracle
from tests.support.corpora import parquet_manifest
from tests.support.streams import joined, loader_of
from tests.support.token_files import LISTS, mask_of, token_manifest, tokens_of

EOS = 0
LENGTHS = [3, 0, None, 17, 1, 2, 40, None, 5, 0, 11, 4, 6, 1, 1, 90, 2, 8, None, 3, 21, 7, 0, 5, 9, 13, 2, 30, 4, 6] * 2
LENGTH = 8
GLOBAL_BATCH = 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    manifest = token_manifest(tmp_path_factory.mktemp("corpus"), LENGTHS, pack=[LENGTH])
    assert manifest.has_long_blocks
    return manifest


def dataset_of(manifest, rank=0, world_size=1, **options):
    options = {
        "sequence_length": LENGTH,
        "eos_id": EOS,
        "seed": 3,
        "batch_size": 2,
        "reading": Reading(gather_rows=48),
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardStreamWarning)  # of lanes: there are few blocks
        return StreamingDataset(manifest, topology=Topology(rank, world_size), **options)


def expected_sequences(manifest, lengths=None, *, seed=3, epoch=0, mode="tokens", eos=True):
    """The sequences of an epoch along the line, as numbers."""
    lengths = LENGTHS if lengths is None else lengths
    layout = manifest.block_rows.tolist(), manifest.block_run_rows.tolist()
    runs = oracle.documents(*layout, lengths, seed, epoch, eos)
    if mode == "tokens":
        found = oracle.sequences(oracle.line(runs, lengths), LENGTH)
    else:
        make = oracle.whole_sequences if mode == "whole" else oracle.unpacked_sequences
        fitted = [make(run, lengths, LENGTH) for run in runs]
        found = [[token for part in sequence for token in part] for run in fitted for sequence in run]
    numbers = [tokens_of(document, length or 0) for document, length in enumerate(lengths)]
    return [[EOS if k == oracle.EOS else numbers[d][k] for d, k in sequence] for sequence in found]


def shown(batches):
    """Place on the line → (inputs, labels) of each real row."""
    return {
        int(place): (batch["input_ids"][row].tolist(), batch["labels"][row].tolist())
        for batch in batches
        for row, place in enumerate(batch.sample_ids)
        if not batch.is_padding[row]
    }


def as_rows(sequences):
    """What a batch shows of sequences without masks."""
    inputs = [sequence[:LENGTH] for sequence in sequences]
    labels = [sequence[1:] for sequence in sequences]
    return {
        q: (i + [0] * (LENGTH - len(i)), k + [-100] * (LENGTH - len(k)))
        for q, (i, k) in enumerate(zip(inputs, labels, strict=True))
    }


# ------------------------------------------------------------------------------------------------ the oracle's


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_every_global_batch_is_the_same_at_any_world_size(corpus, world_size):
    expected = as_rows(expected_sequences(corpus))
    alone = dataset_of(corpus, batch_size=GLOBAL_BATCH)
    by_window = [sorted(batch.sample_ids[~batch.is_padding].tolist()) for batch in alone]
    assert sorted(joined(by_window)) == list(range(len(expected)))
    ranks = [
        list(dataset_of(corpus, rank, world_size, batch_size=1, global_batch=GLOBAL_BATCH))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    for window, places in enumerate(by_window):
        here = [batch for batches in ranks for batch in batches if batch.window_index == window]
        assert shown(here) == {place: expected[place] for place in places}
    targets = sum(int(batch.valid_tokens["lm"].sum()) for batches in ranks for batch in batches)
    num_tokens = sum(length + 1 for length in LENGTHS if length is not None)
    assert targets == num_tokens - 1


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_change_nothing(corpus, num_workers):
    alone, expected = dataset_of(corpus, 1, 2, accumulate=3), []
    for epoch in range(2):
        alone.set_epoch(epoch)
        expected.append([batch.model_inputs() for batch in alone])
    loader = loader_of("streaming", dataset_of(corpus, 1, 2, accumulate=3), num_workers)
    for epoch in range(2):
        found = [batch.model_inputs() for batch in loader]
        for mine, its in zip(found, expected[epoch], strict=True):
            for name in ("input_ids", "labels", "position_ids", "document_ids"):
                assert torch.equal(mine[name], its[name])
            for name in ("cu_seqlens", "span_sample_ids", "span_starts", "span_lengths"):
                assert mine[name].tolist() == its[name].tolist()


KINDS = [*LISTS, "tar<uint16>", "tar<int32>"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_every_kind(tmp_path, kind):
    manifest = token_manifest(tmp_path, LENGTHS, kind, run_num_bytes=4000 if kind.startswith("tar") else 60)
    assert shown(dataset_of(manifest)) == as_rows(expected_sequences(manifest))


def test_lists_of_a_fixed_size(tmp_path):
    lengths = [5] * 20 + [None] * 3 + [5] * 10
    manifest = token_manifest(tmp_path, lengths, "fixed-size list")
    assert shown(dataset_of(manifest, eos_id=None)) == as_rows(expected_sequences(manifest, lengths, eos=False))


@given(
    st.lists(st.none() | st.integers(0, 25), min_size=4, max_size=30),
    st.sampled_from(["tokens", "whole", "unpacked"]),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 2), (3, 1)]),
    st.sampled_from([1, 3, 12]),
)
@settings(max_examples=12)
def test_any_corpus(tmp_path_factory, lengths, mode, eos, topology, lanes):
    folder = tmp_path_factory.mktemp("any")
    manifest = token_manifest(folder, lengths, shards=2, row_group_size=7, run_num_bytes=30, pack=[LENGTH])
    expected = expected_sequences(manifest, lengths, mode=mode, eos=eos, epoch=1)
    world_size, batch_size = topology
    options = {"eos_id": EOS if eos else None, "packing": mode, "lanes": lanes, "batch_size": batch_size}
    if not expected:
        with pytest.raises(PlanError, match="no two tokens"):
            dataset_of(manifest, **options)
        return
    found = {}
    for rank in range(world_size):
        dataset = dataset_of(manifest, rank, world_size, **options)
        dataset.set_epoch(1)
        found |= {place: inputs for place, (inputs, _) in shown(dataset).items()}
    assert found == {place: inputs for place, (inputs, _) in as_rows(expected).items()}


# ------------------------------------------------------------------------------------------------ what a batch says


def test_positions_documents_and_spans_agree(corpus):
    num_tokens = {}
    for batch in dataset_of(corpus, batch_size=5):
        for row in range(len(batch)):
            bounds, spans = batch["cu_seqlens"][row].tolist(), batch["span_lengths"][row].tolist()
            ids, starts = batch["span_sample_ids"][row].tolist(), batch["span_starts"][row].tolist()
            filled = sum(spans)
            documents = batch["document_ids"][row]
            assert bounds == [*np.cumsum([0, *spans]).tolist(), *[LENGTH] * (filled < LENGTH)]
            assert documents.tolist() == [*np.repeat(np.arange(len(spans)), spans), *[-1] * (LENGTH - filled)]
            for begin, end in pairwise(bounds):
                assert batch["position_ids"][row, begin:end].tolist() == list(range(end - begin))
            for begin, length, document, start in zip(bounds, spans, ids, starts, strict=False):
                expected = [*tokens_of(document, LENGTHS[document]), EOS][start : start + length]
                assert batch["input_ids"][row, begin : begin + length].tolist() == expected
                if not batch.is_padding[row]:
                    num_tokens[document] = num_tokens.get(document, 0) + length
            assert batch["cu_seqlens"].values.dtype == documents.dtype == torch.int32
    assert num_tokens == {d: length + 1 for d, length in enumerate(LENGTHS) if length is not None}


def test_masks_take_targets_and_nothing_else(corpus):
    packing = Packing(LENGTH, eos_id=EOS, mask_document_starts=True, loss_mask_column="mask")
    masked = dataset_of(corpus, sequence_length=None, eos_id=None, packing=packing)
    num_targets = 0
    for batch, plain in zip(masked, dataset_of(corpus), strict=True):
        assert torch.equal(batch["input_ids"], plain["input_ids"])
        is_target = batch["labels"] != -100
        assert torch.equal(batch["labels"][is_target], plain["labels"][is_target])
        assert torch.equal(batch.valid_tokens["lm"], is_target.sum(1))
        num_targets += int(is_target.sum())
    masks = [[*mask_of(tokens_of(d, length)), 1] for d, length in enumerate(LENGTHS) if length is not None]
    assert num_targets == sum(sum(mask[1:]) for mask in masks)


def test_whole_documents_are_not_cut_and_each_is_trained_on_by_itself(corpus):
    expected = as_rows(expected_sequences(corpus, mode="whole"))
    num_targets, places = 0, set()
    for batch in dataset_of(corpus, packing="whole"):
        for row in range(len(batch)):
            if batch.is_padding[row]:
                assert int(batch.valid_tokens["lm"][row]) == 0
                continue
            place = int(batch.sample_ids[row])
            places.add(place)
            inputs, labels = expected[place]
            assert batch["input_ids"][row].tolist() == inputs
            is_target = batch["labels"][row] != -100
            assert batch["labels"][row][is_target].tolist() == torch.tensor(labels)[is_target].tolist()
            starts = batch["cu_seqlens"][row][1:-1]
            assert not is_target[starts.long() - 1].any()  # the token before a document does not predict it
        num_targets += int(batch.valid_tokens["lm"].sum())
    assert places == set(expected)
    assert num_targets == sum(length for length in LENGTHS if length is not None)  # all but documents' first, ends too


def test_only_the_columns_asked_for_are_made(corpus):
    batch = next(iter(dataset_of(corpus, columns=["input_ids", "labels"])))
    assert batch.keys() == ["input_ids", "labels"]


# ------------------------------------------------------------------------------------------------ resuming


HOPS = st.tuples(st.sampled_from([(1, 4), (2, 12), (3, 4), (4, 3), (6, 1), (8, 3)]), st.integers(1, 4))


@given(hops=st.lists(HOPS, min_size=1, max_size=5))
@settings(max_examples=8)
@pytest.mark.parametrize("tail", ["pad", "continue"])
def test_chains_of_resizes_give_the_windows_of_one_process(corpus, tail, hops):
    unbroken = dataset_of(corpus, batch_size=GLOBAL_BATCH, tail=tail, lanes=8)
    state = unbroken.state_dict()
    expected = []
    while len(expected) < 20:
        expected += [(shown([batch]), batch.cursor) for batch in islice(unbroken, 20)]
    for (world_size, batch_size), num_windows in hops:
        topology = {"world_size": world_size, "batch_size": batch_size, "global_batch": GLOBAL_BATCH}
        trained, states = [{} for _ in range(num_windows)], []
        for rank in range(world_size):
            dataset = dataset_of(corpus, rank, tail=tail, lanes=5, **topology)
            dataset.load_state_dict(state)
            batches = list(islice(dataset, num_windows * dataset.plan.accumulate))
            for batch in batches:
                trained[batch.window_index] |= shown([batch])
            states.append(batches[-1].cursor)
        assert set(states) == {states[0]}
        state = states[0]
        for window in filter(None, trained):  # an epoch may end before
            its, cursor = expected.pop(0)
            assert window == its
        assert (state.epoch, state.position) == (cursor.epoch, cursor.position)


@pytest.mark.parametrize("mode", ["tokens", "whole"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resume_is_a_seek(corpus, mode, world_size):
    """Behind every window the rest of the epoch is the same, and what is opened first is what any start opens."""
    options = {"packing": mode, "batch_size": 2, "global_batch": 12, "lanes": 4}
    options["reading"] = Reading(look_ahead=1)  # else it is a matter of time what is opened beside the first batch's
    whole = list(dataset_of(corpus, world_size - 1, world_size, **options))
    first_reads = []
    for step in range(0, len(whole), 12 // (2 * world_size)):
        resumed = dataset_of(corpus, world_size - 1, world_size, **options)
        if step:
            resumed.load_state_dict(whole[step - 1].cursor)
        batches = iter(resumed)
        found = [next(batches)]
        first_reads.append(resumed.stats.num_blocks_opened)
        found += batches
        for mine, its in zip(found, whole[step:], strict=True):
            assert torch.equal(mine["input_ids"], its["input_ids"])
            assert torch.equal(mine["labels"], its["labels"])
    assert max(first_reads) <= 4 * max(first_reads[0], 4)


def test_an_epochs_leftover_stays_in_that_epoch(corpus):
    dataset = dataset_of(corpus, batch_size=5, tail="continue")
    num = dataset.plan.num_positions
    rows = [
        (place, inputs) for batch in islice(dataset, 2 * num // 5 + 1) for place, (inputs, _) in shown([batch]).items()
    ]
    expected = [as_rows(expected_sequences(corpus, epoch=epoch)) for epoch in range(2)]
    for epoch in range(2):
        part = rows[epoch * num : (epoch + 1) * num]
        assert dict(part) == {place: inputs for place, (inputs, _) in expected[epoch].items()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sequence_length": 9}, "'sequence_length': 8.* in the cursor"),
        ({"eos_id": None}, "packing"),
        ({"packing": "whole"}, "packing"),
        ({"sequence_length": None, "eos_id": None}, "packing.*None here"),
    ],
)
def test_another_packing_is_refused_on_resume(corpus, changed, message):
    state = next(iter(dataset_of(corpus))).cursor.state_dict()
    assert Cursor.from_state_dict(state).packing["mode"] == "tokens"
    with pytest.raises(CursorError, match=message):
        dataset_of(corpus, **{"lanes": 2, **changed}).load_state_dict(state)


# ------------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize("tail", ["pad", "drop", "continue"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_targets_follow_from_positions_alone(corpus, tail, world_size):
    options = {"tail": tail, "batch_size": 2, "accumulate": 2}
    datasets = [dataset_of(corpus, rank, world_size, **options) for rank in range(world_size)]
    num_batches = 3 * datasets[0].plan.num_positions // (2 * world_size)
    counted, said = {}, {}
    for dataset in datasets:
        for batch in islice(dataset, num_batches):
            window = batch.window_index
            counted[window] = counted.get(window, 0) + int(batch.valid_tokens["lm"].sum())
            said.setdefault(window, []).append(dataset.constant_targets(batch.place))
    unknown = [window for window, texts in said.items() if texts[0] is None]
    last = max(said)
    for window in said.keys() - unknown - {last}:
        assert all(targets == {"lm": counted[window]} for targets in said[window])
    assert unknown in ([], [last]), "only an epoch's last, partial window is counted"
    assert len(said) > 5


def test_masked_targets_are_counted(corpus):
    options = {"sequence_length": None, "eos_id": None, "packing": Packing(LENGTH, mask_document_starts=True)}
    dataset = dataset_of(corpus, **options)
    batches = list(dataset)
    assert all(dataset.constant_targets(batch.place) is None for batch in batches)
    found = [window.targets["lm"] for window in windows(StreamingLoader(dataset_of(corpus, **options)))]
    assert found == [int((batch["labels"] != -100).sum()) for batch in batches]


def test_tokens_that_look_like_no_target_are_counted(corpus):
    dataset = dataset_of(corpus, ignore_index=EOS)  # as in models whose end of text is their padding
    batches = list(dataset)
    assert all(dataset.constant_targets(batch.place) is None for batch in batches)
    for batch in batches:
        assert batch.valid_tokens["lm"].tolist() == (batch["labels"] != EOS).sum(1).tolist()


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "sequence_length >= 1"),
        ({"sequence_length": None}, "eos_id need sequence_length"),
        ({"packing": "cut"}, "unknown packing"),
        ({"packing": Packing(4)}, "sequence_length and eos_id belong into"),
        ({"transform": dict}, "shardstream tokenize"),
        ({"collate": list}, "takes_columns"),
        ({"shifted": False}, "shifted"),
        ({"shuffle": "full"}, "block by block"),
        ({"columns": ["tokens"]}, "no column 'tokens'"),
        ({"columns": ["input_ids"]}, "no column 'labels'"),
        ({"targets": {"lm": "tokens"}}, "no column 'tokens'"),
        ({"tokens_column": "mask"}, "--tokens-column mask"),
        (
            {"sequence_length": 7, "packing": "whole"},
            r"expected sequences.7\+eos.*`shardstream index --tokens-column tokens --pack 7`",
        ),
        (
            {"sequence_length": None, "eos_id": None, "packing": Packing(4, tokens_dtype="uint16")},
            "counted as another type",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(corpus, options, message):
    with pytest.raises(PlanError, match=message):
        dataset_of(corpus, **options)


def test_a_manifest_without_counts_is_refused(tmp_path):
    with pytest.raises(PlanError, match=r"index --tokens-column tokens.*shardstream tokenize"):
        dataset_of(parquet_manifest(tmp_path, [10]))


def test_other_tokens_than_were_counted_are_named(tmp_path):
    """A manifest whose counts are of other data cannot be trained on unnoticed."""
    manifest = token_manifest(tmp_path / "a", [5] * 10, shards=1)
    dataset = dataset_of(manifest)
    lengths = dataset.plan.packed.run_lengths
    lengths.setflags(write=True)
    lengths[0] += 1
    with pytest.raises(DecodeError, match=r"0\.parquet, block 0\]: expected \d+, found \d+"):
        list(dataset)
