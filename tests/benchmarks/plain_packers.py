"""The heuristics that peers use, as plainly as they can be written: sizes of a chunk in, packs of sizes out.

They are what the product is compared with, in the benchmark, and what it is checked against, in the tests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

__all__ = ["best_fit_decreasing", "first_fit_decreasing", "next_fit", "per_chunk"]

Packs = list[list[int]]
CHUNK = 1000


def next_fit(sizes: Sequence[int], capacity: int) -> Packs:
    """First-in-first-out: each size goes into the pack being filled, or starts the next."""
    packs: Packs = [[]]
    room = capacity
    for size in sizes:
        if size > room:
            packs.append([])
            room = capacity
        packs[-1].append(size)
        room -= size
    return packs


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Packs:
    """From the largest on, each into the first pack that has room for it."""
    packs: Packs = []
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        number = next((number for number, room in enumerate(rooms) if room >= size), len(packs))
        if number == len(packs):
            packs.append([])
            rooms.append(capacity)
        packs[number].append(size)
        rooms[number] -= size
    return packs


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> Packs:
    """From the largest on, each into the pack whose room it leaves the least of."""
    packs: Packs = []
    rooms: list[tuple[int, int, int]] = []  # (room, when it came to be, pack), sorted
    for time, size in enumerate(sorted(sizes, reverse=True)):
        at = bisect_left(rooms, (size,))
        if at < len(rooms):
            room, _, number = rooms.pop(at)
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(size)
        insort(rooms, (room - size, time, number))
    return packs


def per_chunk(heuristic: Callable[[Sequence[int], int], Packs], sizes: Sequence[int], capacity: int) -> Packs:
    """A heuristic over one chunk of samples after the other; nothing carries over."""
    chunks = (sizes[start : start + CHUNK] for start in range(0, len(sizes), CHUNK))
    return [pack for chunk in chunks for pack in heuristic(chunk, capacity)]
