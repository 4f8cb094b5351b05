from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardstream.batching import (
    BatchPlan,
    data_parallel_size,
    nearest_world_sizes,
    plan_batch,
    replan,
    resolve_accumulate,
    sequences_in,
    training_state_bytes,
)
from shardstream.errors import PlanError


@pytest.mark.parametrize(
    ("world_size", "batch_size", "global_batch", "accumulate", "expected"),
    [
        (1, 1, None, None, 1),
        (4, 8, None, None, 1),
        (4, 8, None, 3, 3),
        (4, 8, 32, None, 1),
        (4, 8, 128, None, 4),
        (4, 8, 128, 4, 4),
        (3, 2, 6, 1, 1),
        (512, 4, 2048, None, 1),
    ],
)
def test_a_global_batch_is_a_product(world_size, batch_size, global_batch, accumulate, expected):
    resolved = resolve_accumulate(
        world_size=world_size, batch_size=batch_size, global_batch=global_batch, accumulate=accumulate
    )
    assert resolved == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1: found 0"),
        ({"batch_size": 0}, "batch_size must be at least 1: found 0"),
        ({"batch_size": -2}, "batch_size must be at least 1: found -2"),
        ({"accumulate": 0}, "accumulate must be at least 1: found 0"),
        ({"global_batch": 0}, "global_batch must be at least 1: found 0"),
        ({"global_batch": -8}, "global_batch must be at least 1: found -8"),
        ({"global_batch": 64.0}, "global_batch must be a whole number: found 64.0"),
        ({"batch_size": None}, "batch_size must be a whole number: found None"),
        ({"accumulate": "2"}, "accumulate must be a whole number: found '2'"),
        (
            {"global_batch": 100},
            (
                "a global batch of 100 is not a multiple of 4 ranks x 8 per micro-batch = 32; "
                "use global_batch=96 or 128, or batch_size=5 or 25"
            ),
        ),
        (
            {"world_size": 3, "global_batch": 64},
            (
                "a global batch of 64 is not a multiple of 3 ranks x 8 per micro-batch = 24; "
                "use global_batch=48 or 72, or a world size of 2 or 4"
            ),
        ),
        (
            {"world_size": 3, "global_batch": 35},
            "a global batch of 35 is not a multiple of 3 ranks x 8 per micro-batch = 24; use global_batch=24 or 48",
        ),
        (
            {"global_batch": 16},
            (
                "a global batch of 16 is not a multiple of 4 ranks x 8 per micro-batch = 32; "
                "use global_batch=32, or batch_size=4, or a world size of 2"
            ),
        ),
        (
            {"global_batch": 256, "accumulate": 4},
            (
                "a global batch of 256 is not 4 ranks x 8 per micro-batch x accumulate 4 = 128; "
                "use global_batch=128, or accumulate=8, or batch_size=16, or a world size of 8"
            ),
        ),
        (
            {"global_batch": 100, "accumulate": 3},
            "a global batch of 100 is not 4 ranks x 8 per micro-batch x accumulate 3 = 96; use global_batch=96",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(settings, message):
    with pytest.raises(PlanError) as refused:
        resolve_accumulate(**{"world_size": 4, "batch_size": 8, **settings})
    assert str(refused.value) == message


sizes = st.integers(1, 40)


@given(sizes, sizes, st.integers(1, 600), st.none() | st.integers(1, 9))
def test_every_way_out_works(world_size, batch_size, global_batch, accumulate):
    given_settings = {
        "world_size": world_size,
        "batch_size": batch_size,
        "global_batch": global_batch,
        "accumulate": accumulate,
    }
    try:
        resolved = resolve_accumulate(**given_settings)
    except PlanError as error:
        ways = re.findall(
            r"(global_batch=|accumulate=|batch_size=|a world size of )(\d+)(?: or (\d+))?", str(error).split("; ")[1]
        )
        assert ways
        for way, *numbers in ways:
            name = {"a world size of ": "world_size"}.get(way, way.rstrip("="))
            for number in filter(None, numbers):
                fits = {**given_settings, name: int(number)}
                assert fits != given_settings
                resolve_accumulate(**fits)
    else:
        assert world_size * batch_size * resolved == global_batch
        assert accumulate in (None, resolved)


@given(st.integers(1, 500), sizes)
def test_the_nearest_world_sizes_divide_the_global_batch(global_batch, world_size):
    nearest = nearest_world_sizes(global_batch, world_size)
    fits = [p for p in range(1, global_batch + 1) if global_batch % p == 0]
    assume(fits)
    below, above = [p for p in fits if p <= world_size], [p for p in fits if p >= world_size]
    assert nearest == sorted({*below[-1:], *above[:1]})


# ---------------------------------------------------------------------------------------------------------- the planner


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 32))
def test_a_plan_keeps_the_global_batch_with_the_largest_micro_batch_that_fits(share, world_size, most):
    plan = plan_batch(global_batch=share * world_size, world_size=world_size, max_micro_batch=most)
    assert plan.global_batch == share * world_size
    assert plan.accumulate == resolve_accumulate(
        world_size=world_size, batch_size=plan.micro_batch, global_batch=share * world_size
    )
    fits = [micro for micro in range(1, min(share, most) + 1) if share % micro == 0]
    assert plan.micro_batch == fits[-1]
    assert plan.alternatives == tuple((micro, share // micro) for micro in reversed(fits[:-1]))
    for batch in plan.fuller_batches:
        assert plan_batch(global_batch=batch, world_size=world_size, max_micro_batch=most).micro_batch == most


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 8), sizes)
def test_a_resize_keeps_the_global_batch_or_names_world_sizes_that_do(share, world_size, most, resized):
    before = plan_batch(global_batch=share * world_size, world_size=world_size, max_micro_batch=most)
    try:
        after = replan(before, resized)
    except PlanError as error:
        named = re.search(r"a world size of (\d+)(?: or (\d+))?, or global_batch=(\d+)", str(error))
        for number in filter(None, named.groups()[:2]):
            assert replan(before, int(number)).global_batch == before.global_batch
        assert before.global_batch % resized
    else:
        assert (after.global_batch, after.world_size) == (before.global_batch, resized)


