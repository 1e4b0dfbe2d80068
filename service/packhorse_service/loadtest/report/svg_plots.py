"""Plots as numbers: where lines, dots and ticks are in an SVG. The page's template only writes them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from packhorse_service.text.formatting import si

__all__ = ["BOTTOM", "HEIGHT", "LEFT", "RIGHT", "TOP", "WIDTH", "Dot", "Line", "Linear", "Log", "Plot", "line"]

WIDTH, HEIGHT = 480, 250  # of the drawing; it scales with the page
LEFT, RIGHT, TOP, BOTTOM = 56, 462, 14, 208  # the frame inside it
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
TICKS = 5
ROOM = 1.08  # above the highest value
NOTHING = 1e-300  # below it, a scale has no ticks: their distance would not be a normal number


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


class Scale(Protocol):
    """Where a value is between two ends."""

    def part(self, value: float) -> float:
        """0 at the low end, 1 at the high one; never outside."""

    def ticks(self) -> list[tuple[float, str]]:
        """(value, its text), a few of them."""


@dataclass(frozen=True, slots=True)
class Linear:
    low: float
    high: float

    @staticmethod
    def upto(values: Iterable[float]) -> Linear:
        """From 0 to a little over the highest; what is all but 0 has the scale of nothing."""
        top = max(values, default=0.0) * ROOM
        return Linear(0.0, top if top > NOTHING else 1.0)

    def part(self, value: float) -> float:
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step * power for step in STEPS if step * power >= rough)
        first = math.ceil(self.low / step)
        return [(step * n, si(step * n)) for n in range(first, math.floor(self.high / step) + 1)]


@dataclass(frozen=True, slots=True)
class Log:
    """Both ends are over 0."""

    low: float
    high: float

    @staticmethod
    def around(values: Iterable[float], least: float) -> Log:
        """Whole decades around them; what is below ``least`` is drawn there."""
        top = max([*values, least * 10])
        return Log(least, 10.0 ** math.ceil(math.log10(top)))

    def part(self, value: float) -> float:
        held = min(max(value, self.low), self.high)
        return math.log(held / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[tuple[float, str]]:
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        return [(10.0**n, si(10.0**n) if n > first else f"≤ {10.0**n:g}") for n in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Line:
    """A path, the class that gives its colour, and what it is."""

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
    """One drawing."""

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
        """(left, width) of each band."""
        ends = [(across(self.x, begin), across(self.x, end)) for begin, end in self.bands]
        return [(begin, end - begin) for begin, end in ends]


def across(scale: Scale, value: float) -> float:
    """Where a value of x is, from the left."""
    return round(LEFT + (RIGHT - LEFT) * scale.part(value), 1)


def up(scale: Scale, value: float) -> float:
    """Where a value of y is, from the top."""
    return round(BOTTOM - (BOTTOM - TOP) * scale.part(value), 1)


def line(points: Iterable[tuple[float, float]], x: Scale, y: Scale, style: str, label: str) -> Line:
    """A line through ``points``."""
    return Line(" ".join(f"{across(x, at)},{up(y, value)}" for at, value in points), style, label)
