"""Samples to packs: FIFO fill, exact tail.

Each pack is seeded with the oldest pending sample, so none starves; it is filled in arrival order until
about a quarter of it is left, then closed with the best single, pair or triple, in bounded probes. Where
samples over half a pack dominate, filling in order would strand them, and the largest that fits is taken
throughout. All integers, no randomness: the packs are a function of the arrivals alone.

Sizes are in *units* of ``segment_multiple`` slots, so alignment padding is part of a size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Packer", "PackingPlan"]

TAIL_SHARE = 4  # the exact tail starts when at most 1/4 of the pack is left
SKIP_LIMIT = 64  # samples passed over in one pack because they do not fit
PAIR_PROBES = 64
TRIPLE_PROBES = 8
BIG_SHARE = (9, 10)  # largest-fit takes over when big samples need more than 0.9 of the pending packs


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    """``capacity`` and ``lookahead`` in units; ``max_segments`` samples a pack, ``None`` for no limit."""

    capacity: int
    lookahead: int
    max_segments: int | None = None


class Packer:
    """Pending samples, by arrival and by size.

    Within a size samples leave in arrival order, so every bucket is a FIFO. ``_sizes`` has bit s set
    where a sample of s units is pending; Python's integers make it a bitset with a fast "highest bit".
    """

    def __init__(self, plan: PackingPlan) -> None:
        self.plan = plan
        self.units = 0  # pending, in all
        self._big = 0  # pending samples over half a pack
        self._size_of: dict[int, int] = {}  # pending sample -> its units
        self._arrivals: deque[int] = deque()  # in order; those already packed are skipped when met
        self._buckets: list[deque[int]] = [deque() for _ in range(plan.capacity + 1)]
        self._sizes = 0

    def __len__(self) -> int:
        return len(self._size_of)

    @property
    def wants_more(self) -> bool:
        """Whether fewer units are pending than the lookahead asks for."""
        return self.units < self.plan.lookahead

    def add(self, sample: int, units: int) -> None:
        """A sample arrives. ``units`` is in 1 … capacity."""
        self._size_of[sample] = units
        self._arrivals.append(sample)
        self._buckets[units].append(sample)
        self._sizes |= 1 << units
        self.units += units
        self._big += 2 * units > self.plan.capacity

    def pending(self) -> Iterator[tuple[int, int]]:
        """(sample, units) in arrival order: all there is to save."""
        return iter(self._size_of.items())

    def next_pack(self) -> list[int]:
        """The samples of the next pack, in the order in which they are laid out. Needs a pending sample."""
        pack: list[int] = []
        dominated = self._big * self.plan.capacity * BIG_SHARE[1] > self.units * BIG_SHARE[0]
        room = self.plan.capacity - self._take(self._oldest(), pack)
        if not dominated:
            room = self._fill_in_order(room, pack)
            room = self._close_exactly(room, pack)
        self._fill_with_largest(room, pack)
        return pack

    # Taking ------------------------------------------------------------------------------------------

    def _oldest(self) -> int:
        while self._arrivals[0] not in self._size_of:
            self._arrivals.popleft()
        return self._arrivals[0]

    def _take(self, sample: int, pack: list[int]) -> int:
        """Move a pending sample into the pack; returns its units."""
        units = self._size_of.pop(sample)
        bucket = self._buckets[units]
        # Always the oldest of its size: whoever is skipped does not fit, and neither does its size later.
        bucket.popleft()
        if not bucket:
            self._sizes ^= 1 << units
        self.units -= units
        self._big -= 2 * units > self.plan.capacity
        pack.append(sample)
        return units

    def _segments_left(self, pack: list[int]) -> int:
        limit = self.plan.max_segments
        return self.plan.capacity if limit is None else limit - len(pack)

    def _largest(self, room: int) -> int:
        """The largest pending size of at most ``room`` units; 0 for none."""
        return (self._sizes & ((2 << room) - 1)).bit_length() - 1 if room > 0 and self._sizes else 0

    # Filling -----------------------------------------------------------------------------------------

    def _fill_in_order(self, room: int, pack: list[int]) -> int:
        skipped: list[int] = []
        arrivals = self._arrivals
        while arrivals and room * TAIL_SHARE > self.plan.capacity and self._segments_left(pack):
            sample = arrivals.popleft()
            units = self._size_of.get(sample)
            if units is None:
                continue
            if units <= room:
                room -= self._take(sample, pack)
                continue
            skipped.append(sample)
            if len(skipped) == SKIP_LIMIT:
                break
        arrivals.extendleft(reversed(skipped))
        return room

    def _fill_with_largest(self, room: int, pack: list[int]) -> None:
        while (size := max(self._largest(room), 0)) and self._segments_left(pack):
            room -= self._take(self._buckets[size][0], pack)

    def _close_exactly(self, room: int, pack: list[int]) -> int:
        """Take the best single, pair or triple that fits ``room``."""
        left = self._segments_left(pack)
        best: tuple[int, ...] = ()
        for count, candidates in ((1, self._singles), (2, self._pairs), (3, self._triples)):
            if left < count or sum(best) == room:
                break
            best = max(best, candidates(room), key=sum)
        for size in best:
            room -= self._take(self._buckets[size][0], pack)
        return room

    def _singles(self, room: int) -> tuple[int, ...]:
        size = max(self._largest(room), 0)
        return (size,) if size else ()

    def _pairs(self, room: int, probes: int = PAIR_PROBES) -> tuple[int, ...]:
        """The best pair found from the largest size downwards."""
        best: tuple[int, ...] = ()
        first = self._largest(room)
        while first > 0 and probes and 2 * first >= sum(best):
            second = self._largest(min(room - first, first))
            if second == first and len(self._buckets[first]) < 2:
                second = self._largest(first - 1)
            if second > 0 and first + second > sum(best):
                best = (first, second)
                if sum(best) == room:
                    break
            first = self._largest(first - 1)
            probes -= 1
        return best

    def _triples(self, room: int) -> tuple[int, ...]:
        """For each of the oldest that fit, the best pair for what it leaves."""
        best: tuple[int, ...] = ()
        for size in self._oldest_sizes(room):
            pair = self._pairs(room - size, TRIPLE_PROBES)
            triple = (size, *pair)
            enough = all(len(self._buckets[s]) >= triple.count(s) for s in triple)
            if pair and enough and sum(triple) > sum(best):
                best = triple
        return best

    def _oldest_sizes(self, room: int) -> list[int]:
        sizes: list[int] = []
        for _, units in zip(range(SKIP_LIMIT), self._size_of.values(), strict=False):
            if units <= room:
                sizes.append(units)
                if len(sizes) == TRIPLE_PROBES:
                    break
        return sizes
