"""Coverage, disjointness and equal steps: that the audit finds them, and that it finds every way to break them."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest

from shardstream.audit import audit
from shardstream.audit.arithmetic import check_by_arithmetic
from shardstream.audit.enumeration import check_by_enumeration
from shardstream.deal import PARITY_TAILS, TAILS, Deal, Part
from shardstream.errors import PlanError
from shardstream.manifest import Manifest
from shardstream.order import EpochOrder, Lanes
from shardstream.plan import EpochPlan, Plan
from tests.support.layouts import manifest_of

UNEVEN = {  # uneven shards: one without samples, blocks of one row, blocks of several runs
    23: manifest_of([7, 1, 4, 6, 5], [4, 4, 4, 4, 4], [2, 0, 1, 2]),
    1000: manifest_of([333, 64, 64, 7, 432, 100], [100, 64, 10, 7, 50, 100], [1, 3, 0, 2]),
}
BOTH = pytest.mark.parametrize("check", [check_by_enumeration, check_by_arithmetic])


def plan_of(manifest, tail="pad", *, kind=Plan, **settings):
    shuffle = settings.pop("shuffle", tail not in PARITY_TAILS)
    return kind.make(manifest, tail=tail, shuffle=shuffle, **settings)


@pytest.mark.filterwarnings("ignore::shardstream.errors.ShardStreamWarning")
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("num_samples", [23, 1000])
def test_every_topology_covers_each_sample_once(num_samples, tail):
    batch_size = 1 if num_samples == 23 else 6
    for world_size, num_readers, accumulate in product(range(1, 9), (1, 2, 3), range(1, 5)):
        plan = plan_of(UNEVEN[num_samples], tail, batch_size=batch_size, world_size=world_size, accumulate=accumulate)
        found = check_by_enumeration(plan, plan.cursor(), 1, num_readers)
        assert found.violations == []
        by_rule = check_by_arithmetic(plan, plan.cursor(), 1, num_readers)
        assert by_rule.violations == []
        assert by_rule.epochs == found.epochs
        assert by_rule.ranks == found.ranks
        _check_counts(plan, found.epochs[0], found.ranks)


def _check_counts(plan, epoch, ranks):
    """The design's table of tails, in numbers."""
    num_samples, left = plan.num_positions, plan.num_positions % plan.global_batch
    read = {
        "pad": num_samples,
        "uneven": num_samples,
        "drop": num_samples - left,
        "continue": num_samples + -left % plan.global_batch,
        "repeat": num_samples + -left % plan.world_size,
        "truncate": num_samples - left % plan.world_size,
    }[plan.tail]
    assert epoch.num_samples == sum(rank.num_samples for rank in ranks) == read
    assert epoch.num_padding == (-left % (plan.world_size * plan.batch_size) if plan.tail == "pad" else 0)
    samples = [rank.num_samples + rank.num_padding for rank in ranks]
    assert max(samples) - min(samples) <= (1 if plan.tail == "uneven" else 0)
    assert epoch.num_dropped + epoch.num_samples - epoch.num_repeated - epoch.num_ahead == num_samples


@pytest.mark.parametrize("tail", TAILS)
@BOTH
def test_several_epochs_from_the_middle_of_one(check, tail):
    plan = plan_of(UNEVEN[1000], tail, batch_size=4, world_size=3, accumulate=2, lanes=None)
    start = plan.cursor(epoch=2, position=24 * 20)
    found = check(plan, start, 3, 2)
    assert found.violations == []
    assert [epoch.epoch for epoch in found.epochs] == [2, 3, 4]
    assert found.epochs[0].num_steps < found.epochs[1].num_steps


def test_windows_larger_than_the_data():
    plan = plan_of(UNEVEN[23], "continue", batch_size=20, world_size=3)
    for check in (check_by_enumeration, check_by_arithmetic):
        found = check(plan, plan.cursor(), 4, 1)
        assert found.violations == []
        assert [epoch.epoch for epoch in found.epochs] == [0, 2]  # 60 positions: windows begin at 0, 60 = 2 * 23 + 14


