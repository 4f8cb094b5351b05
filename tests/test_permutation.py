from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstream.permutation import full_places, full_positions, key64, keyed_permutation, mix64
from tests.support import order_reference as ref
from tests.support.layouts import GOLDEN

words = st.integers(0, 2**64 - 1)


# ------------------------------------------------------------------------------------------------ goldens and oracle


@pytest.mark.parametrize(("name", "value"), GOLDEN["keys"].items())
def test_keys_are_golden(name, value):
    seed, epoch, purpose, *ids = name[len("key64(") : -1].split(",")
    assert hex(key64(int(seed), int(epoch), purpose, *map(int, ids))) == value


def test_permutations_are_golden():
    golden = GOLDEN["permutations"]
    assert len(golden) == 2
    for epoch in (0, 1):
        permutation = keyed_permutation(10, key64(42, epoch, "blocks"))
        assert permutation.tolist() == golden[f"permutation(10, key64(42,{epoch},blocks))"]


def test_full_positions_are_golden():
    assert full_positions(np.arange(10), 10, 7, 0).tolist() == GOLDEN["full"]["full(10,7,0)"]
    assert full_positions(np.arange(8), 100003, 7, 1).tolist() == GOLDEN["full"]["full(100003,7,1)[:8]"]


@given(st.lists(words, min_size=1))
def test_mix64_equals_the_oracle(numbers):
    assert mix64(np.array(numbers, np.uint64)).tolist() == [ref.mix64(x) for x in numbers]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**70), st.lists(st.integers(0, 2**64), max_size=3))
def test_key64_equals_the_oracle_for_any_seed_and_epoch(seed, epoch, ids):
    assert key64(seed, epoch, "rows", *ids) == ref.key64(seed, epoch, "rows", *ids)


@given(st.integers(0, 300), words)
def test_keyed_permutation_equals_the_oracle(n, key):
    assert keyed_permutation(n, key).tolist() == ref.keyed_permutation(n, key)


@given(st.integers(65536, 2**45), st.data())
def test_full_positions_equal_the_oracle(n, data):
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    seed, epoch = data.draw(st.integers(-5, 2**65)), data.draw(st.integers(0, 2**65))
    expected = [ref.full_position(g, n, seed, epoch) for g in positions]
    assert full_positions(np.array(positions), n, seed, epoch).tolist() == expected


def test_numpy_integers_are_seeds_too():
    assert key64(np.int64(-1), np.int32(3), "rows", 5) == key64(-1, 3, "rows", 5)
    with pytest.raises(TypeError):
        key64(1.5, 0, "rows")


def test_seed_and_epoch_are_not_added():
    assert key64(1, 2, "blocks") != key64(2, 1, "blocks")


# ------------------------------------------------------------------------------------------------ bijections


