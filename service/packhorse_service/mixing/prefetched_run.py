"""A run of samples drawn ahead in one go: each is a whole piece, with nothing to do for it but to count it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, cycle, islice, repeat
from operator import sub
from typing import NamedTuple

from packhorse_service.mixing.open_blocks import UncutRun
from packhorse_service.mixing.order import DeferredCursor, OrderCursor
from packhorse_service.mixing.piece import Demand, Piece, make_piece

__all__ = ["PrefetchedRun", "RunSlice"]


class RunSlice(NamedTuple):
    """Pieces taken from a run, and sums over their samples: ids, slots, and checksums of their blocks."""

    pieces: list[Piece]
    ids: int
    slots: int
    checksum: int


class PrefetchedRun:
    """Samples of one source in order, made into pieces at once; handed out slice by slice.

    All columns but the pieces are sums over what lies before, from 0 on: a slice costs the same whatever its length.
    """

    def __init__(self, uncut: UncutRun, number: int, source: int, start: OrderCursor) -> None:
        """Make the pieces of ``source``'s samples behind ``start``; the first has this ``number``."""
        self._start, self._source = start, source
        samples, begins, ends, slots = uncut.ranges
        count, shards, blocks = len(samples), cycle(uncut.shards), cycle(uncut.blocks)
        columns = range(number, number + count), repeat(source), shards, blocks, samples, begins, ends, slots
        self._pieces = list(map(make_piece, zip(*columns, strict=False)))
        self._ids = list(accumulate(map(sub, ends, begins), initial=0))
        self._slots = list(accumulate(slots, initial=0))
        checksums = cycle([block.checksum for block in uncut.blocks])
        self._checksums = list(accumulate(islice(checksums, count), initial=0))
        self._units, self._multiple = self._slots, 1
        self._taken = 0

    @property
    def exhausted(self) -> bool:
        """True where no samples are left."""
        return self._taken == len(self._pieces)

    @property
    def ids(self) -> int:
        """Ids of all samples of the run."""
        total: int = self._ids[-1]
        return total

    @property
    def cursor(self) -> DeferredCursor:
        """Cursor behind the samples taken so far."""
        return DeferredCursor(self._start, self._source, self._taken, self._ids[self._taken])

    def take(self, demand: Demand, limit: int) -> RunSlice:
        """Take the next pieces: those in demand, as far as there are any, and at most ``limit``."""
        if demand.multiple != self._multiple:
            self._multiple = demand.multiple
            units = [-(-piece.slots // demand.multiple) for piece in self._pieces]
            self._units = list(accumulate(units, initial=0))
        first, most = self._taken, min(self._taken + min(demand.pieces, limit), len(self._pieces))
        end = self._taken = bisect_left(self._units, self._units[first] + demand.units, first + 1, most)
        ids, slots = self._ids[end] - self._ids[first], self._slots[end] - self._slots[first]
        return RunSlice(self._pieces[first:end], ids, slots, self._checksums[end] - self._checksums[first])
