from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardstream.batching import nearest_world_sizes, resolve_accumulate
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
