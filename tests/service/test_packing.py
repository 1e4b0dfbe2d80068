"""Packs lose nothing, starve nothing and are full; they follow from the arrivals alone."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_service.packing import Packer, PackingPlan

CAPACITIES = st.integers(1, 200)


def packs_of(
    sizes: Iterable[int], plan: PackingPlan, packer: Packer | None = None, first: int = 0
) -> Iterator[list[int]]:
    """Pack samples of these sizes, numbered from ``first`` in arrival order, until none is pending."""
    packer = Packer(plan) if packer is None else packer
    arrivals = enumerate(sizes, first)
    while True:
        while packer.wants_more and (arrival := next(arrivals, None)) is not None:
            packer.add(*arrival)
        if not len(packer):
            return
        yield packer.next_pack()


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], PackingPlan]:
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
    plan = PackingPlan(capacity=capacity, lookahead=lookahead, max_segments=limit)
    return draw(st.lists(size, max_size=120)), plan


STREAMS = streams()


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_every_sample_is_packed_once_and_no_pack_is_over_its_limits(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packs = list(packs_of(sizes, plan))
    assert sorted(chain.from_iterable(packs)) == list(range(len(sizes)))
    for pack in packs:
        assert 1 <= sum(sizes[sample] for sample in pack) <= plan.capacity
        assert plan.max_segments is None or len(pack) <= plan.max_segments


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_the_oldest_pending_sample_seeds_every_pack(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packed: set[int] = set()
    for pack in packs_of(sizes, plan):
        assert pack[0] == min(set(range(len(sizes))) - packed)
        packed.update(pack)


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_samples_of_one_size_leave_in_arrival_order(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    leaving: dict[int, list[int]] = defaultdict(list)
    for sample in chain.from_iterable(packs_of(sizes, plan)):
        leaving[sizes[sample]].append(sample)
    assert all(samples == sorted(samples) for samples in leaving.values())


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_no_pack_leaves_out_a_pending_sample_that_fits(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packer = Packer(plan)
    for pack in packs_of(sizes, plan, packer):
        room = plan.capacity - sum(sizes[sample] for sample in pack)
        if plan.max_segments is None or len(pack) < plan.max_segments:
            assert all(units > room for _, units in packer.pending())


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_the_counts_of_what_is_pending_are_exact(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packer = Packer(plan)
    for _ in packs_of(sizes, plan, packer):
        pending = list(packer.pending())
        assert pending == sorted(pending)
        assert len(packer) == len(pending)
        assert packer.units == sum(units for _, units in pending)
        assert packer.wants_more == (packer.units < plan.lookahead)


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_the_lookahead_bounds_what_is_pending(stream: tuple[list[int], PackingPlan]) -> None:
    sizes, plan = stream
    packer = Packer(plan)
    for _ in packs_of(sizes, plan, packer):
        assert packer.units < plan.lookahead + plan.capacity


@settings(max_examples=60, deadline=None)
@given(STREAMS)
def test_a_packer_rebuilt_from_what_is_pending_goes_on_the_same_at_any_point(
    stream: tuple[list[int], PackingPlan],
) -> None:
    sizes, plan = stream
    whole = list(packs_of(sizes, plan))
    assert whole == list(packs_of(sizes, plan))
    packer, arrived = Packer(plan), 0
    for made in range(len(whole)):
        rebuilt = Packer(plan)
        for sample, units in packer.pending():
            rebuilt.add(sample, units)
        assert list(packs_of(sizes[arrived:], plan, rebuilt, first=arrived)) == whole[made:]
        while packer.wants_more and arrived < len(sizes):
            packer.add(arrived, sizes[arrived])
            arrived += 1
        assert packer.next_pack() == whole[made]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 32), max_size=60), lookahead=st.integers(1, 4))
def test_a_pack_closes_at_least_as_well_as_the_best_single_or_pair(sizes: list[int], lookahead: int) -> None:
    plan = PackingPlan(capacity=32, lookahead=lookahead * 32)
    packer, arrived = Packer(plan), 0
    while arrived < len(sizes) or len(packer):
        while packer.wants_more and arrived < len(sizes):
            packer.add(arrived, sizes[arrived])
            arrived += 1
        pending = list(packer.pending())
        pack = packer.next_pack()
        taken, room = in_order(pending, plan)
        if pack[: len(taken)] == taken:  # else big samples dominate, and the order does not count
            rest = [units for sample, units in pending if sample not in taken]
            closings = [(), *combinations(rest, 1), *combinations(rest, 2)]
            best = max(sum(closing) for closing in closings if sum(closing) <= room)
            assert sum(sizes[sample] for sample in pack) >= plan.capacity - room + best


def in_order(pending: list[tuple[int, int]], plan: PackingPlan) -> tuple[list[int], int]:
    """What is taken in arrival order until a quarter of the pack is left, and the room that is then left."""
    taken: list[int] = []
    room = plan.capacity
    for sample, units in pending:
        if taken and room * 4 <= plan.capacity:
            break
        if units <= room:
            taken.append(sample)
            room -= units
    return taken, room


def test_the_packs_of_a_stream_never_change() -> None:
    sizes = [5, 9, 3, 2, 8, 8, 1, 1, 4, 6, 7, 2, 3, 9, 9, 9, 1, 5, 5, 2, 7, 4, 1, 3, 16, 6]
    assert list(packs_of(sizes, PackingPlan(capacity=16, lookahead=64))) == GOLDEN_PACKS


GOLDEN_PACKS = [
    [0, 1, 3],
    [2, 4, 6, 8],
    [5, 7, 9, 16],
    [10, 11, 12, 21],
    [13, 20],
    [14, 17, 19],
    [15, 18, 22],
    [23, 25],
    [24],
]


# Fill and waiting ------------------------------------------------------------------------------------


def log_normal(count: int, capacity: int, seed: int = 0) -> list[int]:
    """Sample lengths of a chat set: mean about 500, sigma 1.2, at most a pack."""
    drawn = np.random.default_rng(seed).lognormal(np.log(500) - 1.2**2 / 2, 1.2, count)
    lengths: list[int] = np.clip(drawn.astype(int), 1, capacity).tolist()
    return lengths


def uniform(count: int, capacity: int, seed: int = 0) -> list[int]:
    lengths: list[int] = np.random.default_rng(seed).integers(1, capacity + 1, count).tolist()
    return lengths


def steady_fill(sizes: Sequence[int], plan: PackingPlan) -> float:
    """Share of slots that are filled while samples still arrive: the last lookahead of packs is left out."""
    packs = list(packs_of(sizes, plan))
    steady = packs[: -2 * plan.lookahead // plan.capacity]
    assert len(steady) > 100
    return sum(sizes[sample] for pack in steady for sample in pack) / (len(steady) * plan.capacity)


def longest_wait(sizes: Sequence[int], plan: PackingPlan) -> int:
    """Packs made between a sample's arrival and its leaving, at most."""
    packer, made, arrived_at = Packer(plan), 0, {}
    arrivals, waits = deque(enumerate(sizes)), [0]
    while arrivals or len(packer):
        while packer.wants_more and arrivals:
            sample, units = arrivals.popleft()
            packer.add(sample, units)
            arrived_at[sample] = made
        waits += [made - arrived_at[sample] for sample in packer.next_pack()]
        made += 1
    return max(waits)