def inverse_of_mix64(x):
    """Undoes mix64 step by step, which it could not if two words went to one."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        undone = x
        for _ in range(64 // shift + 1):
            undone = x ^ (undone >> shift)
        x = undone * pow(factor, -1, 2**64) % 2**64
    return x


@given(words)
def test_mix64_is_a_bijection(x):
    assert inverse_of_mix64(int(mix64(np.array([x], np.uint64))[0])) == x
    assert int(mix64(np.array([inverse_of_mix64(x)], np.uint64))[0]) == x


def assert_bijection(ids, n):
    assert ids.dtype == np.int64
    assert ids.min() >= 0
    assert ids.max() < n
    assert np.bincount(ids, minlength=n).max() == 1


def test_keyed_permutation_is_a_bijection():
    assert len(keyed_permutation(0, 5)) == 0
    for n in (*range(1, 200), 4095, 4096, 4097):
        assert_bijection(keyed_permutation(n, key64(1, n, "blocks")), n)


def test_full_positions_are_a_bijection_for_every_small_n():
    for n in range(1, 5001):
        assert_bijection(full_positions(np.arange(n), n, seed=n % 7, epoch=n % 3), n)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("exponent", range(12, 18))
def test_full_positions_are_a_bijection_around_powers_of_two(exponent, more):
    n = 2**exponent + more
    assert_bijection(full_positions(np.arange(n), n, seed=3, epoch=1), n)


@pytest.mark.slow
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("exponent", range(18, 22))
def test_full_positions_are_a_bijection_around_large_powers_of_two(exponent, more):
    n = 2**exponent + more
    assert_bijection(full_positions(np.arange(n), n, seed=4, epoch=2), n)


@given(st.one_of(st.integers(1, 300), st.integers(65536, 2**45)), words, st.data())
def test_full_places_undo_full_positions(n, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    assert full_places(full_positions(positions, n, seed, 3), n, seed, 3).tolist() == positions.tolist()


def test_full_positions_do_not_depend_on_who_asks_for_which():
    n = 100_003
    whole = full_positions(np.arange(n), n, 7, 1)
    for rank in range(3):
        assert (full_positions(np.arange(rank, n, 3), n, 7, 1) == whole[rank::3]).all()
    assert (full_positions(np.arange(6).reshape(2, 3), n, 7, 1) == whole[:6].reshape(2, 3)).all()
    assert full_positions(np.array(5), n, 7, 1).tolist() == whole[5]
    assert full_positions(np.array(5), 10, 7, 0).tolist() == GOLDEN["full"]["full(10,7,0)"][5]


# ------------------------------------------------------------------------------------------------ no rank-stride bias
# Rank r of P reads positions r, r + P, r + 2P ... . Under a true permutation its ids fall evenly into P equal ranges
# of ids and into the P residues modulo P. Chi-square over the P x P table with fixed margins has (P - 1)^2 degrees of
# freedom. Both tails count: an affine "permutation" is far too even in one table or far too uneven in another.

STRIDES = range(2, 65)
PROBABILITY = 0.001  # of one false alarm in a whole set of tests; seeds are fixed, so the verdict never changes


def extremeness(table):
    """The two-sided p-value of independence for a table of counts."""
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    chi_square = float(((table - expected) ** 2 / expected).sum())
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    above = torch.special.gammaincc(half[0], half[1]).item()
    return 2 * min(above, 1 - above)


def stride_p_values(ids):
    n = len(ids)
    for stride in STRIDES:
        rank = np.arange(n) % stride
        for group in (ids * stride // n, ids % stride):
            table = np.bincount(rank * stride + group, minlength=stride * stride).reshape(stride, stride)
            yield extremeness(table)


def least_p_value(permutations):
    """The least p-value of all tests, times their number (Bonferroni)."""
    p_values = [p for ids in permutations for p in stride_p_values(ids)]
    return min(p_values) * len(p_values)


SIZES = (2**16 - 1, 2**16, 2**16 + 1, 2**17 + 1)


def test_a_true_permutation_passes_the_stride_test():
    generator = np.random.Generator(np.random.PCG64(1))
    assert least_p_value(generator.permutation(n) for n in SIZES) > PROBABILITY


def test_full_positions_have_no_stride_bias():
    assert least_p_value(full_positions(np.arange(n), n, seed=11, epoch=2) for n in SIZES) > PROBABILITY


def test_keyed_permutations_have_no_stride_bias():
    assert least_p_value(keyed_permutation(n, key64(11, 2, "blocks")) for n in SIZES) > PROBABILITY


def affine(n, factor):
    assert np.gcd(n, factor) == 1
    return np.arange(n, dtype=np.int64) * factor % n


def walked_lcg(n):
    """A power-of-two LCG, walked until it falls below n: its low bits alternate with the position."""
    size = 1 << (n - 1).bit_length()
    x = np.arange(n, dtype=np.int64)
    x = (x * 1664525 + 1013904223) % size
    while (outside := x >= n).any():
        x[outside] = (x[outside] * 1664525 + 1013904223) % size
    return x


@pytest.mark.parametrize(
    "bad",
    [np.arange, lambda n: affine(n, 40503), lambda n: affine(n, int(n * 0.6180339887) | 1), walked_lcg],
    ids=["identity", "affine", "golden-ratio", "walked-lcg"],
)
def test_bad_permutations_fail_the_stride_test(bad):
    ids = bad(2**16 + 1)
    assert_bijection(ids, len(ids))
    assert least_p_value([ids]) < PROBABILITY / 1000


def test_epochs_are_independent():
    """Where a sample stands in one epoch says nothing about where it stands in the next, nor under the next seed."""
    n, groups = 65_537, 32
    first = full_positions(np.arange(n), n, 5, 0)
    for seed, epoch in ((5, 1), (6, 0)):
        other = full_positions(np.arange(n), n, seed, epoch)
        pairs = first * groups // n * groups + other * groups // n
        assert extremeness(np.bincount(pairs, minlength=groups * groups).reshape(groups, groups)) > PROBABILITY
