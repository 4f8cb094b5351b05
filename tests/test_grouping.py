from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.grouping import stable_order


@given(st.lists(st.integers(0, 2**62), max_size=50), st.sampled_from([1, 3, 70_000]))
def test_it_sorts_and_equal_codes_keep_their_order(numbers, modulus):
    codes = np.array([number % modulus * (number % 2 + 1) for number in numbers], np.int64)
    assert stable_order(codes).tolist() == sorted(range(len(codes)), key=codes.tolist().__getitem__)


@pytest.mark.parametrize("span", [65_535, 65_536, 2**62])
def test_codes_far_from_zero_and_far_apart(span):
    codes = np.array([-5 + span, -5, span // 2, -5 + span], np.int64)
    assert stable_order(codes).tolist() == [1, 2, 0, 3]
