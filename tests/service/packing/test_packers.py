"""Packs lose nothing, starve nothing and are full; they follow from the arrivals alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_service.packing.decreasing import HEURISTICS
from packhorse_service.packing.packer import packer_for
from packhorse_service.packing.packing_plan import PackingAlgorithm, PackingPlan
from tests.benchmarks import plain_packers
from tests.length_streams import log_normal, packs_of

CAPACITIES = st.integers(1, 200)


@st.composite
def streams(draw: st.DrawFn, algorithm: PackingAlgorithm) -> tuple[list[int], PackingPlan]:
    """Sizes, many of them equal or around half a pack, and a plan."""
    capacity = draw(CAPACITIES)
    half = capacity // 2
    size = st.one_of(
        st.integers(1, capacity),
        st.integers(1, max(1, capacity // 8)),
        st.sampled_from([1, max(1, half), min(capacity, half + 1), capacity]),
    )
    lookahead = draw(st.integers(1, 8)) * capacity
    limit = draw(st.none() | st.integers(1, 6))
    plan = PackingPlan(capacity=capacity, lookahead=lookahead, max_segments=limit, algorithm=algorithm)
    return draw(st.lists(size, max_size=120)), plan


STREAMS = st.sampled_from(PackingAlgorithm).flatmap(streams)
FIFO_STREAMS = streams(PackingAlgorithm.FIFO_EXACT_TAIL)


def packed(sizes: Sequence[int], plan: PackingPlan) -> list[list[int]]:
    """All packs of a stream."""
    return list(packs_of(sizes, packer_for(plan)))


def samples_of_pending(sizes: Sequence[int], plan: PackingPlan) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
    """(what was pending, the pack made of it) for each pack of a stream."""
    packer, arrived = packer_for(plan), 0
    while arrived < len(sizes) or len(packer):
        while packer.wants_more and arrived < len(sizes):
            packer.add(arrived, sizes[arrived])
            arrived += 1
        pending = list(packer.pending())
        yield pending, packer.next_pack()


@settings(max_examples=200)
@given(STREAMS)
def test_every_sample_is_packed_once_and_no_pack_is_over_its_limits(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packs = packed(sizes, plan)
    assert sorted(chain.from_iterable(packs)) == list(range(len(sizes)))
    for pack in packs:
        assert 1 <= sum(sizes[sample] for sample in pack) <= plan.capacity
        assert plan.max_segments is None or len(pack) <= plan.max_segments


@settings(max_examples=200)
@given(STREAMS)
def test_the_oldest_pending_sample_is_in_every_pack_and_first(stream: tuple[list[int], PackingPlan]) -> None:
    for pending, pack in samples_of_pending(*stream):
        assert pack[0] == pending[0][0]


@settings(max_examples=200)
@given(STREAMS)
def test_samples_of_one_size_leave_in_arrival_order(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    leaving: dict[int, list[int]] = defaultdict(list)
    for sample in chain.from_iterable(packed(sizes, plan)):
        leaving[sizes[sample]].append(sample)
    assert all(samples == sorted(samples) for samples in leaving.values())


@settings(max_examples=200)
@given(STREAMS)
def test_the_counts_of_what_is_pending_are_exact(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packer = packer_for(plan)
    for _ in packs_of(sizes, packer):
        pending = list(packer.pending())
        assert pending == sorted(pending)
        assert len(packer) == len(pending)
        assert packer.units == sum(units for _, units in pending)
        assert packer.wants_more == (packer.units < plan.lookahead and not packer.closed)
        assert packer.units < plan.lookahead + plan.capacity


@settings(max_examples=100)
@given(STREAMS)
def test_a_packer_rebuilt_from_what_is_pending_goes_on_the_same_at_any_point(
    stream: tuple[list[int], PackingPlan],
) -> None:
    sizes, plan = stream
    whole = packed(sizes, plan)
    assert whole == packed(sizes, plan)
    packer, arrived = packer_for(plan), 0
    for made in range(len(whole)):
        rebuilt = packer_for(plan)
        for sample, units in packer.pending():
            rebuilt.add(sample, units)
        if packer.closed:
            rebuilt.close()
        assert list(packs_of(sizes[arrived:], rebuilt, first=arrived)) == whole[made:]
        while packer.wants_more and arrived < len(sizes):
            packer.add(arrived, sizes[arrived])
            arrived += 1
        assert packer.next_pack() == whole[made]


# FIFO fill, exact tail --------------------------------------------------------------------------------


@settings(max_examples=100)
@given(FIFO_STREAMS)
def test_no_pack_leaves_out_a_pending_sample_that_fits(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    for pending, pack in samples_of_pending(sizes, plan):
        room = plan.capacity - sum(sizes[sample] for sample in pack)
        if plan.max_segments is None or len(pack) < plan.max_segments:
            assert all(units > room for sample, units in pending if sample not in pack)


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 32), max_size=60), lookahead=st.integers(1, 4))
def test_a_pack_closes_at_least_as_well_as_the_best_single_or_pair(sizes: list[int], lookahead: int) -> None:
    plan = PackingPlan(capacity=32, lookahead=lookahead * 32)
    for pending, pack in samples_of_pending(sizes, plan):
        taken, room = in_order(pending, plan)
        if pack[: len(taken)] == taken and not big_dominate(pending, plan):
            rest = [units for sample, units in pending if sample not in taken]
            closings = [(), *combinations(rest, 1), *combinations(rest, 2)]
            best = max(sum(closing) for closing in closings if sum(closing) <= room)
            assert sum(sizes[sample] for sample in pack) >= plan.capacity - room + best


@settings(max_examples=100)
@given(FIFO_STREAMS)
def test_a_pack_begins_with_the_arrival_order_unless_big_samples_dominate(
    stream: tuple[list[int], PackingPlan],
) -> None:
    sizes, plan = stream
    for pending, pack in samples_of_pending(sizes, replace(plan, max_segments=None)):
        taken, _ = in_order(pending, plan)
        assert big_dominate(pending, plan) or pack[: len(taken)] == taken


def in_order(pending: list[tuple[int, int]], plan: PackingPlan) -> tuple[list[int], int]:
    """What is taken in arrival order until the tail begins, and the room that is then left."""
    tail = max(plan.capacity // 4, 3 * (sum(units for _, units in pending) // len(pending)))
    taken: list[int] = []
    room = plan.capacity
    for sample, units in pending:
        if taken and room <= tail:
            break
        if units <= room:
            taken.append(sample)
            room -= units
    return taken, room


def big_dominate(pending: list[tuple[int, int]], plan: PackingPlan) -> bool:
    """Whether fewer than three samples are pending for each of over half a pack."""
    return len(pending) < 3 * sum(2 * units > plan.capacity for _, units in pending)


def test_the_packs_of_a_stream_never_change() -> None:
    sizes = [5, 9, 3, 2, 8, 8, 1, 1, 4, 6, 7, 2, 3, 9, 9, 9, 1, 5, 5, 2, 7, 4, 1, 3, 16, 6]
    assert packed(sizes, PackingPlan(capacity=16, lookahead=64)) == GOLDEN_PACKS


GOLDEN_PACKS = [
    [0, 1, 3],
    [2, 13, 8],
    [4, 5],
    [6, 7, 9, 10, 16],
    [11, 14, 17],
    [12, 15, 21],
    [18, 20, 23, 22],
    [19, 25],
    [24],
]


# First-fit and best-fit decreasing ---------------------------------------------------------------------

PLAIN = {
    PackingAlgorithm.FIRST_FIT_DECREASING: plain_packers.first_fit_decreasing,
    PackingAlgorithm.BEST_FIT_DECREASING: plain_packers.best_fit_decreasing,
}
DECREASING = pytest.mark.parametrize("algorithm", PLAIN)


@DECREASING
@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 40), max_size=80), capacity=st.integers(40, 90))
def test_the_heuristics_are_those_of_the_books(algorithm: PackingAlgorithm, sizes: list[int], capacity: int) -> None:
    plan = PackingPlan(capacity=capacity, lookahead=1, algorithm=algorithm)
    packs = HEURISTICS[algorithm](sorted(sizes, reverse=True), plan)
    assert packs == PLAIN[algorithm](sizes, capacity)


@DECREASING
@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 40), max_size=120), lookahead=st.integers(1, 6))
def test_each_lookahead_is_packed_as_a_whole_and_nothing_carries_over(
    algorithm: PackingAlgorithm, sizes: list[int], lookahead: int
) -> None:
    plan = PackingPlan(capacity=40, lookahead=lookahead * 40, algorithm=algorithm)
    chunks: list[list[int]] = [[]]
    for size in sizes:
        if sum(chunks[-1]) >= plan.lookahead:
            chunks.append([])
        chunks[-1].append(size)
    expected = Counter(tuple(sorted(pack)) for chunk in chunks for pack in PLAIN[algorithm](chunk, 40))
    assert Counter(tuple(sorted(sizes[s] for s in pack)) for pack in packed(sizes, plan)) == expected


@DECREASING
def test_the_longest_samples_do_not_come_first(algorithm: PackingAlgorithm) -> None:
    """Packs leave by their oldest sample; as made, they would be a curriculum from long to short."""
    sizes = [1, 9] * 40
    packs = packed(sizes, PackingPlan(capacity=10, lookahead=800, algorithm=algorithm))
    assert packs == [[2 * i, 2 * i + 1] for i in range(40)]


# Degenerate streams ----------------------------------------------------------------------------------


def test_samples_of_a_whole_pack_are_packs_in_arrival_order() -> None:
    assert packed([7] * 20, PackingPlan(capacity=7, lookahead=28)) == [[i] for i in range(20)]


def test_samples_of_one_slot_fill_packs_in_arrival_order() -> None:
    packs = packed([1] * 50, PackingPlan(capacity=8, lookahead=16))
    assert packs == [list(range(i, min(i + 8, 50))) for i in range(0, 50, 8)]


def test_samples_just_over_half_a_pack_do_not_share_one() -> None:
    assert packed([5] * 9, PackingPlan(capacity=8, lookahead=32)) == [[i] for i in range(9)]


def test_small_samples_fill_up_packs_that_big_ones_dominate() -> None:
    """Taken in order, two small ones would share a pack, and a big one would go without."""
    sizes = [6, 2] * 20
    packs = packed(sizes, PackingPlan(capacity=8, lookahead=64))
    assert sorted(sum(sizes[sample] for sample in pack) for pack in packs) == [8] * 20


@given(count=st.integers(0, 20), lookahead=st.integers(1, 9))
def test_a_capacity_of_one_holds_one_sample_a_pack(count: int, lookahead: int) -> None:
    assert packed([1] * count, PackingPlan(capacity=1, lookahead=lookahead)) == [[i] for i in range(count)]


def test_one_segment_a_pack_keeps_the_arrival_order() -> None:
    sizes = log_normal(200, 512).tolist()
    packs = packed(sizes, PackingPlan(capacity=512, lookahead=2048, max_segments=1))
    assert packs == [[i] for i in range(200)]
