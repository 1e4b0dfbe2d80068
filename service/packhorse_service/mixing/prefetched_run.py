"""Pieces: what is drawn, packed, and laid out in rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, cycle, islice, repeat
from operator import sub
from typing import NamedTuple

from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.open_blocks import UncutRun
from packhorse_service.mixing.order import OrderCursor
from packhorse_service.mixing.over_length import UNLIMITED

__all__ = ["ONE_PIECE", "DeferredCursor", "Demand", "Piece", "PrefetchedRun", "RunSlice", "make_piece"]


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


make_piece: Callable[[Iterable[object]], Piece] = partial(tuple.__new__, Piece)  # what its own __new__ calls, for each


class Demand(NamedTuple):
    """So many pieces, or as many as have so many units of ``multiple`` slots: whichever is reached first."""

    pieces: int = UNLIMITED
    units: int = UNLIMITED
    multiple: int = 1


ONE_PIECE = Demand(pieces=1)


class RunSlice(NamedTuple):
    """A part of a run, and its sums: ids and slots of the samples, and checksums of their blocks."""

    pieces: list[Piece]
    ids: int
    slots: int
    checksum: int


class DeferredCursor(NamedTuple):
    """A place in the order: so many samples of a source that is alone, and their ids, behind another place."""

    start: OrderCursor
    source: int = 0
    draws: int = 0
    ids: int = 0

    def order(self) -> OrderCursor:
        """The order there; only to look at."""
        if not self.draws:
            return self.start
        order = self.start.clone()
        order.advance_by(self.source, self.draws, self.ids)
        return order


class PrefetchedRun:
    """Samples drawn one after the other, each a whole piece, with nothing to do for them but to count them.

    All columns but the pieces are sums of what lies before, from 0 on.
    """

    def __init__(self, ahead: UncutRun, number: int, source: int, start: OrderCursor) -> None:
        """Of the samples ahead in a source, at the ``start``; the first piece has this number."""
        self._start, self._source = start, source
        samples, begins, ends, slots = ahead.spans
        count, shards, blocks = len(samples), cycle(ahead.shards), cycle(ahead.blocks)
        columns = range(number, number + count), repeat(source), shards, blocks, samples, begins, ends, slots
        self._pieces = list(map(make_piece, zip(*columns, strict=False)))
        self._ids = list(accumulate(map(sub, ends, begins), initial=0))
        self._slots = list(accumulate(slots, initial=0))
        checksums = cycle([block.checksum for block in ahead.blocks])
        self._checksums = list(accumulate(islice(checksums, count), initial=0))
        self._units, self._multiple = self._slots, 1
        self._taken = 0

    @property
    def taken(self) -> bool:
        """Whether no samples are left."""
        return self._taken == len(self._pieces)

    @property
    def ids(self) -> int:
        """Of all samples."""
        total: int = self._ids[-1]
        return total

    @property
    def stand(self) -> DeferredCursor:
        """Behind those taken."""
        return DeferredCursor(self._start, self._source, self._taken, self._ids[self._taken])

    def take(self, wanted: Demand, limit: int) -> RunSlice:
        """The next ones, as many as wanted if there are, and at most so many."""
        if wanted.multiple != self._multiple:
            self._multiple = wanted.multiple
            units = [-(-piece.slots // wanted.multiple) for piece in self._pieces]
            self._units = list(accumulate(units, initial=0))
        first, most = self._taken, min(self._taken + min(wanted.pieces, limit), len(self._pieces))
        end = self._taken = bisect_left(self._units, self._units[first] + wanted.units, first + 1, most)
        ids, slots = self._ids[end] - self._ids[first], self._slots[end] - self._slots[first]
        return RunSlice(self._pieces[first:end], ids, slots, self._checksums[end] - self._checksums[first])
