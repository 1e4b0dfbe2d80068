"""The two ways of decoding a header take the same values."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from msgspec import Struct

from packhorse.schema import Whole, exact_reader


class Pair(NamedTuple):
    first: Whole
    second: int


class Nested(Struct):
    fine: Whole
    pairs: tuple[Pair, ...]
    maybe: int | None


class Ranged(Struct):
    fine: Whole
    maybe: Whole | None
    many: tuple[Whole, ...]


def test_an_integer_without_a_range_cannot_be_read_the_short_way() -> None:
    """It would be checked by one of the two ways and not by the other."""
    with pytest.raises(TypeError, match=r"TAG.pairs.second, TAG.maybe must be declared as Whole"):
        exact_reader("TAG", Nested)


def test_integers_with_a_range_can() -> None:
    assert exact_reader("TAG", Ranged)(b"\xc0") is None
