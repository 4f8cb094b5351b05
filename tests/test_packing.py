from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.columns import Dense, Objects, Rows, Slices
from shardstream.errors import DecodeError, PlanError
from shardstream.fitting import best_fit, cut_documents, num_best_fit, num_first_fit
from shardstream.order import EpochOrder
from shardstream.packed_run import packed_run
from shardstream.packing import Packed, PackedOrder, Packing
from tests.support import order_reference as ref
from tests.support import packing_reference as oracle
from tests.support.layouts import manifest_of
from tests.support.packings import TOKENS_A_SAMPLE, order_of, rows_of_run, run_of, sequences_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "packing_golden.json").read_text())
EOS = 999_999


@st.composite
def corpora(draw):
    """Blocks of any size, runs of any length, documents of any length: null, empty and longer than sequences too."""
    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    runs = [draw(st.integers(1, 10)) for _ in rows]
    num = sum(rows)
    lengths = draw(st.lists(st.none() | st.integers(0, 12), min_size=num, max_size=num))
    return manifest_of(rows, runs), lengths


packings = st.builds(
    Packing,
    sequence_length=st.integers(1, 20),
    eos_id=st.sampled_from([None, EOS]),
    mode=st.sampled_from(["tokens", "whole", "unpacked"]),
)


def number_of(token):
    sample, offset = token
    return EOS if offset == oracle.EOS else sample * TOKENS_A_SAMPLE + offset


def oracle_sequences(manifest, lengths, packing, seed, epoch, *, shuffle=True):
    """All sequences of an epoch along the line, as lists of numbers."""
    has_eos = packing.eos_id is not None
    layout = manifest.block_rows.tolist(), manifest.block_run_rows.tolist()
    runs = oracle.documents(*layout, lengths, seed, epoch, has_eos, shuffle=shuffle)
    if packing.mode == "tokens":
        found = oracle.sequences(oracle.line(runs, lengths), packing.sequence_length)
    else:
        make = oracle.whole_sequences if packing.mode == "whole" else oracle.unpacked_sequences
        fitted = [make(run, lengths, packing.sequence_length) for run in runs]
        found = [[token for part in sequence for token in part] for run in fitted for sequence in run]
    return [list(map(number_of, sequence)) for sequence in found]


# ------------------------------------------------------------------------------------------------ goldens and oracle


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_sequences_are_golden(golden):
    manifest = manifest_of(golden["block_rows"], golden["run_rows"])
    packing = Packing(golden["sequence_length"], eos_id=golden["eos_id"], mode=golden["mode"])
    place = {name: golden[name] for name in ("seed", "epoch", "lanes", "shuffle")}
    order = order_of(manifest, golden["lengths"], packing, **place)
    ids = order.sample_ids(np.arange(order.num_positions))
    assert ids.tolist() == golden["sequence_ids"]
    assert sequences_of(order, golden["lengths"], ids) == golden["sequences"]


@given(corpora(), packings, st.integers(0, 99), st.integers(0, 5), st.sampled_from([1, 2, 3, 8, 64]), st.booleans())
def test_sequences_equal_the_oracle(corpus, packing, seed, epoch, lanes, shuffle):
    manifest, lengths = corpus
    order = order_of(manifest, lengths, packing, seed=seed, epoch=epoch, lanes=lanes, shuffle=shuffle)
    expected = oracle_sequences(manifest, lengths, packing, seed, epoch, shuffle=shuffle)
    assert order.num_positions == len(expected)
    ids = order.sample_ids(np.arange(len(expected)))
    phases = shuffle and manifest.has_long_blocks
    assert ids.tolist() == ref.lane_order(len(expected), lanes, seed, epoch, phases)
    assert sequences_of(order, lengths, ids) == [expected[k] for k in ids.tolist()]


# ------------------------------------------------------------------------------------------------ tokens conserved


