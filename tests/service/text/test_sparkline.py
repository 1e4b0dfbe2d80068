"""Bars over time, and places between two ends, of every float there is."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from packhorse_service.text.sparkline import BARS, finite, fraction, sparkline

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.floats()), st.floats(), st.floats())
@example([2e-311], 0.0, 2e-311)  # seven bars divided by that are more than a float can be
@example([-1.7e308, 1.7e308], -1.7e308, 1.7e308)  # as is their distance
def test_every_number_has_one_bar_and_what_is_none_an_empty_place(values: list[float], low: float, high: float) -> None:
    line = sparkline(values, low, high)
    assert len(line) == len(values)
    assert all(bar in BARS if value == value else bar == " " for value, bar in zip(values, line, strict=True))


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), FINITE, FINITE)
def test_a_larger_number_is_never_lower(one: float, other: float, low: float, high: float) -> None:
    assert 0 <= fraction(min(one, other), low, high) <= fraction(max(one, other), low, high) <= 1


@given(FINITE, FINITE)
def test_the_ends_of_a_scale_have_the_lowest_and_the_highest_bar(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assert sparkline([low, high], low, high) == (BARS[0] + BARS[-1] if high > low else BARS[0] * 2)


def test_a_scale_is_made_of_finite_numbers() -> None:
    assert finite([1.0, float("nan"), float("inf"), -2.0, float("-inf")]) == [1.0, -2.0]
