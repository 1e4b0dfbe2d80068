"""Figures for people."""

from __future__ import annotations

import pytest

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
