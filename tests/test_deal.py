from __future__ import annotations

import dataclasses
import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from shardstream.deal import TAILS, Deal
from shardstream.errors import PlanError
from shardstream.order import EpochOrder
from tests.support import order_reference as ref
from tests.support.layouts import GOLDEN, manifest_of

LARGE = 2**40


def windows_of(deal, rank):
    """What a rank reads, as the oracle writes it: windows of micro-batches of [position, is_padding]."""
    windows = []
    for window in range(deal.num_windows):
        part = deal.part(window, rank)
        rows = [list(row) for row in zip(part.positions.tolist(), part.is_padding.tolist(), strict=True)]
        if rows:
            windows.append([rows[i : i + deal.batch_size] for i in range(0, len(rows), deal.batch_size)])
    return windows


def oracle(deal):
    args = (deal.num_positions, deal.world_size, deal.batch_size, deal.accumulate, deal.tail, deal.lanes, deal.start)
    return json.loads(json.dumps(ref.deal(*args)))


@st.composite
def deals(draw, tails=("pad", "drop", "uneven", "repeat", "truncate")):
    tail = draw(st.sampled_from(tails))
    num_positions = draw(st.integers(0, 60))
    return Deal(
        num_positions=num_positions,
        world_size=draw(st.integers(1, 6)),
        batch_size=draw(st.integers(1, 4)),
        accumulate=draw(st.integers(1, 3)),
        tail=tail,
        lanes=1 if tail in ("repeat", "truncate") else draw(st.sampled_from([1, 2, 3, 4, 6, 8, 24, 70])),
        start=draw(st.integers(0, num_positions)),
    )


# ------------------------------------------------------------------------------------------------ goldens and oracle


@pytest.mark.parametrize("golden", GOLDEN["deals"], ids=lambda g: "-".join(str(g[k]) for k in list(g)[:7]))
def test_deals_are_golden(golden):
    names = {"n": "num_positions"}
    deal = Deal(**{names.get(name, name): value for name, value in golden.items() if name != "ranks"})
    assert [windows_of(deal, rank) for rank in range(deal.world_size)] == golden["ranks"]


@given(deals())
def test_deals_equal_the_oracle(deal):
    assert [windows_of(deal, rank) for rank in range(deal.world_size)] == oracle(deal)


@given(deals())
def test_counts_equal_what_is_dealt(deal):
    ranks = oracle(deal)
    rows = list(chain.from_iterable(chain.from_iterable(chain.from_iterable(ranks))))
    real = Counter(position for position, is_padding in rows if not is_padding)
    assert deal.num_windows == max(map(len, ranks))
    assert [deal.num_micro_batches(r) for r in range(deal.world_size)] == [sum(map(len, windows)) for windows in ranks]
    assert deal.num_padding == sum(is_padding for _, is_padding in rows)
    assert deal.num_dropped == len(set(range(deal.start, deal.num_positions)) - set(real))
    assert deal.num_repeated == real.total() - (deal.num_positions - deal.start - deal.num_dropped)


@given(deals((*TAILS[:3], "continue")))
def test_one_by_one_or_many_at_once_is_the_same(deal):
    share = deal.batch_size * deal.accumulate
    for rank in range(deal.world_size):
        at_once = deal.parts(rank, 0, deal.num_whole_windows)
        assert at_once.shape == (deal.num_whole_windows, share)
        for window, positions in enumerate(at_once.tolist()):
            assert deal.part(window, rank).positions.tolist() == positions
        micro_batches = [deal.micro_batch(rank, index) for index in range(deal.num_micro_batches(rank))]
        for window in range(deal.num_windows):
            of_window = [batch for batch in micro_batches if batch.window == window]
            assert [batch.micro for batch in of_window] == list(range(len(of_window)))
            assert [batch.is_last for batch in of_window] == [False] * (len(of_window) - 1) + [True] * bool(of_window)
            rows = [position for batch in of_window for position in batch.positions.tolist()]
            assert rows == deal.part(window, rank).positions.tolist()


# ------------------------------------------------------------------------------------------------ promises


@given(deals(("pad", "drop", "truncate", "repeat", "continue")))
def test_every_rank_takes_equally_many_steps(deal):
    assert len({deal.num_micro_batches(rank) for rank in range(deal.world_size)}) == 1
    for window in range(deal.num_windows):
        assert len({len(deal.part(window, rank).positions) for rank in range(deal.world_size)}) == 1


