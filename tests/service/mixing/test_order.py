"""The order of samples: by weight, each sample once an epoch, and the same after every restart."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import ConfigError, ProtocolError
from packhorse_service.mixing.open_blocks import SourcePlan
from packhorse_service.mixing.order import (
    BlockFacts,
    MixBy,
    Mixing,
    OnEnd,
    OrderCursor,
    SourceCursor,
    SourceOrderPlan,
    integer_weights,
)
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.sources.shards import Shard
from tests.service.corpus import mutated

STRIDE = 100  # bytes of a block

# Of one source: for each shard, for each block, the ids of its samples.
Data = Sequence[Sequence[Sequence[int]]]


class Draw(NamedTuple):
    source: int
    epoch: int
    shard: int
    sample: int  # within the shard
    ids: int


def plan_for(
    data: Data,
    *,
    name: str = "docs",
    weight: int = 1,
    epochs: int | None = 1,
    open_shards: int = 2,
    shuffle: bool = True,
    seed: int = 0,
) -> SourceOrderPlan:
    return SourceOrderPlan(
        name=name,
        shards=len(data),
        weight=weight,
        epochs=epochs,
        open_shards=open_shards,
        shuffle=shuffle,
        seed=seed,
    )


def start(plans: Sequence[SourceOrderPlan], by: MixBy = MixBy.TOKENS, on_end: OnEnd = OnEnd.GO_ON) -> OrderCursor:
    return OrderCursor.at_start(plans, Mixing(by, on_end))


def walk(order: OrderCursor, data: Sequence[Data]) -> Iterator[Draw]:
    """Draw samples until the end of the mixture."""

    def next_ids(source: int) -> int:
        at = order.sources[source].current
        return data[source][at.shard][at.offset // STRIDE][at.index]

    of_each = [partial(next_ids, source) for source in range(len(order.sources))]
    while (source := order.choose(of_each)) is not None:
        at, epoch, ids = order.sources[source].current, order.sources[source].epoch, next_ids(source)
        blocks, number = data[source][at.shard], at.offset // STRIDE
        facts = BlockFacts(len(blocks[number]), None if number + 1 == len(blocks) else (number + 1) * STRIDE)
        draw = Draw(source, epoch, at.shard, at.first_sample + at.index, ids)
        order.advance(source, ids, facts)
        yield draw


def decode_order(encoded: bytes, plans: Sequence[SourceOrderPlan], mixing: Mixing) -> OrderCursor:
    rest, places = memoryview(encoded), []
    for plan in plans:
        place, rest = SourceCursor.decode(plan, rest)
        places.append(place)
    assert not rest
    return OrderCursor(places, mixing)


def all_samples(data: Data) -> Counter[tuple[int, int]]:
    return Counter((shard, sample) for shard, blocks in enumerate(data) for sample in range(sum(map(len, blocks))))


BLOCKS = st.lists(st.integers(2, 50), min_size=1, max_size=4)
SOURCES = st.lists(st.lists(BLOCKS, min_size=1, max_size=3), min_size=1, max_size=5)
OPEN_SHARDS = st.integers(1, 4)


# Weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "integers"),
    [
        ([1.0], [1]),
        ([0.5, 0.3, 0.2], [5, 3, 2]),
        ([0.1, 0.25, 3], [2, 5, 60]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),  # as decimals: in binary, 0.1 + 0.2 is not 0.3
        ([1, 2], [1, 2]),
    ],
)
def test_weights_are_read_as_decimals(weights: list[float], integers: list[int]) -> None:
    assert integer_weights(weights) == integers


@given(weights=st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=5))
def test_every_positive_weight_becomes_a_positive_integer_or_is_refused(weights: list[float]) -> None:
    with contextlib.suppress(ConfigError):
        assert all(weight > 0 for weight in integer_weights(weights))


@given(weights=st.lists(st.decimals(min_value="0.001", max_value=1000, places=3).map(float), min_size=1, max_size=5))
def test_integers_have_the_ratio_of_the_weights(weights: list[float]) -> None:
    integers = integer_weights(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    assert [Fraction(a, integers[0]) for a in integers] == [b / exact[0] for b in exact]


# Epochs and shards -----------------------------------------------------------------------------------


@settings(max_examples=80)
@given(data=SOURCES, open_shards=OPEN_SHARDS, epochs=st.integers(1, 3), shuffle=st.booleans())
def test_each_sample_of_a_finite_source_comes_once_an_epoch(
    data: Data, open_shards: int, epochs: int, shuffle: bool
) -> None:
    plan = plan_for(data, open_shards=open_shards, epochs=epochs, shuffle=shuffle)
    draws = list(walk(start([plan]), [data]))
    assert [draw.epoch for draw in draws] == sorted(draw.epoch for draw in draws)
    for epoch in range(epochs):
        assert Counter((d.shard, d.sample) for d in draws if d.epoch == epoch) == all_samples(data)


@settings(max_examples=40)
@given(data=SOURCES, open_shards=OPEN_SHARDS, seed=st.integers(0, 100))
def test_each_run_gives_the_same_order(data: Data, open_shards: int, seed: int) -> None:
    plan = plan_for(data, open_shards=open_shards, epochs=2, seed=seed)
    assert list(walk(start([plan]), [data])) == list(walk(start([plan]), [data]))


@settings(max_examples=40)
@given(data=SOURCES, open_shards=OPEN_SHARDS)
def test_samples_of_a_shard_come_in_its_order(data: Data, open_shards: int) -> None:
    """The loader reads a shard forward; samples are shuffled within a block, by the stream."""
    draws = list(walk(start([plan_for(data, open_shards=open_shards)]), [data]))
    for shard in range(len(data)):
        of_shard = [draw.sample for draw in draws if draw.shard == shard]
        assert of_shard == sorted(of_shard)


def opened_in(plan: SourceOrderPlan, epochs: int) -> list[tuple[int, ...]]:
    """In which order each epoch opens the shards."""
    data: Data = [[[2]]] * plan.shards
    draws = list(islice(walk(start([plan]), [data]), plan.shards * epochs))
    return [tuple(draw.shard for draw in draws if draw.epoch == epoch) for epoch in range(epochs)]


def test_each_epoch_has_another_order() -> None:
    assert len(set(opened_in(plan_for([[[2]]] * 12, epochs=None), epochs=20))) == 20


def test_the_seed_and_the_name_of_a_source_decide_its_order() -> None:
    data: Data = [[[2]]] * 12
    orders = [opened_in(plan_for(data, name=name, seed=seed), 1)[0] for name in ("a", "b") for seed in range(5)]
    assert len(set(orders)) == 10


def test_the_order_of_shards_never_changes() -> None:
    assert opened_in(plan_for([[[2]]] * 8, name="docs", seed=3, epochs=None), 3) == GOLDEN_SHARDS


GOLDEN_SHARDS = [(3, 6, 0, 2, 5, 1, 7, 4), (0, 5, 4, 2, 7, 3, 1, 6), (4, 5, 6, 7, 3, 2, 1, 0)]


def test_without_shuffling_shards_come_as_they_are_listed() -> None:
    assert opened_in(plan_for([[[2]]] * 5, shuffle=False, open_shards=1, epochs=2), 2) == [(0, 1, 2, 3, 4)] * 2


def test_open_shards_give_one_sample_each_in_turn() -> None:
    data: Data = [[[2, 2, 2]], [[2], [2]], [[2, 2]]]  # shard 1 ends first; 2 takes its place
    draws = list(walk(start([plan_for(data, open_shards=2, shuffle=False)]), [data]))
    assert [(draw.shard, draw.sample) for draw in draws] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0), (2, 1)]


def test_a_shard_that_ends_without_another_to_open_leaves_the_turn_to_the_one_behind_it() -> None:
    data: Data = [[[2, 2, 2]], [[2]], [[2, 2]]]
    draws = list(walk(start([plan_for(data, open_shards=3, shuffle=False)]), [data]))
    assert [draw.shard for draw in draws] == [0, 1, 2, 0, 2, 0]


@settings(max_examples=40)
@given(data=SOURCES, open_shards=OPEN_SHARDS)
def test_no_more_shards_are_open_than_allowed(data: Data, open_shards: int) -> None:
    order = start([plan_for(data, open_shards=open_shards, epochs=2)])
    for _ in walk(order, [data]):
        assert len(order.sources[0].open) <= min(open_shards, len(data))


def test_the_next_shard_is_the_one_that_opens_next() -> None:
    data: Data = [[[2]]] * 6
    order = start([plan_for(data, open_shards=2, epochs=2)])
    place = order.sources[0]
    for _ in range(10):
        expected, opened_before = place.upcoming_shard(), {(place.epoch, shard.shard) for shard in place.open}
        next(walk(order, [data]))
        opened = {(place.epoch, shard.shard) for shard in place.open} - opened_before
        assert expected in {shard for _, shard in opened} or not opened


# Saving and restoring --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    data=st.lists(SOURCES, min_size=1, max_size=3),
    open_shards=OPEN_SHARDS,
    weight=st.integers(1, 5),
    mixing=st.builds(Mixing, st.sampled_from(MixBy), st.sampled_from(OnEnd)),
)
def test_an_order_goes_on_the_same_from_every_point(
    data: list[Data], open_shards: int, weight: int, mixing: Mixing
) -> None:
    plans = [
        plan_for(of_source, name=str(i), weight=weight + i, epochs=2, open_shards=open_shards)
        for i, of_source in enumerate(data)
    ]
    whole = list(walk(start(plans, mixing.by, mixing.on_end), data))
    order = start(plans, mixing.by, mixing.on_end)
    for drawn in range(0, len(whole) + 1, 3):
        encoded = order.encode()
        again = decode_order(encoded, plans, mixing)
        assert again.encode() == encoded
        assert list(walk(again, data)) == whole[drawn:]
        list(islice(walk(order, data), 3))


def test_a_clone_goes_its_own_way() -> None:
    data: Data = [[[2, 3, 4], [5, 6]], [[7, 8]]]
    order = start([plan_for(data)])
    clone, before = order.clone(), order.encode()
    whole = list(walk(clone, [data]))
    assert order.encode() == before
    assert list(walk(order, [data])) == whole


def test_faults_are_counted_and_saved() -> None:
    plan = plan_for([[[2, 2, 2]]])
    order = start([plan])
    for faults in (1, 0, 1):
        order.sources[0].faults += faults
        order.advance(0, 5, BlockFacts(9, None))
    again, _ = SourceCursor.decode(plan, memoryview(order.encode()))
    assert (again.faults, again.drawn) == (2, 15)


def test_a_place_cut_short_is_refused() -> None:
    plan = plan_for([[[2]]] * 4)
    encoded = SourceCursor.at_start(plan).encode()
    for length in range(len(encoded)):
        with pytest.raises(ProtocolError, match="'docs'"):
            SourceCursor.decode(plan, memoryview(encoded[:length]))


def test_mutated_places_are_refused_or_lie_within_the_plan() -> None:
    data: Data = [[[2, 3], [4]]] * 5
    plan = plan_for(data, open_shards=3, epochs=3)
    order = start([plan])
    list(islice(walk(order, [data]), 4))
    honest = order.encode()
    mutate = random.Random(1)
    for _ in range(20_000):
        place = decode_or_refuse(plan, mutated(honest, mutate))
        if place is not None:
            assert len(place.open) <= plan.open_shards
            assert all(shard.shard < plan.shards for shard in place.open)
            assert place.epoch < 3
            assert place.opened <= plan.shards
            assert not place.live or place.current


def test_a_place_with_a_shard_open_twice_is_refused() -> None:
    plan = plan_for([[[2]]] * 4, open_shards=2)
    place = SourceCursor.at_start(plan)
    place.open[1].shard = place.open[0].shard
    with pytest.raises(ProtocolError):
        SourceCursor.decode(plan, memoryview(place.encode()))


def test_a_place_with_a_shard_that_is_not_opened_yet_is_refused() -> None:
    """It would be read again when its turn comes, and the one it stands for never."""
    plan = plan_for([[[2]]] * 4, open_shards=2)
    place = SourceCursor.at_start(plan)
    unopened = ({0, 1, 2, 3} - {shard.shard for shard in place.open}).pop()
    place.open[0].shard = unopened
    with pytest.raises(ProtocolError):
        SourceCursor.decode(plan, memoryview(place.encode()))


def test_a_place_without_open_shards_before_the_end_of_its_epochs_is_refused() -> None:
    """The source would seem to have ended, and an endless one never ends."""
    plan = plan_for([[[2]]] * 4, open_shards=2, epochs=None)
    place = SourceCursor.at_start(plan)
    place.open.clear()
    with pytest.raises(ProtocolError):
        SourceCursor.decode(plan, memoryview(place.encode()))


def test_a_source_that_has_ended_with_a_share_drawn_is_refused() -> None:
    """When a source ends, all begin anew."""
    data: Data = [[[2, 3]]]
    order = start([plan_for(data)])
    assert list(walk(order, [data]))
    order.sources[0].drawn = 1
    with pytest.raises(ProtocolError):
        SourceCursor.decode(order.sources[0].plan, memoryview(order.encode()))


def decode_or_refuse(plan: SourceOrderPlan, data: bytes) -> SourceCursor | None:
    try:
        return SourceCursor.decode(plan, memoryview(data))[0]
    except ProtocolError:
        return None


# Plans that check themselves -------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"weight": 0}, {"epochs": 0}, {"open_shards": 0}])
def test_a_plan_that_gives_no_order_is_refused_with_its_source_and_number(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"source 'docs': {name}=0 must be at least 1"):
        plan_for([[[2]]], **wrong)  # type: ignore[arg-type]


def test_a_plan_without_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match="shards=0"):
        plan_for([])


@pytest.mark.parametrize(
    ("shards", "budget", "said"), [(1, 0, "1 shards, and an order of 2"), (2, -1, "skip_budget=-1")]
)
def test_a_source_whose_parts_do_not_fit_is_refused(shards: int, budget: int, said: str) -> None:
    named = tuple(Shard(f"{i}.tar", f"/{i}.tar", 512) for i in range(shards))
    with pytest.raises(ConfigError, match=said):
        SourcePlan(order=plan_for([[[2]]] * 2), shards=named, over_length=OverLength.SPLIT, skip_budget=budget)
