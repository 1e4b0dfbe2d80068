"""Integers rounded up: how many units hold a value, and the next multiple of a number.

Loops over every sample have ``-(-value // unit)`` written out, as a call there costs more than the division.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt

__all__ = ["ceil_div", "round_up"]

Integers = TypeVar("Integers", int, npt.NDArray[Any])


def ceil_div(value: Integers, unit: int) -> Integers:
    """Return how many units hold ``value``: the quotient rounded up, of each entry of an array.

    >>> ceil_div(9, 4)
    3
    """
    return -(-value // unit)


def round_up(value: Integers, multiple: int) -> Integers:
    """Return the least multiple that is not below ``value``, of each entry of an array.

    >>> round_up(9, 4)
    12
    """
    return -(-value // multiple) * multiple
