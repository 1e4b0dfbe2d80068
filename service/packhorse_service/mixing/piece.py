"""Pieces: what samples are cut to, and what is packed and laid out in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.over_length import UNLIMITED

__all__ = ["ONE_PIECE", "Demand", "Piece", "make_piece"]


class Piece(NamedTuple):
    """A sample, or a part of one: ids ``begin`` … ``end`` of its block. ``number`` counts the pieces of a stream."""

    number: int
    source: int
    shard: int  # of the source
    block: TokenBlock
    sample: int  # within the block
    begin: int
    end: int
    slots: int  # targets: one fewer than ids where the last id is a target only


# ``Piece(*values)`` calls a ``__new__`` in Python, which calls this: measured, 0.18 µs a piece instead of 0.35 µs.
make_piece: Callable[[Iterable[object]], Piece] = partial(tuple.__new__, Piece)


class Demand(NamedTuple):
    """Request for pieces: so many, or as many as have so many units of ``multiple`` slots; whichever comes first."""

    pieces: int = UNLIMITED
    units: int = UNLIMITED
    multiple: int = 1


ONE_PIECE = Demand(pieces=1)
