"""Rounding up: exact for every integer, and the same for arrays."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packhorse.rounding import ceil_div, round_up

VALUES, UNITS = st.integers(-(1 << 62), 1 << 62), st.integers(1, 1 << 20)


@given(VALUES, UNITS)
def test_a_quotient_is_rounded_up_exactly(value: int, unit: int) -> None:
    assert ceil_div(value, unit) == math.ceil(Fraction(value, unit))


@given(VALUES, UNITS)
def test_the_next_multiple_is_the_least_that_is_not_below(value: int, multiple: int) -> None:
    found = round_up(value, multiple)
    assert found % multiple == 0
    assert 0 <= found - value < multiple


@given(st.lists(st.integers(0, 1 << 40)), UNITS)
def test_an_array_is_rounded_entry_by_entry(values: list[int], unit: int) -> None:
    array = np.array(values, np.int64)
    assert ceil_div(array, unit).tolist() == [ceil_div(value, unit) for value in values]
    assert round_up(array, unit).tolist() == [round_up(value, unit) for value in values]
