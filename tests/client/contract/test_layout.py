"""Ranks and coordinates name the same places, in Megatron's order or any other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.errors import ConfigError
from tests.strategies import ORDERS, layouts


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one(layout: ParallelLayout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(at) for at in places] == list(range(layout.world_size))
    assert set(places) == {
        Coordinates(data, context, tensor, pipeline)
        for data in range(layout.data)
        for context in range(layout.context)
        for tensor in range(layout.tensor)
        for pipeline in range(layout.pipeline)
    }


@given(layouts())
def test_the_first_axis_of_the_order_varies_fastest_and_the_last_slowest(layout: ParallelLayout) -> None:
    names = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    slowest_first = [names[short] for short in reversed(layout.order.split("-"))]
    keys = [
        tuple(getattr(layout.coordinates(rank), axis) for axis in slowest_first) for rank in range(layout.world_size)
    ]
    assert keys == sorted(keys)


# Megatron-LM, parallel_state.py, the groups that its docstring lists for 16 GPUs with TP 2 and PP 4.
def test_megatrons_own_example_of_sixteen_ranks() -> None:
    layout = ParallelLayout(tensor=2, data=2, pipeline=4)

    def groups(axis: str) -> list[list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(16):
            at = layout.coordinates(rank)._asdict()
            del at[axis]
            found.setdefault(tuple(at.values()), []).append(rank)
        return sorted(found.values())

    assert groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups("tensor") == [[2 * i, 2 * i + 1] for i in range(8)]
    assert groups("pipeline") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


@pytest.mark.parametrize(
    ("order", "rank", "at"),
    [
        ("tp-cp-dp-pp", 1, Coordinates(data=0, context=0, tensor=1, pipeline=0)),
        ("tp-cp-dp-pp", 2, Coordinates(data=0, context=1, tensor=0, pipeline=0)),
        ("tp-cp-dp-pp", 4, Coordinates(data=1, context=0, tensor=0, pipeline=0)),
        ("tp-cp-dp-pp", 8, Coordinates(data=0, context=0, tensor=0, pipeline=1)),
        ("tp-cp-pp-dp", 4, Coordinates(data=0, context=0, tensor=0, pipeline=1)),
        ("tp-cp-pp-dp", 8, Coordinates(data=1, context=0, tensor=0, pipeline=0)),
        ("dp-pp-tp-cp", 1, Coordinates(data=1, context=0, tensor=0, pipeline=0)),
    ],
)
def test_neighbours_by_order(order: str, rank: int, at: Coordinates) -> None:
    assert ParallelLayout(data=2, context=2, tensor=2, pipeline=2, order=order).coordinates(rank) == at


def test_the_default_order_is_megatrons() -> None:
    assert ParallelLayout().order == "tp-cp-dp-pp"


@pytest.mark.parametrize("axis", ["data", "context", "tensor", "pipeline"])
@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True, None])
def test_a_size_that_is_not_a_positive_integer_is_refused_by_field_and_value(axis: str, size: object) -> None:
    sizes: dict[str, Any] = {axis: size}
    with pytest.raises(ConfigError, match=rf"layout\.{axis}={size!r}"):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    "order", ["", "tp", "tp-cp-dp", "tp-cp-dp-dp", "tp-ep-cp-ep-dp-pp", "tp-cp-gtp_remat-dp-pp", "tp,cp,dp,pp"]
)
def test_an_order_that_does_not_name_each_axis_once_is_refused_by_field_and_value(order: str) -> None:
    with pytest.raises(ConfigError, match=rf"layout\.order='{order}'.*tp-cp-dp-pp"):
        ParallelLayout(order=order)


@pytest.mark.parametrize("order", [None, 4, ("tp", "cp", "dp", "pp")])
def test_an_order_that_is_no_text_is_refused_by_field_and_value(order: Any) -> None:
    with pytest.raises(ConfigError, match=r"layout\.order="):
        ParallelLayout(order=order)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "ep-tp-cp-dp-pp", "TP-CP-DP-PP", "tp-cp-dp-pp-ep"])
def test_an_order_is_read_as_megatron_reads_it_and_the_expert_axis_places_nobody(order: str) -> None:
    assert ParallelLayout(data=2, pipeline=2, order=order) == ParallelLayout(data=2, pipeline=2)


def test_stages_of_prediction_layers_are_named_once_in_order_and_the_last_needs_no_naming() -> None:
    stages: Any = [2, 1, 2, 3]
    assert ParallelLayout(pipeline=4, mtp_stages=stages).mtp_stages == (1, 2)
    assert ParallelLayout(mtp_stages=(0,)) == ParallelLayout()


@pytest.mark.parametrize("stages", [(4,), (-1,), 2, "2", (True,), (1.0,), None])
def test_a_stage_that_the_pipeline_does_not_have_is_refused_by_field_and_value(stages: Any) -> None:
    with pytest.raises(ConfigError, match=r"layout\.mtp_stages="):
        ParallelLayout(pipeline=4, mtp_stages=stages)


@given(layouts(), st.sampled_from(ORDERS))
def test_orders_place_alike_exactly_where_every_rank_has_the_same_coordinates(
    layout: ParallelLayout, order: str
) -> None:
    other = replace(layout, order=order)
    alike = [layout.coordinates(rank) for rank in range(layout.world_size)] == [
        other.coordinates(rank) for rank in range(layout.world_size)
    ]
    assert layout.places_as(other) == other.places_as(layout) == alike


@pytest.mark.parametrize("value", [1, "yes", None])
def test_sequence_parallel_is_a_bool(value: object) -> None:
    """Not a bool would pass here and be refused by the server as a malformed HELLO."""
    settings: dict[str, Any] = {"sequence_parallel": value}
    with pytest.raises(ConfigError, match=r"layout\.sequence_parallel"):
        ParallelLayout(**settings)


@given(layouts(), st.integers(-3, 300))
def test_a_rank_outside_the_layout_is_refused_by_value(layout: ParallelLayout, rank: int) -> None:
    if 0 <= rank < layout.world_size:
        assert layout.rank(layout.coordinates(rank)) == rank
    else:
        with pytest.raises(ConfigError, match=rf"rank={rank} is outside .* 0 to {layout.world_size - 1}"):
            layout.coordinates(rank)


def test_a_layout_prints_every_degree() -> None:
    assert str(ParallelLayout(data=4, context=2, tensor=8, pipeline=3, sequence_parallel=True)) == "DP4·CP2·TP8·PP3 SP"
    assert str(Coordinates(data=1, context=2, tensor=3, pipeline=4)) == "dp1·cp2·tp3·pp4"