def test_the_worked_example_of_the_docs():
    world_size = data_parallel_size(8 * 1 * 16 * 64, tensor=8, context=1, pipeline=16)
    sequences = sequences_in(16 * 2**20, 4096)
    before = plan_batch(global_batch=sequences, world_size=world_size, max_micro_batch=1, sequence_length=4096)
    assert (before.world_size, before.tokens) == (64, 16_777_216)
    assert before.at(32).tokens == 8_388_608
    after = replan(before, 32)
    assert (after.tokens, after.micro_batch, after.accumulate) == (16_777_216, 1, 2 * before.accumulate)
    assert training_state_bytes(7 * 10**9) == 112 * 10**9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plan_batch(global_batch=0, world_size=1, max_micro_batch=1),
            "global_batch must be at least 1: found 0",
        ),
        (lambda: plan_batch(global_batch=1, world_size=1, max_micro_batch=0), "max_micro_batch must be at least 1"),
        (
            lambda: plan_batch(global_batch=4, world_size=6, max_micro_batch=1),
            (
                "a global batch of 4 cannot be shared by 6 ranks: expected a multiple of 6; "
                "use a world size of 4, or global_batch=6"
            ),
        ),
        (lambda: BatchPlan(1, 2, 1, 1), "the micro-batch does not fit: expected <= 1, found 2"),
        (lambda: BatchPlan(1, 1, 1, 1, 0), "sequence_length must be at least 1: found 0"),
        (lambda: sequences_in(1000, 300), "1000 tokens are no whole number of sequences of 300; use 900 or 1200"),
        (
            lambda: data_parallel_size(100, tensor=8),
            (
                "100 devices are no whole number of data-parallel ranks: expected a multiple of "
                "8 tensor x 1 pipeline x 1 context = 8; use 96 or 104 devices"
            ),
        ),
        (lambda: data_parallel_size(8, tensor=0), "tensor must be at least 1: found 0"),
        (lambda: training_state_bytes(-1), "must not be negative: found -1"),
    ],
)
def test_impossible_plans_are_refused(call, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        call()
