"""Pieces: what is drawn, packed, and laid out in rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, repeat
from typing import NamedTuple

from packhorse_service.blocks import TokenBlock
from packhorse_service.cutting import NEVER
from packhorse_service.reading import Ahead

__all__ = ["ONE", "Piece", "Run", "Wanted", "whole_pieces"]


class Piece(NamedTuple):
    """A sample, or a run of one: ids ``begin`` … ``end`` of its block. ``number`` counts pieces drawn."""

    number: int
    source: int
    shard: int
    block: TokenBlock
    sample: int  # within the block
    begin: int
    end: int
    slots: int


class Wanted(NamedTuple):
    """So many pieces, or as many as have so many units of ``multiple`` slots: whichever is reached first."""

    pieces: int = NEVER
    units: int = NEVER
    multiple: int = 1


ONE = Wanted(pieces=1)


class Run:
    """The samples drawn next, each a whole piece, while there is nothing to do for them but to count them."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._pieces = list(pieces)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def take(self, wanted: Wanted) -> list[Piece]:
        """The first of them, as many as wanted if there are."""
        units, multiple, count = wanted.units, wanted.multiple, 0
        for piece in self._pieces[: wanted.pieces]:
            count += 1
            units -= -(-piece.slots // multiple)
            if units <= 0:
                break
        taken, self._pieces = self._pieces[:count], self._pieces[count:]
        return taken


def whole_pieces(ahead: Ahead, number: int, source: int) -> Iterator[Piece]:
    """Samples as pieces, counted from ``number`` on."""
    samples, begins, ends, slots = zip(*ahead.spans, strict=True)
    numbers = range(number, number + len(samples))
    shards, blocks = cycle(ahead.shards), cycle(ahead.blocks)
    return map(
        Piece._make, zip(numbers, repeat(source), shards, blocks, samples, begins, ends, slots, strict=False)
    )
