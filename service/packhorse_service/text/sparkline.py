"""Numbers over time as a line of bars, and where a number lies between two others: for every float there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, isinf, isnan

__all__ = ["BARS", "finite", "fraction", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"
NO_BAR = " "


def finite(values: Iterable[float]) -> list[float]:
    """Return those of ``values`` that are neither NaN nor infinite: a scale is made of them."""
    return [value for value in values if isfinite(value)]


def fraction(value: float, low: float, high: float) -> float:
    """Return where ``value`` lies between two finite ends, from 0 to 1: beyond them at the nearer, NaN at 0.

    Where ``high`` is not above ``low``, all values are at 0.
    """
    if isnan(value) or not high > low:
        return 0.0
    held = min(max(value, low), high)
    if isinf(high - low):
        return (held / 2 - low / 2) / (high / 2 - low / 2)
    return (held - low) / (high - low)


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return a bar for each of ``values``: the lowest is ``low``, the highest ``high``; NaN leaves its place empty."""
    top = len(BARS) - 1
    return "".join(NO_BAR if isnan(value) else BARS[round(top * fraction(value, low, high))] for value in values)