@given(deals(("uneven",)))
def test_uneven_ranks_differ_by_at_most_one_sample(deal):
    totals = [
        sum(len(deal.part(w, rank).positions) for w in range(deal.num_windows)) for rank in range(deal.world_size)
    ]
    assert max(totals) - min(totals) <= 1
    steps = [deal.num_micro_batches(rank) for rank in range(deal.world_size)]
    assert max(steps) - min(steps) <= 1


@given(deals(("pad", "drop", "uneven")))
def test_an_epoch_is_each_sample_once(deal):
    parts = [deal.part(w, rank) for w in range(deal.num_windows) for rank in range(deal.world_size)]
    real = sorted(chain.from_iterable(part.positions[~part.is_padding].tolist() for part in parts))
    assert real == list(range(deal.start, deal.num_positions - deal.num_dropped))
    assert deal.num_dropped == (deal.num_left if deal.tail == "drop" else 0)


@given(st.integers(0, 100), st.sampled_from([1, 3, 4, 8, 24]), st.sampled_from(["pad", "drop", "uneven"]), st.data())
def test_windows_are_the_same_for_every_way_to_write_the_global_batch(num_positions, lanes, tail, data):
    """Padding apart: the set of real positions of each window depends on the global batch only."""
    start = data.draw(st.integers(0, num_positions))
    products = [(p, b, 24 // p // b) for p in range(1, 25) if 24 % p == 0 for b in range(1, 25) if 24 // p % b == 0]
    assert len(products) == 30
    seen = set()
    for world_size, batch_size, accumulate in products:
        deal = Deal(num_positions, world_size, batch_size, accumulate, tail, lanes, start)
        seen.add(
            tuple(
                tuple(sorted(chain.from_iterable(p.positions[~p.is_padding].tolist() for p in parts)))
                for parts in ([deal.part(w, rank) for rank in range(world_size)] for w in range(deal.num_windows))
            )
        )
    assert len(seen) == 1


@given(deals(("pad",)))
def test_padding_fills_with_the_rows_of_its_own_window(deal):
    """The multiset: rows of the window again, in turn, as few as make every micro-batch whole."""
    assert deal.num_padding == (-deal.num_left % (deal.world_size * deal.batch_size) if deal.num_left else 0)
    if not deal.num_left:
        return
    parts = [deal.part(deal.num_windows - 1, rank) for rank in range(deal.world_size)]
    left = range(deal.num_positions - deal.num_left, deal.num_positions)
    padding = Counter(chain.from_iterable(part.positions[part.is_padding].tolist() for part in parts))
    assert padding == Counter(left[k % len(left)] for k in range(deal.num_padding))
    assert all(len(part.positions) % deal.batch_size == 0 for part in parts)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4, 5]))
def test_continue_has_no_gap(num_positions, world_size, batch_size, accumulate, lanes):
    """Epochs end to end, with windows that reach over one border or several: each position of each epoch once."""
    epoch, start, seen, num_windows = 0, 0, [], 0
    while num_windows < 12:
        deal = Deal(num_positions, world_size, batch_size, accumulate, "continue", lanes, start)
        for window in range(deal.num_windows):
            parts = [deal.part(window, rank).positions for rank in range(world_size)]
            assert {len(part) for part in parts} == {batch_size * accumulate}
            here = sorted(np.concatenate(parts).tolist())
            first = start + window * deal.global_batch
            assert here == list(range(first, first + deal.global_batch))
            seen += [epoch * num_positions + position for position in here]
            num_windows += 1
        assert deal.num_padding == deal.num_dropped == deal.num_repeated == 0
        more, start = divmod(start + deal.num_windows * deal.global_batch, num_positions)
        epoch += more
        assert more > 0
    assert seen == list(range(num_windows * world_size * batch_size * accumulate))


@given(deals(("pad", "drop", "uneven")))
def test_a_rank_stays_on_its_own_lanes(deal):
    """With lanes a rank reads consecutive lanes; of G = L x k it reads the same L / P of them at every whole window."""
    if deal.lanes == 1 or deal.global_batch % deal.lanes or deal.lanes % deal.world_size:
        return
    own = deal.lanes // deal.world_size
    for rank in range(deal.world_size):
        for positions in deal.parts(rank, 0, deal.num_whole_windows):
            assert set((positions % deal.lanes).tolist()) == set(range(rank * own, (rank + 1) * own))


# ------------------------------------------------------------------------------------------------ DistributedSampler