@pytest.mark.parametrize("seed", [0, 1])
def test_realistic_streams_fill_999_slots_of_1000_with_16_packs_lookahead(seed: int) -> None:
    plan = PackingPlan(capacity=8192, lookahead=16 * 8192)
    assert steady_fill(log_normal(20_000, 8192, seed), plan) >= 0.999


def test_alignment_does_not_lower_the_fill() -> None:
    """Sizes are in units of 16 slots."""
    units = [-(-length // 16) for length in log_normal(20_000, 8192)]
    assert steady_fill(units, PackingPlan(capacity=512, lookahead=16 * 512)) >= 0.999


@pytest.mark.parametrize("seed", [0, 1])
def test_uniform_lengths_fill_97_slots_of_100_with_64_packs_lookahead(seed: int) -> None:
    plan = PackingPlan(capacity=8192, lookahead=64 * 8192)
    assert steady_fill(uniform(3_000, 8192, seed), plan) >= 0.97


@pytest.mark.parametrize("lookahead", [64, 128])
@pytest.mark.parametrize("lengths", [log_normal(16_000, 8192), uniform(3_000, 8192)], ids=["log-normal", "uniform"])
def test_no_sample_waits_longer_than_twice_the_lookahead(lengths: list[int], lookahead: int) -> None:
    assert longest_wait(lengths, PackingPlan(capacity=8192, lookahead=lookahead * 8192)) <= 2 * lookahead


# Degenerate streams ----------------------------------------------------------------------------------


def test_samples_of_a_whole_pack_are_packs_in_arrival_order() -> None:
    assert list(packs_of([7] * 20, PackingPlan(capacity=7, lookahead=28))) == [[i] for i in range(20)]


def test_samples_of_one_slot_fill_packs_in_arrival_order() -> None:
    packs = list(packs_of([1] * 50, PackingPlan(capacity=8, lookahead=16)))
    assert packs == [list(range(i, min(i + 8, 50))) for i in range(0, 50, 8)]


def test_samples_just_over_half_a_pack_do_not_share_one() -> None:
    assert list(packs_of([5] * 9, PackingPlan(capacity=8, lookahead=32))) == [[i] for i in range(9)]


def test_small_samples_fill_up_packs_that_big_ones_dominate() -> None:
    """Taken in order, two small ones would share a pack, and a big one would go without."""
    sizes = [6, 2] * 20
    packs = list(packs_of(sizes, PackingPlan(capacity=8, lookahead=64)))
    assert sorted(sum(sizes[sample] for sample in pack) for pack in packs) == [8] * 20


@given(count=st.integers(0, 20), lookahead=st.integers(1, 9))
def test_a_capacity_of_one_holds_one_sample_a_pack(count: int, lookahead: int) -> None:
    assert list(packs_of([1] * count, PackingPlan(capacity=1, lookahead=lookahead))) == [[i] for i in range(count)]


def test_one_segment_a_pack_keeps_the_arrival_order() -> None:
    sizes = log_normal(200, 512)
    packs = list(packs_of(sizes, PackingPlan(capacity=512, lookahead=2048, max_segments=1)))
    assert packs == [[i] for i in range(200)]


@pytest.mark.parametrize("capacity", [8193, 8191, 3])
def test_capacities_that_are_no_power_of_two_fill_as_well(capacity: int) -> None:
    plan = PackingPlan(capacity=capacity, lookahead=16 * capacity)
    assert steady_fill([1 + size * capacity // 8200 for size in log_normal(8_000, 8192)], plan) >= 0.999
