"""How full packs are, how long samples wait, how evenly long ones are spread: on seeded streams and real lengths."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from packhorse_service.packing.decreasing import first_fit_decreasing
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingPlan
from tests.length_streams import (
    LONG,
    STREAMS,
    Lengths,
    bimodal,
    fill_of,
    in_arrival_order,
    length_files,
    log_normal,
    mixture,
    packs_of,
    shares_of,
    tiled,
    uniform,
)
from tests.shared_data import shared

COUNT = 20_000


def packer(capacity: int, lookahead: float) -> FifoExactTailPacker:
    """``lookahead`` in packs' worth."""
    return FifoExactTailPacker(PackingPlan(capacity=capacity, lookahead=int(lookahead * capacity)))


def steady_fill(lengths: Lengths, capacity: int, lookahead: int) -> float:
    """Share of slots that are filled while samples still arrive."""
    sizes: list[int] = lengths.tolist()
    packs = list(packs_of(sizes, packer(capacity, lookahead), drain=False))
    assert len(packs) > 4 * lookahead
    return fill_of(packs, sizes, capacity)


def waits_of(lengths: Lengths, capacity: int, lookahead: int) -> tuple[int, int]:
    """(packs made between a sample's arrival and its leaving, places it left later than it arrived), at most."""
    fed, made, place = packer(capacity, lookahead), 0, 0
    arrived_at: dict[int, int] = {}
    longest = latest = 0
    arrivals = enumerate(lengths.tolist())
    while True:
        while fed.wants_more and (arrival := next(arrivals, None)) is not None:
            fed.add(*arrival)
            arrived_at[arrival[0]] = made
        if not len(fed):
            return longest, latest
        for sample in fed.next_pack():
            longest, latest = max(longest, made - arrived_at[sample]), max(latest, place - sample)
            place += 1
        made += 1


# Fill -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("capacity", "lookahead", "least"),
    [(8192, 16, 0.999), (32_768, 16, 0.999), (4096, 64, 0.997), (8192, 64, 0.9998), (32_768, 64, 0.9998)],
)
@pytest.mark.parametrize("stream", ["log-normal", "bimodal"])
def test_packs_of_realistic_streams_are_full(
    stream: str, capacity: int, lookahead: int, least: float, seed: int
) -> None:
    assert steady_fill(STREAMS[stream](2 * COUNT, capacity, seed), capacity, lookahead) >= least


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [4096, 8192, 32_768])
def test_packs_of_uniform_lengths_are_98_percent_full(capacity: int, seed: int) -> None:
    assert steady_fill(uniform(COUNT, capacity, seed), capacity, 64) >= 0.98


@pytest.mark.parametrize("multiple", [8, 16, 32])
@pytest.mark.parametrize("stream", ["log-normal", "bimodal"])
def test_useful_fill_is_what_alignment_leaves(stream: str, multiple: int) -> None:
    """Padding each sample to a multiple bounds it; packing loses less than a tenth of a point more."""
    lengths = STREAMS[stream](2 * COUNT, 8192, 0)
    units = -(-lengths // multiple)
    packs = list(packs_of(units.tolist(), packer(8192 // multiple, 64), drain=False))
    packed = np.fromiter(chain.from_iterable(packs), int)
    bound = lengths[packed].sum() / (units[packed].sum() * multiple)
    assert lengths[packed].sum() / (len(packs) * 8192) >= bound - 0.001


@pytest.mark.parametrize("capacity", [8193, 8191, 3])
def test_capacities_that_are_no_power_of_two_fill_as_well(capacity: int) -> None:
    assert steady_fill(1 + log_normal(COUNT, 8192) * capacity // 8200, capacity, 16) >= 0.999


@pytest.mark.parametrize("capacity", [4096, 8192, 32_768])
def test_real_lengths_never_need_more_packs_than_first_fit_decreasing_over_chunks(capacity: int) -> None:
    """At a lookahead of as many samples as a chunk has; to the end, where ours drains what it looked ahead."""
    shared("data/lengths")
    more = {}
    for name in length_files():
        lengths = tiled(name, capacity)
        ours = len(list(packs_of(lengths.tolist(), packer(capacity, 1000 * lengths.mean() / capacity))))
        theirs = sum(len(packs) for packs in chunks_of(lengths, capacity))
        if ours > theirs:
            more[name] = (ours, theirs)
    assert more == {}


def chunks_of(lengths: Lengths, capacity: int) -> list[list[list[int]]]:
    """First-fit decreasing over chunks of 1,000."""
    plan = PackingPlan(capacity=capacity, lookahead=1)
    chunks = (lengths[start : start + 1000] for start in range(0, len(lengths), 1000))
    return [first_fit_decreasing(np.sort(chunk)[::-1].tolist(), plan) for chunk in chunks]


# Order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [64, 128])
@pytest.mark.parametrize("capacity", [8192, 32_768])
@pytest.mark.parametrize("stream", STREAMS)
def test_no_sample_waits_longer_than_twice_the_lookahead(stream: str, capacity: int, lookahead: int) -> None:
    assert waits_of(STREAMS[stream](COUNT, capacity, 0), capacity, lookahead)[0] <= 2 * lookahead


@pytest.mark.parametrize("capacity", [8192, 32_768])
@pytest.mark.parametrize("stream", ["log-normal", "bimodal"])
def test_samples_leave_at_most_400_places_late(stream: str, capacity: int) -> None:
    assert waits_of(STREAMS[stream](COUNT, capacity, 0), capacity, 64)[1] <= 400


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("stream", ["mixture", "bimodal"])
def test_the_share_of_long_samples_varies_no_more_than_in_arrival_order(stream: str, seed: int) -> None:
    """By steps of 64 packs, at a lookahead of as many."""
    capacity, count = 32_768, 150_000
    if stream == "mixture":
        lengths, long = mixture(count, capacity, seed)
    else:
        lengths = bimodal(count, capacity, seed)
        long = lengths >= LONG
    sizes = lengths.tolist()
    ours = shares_of(list(packs_of(sizes, packer(capacity, 64), drain=False)), lengths, long, 64)
    theirs = shares_of(in_arrival_order(sizes, capacity), lengths, long, 64)
    assert np.std(ours) <= 1.05 * np.std(theirs)