@pytest.mark.parametrize(("tail", "drop_last"), [("repeat", False), ("truncate", True)])
@pytest.mark.parametrize("world_size", range(1, 9))
def test_parity_tails_equal_distributed_sampler_element_for_element(world_size, tail, drop_last):
    settings = [(False, 0, 0), ("torch", 0, 0), ("torch", 0, 1), ("torch", 12, 3)]
    for n in range(1, 51):
        manifest = manifest_of([min(7, n - first) for first in range(0, n, 7)], [3] * len(range(0, n, 7)))
        deal = Deal(n, world_size, batch_size=1 + n % 3, accumulate=1 + n % 2, tail=tail)
        for shuffle, seed, epoch in settings:
            order = EpochOrder(manifest, seed, epoch, shuffle=shuffle)
            for rank in range(world_size):
                sampler = DistributedSampler(
                    range(n), world_size, rank, shuffle=bool(shuffle), seed=seed, drop_last=drop_last
                )
                sampler.set_epoch(epoch)
                ours = [deal.part(window, rank).positions for window in range(deal.num_windows)]
                positions = np.concatenate([np.empty(0, np.int64), *ours])
                assert order.sample_ids(positions).tolist() == list(sampler)


# ------------------------------------------------------------------------------------------------ borders and refusals


@pytest.mark.parametrize("tail", TAILS)
def test_nothing_is_dealt_of_an_empty_epoch_or_at_its_end(tail):
    for deal in (Deal(0, 3, 2, 2, tail), Deal(10, 3, 2, 2, tail, start=10)):
        assert deal.num_windows == deal.num_padding == deal.num_dropped == deal.num_repeated == 0
        for rank in range(3):
            assert deal.num_micro_batches(rank) == 0
            assert len(deal.part(0, rank).positions) == len(deal.part(7, rank).positions) == 0
            assert deal.parts(rank, 0, 0).shape == (0, 4)


def test_fewer_samples_than_a_global_batch_or_than_ranks():
    assert Deal(5, 2, 2, 2, "drop").num_windows == 0
    assert Deal(5, 2, 2, 2, "drop").num_dropped == 5
    assert Deal(2, 4, 1, 1, "truncate").num_windows == 0
    pad = Deal(3, 4, 2, 3, "pad", lanes=2)
    assert [pad.num_micro_batches(rank) for rank in range(4)] == [1] * 4
    assert pad.num_padding == 5
    assert [len(Deal(3, 4, 2, 3, "uneven").part(0, rank).positions) for rank in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize("lanes", [1, 6, 4096])
def test_positions_do_not_overflow(lanes):
    deal = Deal(LARGE + 5, 3, 2, 1, "pad", lanes, start=LARGE - 61)
    assert deal.num_windows == 11
    parts = [deal.part(window, rank).positions for window in range(11) for rank in range(3)]
    assert sorted({*np.concatenate(parts).tolist()}) == list(range(LARGE - 61, LARGE + 5))
    assert deal.parts(1, 2, 3).dtype == np.int64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1: found 0"),
        ({"batch_size": -1}, "batch_size must be at least 1: found -1"),
        ({"accumulate": 0}, "accumulate must be at least 1: found 0"),
        ({"lanes": 0}, "lanes must be at least 1: found 0"),
        ({"num_positions": -1}, "num_positions must not be negative: found -1"),
        (
            {"tail": "Pad"},
            "unknown tail: expected pad or drop or uneven or continue or repeat or truncate, found 'Pad'",
        ),
        ({"tail": "repeat", "lanes": 2}, "tail='repeat' is DistributedSampler's and has one lane: found 2"),
        ({"start": 11}, r"the start lies outside the epoch: expected 0..10, found 11"),
        ({"start": -1}, r"the start lies outside the epoch: expected 0..10, found -1"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(PlanError) as refused:
        Deal(**{"num_positions": 10, "world_size": 2, "batch_size": 2, **settings})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("rank", [-1, 2, 7])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_rank_that_does_not_exist_gets_nothing_but_a_refusal(rank, lanes):
    """Another rank's rows, silently read twice, would be the alternative."""
    deal = Deal(11, 2, 2, 1, lanes=lanes)
    for ask in (
        lambda: deal.part(0, rank),
        lambda: deal.part(2, rank),
        lambda: deal.parts(rank, 0, 1),
        lambda: deal.num_micro_batches(rank),
        lambda: deal.micro_batch(rank, 0),
    ):
        with pytest.raises(PlanError, match=rf"no such rank: expected 0\.\.1, found {rank}"):
            ask()


def test_deals_are_values():
    deal = Deal(10, 2, 2)
    assert deal == Deal(10, 2, 2)
    assert hash(deal) == hash(Deal(10, 2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        deal.start = 3
