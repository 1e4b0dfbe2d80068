"""Plots as numbers: where lines, dots and ticks are in an SVG. The page's template only writes them down."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from packhorse_service.text.formatting import si
from packhorse_service.text.sparkline import finite, fraction

__all__ = ["BOTTOM", "HEIGHT", "LEFT", "RIGHT", "TOP", "WIDTH", "Dot", "Line", "Linear", "Log", "Plot", "line"]

WIDTH, HEIGHT = 480, 250  # of the drawing; it scales with the page
LEFT, RIGHT, TOP, BOTTOM = 56, 462, 14, 208  # the frame inside it
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
TICKS = 5
DECADES = 10  # at most, between the ends of a logarithmic scale that names each
LARGEST_POWER = sys.float_info.max_10_exp
ROOM = 1.08  # above the highest value
NOTHING = 1e-300  # all but 0: a scale up to it would have no ticks


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


class Scale(Protocol):
    """Axis from a low end to a high one: every float has a place on it."""

    def part(self, value: float) -> float:
        """Return 0 at the low end, 1 at the high one, never anything outside; NaN is at the low end."""

    def ticks(self) -> list[tuple[float, str]]:
        """Return (value, its text), a few of them, in order."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Axis of which equal differences take equal room."""

    low: float
    high: float

    @staticmethod
    def upto(values: Iterable[float]) -> Linear:
        """Return a scale from 0 to a little over the highest finite value; up to 1 where that is all but 0."""
        top = min(max(finite(values), default=0.0) * ROOM, sys.float_info.max)
        return Linear(0.0, top if top > NOTHING else 1.0)

    def part(self, value: float) -> float:
        return fraction(value, self.low, self.high)

    def ticks(self) -> list[tuple[float, str]]:
        rough = self.high / TICKS - self.low / TICKS
        if not NOTHING < rough < math.inf:
            return []  # their distance would not be a normal number
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step * power for step in STEPS if step * power >= rough)
        first = math.ceil(self.low / step)
        return [(step * n, si(step * n)) for n in range(first, math.floor(self.high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Log:
    """Axis of which equal ratios take equal room; both ends are over 0."""

    low: float
    high: float

    @staticmethod
    def around(values: Iterable[float], least: float) -> Log:
        """Return a scale of whole decades around the finite ones; what is below ``least`` is drawn there."""
        top = max([*finite(values), least * 10])
        return Log(least, 10.0 ** min(math.ceil(math.log10(top)), LARGEST_POWER))

    def part(self, value: float) -> float:
        held = self.low if math.isnan(value) else min(max(value, self.low), self.high)
        return fraction(math.log(held), math.log(self.low), math.log(self.high))

    def ticks(self) -> list[tuple[float, str]]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        each = -(-(last - first) // DECADES) or 1  # so many decades apart
        return [(10.0**n, si(10.0**n) if n > first else f"≤ {10.0**n:g}") for n in range(first, last + 1, each)]


@dataclass(frozen=True, slots=True)
class Line:
    """Path of a line, the class that gives its colour, and what it is."""

    path: str
    style: str
    label: str


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    style: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Everything that the template of a drawing needs."""

    title: str
    caption: str
    x_label: str
    x: Scale
    y: Scale
    lines: Sequence[Line] = ()
    dots: Sequence[Dot] = ()
    bands: Sequence[tuple[float, float]] = ()  # of x, in values
    legend: Sequence[tuple[str, str]] = field(default=())  # (style, what it is)

    @property
    def x_ticks(self) -> list[Tick]:
        return [Tick(across(self.x, value), text) for value, text in self.x.ticks()]

    @property
    def y_ticks(self) -> list[Tick]:
        return [Tick(up(self.y, value), text) for value, text in self.y.ticks()]

    @property
    def boxes(self) -> list[tuple[float, float]]:
        """Left edge and width of each band."""
        ends = [(across(self.x, begin), across(self.x, end)) for begin, end in self.bands]
        return [(begin, end - begin) for begin, end in ends]


def across(scale: Scale, value: float) -> float:
    """Return where a value of x is, from the left, in units of the drawing."""
    return round(LEFT + (RIGHT - LEFT) * scale.part(value), 1)


def up(scale: Scale, value: float) -> float:
    """Return where a value of y is, from the top, in units of the drawing."""
    return round(BOTTOM - (BOTTOM - TOP) * scale.part(value), 1)


def line(points: Iterable[tuple[float, float]], x: Scale, y: Scale, style: str, label: str) -> Line:
    """Return a line through ``points``; those of which a coordinate is NaN are left out."""
    known = [(at, value) for at, value in points if not (math.isnan(at) or math.isnan(value))]
    return Line(" ".join(f"{across(x, at)},{up(y, value)}" for at, value in known), style, label)
