"""Where plots put figures."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from packhorse_service.loadtest.report.svg_plots import BOTTOM, LEFT, RIGHT, TOP, Linear, Log, across, line, up


@given(st.lists(st.floats()), st.floats())
@example([5e-324], 0.0)  # under the least normal number, logarithms and divisions end
@example([1.7e308], 1.7e308)  # over the largest, powers do
def test_whatever_is_drawn_stays_inside_the_frame(values: list[float], at: float) -> None:
    for scale in (Linear.upto(values), Log.around(values, 0.1)):
        assert LEFT <= across(scale, at) <= RIGHT
        assert TOP <= up(scale, at) <= BOTTOM
        assert all(0 <= scale.part(value) <= 1 for value, _ in scale.ticks())
        assert 1 <= len(scale.ticks()) <= 12, "they can be read"


@given(st.floats(), st.floats())
def test_any_two_ends_can_be_drawn_between(low: float, high: float) -> None:
    scale = Linear(low, high)
    assert 0 <= scale.part(1.0) <= 1
    assert len(scale.ticks()) <= 12


@given(st.lists(st.tuples(st.floats(), st.floats())))
def test_a_line_has_a_point_for_each_pair_of_numbers(points: list[tuple[float, float]]) -> None:
    x, y = Linear.upto(at for at, _ in points), Linear.upto(value for _, value in points)
    drawn = [tuple(map(float, point.split(","))) for point in line(points, x, y, "a", "").path.split()]
    assert len(drawn) == sum(at == at and value == value for at, value in points)
    assert all(LEFT <= across_ <= RIGHT and TOP <= up_ <= BOTTOM for across_, up_ in drawn)


@given(st.floats(1e-6, 1e12))
def test_a_linear_scale_has_a_few_ticks(top: float) -> None:
    ticks = Linear.upto([top]).ticks()
    assert 2 <= len(ticks) <= 7
    assert ticks[0][0] == 0


def test_a_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    scale = Linear(0.0, 10.0)
    assert line([(0, 0), (10, 10)], scale, scale, "a", "").path == f"{LEFT}.0,{BOTTOM}.0 {RIGHT}.0,{TOP}.0"
