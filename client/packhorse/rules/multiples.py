"""Multiples of a unit: the arithmetic of remedies."""

from __future__ import annotations

from packhorse.rounding import round_up

__all__ = ["near_multiples", "next_multiple"]


def next_multiple(value: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``value``, and at least ``unit``."""
    return max(unit, round_up(value, unit))


def near_multiples(value: int, unit: int) -> str:
    """Return a remedy: the multiples of ``unit`` around ``value``."""
    below, above = value // unit * unit, next_multiple(value + 1, unit)
    return f"use {below} or {above}" if below else f"use {above}"
