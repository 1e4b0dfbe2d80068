"""Ranks stand where Megatron-Core's own generators and grids put them, in every order that a layout has."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core", exc_type=ImportError)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of accelerator libraries that are not here
    from megatron.core.parallel_state import RankGenerator

from packhorse import ParallelLayout
from tests.strategies import layouts

AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}


def disagreements(layout: ParallelLayout, order: str) -> list[str]:
    """Axes along which Megatron-Core groups other ranks than those that differ in that coordinate alone."""
    sizes = {short: getattr(layout, axis) for short, axis in AXES.items()}
    generator = RankGenerator(**sizes, ep=1, order=order)
    return [short for short in AXES if sorted(generator.get_ranks(short)) != sorted(groups(layout, AXES[short]))]


def groups(layout: ParallelLayout, axis: str) -> list[list[int]]:
    found: dict[Any, list[int]] = {}
    for rank in range(layout.world_size):
        found.setdefault(layout.coordinates(rank)._replace(**{axis: 0}), []).append(rank)
    return list(found.values())


@given(layouts())
def test_every_order_places_ranks_as_the_generator_does(layout: ParallelLayout) -> None:
    assert disagreements(layout, layout.order) == []


@given(layouts(max_degree=3), st.integers(0, 4))
def test_the_expert_axis_of_an_order_moves_nobody(layout: ParallelLayout, at: int) -> None:
    named = layout.order.split("-")
    order = "-".join([*named[:at], "ep", *named[at:]])
    read = ParallelLayout(
        data=layout.data, context=layout.context, tensor=layout.tensor, pipeline=layout.pipeline, order=order
    )
    assert disagreements(read, order) == []


def bridge(*, mapped: bool, decentralized: bool = False) -> Any:
    model = SimpleNamespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True
    )
    dist = SimpleNamespace(use_tp_pp_dp_mapping=mapped, use_decentralized_pg=decentralized)
    return SimpleNamespace(model=model, dist=dist)


# The orders that Megatron-Bridge 0.6.2 gives initialize_model_parallel, training/initialize.py.
BRIDGE_ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


@pytest.mark.parametrize("mapped", [False, True])
def test_a_bridge_job_has_the_order_of_its_mapping(mapped: bool) -> None:
    layout = ParallelLayout.from_megatron_bridge(bridge(mapped=mapped), world_size=24)
    assert disagreements(layout, BRIDGE_ORDERS[mapped]) == []


@pytest.mark.parametrize("mapped", [False, True])
def test_the_other_order_is_noticed(mapped: bool) -> None:
    layout = ParallelLayout.from_megatron_bridge(bridge(mapped=not mapped), world_size=24)
    assert disagreements(layout, BRIDGE_ORDERS[mapped])


@pytest.mark.parametrize("mapped", [False, True])
def test_decentralised_groups_of_bridge_are_a_grid_in_the_default_order_whatever_the_mapping(mapped: bool) -> None:
    """Bridge builds HyperCommGrid([TP, CP, DP, PP], ["tp", "cp", "dp", "pp"]): the first dimension is the fastest."""
    layout = ParallelLayout.from_megatron_bridge(bridge(mapped=mapped, decentralized=True), world_size=24)
    shape = (layout.pipeline, layout.data, layout.context, layout.tensor)
    grid = [tuple(reversed(at)) for at in itertools.product(*map(range, shape))]
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [(at.tensor, at.context, at.data, at.pipeline) for at in places] == grid
