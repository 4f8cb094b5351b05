"""What a span must have consumed, against counting every rank's samples."""

from __future__ import annotations

import pytest

from shardstream.audit.exactly_once import IdSum, expected_sum
from shardstream.plan import Plan
from tests.support.layouts import manifest_of

TAILS = ["pad", "drop", "continue", "repeat", "truncate"]


def counted(plan, start, num_windows):
    """The real samples of so many windows of all ranks, and where the last begins and the next one would."""
    total, last, cursor = IdSum(), None, start
    for _ in range(num_windows):
        last = (cursor.epoch, cursor.position)
        for rank in range(plan.world_size):
            for batch in plan.micro_batches(rank, cursor):
                total += IdSum.of(plan.sample_ids(batch.epoch, batch.positions[~batch.is_padding]))
                if batch.is_last_in_window:
                    break
        cursor = cursor.advanced(1, num_positions=plan.num_positions)
    return total, last, (cursor.epoch, cursor.position)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("shuffle", [True, False, "full"])
def test_it_is_what_the_ranks_are_dealt(tail, skipped, shuffle):
    manifest = manifest_of([9, 5, 9], [9, 5, 9])
    plan = Plan.make(manifest, batch_size=2, world_size=3, tail=tail, shuffle=shuffle, seed=5)
    start = plan.cursor(1).advanced(skipped, num_positions=plan.num_positions)
    num_windows = 1
    while True:
        total, last, end = counted(plan, start, num_windows)
        if end[0] > start.epoch:
            break
        num_windows += 1
    begin = (start.epoch, start.position)
    assert expected_sum(plan, begin, last, end) == total
    shares = [expected_sum(plan, begin, last, end, (share, 4)) for share in range(4)]
    assert sum(shares, IdSum()) == total


def test_a_window_of_several_epochs():
    plan = Plan.make(manifest_of([3], [3]), batch_size=8, tail="continue")
    total, last, end = counted(plan, plan.cursor(), 1)
    assert end == (2, 2)
    assert expected_sum(plan, (0, 0), last, end) == total
