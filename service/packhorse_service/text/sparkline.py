"""Figures over time as a line of bars."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BARS", "sparkline"]

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """A bar for each value: the lowest is ``low``, the highest ``high``."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)
