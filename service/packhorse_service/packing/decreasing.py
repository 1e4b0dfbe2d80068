"""Packs by the offline heuristics: first-fit and best-fit decreasing, of one lookahead after the other.

A lookahead is gathered, packed as a whole from the largest sample to the smallest, and given out before more
samples are taken in: nothing carries over, so the last packs of each lookahead are less full, and a sample
can wait for all of it. They are here for comparison, and for people who ask for them.

Both heuristics decide which *sizes* share a pack. The oldest pending sample then names the next pack, the
first made that holds its size, and each size is taken by its oldest sample: not in the order in which packs
are made, which has the longest samples first, a curriculum by accident.

Removing a pack changes no other pack of either heuristic, so the samples that are left make the packs that
are left: what is pending, and whether the lookahead is closed, is all the state.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from packhorse_service.packing.packing_plan import PackingAlgorithm, PackingPlan

__all__ = ["DecreasingPacker", "best_fit_decreasing", "first_fit_decreasing"]


class DecreasingPacker:
    """Packs whole lookaheads; has the interface of ``FifoExactTailPacker``."""

    def __init__(self, plan: PackingPlan) -> None:
        self.plan = plan
        self.units = 0  # pending, in all
        self._size_of: dict[int, int] = {}  # pending sample -> its units, in arrival order
        self._packs: deque[list[int]] = deque()  # what is left of a closed lookahead

    def __len__(self) -> int:
        return len(self._size_of)

    @property
    def wants_more(self) -> bool:
        """True while a lookahead is being gathered."""
        return not self._packs and self.units < self.plan.lookahead

    @property
    def closed(self) -> bool:
        """True while packs of a lookahead are left, so that no sample may be added."""
        return bool(self._packs)

    def add(self, sample: int, units: int) -> None:
        """Add a sample that arrives. ``units`` is in 1 … capacity."""
        self.add_all([sample], [units])

    def add_all(self, samples: Sequence[int], sizes: Sequence[int]) -> None:
        """Add samples that arrive, each with its units."""
        self._size_of.update(zip(samples, sizes, strict=True))
        self.units += sum(sizes)

    def pending(self) -> Iterator[tuple[int, int]]:
        """(sample, units) in arrival order."""
        return iter(self._size_of.items())

    def close(self) -> None:
        """Pack what is pending as one lookahead."""
        packs = HEURISTICS[self.plan.algorithm](sorted(self._size_of.values(), reverse=True), self.plan)
        holding: defaultdict[int, deque[int]] = defaultdict(deque)  # size -> packs that hold it, as made
        for number, sizes in enumerate(packs):
            for size in sizes:
                holding[size].append(number)
        samples: defaultdict[int, deque[int]] = defaultdict(deque)  # size -> its samples, in arrival order
        for sample, size in self._size_of.items():
            samples[size].append(sample)
        left = set(range(len(packs)))
        for sample, size in self._size_of.items():
            if samples[size] and samples[size][0] == sample:
                number = next(n for n in iter(holding[size].popleft, None) if n in left)
                left.remove(number)
                self._packs.append(sorted(samples[each].popleft() for each in packs[number]))

    def next_pack(self) -> list[int]:
        """Return the samples of the next pack, in arrival order. Needs a pending sample."""
        if not self._packs:
            self.close()
        pack = self._packs.popleft()
        self.units -= sum(self._size_of.pop(sample) for sample in pack)
        return pack


def first_fit_decreasing(sizes: list[int], plan: PackingPlan) -> list[list[int]]:
    """Each of ``sizes``, from the largest on, goes into the first pack that has room for it.

    Made pack by pack, which gives the same: a pack takes what fits of what no earlier pack took.
    """
    left = Counter(sizes)
    pending = bytearray(plan.capacity + 1)  # 1 where samples of that size are left
    for size in left:
        pending[size] = 1
    packs: list[list[int]] = []
    while left:
        pack: list[int] = []
        room = plan.capacity
        while len(pack) < plan.segments_limit and (size := pending.rfind(1, 0, room + 1)) > 0:
            pack.append(size)
            room -= size
            left[size] -= 1
            if not left[size]:
                del left[size]
                pending[size] = 0
        packs.append(pack)
    return packs


def best_fit_decreasing(sizes: list[int], plan: PackingPlan) -> list[list[int]]:
    """Each of ``sizes``, from the largest on, goes into the fullest pack that has room for it.

    Of equally full ones it goes into the first to get there.
    """
    packs: list[list[int]] = []
    by_room: defaultdict[int, deque[int]] = defaultdict(deque)  # packs with that much room
    rooms = bytearray(plan.capacity + 1)  # 1 where there is one
    for size in sizes:
        room, number = rooms.find(1, size), len(packs)
        if room < 0:
            room = plan.capacity
            packs.append([])
        else:
            number = by_room[room].popleft()
            rooms[room] = bool(by_room[room])
        packs[number].append(size)
        if len(packs[number]) < plan.segments_limit:
            by_room[room - size].append(number)
            rooms[room - size] = 1
    return packs


HEURISTICS: dict[PackingAlgorithm, Callable[[list[int], PackingPlan], list[list[int]]]] = {
    PackingAlgorithm.FIRST_FIT_DECREASING: first_fit_decreasing,
    PackingAlgorithm.BEST_FIT_DECREASING: best_fit_decreasing,
}
