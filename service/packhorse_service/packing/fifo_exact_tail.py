"""Samples to packs: FIFO fill, exact tail.

Each pack is seeded with the oldest pending sample, so none starves. It is filled in arrival order until what
is left is about a quarter of it, or three samples of average size; then it is closed with the best single,
pair or triple, in bounded probes. Where big samples dominate, filling in order would take from one what
another needs, and the largest that fits is taken throughout. All integers, no randomness: the packs are a
function of the arrivals alone.

Sizes are in *units* of ``segment_multiple`` slots, so alignment padding is part of a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packhorse_service.packing.packing_plan import PackingPlan

__all__ = ["FifoExactTailPacker"]

TAIL_SHARE = 4  # the exact tail starts when at most 1/4 of the pack is left …
TAIL_SAMPLES = 3  # … or about as many samples as it tries together
SAMPLES_FOR_EACH_BIG = 3  # big samples (over half a pack) dominate when fewer are pending for each of them
SKIP_LIMIT = 64  # samples passed over in one pack because they do not fit
PAIR_PROBES = 64
TRIPLE_PROBES = 8


class FifoExactTailPacker:
    """Pending samples, by arrival and by size.

    Within a size samples leave in arrival order: whoever is passed over does not fit, and neither does its
    size later in that pack. So every size is a FIFO, and taking a sample takes the first of its size.
    """

    closed = False  # samples may be added at any time

    def __init__(self, plan: PackingPlan) -> None:
        self.plan = plan
        self.units = 0  # pending, in all
        self._capacity, self._limit, self._half = plan.capacity, plan.segments_limit, plan.capacity // 2
        self._big = 0  # pending samples over half a pack
        self._size_of: dict[int, int] = {}  # pending sample -> its units, in arrival order
        # By size a queue of samples, as links: most have one, which takes two entries and no object of its own.
        # Those of a size of which no sample is pending any more are left as they are.
        self._oldest: dict[int, int] = {}  # size -> its first sample …
        self._newest: dict[int, int] = {}  # … and its last
        self._behind: dict[int, int] = {}  # sample -> the next one of its size
        # 1 where a sample of that many units is pending: its ``rfind`` is a fast "largest of at most".
        self._sizes = bytearray(plan.capacity + 1)
        self._sizes[0] = 1  # found where no sample fits

    def __len__(self) -> int:
        return len(self._size_of)

    @property
    def wants_more(self) -> bool:
        """True while fewer units are pending than the lookahead asks for."""
        return self.units < self.plan.lookahead

    def add(self, sample: int, units: int) -> None:
        """Add a sample that arrives. ``units`` is in 1 … capacity."""
        self.add_all([sample], [units])

    def add_all(self, samples: Sequence[int], sizes: Sequence[int]) -> None:
        """Add samples that arrive, each with its units."""
        self._size_of.update(zip(samples, sizes, strict=True))
        self.units += sum(sizes)
        oldest, newest, behind, present, half = self._oldest, self._newest, self._behind, self._sizes, self._half
        for sample, units in zip(samples, sizes, strict=True):
            if present[units]:
                behind[newest[units]] = sample
            else:
                oldest[units] = sample
                present[units] = 1
            newest[units] = sample
            if units > half:
                self._big += 1

    def pending(self) -> Iterator[tuple[int, int]]:
        """(sample, units) in arrival order: all there is to save."""
        return iter(self._size_of.items())

    def close(self) -> None:
        """Nothing to do: packs are made one at a time."""

    def next_pack(self) -> list[int]:
        """Return the samples of the next pack, in the order in which they are laid out. Needs a pending sample."""
        dominated = len(self._size_of) < SAMPLES_FOR_EACH_BIG * self._big
        average = self.units // len(self._size_of)
        capacity, limit = self._capacity, self._limit
        tail = capacity - 1 if dominated else max(capacity // TAIL_SHARE, TAIL_SAMPLES * average)
        pack: list[int] = []
        room = self._fill_in_order(min(tail, capacity - 1), pack)
        if not dominated:
            for size in self._best_closing(room, limit - len(pack)):
                room -= self._take(size, pack)
        while (size := self._largest(room)) and len(pack) < limit:
            room -= self._take(size, pack)
        self.units -= capacity - room
        return pack

    def _fill_in_order(self, tail: int, pack: list[int]) -> int:
        """Take samples in arrival order, the oldest first, while more than ``tail`` units are left.

        ``pack`` is empty. Returns the room that is left. This is ``_take`` written out: most samples are packed here.
        """
        oldest, behind, present = self._oldest, self._behind, self._sizes
        room, limit, half = self._capacity, self._limit, self._half
        passed_over = 0
        for sample, units in self._size_of.items():
            if units > room:
                passed_over += 1
                if passed_over == SKIP_LIMIT:
                    break
                continue
            if sample in behind:
                oldest[units] = behind.pop(sample)
            else:
                present[units] = 0
            if units > half:
                self._big -= 1
            pack.append(sample)
            room -= units
            if room <= tail or len(pack) == limit:
                break
        for sample in pack:
            del self._size_of[sample]
        return room

    def _take(self, size: int, pack: list[int]) -> int:
        """Move the oldest sample of a pending size into the pack; returns the size."""
        sample = self._oldest[size]
        if sample in self._behind:
            self._oldest[size] = self._behind.pop(sample)
        else:
            self._sizes[size] = 0
        if size > self._half:
            self._big -= 1
        del self._size_of[sample]
        pack.append(sample)
        return size

    def _has(self, size: int, count: int) -> bool:
        """Return whether so many samples of a pending size are pending."""
        sample: int | None = self._oldest[size]
        while sample is not None and count > 1:
            sample = self._behind.get(sample)
            count -= 1
        return sample is not None

    # The exact tail ----------------------------------------------------------------------------------

    def _largest(self, room: int) -> int:
        """Return the largest pending size of at most ``room`` units; 0 for none."""
        return self._sizes.rfind(1, 0, room + 1)

    def _best_closing(self, room: int, left: int) -> tuple[int, ...]:
        """Return one, two or three pending sizes, ``left`` at most, that come nearest to ``room``; rather fewer."""
        largest = self._largest(room)
        best: tuple[int, ...] = (largest,) if largest and left else ()
        if left > 1 and best and sum(best) < room:
            best = max(best, self._best_pair(room, PAIR_PROBES), key=sum)
        if left > 2 and best and sum(best) < room:
            best = max(best, self._best_triple(room), key=sum)
        return best

    def _best_pair(self, room: int, probes: int) -> tuple[int, ...]:
        """Return the best pair found from the largest size downwards."""
        best: tuple[int, ...] = ()
        most, largest = 0, self._sizes.rfind  # ``_largest`` written out
        first = largest(1, 0, room)
        while 2 * first > most and probes:
            second = largest(1, 0, min(room - first, first) + 1)
            if second == first and not self._has(first, 2):
                second = largest(1, 0, first)
            if second and first + second > most:
                best, most = (first, second), first + second
                if most == room:
                    break
            first = largest(1, 0, first)
            probes -= 1
        return best

    def _best_triple(self, room: int) -> tuple[int, ...]:
        """For each of the oldest that fit, the best pair for what it leaves."""
        best: tuple[int, ...] = ()
        for size in self._oldest_sizes(room):
            triple = (size, *self._best_pair(room - size, TRIPLE_PROBES))
            if sum(triple) > sum(best) and all(self._has(s, triple.count(s)) for s in triple):
                best = triple
                if sum(best) == room:
                    break
        return best

    def _oldest_sizes(self, room: int) -> Iterator[int]:
        """Sizes of some of the oldest samples that fit."""
        fitting = (units for _, units in zip(range(SKIP_LIMIT), self._size_of.values(), strict=False) if units <= room)
        return (units for _, units in zip(range(TRIPLE_PROBES), fitting, strict=False))