@pytest.mark.parametrize(
    ("shuffle", "lanes"), [*product([True, False], [1, 3, 7, 24, 48, 100]), ("full", 1), ("torch", 1)]
)
@BOTH
def test_any_lanes_and_shuffle(check, shuffle, lanes):
    plan = plan_of(UNEVEN[1000], batch_size=4, world_size=3, accumulate=2, lanes=lanes, shuffle=shuffle)
    assert check(plan, plan.cursor(), 2, 2).violations == []


# ------------------------------------------------------------------------------------------------------- broken deals


def in_window(window, rank, change):
    """A deal in which one rank's part of one window is changed."""

    class Broken(Deal):
        def parts(self, rank_, first, num_windows):
            parts = super().parts(rank_, first, num_windows).copy()
            if rank_ == rank and first <= window < first + num_windows:
                parts[window - first] = change(self, parts[window - first])
            return parts

    return Broken


def in_tail(change):
    """A deal in which rank 0's part of the last, partial window is changed."""

    class Broken(Deal):
        def part(self, window, rank):
            part = super().part(window, rank)
            return change(part) if window == self.num_whole_windows and rank == 0 else part

    return Broken


class SameForAllRanks(Deal):
    def parts(self, rank, first, num_windows):
        return super().parts(0, first, num_windows)


class OneWindowTooMany(Deal):
    def num_micro_batches(self, rank):
        return super().num_micro_batches(rank) - (rank == 1)


class WrongClaim(Deal):
    @property
    def num_padding(self):
        return 0


def _doubled(deal, part):
    return np.concatenate((part[1:2], part[1:]))


def _unflagged(part):
    return Part(part.positions, np.zeros_like(part.is_padding))


BROKEN_DEALS = {
    "a position twice, another never": in_window(5, 1, _doubled),
    "shifted by one": in_window(0, 0, lambda deal, part: part + 1),
    "shifted in the last window": in_window(40, 2, lambda deal, part: part - 1),
    "another window's": in_window(7, 2, lambda deal, part: part + deal.global_batch),
    "outside the epoch": in_window(3, 0, lambda deal, part: part + 10**6),
    "negative": in_window(3, 0, lambda deal, part: part - 10**6),
    "all ranks the same": SameForAllRanks,
    "a rank stops early": OneWindowTooMany,
    "a wrong claim": WrongClaim,
    "padding counted as real": in_tail(_unflagged),
    "tail: a position lost": in_tail(lambda part: Part(part.positions[:-1], part.is_padding[:-1])),
    "tail: a position twice": in_tail(lambda p: Part(np.where(p.is_padding, p.positions, 990), p.is_padding)),
    "tail: from an earlier window": in_tail(lambda p: Part(p.positions - 900, p.is_padding)),
}


class BrokenPlan(Plan):
    """A plan whose deal and order are of these classes."""

    deal_class = Deal
    order_class = EpochOrder

    def epoch(self, epoch, start=0):
        here = super().epoch(epoch, start)
        deal = self.deal_class(**{f.name: getattr(here.deal, f.name) for f in dataclasses.fields(Deal)})
        order = here.order
        if self.order_class is not EpochOrder:
            order = self.order_class(self.manifest, self.seed, epoch, self.lanes, self.shuffle)
        return EpochPlan(epoch, order, deal)


@pytest.mark.parametrize("lanes", [24, 1, 7])
@pytest.mark.parametrize("name", BROKEN_DEALS)
@BOTH
def test_broken_deals_are_found(check, name, lanes):
    kind = type("Broken", (BrokenPlan,), {"deal_class": BROKEN_DEALS[name]})
    plan = plan_of(UNEVEN[1000], kind=kind, batch_size=4, world_size=3, accumulate=2, lanes=lanes)
    violations = check(plan, plan.cursor(), 1, 2).violations
    assert violations
    assert all(isinstance(text, str) and text for text in violations)


