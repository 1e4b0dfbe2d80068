"""Quantiles from bins are those of the durations, to one percent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.loadtest.ranks.wait_histogram import LEAST_S, WaitHistogram, bin_of, upper_edge

DURATIONS = st.lists(st.floats(0, 1000), min_size=1, max_size=200)


def histogram(durations: list[float]) -> WaitHistogram:
    counted = WaitHistogram()
    for seconds in durations:
        counted.add(seconds)
    return counted


@given(DURATIONS, st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_one_percent_of_the_exact_one(durations: list[float], share: float) -> None:
    exact = float(np.quantile(durations, share, method="inverted_cdf"))
    assert exact - LEAST_S <= histogram(durations).quantile(share) <= exact * 1.01 + LEAST_S


@given(st.floats(0, 1e6))
def test_a_duration_lies_in_its_bin(seconds: float) -> None:
    number = bin_of(seconds)
    assert seconds <= max(upper_edge(number), LEAST_S) * (1 + 1e-9)
    assert number == 0 or seconds >= upper_edge(number - 1) * (1 - 1e-9)


@given(DURATIONS, DURATIONS)
def test_merging_is_counting_all(some: list[float], others: list[float]) -> None:
    merged = WaitHistogram.merged([histogram(some).bins, histogram(others).bins])
    assert merged.bins == histogram(some + others).bins


def test_no_durations_have_quantiles_of_0() -> None:
    assert WaitHistogram().quantile(0.99) == 0.0


def test_the_maximum_and_the_sum_are_exact() -> None:
    counted = histogram([0.1, 0.25, 3.0])
    assert counted.max_s == 3.0
    assert counted.total_s == pytest.approx(3.35)
    assert counted.quantile(1.0) == 3.0