@given(corpora(), packings, st.integers(0, 9))
def test_every_token_is_there_and_a_target_once(corpus, packing, epoch):
    """In tokens mode every token but the line's first is a target once, in whole mode all but documents' first."""
    manifest, lengths = corpus
    order = order_of(manifest, lengths, packing, epoch=epoch)
    sequences = sequences_of(order, lengths, np.arange(order.num_positions))
    all_tokens = Counter(
        token
        for sample, num in enumerate(lengths)
        if num is not None
        for token in [*(sample * TOKENS_A_SAMPLE + np.arange(num)).tolist(), *[EOS] * (packing.eos_id is not None)]
    )
    if packing.mode == "tokens":
        targets = Counter(token for sequence in sequences for token in sequence[1:])
        if sequences:
            targets[sequences[0][0]] += 1
        assert targets == (all_tokens if all_tokens.total() > 1 else Counter())
        assert all(len(sequence) == packing.sequence_length + 1 for sequence in sequences[:-1])
        return
    targets = Counter()
    for block, num in enumerate((-(-manifest.block_rows // manifest.block_run_rows)).tolist()):
        for run in range(num):
            packed = run_of(order.samples, lengths, packing, block, run)
            targets.update(packed.tokens[packed.is_target].tolist())
            for begin, end in zip(packed.sequence_start, packed.sequence_start[1:], strict=False):
                assert begin < end <= begin + packing.sequence_length + 1
    has_eos = packing.eos_id is not None
    firsts = Counter(sample * TOKENS_A_SAMPLE for sample, num in enumerate(lengths) if num)
    firsts[EOS] = sum(num == 0 for num in lengths) * has_eos  # of empty documents their end is all there is
    assert targets == all_tokens - firsts
    cut = {token // TOKENS_A_SAMPLE for sequence in sequences for token in sequence} - {EOS // TOKENS_A_SAMPLE}
    for sample in cut:
        if lengths[sample] + has_eos <= packing.sequence_length + 1:
            holding = [s for s in sequences if any(t // TOKENS_A_SAMPLE == sample and t != EOS for t in s)]
            assert len(holding) == 1  # no document is cut that need not be


@given(corpora(), packings, st.integers(0, 9), st.integers(0, 9))
def test_the_number_of_sequences_is_that_of_every_epoch_and_seed(corpus, packing, seed, epoch):
    manifest, lengths = corpus
    one = order_of(manifest, lengths, packing, seed=0, epoch=0, shuffle=False)
    other = order_of(manifest, lengths, packing, seed=seed, epoch=epoch)
    assert one.packed.run_lengths.tolist() == other.packed.run_lengths.tolist()
    num_tokens = sum(num + (packing.eos_id is not None) for num in lengths if num is not None)
    if packing.mode == "tokens":
        assert one.num_positions == ref.num_sequences(num_tokens, packing.sequence_length)


def test_documents_longer_than_sequences_span_runs_blocks_and_sequences():
    manifest = manifest_of([1, 2, 1], [1, 1, 1])
    order = order_of(manifest, [25, 1, 0, 30], Packing(4), shuffle=False)
    assert [len(sequence) for sequence in sequences_of(order, [25, 1, 0, 30], range(14))] == [5] * 13 + [4]
    pieces = order.pieces(np.array([6, 0]))
    assert pieces.sequence.tolist() == [0, 0, 0, 1]
    assert list(zip(pieces.block, pieces.run, pieces.begin, pieces.end, strict=True)) == [
        (0, 0, 24, 25),
        (1, 0, 0, 1),
        (2, 0, 0, 3),
        (0, 0, 0, 5),
    ]


@pytest.mark.parametrize("lengths", [[None, None], [0, 0], [1, 0], [0, None]])
def test_fewer_than_two_tokens_are_no_sequence(lengths):
    assert order_of(manifest_of([2], [2]), lengths, Packing(4)).num_positions == 0


def test_every_epoch_lets_other_documents_meet():
    manifest, lengths = manifest_of([40], [40]), [3] * 40
    together = [
        {
            frozenset(token // TOKENS_A_SAMPLE for token in sequence)
            for sequence in sequences_of(order, lengths, range(order.num_positions))
        }
        for order in (order_of(manifest, lengths, Packing(11, mode="whole"), epoch=epoch) for epoch in range(2))
    ]
    assert len(together[0]) == len(together[1]) == 10
    assert together[0] != together[1]


# ------------------------------------------------------------------------------------------------ fitting


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 30))
def test_best_fit_holds_all_and_takes_few(lengths, sequence_length):
    lengths = np.array(lengths, np.int64)
    parts = cut_documents(lengths, sequence_length)
    fitted = best_fit(parts.length, sequence_length + 1)
    filled = np.bincount(fitted, weights=parts.length)
    assert not len(filled) or filled.min() > 0
    assert filled.max(initial=0) <= sequence_length + 1
    assert len(filled) == num_best_fit(lengths, sequence_length) == num_best_fit(lengths[::-1], sequence_length)
    at_least = -(-int(parts.length.sum()) // (sequence_length + 1))
    assert len(filled) >= at_least
    # Best fit decreasing needs at most 11/9 of the fewest there can be, and so of what first fit needs.
    assert len(filled) <= 11 / 9 * num_first_fit(lengths, sequence_length) + 1


@given(st.lists(st.integers(1, 60), max_size=10), st.integers(1, 30))
def test_parts_of_long_documents_overlap_by_one(lengths, sequence_length):
    parts = cut_documents(np.array(lengths, np.int64), sequence_length)
    for document, length in enumerate(lengths):
        mine = parts.document == document
        covered = [range(o, o + n) for o, n in zip(parts.offset[mine], parts.length[mine], strict=True)]
        assert [list(part) for part in covered] == oracle.cut(list(range(length)), sequence_length)


# ------------------------------------------------------------------------------------------------ columns of a run

LISTS = [[5, 6], [], None, [7], [1, 2, 3]]


def lists_column(dtype):
    values = np.array([5, 6, 7, 1, 2, 3], dtype)
    nulls = np.array([row is None for row in LISTS])
    return Slices(values, np.array([0, 2, 2, 2, 3]), np.array([2, 0, 0, 1, 3]), "list", nulls)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "uint64"])
def test_lists_of_any_whole_numbers(dtype):
    rows = Rows(5, {"tokens": lists_column(dtype)})
    run = packed_run(rows, np.array([3, 2, 1, 0, 4]), 10, Packing(4, eos_id=0))
    assert run.tokens.dtype == dtype
    assert run.tokens.tolist() == [7, 0, 0, 5, 6, 0, 1, 2, 3, 0]
    assert run.part_start.tolist() == [0, 2, 3, 6, 10]
    assert run.sample_ids.tolist() == [13, 11, 10, 14]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_raw_bytes_of_tars(dtype):
    data = [None if row is None else np.array(row, np.dtype(dtype).newbyteorder("<")).tobytes() for row in LISTS]
    lengths = np.array([len(value or b"") for value in data])
    values = np.frombuffer(b"x" + b"".join(value or b"" for value in data), np.uint8)  # not aligned
    column = Slices(values, 1 + np.cumsum(lengths) - lengths, lengths, "bytes", np.array([r is None for r in LISTS]))
    for eos in (None, 9):
        expected = packed_run(Rows(5, {"tokens": lists_column(dtype)}), np.arange(5), 0, Packing(4, eos_id=eos))
        found = packed_run(Rows(5, {"tokens": column}), np.arange(5), 0, Packing(4, eos_id=eos, tokens_dtype=dtype))
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.part_start.tolist() == expected.part_start.tolist()


def test_lists_of_a_fixed_size():
    column = Dense(np.array([[1, 2], [3, 4], [5, 6]]), np.array([False, True, False]))
    run = packed_run(Rows(3, {"tokens": column}), np.array([2, 1, 0]), 0, Packing(4))
    assert (run.tokens.tolist(), run.sample_ids.tolist()) == ([5, 6, 1, 2], [2, 0])


def test_masks():
    mask = Slices(
        np.array([1, 0, 1, 1, 1, 0]), *(getattr(lists_column("i4"), n) for n in ("starts", "lengths")), "list"
    )
    rows = Rows(5, {"tokens": lists_column("i4"), "mask": mask})
    packing = Packing(4, eos_id=0, loss_mask_column="mask")
    run = packed_run(rows, np.arange(5), 0, packing)
    assert run.tokens.tolist() == [5, 6, 0, 0, 7, 0, 1, 2, 3, 0]
    assert run.is_target.astype(int).tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 0, 1]
    run = packed_run(rows, np.arange(5), 0, replace(packing, mask_document_starts=True))
    assert run.is_target.astype(int).tolist() == [0, 0, 1, 0, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("column", "packing", "message"),
    [
        (Objects([[1], None, [1, None]]), Packing(4), "sample 12 is no list of tokens: a null"),
        (Slices(np.zeros(3), np.arange(3), np.ones(3, np.int64), "list"), Packing(4), "expected whole numbers"),
        (Slices(np.zeros(3, np.uint8), np.arange(3), np.ones(3, np.int64), "text"), Packing(4), "no lists of tokens"),
        (Slices(np.zeros(3, np.uint8), np.arange(3), np.ones(3, np.int64), "bytes"), Packing(4), "tokens_dtype="),
        (
            Slices(np.zeros(3, np.uint8), np.arange(3), np.ones(3, np.int64), "bytes"),
            Packing(4, tokens_dtype="uint16"),
            "of sample 10 are no uint16: expected a multiple of 2, found 1",
        ),
        (
            Slices(np.zeros(3, np.uint8), np.arange(3), np.ones(3, np.int64), "list"),
            Packing(4, eos_id=256),
            "at most 255, which uint8 holds, found 256",
        ),
        (Dense(np.zeros(3)), Packing(4), "no lists of tokens"),
    ],
)
def test_columns_that_hold_no_tokens_are_refused(column, packing, message):
    with pytest.raises(DecodeError, match=message):
        packed_run(Rows(3, {"tokens": column}), np.arange(3), 10, packing)


def test_a_loss_mask_of_another_length_is_refused():
    _, rows = rows_of_run(manifest_of([3], [3]), [2, 3, 1], 0, 0)
    _, mask = rows_of_run(manifest_of([3], [3]), [2, 2, 1], 0, 0)
    both = Rows(3, {**rows.columns, "mask": mask.columns["tokens"]})
    with pytest.raises(DecodeError, match=r"sample 1 .*expected 3, found 2"):
        packed_run(both, np.arange(3), 0, Packing(4, loss_mask_column="mask"))


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 0}, "sequence_length >= 1"),
        ({"sequence_length": 2.0}, "whole number"),
        ({"sequence_length": True}, "whole number"),
        ({"mode": "split"}, "'tokens', 'whole' or 'unpacked'"),
        ({"eos_id": -1}, "eos_id must be a token"),
        ({"tokens_dtype": "float32"}, "unknown tokens_dtype"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        Packing(**{"sequence_length": 4, **settings})


@pytest.mark.parametrize("shuffle", ["full", "torch"])
def test_orders_without_blocks_are_refused(shuffle):
    rows = EpochOrder(manifest_of([4], [4]), 0, 0, 1, shuffle)
    with pytest.raises(PlanError, match="block by block"):
        PackedOrder(rows, Packed(Packing(4), np.array([9])))


def test_positions_outside_the_epoch_are_refused():
    order = order_of(manifest_of([2], [2]), [9, 9], Packing(4))
    for positions in ([-1], [5]):
        with pytest.raises(PlanError, match=r"expected 0\.\.4"):
            order.sample_ids(np.array(positions))


def test_packed_pickles_without_what_it_remembers():
    packed = Packed(Packing(4, eos_id=1), np.array([5, 7]))
    assert packed.num_places == 12
    copy = pickle.loads(pickle.dumps(packed))
    assert "num_places" not in copy.__dict__
    assert (copy.packing, copy.num_sequences) == (packed.packing, 3)


def test_the_block_starts_of_the_line_count_sequences():
    order = order_of(manifest_of([2, 1, 1], [1, 1, 1]), [3, 4, 0, 6], Packing(4), shuffle=False)
    assert order.line_start.tolist() == [0, 2, 2, 3]