def test_a_violation_names_sample_and_readers():
    kind = type("Broken", (BrokenPlan,), {"deal_class": BROKEN_DEALS["a position twice, another never"]})
    plan = plan_of(UNEVEN[1000], kind=kind, batch_size=4, world_size=3, accumulate=2, shuffle=False)
    report = audit(plan, num_workers=2)
    assert not report.holds
    assert report.reading is None
    assert "epoch 0, position 121, sample 121 (0.parquet:121): read 0 times, expected 1" in report.violations
    text = next(text for text in report.violations if "position 124" in text)
    assert text.startswith("epoch 0, position 124, sample 124 (0.parquet:124): read 2 times, expected 1 (rank 1 worker")


class EveryWorkerYieldsEverything(Plan):
    """Case C30."""

    def micro_batches(self, rank, start, *, worker=0, num_workers=1, first_index=0):
        return super().micro_batches(rank, start, first_index=first_index)


class WorkersSkipTheEnd(Plan):
    def micro_batches(self, rank, start, *, worker=0, num_workers=1, first_index=0):
        yielded = list(super().micro_batches(rank, start, worker=worker, num_workers=num_workers))
        return (batch for batch in yielded[:-1] if batch.batch_index >= first_index)


class NoWindowEnds(Plan):
    def micro_batches(self, rank, start, **which):
        return (batch._replace(is_last_in_window=False) for batch in super().micro_batches(rank, start, **which))


@pytest.mark.parametrize("kind", [EveryWorkerYieldsEverything, WorkersSkipTheEnd, NoWindowEnds])
@BOTH
def test_broken_workers_are_found(check, kind):
    plan = plan_of(UNEVEN[1000], kind=kind, batch_size=4, world_size=3, accumulate=2)
    assert check(plan, plan.cursor(), 1, 2).violations


# ------------------------------------------------------------------------------------------------------ broken orders


class ARowTwice(EpochOrder):
    def rows(self, positions):
        located = super().rows(positions)
        return located._replace(row=located.row - (located.row % 2))


class ABlockTwice(EpochOrder):
    @property
    def line_blocks(self):
        return np.append(super().line_blocks[1:], super().line_blocks[1])


class Gap(EpochOrder):
    @property
    def line_start(self):
        start = super().line_start.copy()
        start[1:-1] -= 1
        return start


class CutLanes(Lanes):
    def line_index(self, positions):
        return np.minimum(super().line_index(positions), self.num_positions - 2)


class LanesThatMeet(EpochOrder):
    @property
    def lane_cut(self):
        cut = super().lane_cut
        return CutLanes(cut.num_positions, cut.lanes, cut.phases)


class OutsideTheData(EpochOrder):
    def sample_ids(self, positions):
        return super().sample_ids(positions) + 1


@pytest.mark.parametrize("order", [ARowTwice, ABlockTwice, Gap, LanesThatMeet, OutsideTheData])
@BOTH
def test_orders_that_are_no_bijection_are_found(check, order):
    kind = type("Broken", (BrokenPlan,), {"order_class": order})
    plan = plan_of(UNEVEN[1000], kind=kind, batch_size=4, world_size=3, accumulate=2)
    violations = check(plan, plan.cursor(), 1, 2).violations
    assert any("order" in text for text in violations)


@pytest.mark.parametrize("shuffle", ["full", "torch"])
@BOTH
def test_broken_orders_without_blocks_are_found(check, shuffle):
    class Halved(EpochOrder):
        def sample_ids(self, positions):
            return super().sample_ids(positions) // 2

    kind = type("Broken", (BrokenPlan,), {"order_class": Halved})
    plan = plan_of(UNEVEN[1000], kind=kind, batch_size=4, world_size=3, shuffle=shuffle)
    assert any("no bijection" in text for text in check(plan, plan.cursor(), 1, 1).violations)


# -------------------------------------------------------------------------------------------------------------- audit


