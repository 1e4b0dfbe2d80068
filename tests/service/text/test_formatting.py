"""Numbers, sizes, durations and lists as short texts for people."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packhorse_service.text.formatting import (
    NAMES_SHOWN,
    and_more,
    duration,
    mebibytes,
    names,
    names_listed,
    percent,
    rounded,
    si,
)


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
    assert rounded(value) == text


def test_sizes_have_units() -> None:
    assert (si(4_210_000), si(999), si(2.5e9)) == ("4.21 M", "999", "2.50 G")
    assert (mebibytes(300 << 20), mebibytes(3 << 30), mebibytes(None)) == ("300 MiB", "3.00 GiB", "not known")
    assert (percent(0.1234), percent(None)) == ("12.3%", "not known")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (3.21, "3.2 s"),
        (9.99, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (4_320, "1 h 12 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


FORMATS: list[Callable[[float], str]] = [si, rounded, mebibytes, percent, duration]
LONGEST = len("-999,999,999,999,999 min 59 s")


@pytest.mark.parametrize("text_of", FORMATS)
@given(st.floats())
@example(5e-324)
@example(1.7e308)
@example(-0.0)
def test_every_float_has_a_short_text(text_of: Callable[[float], str], value: float) -> None:
    text = text_of(value)
    assert 1 <= len(text) <= LONGEST
    assert "nan" not in text
    assert "inf" not in text


@pytest.mark.parametrize("text_of", FORMATS)
def test_what_is_no_number_is_not_known_and_what_has_no_end_is_infinite(text_of: Callable[[float], str]) -> None:
    assert [text_of(float(name)) for name in ("nan", "inf", "-inf")] == ["not known", "∞", "-∞"]


@pytest.mark.parametrize("text_of", FORMATS)
@given(st.floats(allow_nan=False))
def test_only_a_number_below_zero_that_shows_as_one_has_a_sign(text_of: Callable[[float], str], value: float) -> None:
    text = text_of(value)
    shows = any(digit in text for digit in "123456789∞")
    assert text.startswith("-") == (value < 0 and shows)


@pytest.mark.parametrize("count", range(NAMES_SHOWN + 3))
def test_a_long_list_names_the_first_and_says_how_many_more_there_are(count: int) -> None:
    """As a sentence and as a list, in the same words; what fits is named whole."""
    every = [f"rank {number}" for number in range(count)]
    shown, more = every[:NAMES_SHOWN], count - NAMES_SHOWN
    assert names_listed(every) == (shown if more <= 0 else [*shown, f"and {more} more"])
    assert names(every) == ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def test_a_list_may_have_another_limit_and_say_what_is_left_out() -> None:
    assert names(range(2000), 3) == "0, 1, 2 and 1,997 more"
    assert and_more(4, "samples") == "and 4 more samples"
