"""Figures for people, and where plots put them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packhorse_service.loadtest.plots import BOTTOM, LEFT, RIGHT, TOP, Linear, Log, across, line, up
from packhorse_service.loadtest.words import figure, mebibytes, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00436, "0.00436"),
        (2.234, "2.23"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (7.0, "7"),
        (None, "not known"),
    ],
)
def test_a_figure_has_about_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_sizes_have_units() -> None:
    assert (number(4_210_000), number(999), number(2.5e9)) == ("4.21 M", "999", "2.50 G")
    assert (mebibytes(300 << 20), mebibytes(3 << 30), mebibytes(None)) == ("300 MiB", "3.00 GiB", "not known")
    assert (percent(0.1234), percent(None)) == ("12.3%", "not known")


@given(st.lists(st.floats(0, 1e12), min_size=1), st.floats(-1e3, 1e13))
@example([5e-324], 0.0)  # under the least normal number, logarithms and divisions end
def test_whatever_is_drawn_stays_inside_the_frame(values: list[float], at: float) -> None:
    for scale in (Linear.upto(values), Log.around(values, 0.1)):
        assert LEFT <= across(scale, at) <= RIGHT
        assert TOP <= up(scale, at) <= BOTTOM
        assert all(0 <= scale.part(value) <= 1 for value, _ in scale.ticks())


@given(st.floats(1e-6, 1e12))
def test_a_linear_scale_has_a_few_ticks(top: float) -> None:
    ticks = Linear.upto([top]).ticks()
    assert 2 <= len(ticks) <= 7
    assert ticks[0][0] == 0


def test_a_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    scale = Linear(0.0, 10.0)
    assert line([(0, 0), (10, 10)], scale, scale, "a", "").path == f"{LEFT}.0,{BOTTOM}.0 {RIGHT}.0,{TOP}.0"