def test_large_plans_are_proved_by_arithmetic():
    manifest = Manifest.synthetic(num_shards=100, blocks_per_shard=100, rows_per_block=1000)
    report = audit(plan_of(manifest, batch_size=32, world_size=16), num_workers=4)
    assert report.holds
    assert any("bijection by construction" in text for text in report.proofs)
    assert any("whole windows enumerated for all 16 ranks" in text for text in report.proofs)
    assert report.epochs[0].num_samples == 10**7


def test_small_plans_are_enumerated():
    report = audit(plan_of(UNEVEN[1000], batch_size=4), epochs=2)
    assert report.proofs == (
        "order: all 1000 positions of 2 epoch(s) located, each sample found once",
        "deal: all 500 micro-batches of 1 rank(s) x 1 reader(s) enumerated",
    )
    assert report.to_dict()["holds"] is True


@pytest.mark.parametrize("wrong", [{"num_workers": -1}, {"epochs": 0}])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(PlanError, match="at least"):
        audit(plan_of(UNEVEN[23], batch_size=1), **wrong)


# -------------------------------------------------------------------------------------------------------------- cases

NAMES = {"pad": "pad", "drop": "drop", "join": "uneven"}


@pytest.mark.parametrize(
    ("world_size", "tail", "samples", "num_padding", "num_dropped"),
    [
        (4, "pad", [3, 3, 3, 3], 0, 0),
        (4, "drop", [3, 3, 3, 3], 0, 0),
        (4, "join", [3, 3, 3, 3], 0, 0),
        (5, "pad", [3, 3, 3, 3, 3], 3, 0),
        (5, "drop", [2, 2, 2, 2, 2], 0, 2),
        (5, "join", [2, 2, 2, 3, 3], 0, 0),
    ],
)
def test_case_c17_a_shard_without_rows(world_size, tail, samples, num_padding, num_dropped):
    plan = plan_of(manifest_of([7, 5], [7, 5], [1, 0, 1]), NAMES[tail], batch_size=1, world_size=world_size)
    report = audit(plan, num_workers=2)
    assert report.holds
    assert sorted(rank.num_samples + rank.num_padding for rank in report.ranks) == samples
    assert (report.epochs[0].num_padding, report.epochs[0].num_dropped) == (num_padding, num_dropped)


@pytest.mark.parametrize("num_workers", [0, 1, 3, 4, 10])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(1000, 128), (46, 8), (50, 8)])
def test_case_c32_batches_do_not_depend_on_workers(num_samples, batch_size, num_workers):
    manifest = manifest_of([num_samples], [num_samples])
    dropping = audit(plan_of(manifest, "drop", batch_size=batch_size), num_workers=num_workers)
    assert dropping.holds
    assert dropping.ranks[0].num_micro_batches == num_samples // batch_size
    assert dropping.epochs[0].num_samples == num_samples // batch_size * batch_size
    assert dropping.epochs[0].num_dropped == num_samples % batch_size
    keeping = audit(plan_of(manifest, "uneven", batch_size=batch_size), num_workers=num_workers)
    assert keeping.holds
    assert keeping.ranks[0].num_micro_batches == -(-num_samples // batch_size)
    assert keeping.epochs[0].num_samples == num_samples


@pytest.mark.parametrize(
    ("num_samples", "world_size", "tail", "samples", "num_padding", "num_dropped"),
    [
        (3, 4, "pad", [1, 1, 1, 1], 1, 0),
        (3, 4, "drop", [0, 0, 0, 0], 0, 3),
        (3, 4, "join", [0, 1, 1, 1], 0, 0),
        (2, 64, "pad", [1] * 64, 62, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:tail='drop' leaves no step:shardstream.errors.ShardStreamWarning")
def test_case_c34_fewer_samples_than_ranks(num_samples, world_size, tail, samples, num_padding, num_dropped):
    plan = plan_of(manifest_of([num_samples], [num_samples]), NAMES[tail], batch_size=1, world_size=world_size)
    report = audit(plan, num_workers=2)
    assert report.holds
    assert sorted(rank.num_samples + rank.num_padding for rank in report.ranks) == samples
    assert (report.epochs[0].num_padding, report.epochs[0].num_dropped) == (num_padding, num_dropped)
