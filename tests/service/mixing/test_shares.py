"""Each source gets its share: within one sample of its weight after every draw, also where others end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_service.mixing.order import BlockFacts, MixBy, OnEnd, OrderCursor, SourceOrderPlan
from tests.service.mixing.test_order import Data, decode_order, plan_for, start, walk

LENGTHS = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 5000)), min_size=1, max_size=12)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[Data], list[SourceOrderPlan]]:
    """One to six sources of arbitrary weights and lengths; some repeat for ever, some end."""
    data: list[Data] = [[[lengths]] for lengths in draw(st.lists(LENGTHS, min_size=1, max_size=6))]
    plans = [
        plan_for(
            of_source,
            name=str(number),
            weight=draw(st.one_of(st.integers(1, 9), st.integers(1, 10_000))),
            epochs=draw(st.one_of(st.none(), st.integers(1, 4))),
        )
        for number, of_source in enumerate(data)
    ]
    return data, plans


SIZES: dict[MixBy, Callable[[int], int]] = {MixBy.TOKENS: lambda ids: ids, MixBy.SAMPLES: lambda ids: 1}


def worst_shares(order: OrderCursor, data: Sequence[Data], limit: int) -> Iterator[tuple[Fraction, int]]:
    """After each draw: how far any live source is off its share, and the largest sample of the mixture.

    Shares are of what was drawn since a source last ended.
    """
    size = SIZES[order.mixing.by]
    largest = max(size(ids) for of_source in data for ids in of_source[0][0])
    live, drawn = set(range(len(data))), Counter[int]()
    for draw in islice(walk(order, data), limit):
        drawn[draw.source] += size(draw.ids)
        weights = {number: order.sources[number].plan.weight for number in live}
        shares = {number: Fraction(weight, sum(weights.values())) for number, weight in weights.items()}
        yield max(abs(drawn[number] - share * drawn.total()) for number, share in shares.items()), largest
        if ended := {number for number in live if not order.sources[number].live}:
            live -= ended
            drawn.clear()


@pytest.mark.parametrize("by", MixBy)
@settings(max_examples=150)
@given(mixture=mixtures())
def test_each_source_is_within_one_sample_of_its_share_after_every_draw(
    by: MixBy, mixture: tuple[list[Data], list[SourceOrderPlan]]
) -> None:
    """For any number of sources. Where one ends, the shares from there on are those of the rest."""
    data, plans = mixture
    for off, largest in worst_shares(start(plans, by), data, 250):
        assert off <= largest


def test_many_sources_stay_within_one_sample_where_the_one_furthest_behind_would_not_be_enough() -> None:
    """Picking who is furthest behind its weight lets many long samples come at once, and one source pays for all."""
    lengths = random.Random(0)
    data: list[Data] = [[[[4000] * 40]] for _ in range(30)]
    data[-1] = [[[lengths.randint(1, 20) for _ in range(40)]]]
    plans = [plan_for(of_source, name=str(i), epochs=None) for i, of_source in enumerate(data)]
    plans[-1] = plan_for(data[-1], name="short", weight=30, epochs=None)
    assert max(off for off, _ in worst_shares(start(plans), data, 3000)) <= 4000
    behind = furthest_behind([of_source[0][0] for of_source in data], [plan.weight for plan in plans], 3000)
    assert behind > 10 * 4000


def furthest_behind(lengths: Sequence[Sequence[int]], weights: Sequence[int], draws: int) -> Fraction:
    """How far the rule "the least drawn by weight is next" lets a source fall behind its share."""
    drawn, worst = [0] * len(lengths), Fraction(0)
    for draw in range(draws):
        source = min(range(len(lengths)), key=lambda i: Fraction(drawn[i], weights[i]))
        drawn[source] += lengths[source][draw % len(lengths[source])]
        worst = max(worst, *(Fraction(w * sum(drawn), sum(weights)) - d for w, d in zip(weights, drawn, strict=True)))
    return worst


@pytest.mark.parametrize("by", MixBy)
def test_a_source_that_ends_is_not_made_up_for_and_leaves_nobody_to_catch_up(by: MixBy) -> None:
    """Whatever the others led or lagged by: from its end on, two equal sources take turns."""
    data: list[Data] = [[[[7, 900]]], [[[10] * 400]], [[[10] * 400]]]
    plans = [plan_for(data[0], name="a", weight=5), *(plan_for(d, name=n) for d, n in zip(data[1:], "bc", strict=True))]
    after = [draw.source for draw in walk(start(plans, by), data)]
    rest = after[after.index(0, after.index(0) + 1) + 1 :]
    assert all(abs(rest[:n].count(1) - rest[:n].count(2)) <= 1 for n in range(min(len(rest), 300)))


@settings(max_examples=60)
@given(mixture=mixtures(), by=st.sampled_from(MixBy))
def test_a_stream_that_stops_is_the_beginning_of_the_one_that_goes_on(
    mixture: tuple[list[Data], list[SourceOrderPlan]], by: MixBy
) -> None:
    data, plans = mixture
    stopping = start(plans, by, OnEnd.STOP)
    stopped = list(islice(walk(stopping, data), 300))
    going_on = list(islice(walk(start(plans, by), data), 300))
    assert stopped == going_on[: len(stopped)]
    if len(stopped) < 300:
        assert [source.live for source in stopping.sources].count(False) == 1
        assert decode_order(stopping.encode(), plans, stopping.mixing).choose([lambda: 1] * len(plans)) is None


def test_lengths_are_only_asked_for_where_they_decide() -> None:
    def asked() -> int:
        raise AssertionError

    assert start([plan_for([[[5]]])]).choose([asked]) == 0
    alone = start([plan_for([[[5]]]), plan_for([[[7]]], name="other")])
    alone.advance(0, 5, BlockFacts(1, None))
    assert alone.choose([asked] * 2) == 1


def test_by_samples_lengths_do_not_matter() -> None:
    data: list[Data] = [[[[10] * 100]], [[[1000]]]]
    plans = [plan_for(data[0], name="short", weight=3, epochs=None), plan_for(data[1], name="long", epochs=None)]
    drawn = Counter(draw.source for draw in islice(walk(start(plans, MixBy.SAMPLES), data), 400))
    assert drawn == {0: 300, 1: 100}


def test_mixing_counts_ids_and_not_samples() -> None:
    data: list[Data] = [[[[10] * 100]], [[[1000]]]]
    plans = [plan_for(data[0], name="short", epochs=None), plan_for(data[1], name="long", epochs=None)]
    drawn = Counter(draw.source for draw in islice(walk(start(plans), data), 1010))
    assert drawn == {0: 1000, 1: 10}


def test_a_source_that_ends_leaves_the_rest_going_on() -> None:
    data: list[Data] = [[[[10, 10]]], [[[10] * 7]], [[[10]]]]
    plans = [plan_for(of_source, name=str(i)) for i, of_source in enumerate(data)]
    draws = list(walk(start(plans), data))
    assert [draw.source for draw in draws] == [0, 1, 2, 0, 1, 1, 1, 1, 1, 1]
    assert [draw.source for draw in walk(start(plans, on_end=OnEnd.STOP), data)] == [0, 1, 2]
