"""Packs are dealt so that ranks finish each micro-batch, and the step, together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.planning import CostModel, plan_step


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], int]:
    """Costs of a step's packs, many of them equal, and a data-parallel size."""
    data_parallel, rows = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    count = data_parallel * rows
    return draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)), data_parallel


STEPS = steps()


@given(STEPS)
def test_every_pack_is_dealt_once_and_every_rank_gets_the_same_number(step: tuple[list[int], int]) -> None:
    costs, data_parallel = step
    plan = plan_step(costs, data_parallel, [1] * len(costs))
    assert sorted(pack for of_rank in plan for pack in of_rank) == list(range(len(costs)))
    assert [len(of_rank) for of_rank in plan] == [len(costs) // data_parallel] * data_parallel


@given(STEPS)
def test_the_packs_of_a_row_are_neighbours_in_cost(step: tuple[list[int], int]) -> None:
    """No pack of a later row costs more than one of an earlier row."""
    costs, data_parallel = step
    rows = [
        [costs[pack] for pack in row] for row in zip(*plan_step(costs, data_parallel, [1] * len(costs)), strict=True)
    ]
    assert all(min(row) >= max(following) for row, following in pairwise(rows))


@given(STEPS)
def test_equal_costs_keep_the_order_of_the_packs(step: tuple[list[int], int]) -> None:
    costs, data_parallel = step
    plan = plan_step(costs, data_parallel, [1] * len(costs))
    rows = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(zip(*plan, strict=True))]
    dealt = [pack for row in rows for pack in row]
    assert dealt == sorted(range(len(costs)), key=lambda pack: (-costs[pack], pack))
    assert plan == plan_step(list(costs), data_parallel, [1] * len(costs))


def test_rows_are_dealt_in_a_snake() -> None:
    assert plan_step([9, 8, 7, 6, 5, 4, 3, 2, 1], 3, [1] * 9) == [[0, 5, 6], [1, 4, 7], [2, 3, 8]]


def test_one_rank_gets_the_packs_by_cost() -> None:
    assert plan_step([3, 9, 5], 1, [1] * 3) == [[1, 2, 0]]


def imbalances(seed: int, data_parallel: int, rows: int) -> tuple[float, float, float, float]:
    """(max ÷ mean of rank totals, sum of row maxima ÷ mean), as planned and as packs arrive."""
    random = np.random.default_rng(seed)
    model = CostModel()
    packs = [random.multinomial(32_768, random.dirichlet(np.full(n, 0.3))) for n in random.integers(1, 40, 64 * rows)]
    costs = np.array([model.cost(pack) for pack in packs[: data_parallel * rows]])
    planned = costs[np.array(plan_step(costs.tolist(), data_parallel, [1] * len(costs)))]
    naive = costs.reshape(rows, data_parallel).T
    mean = costs.sum() / data_parallel
    return (
        planned.sum(axis=1).max() / mean,
        naive.sum(axis=1).max() / mean,
        planned.max(axis=0).sum() / mean,
        naive.max(axis=0).sum() / mean,
    )


@pytest.mark.parametrize(("data_parallel", "rows"), [(2, 4), (8, 4), (64, 4), (64, 8), (16, 1)])
def test_ranks_are_better_balanced_than_by_arrival(data_parallel: int, rows: int) -> None:
    """On the average over seeds: with few packs, one step's arrival order may be even by luck."""
    steps = [imbalances(seed, data_parallel, rows) for seed in range(20)]
    total, naive_total, synchronous, naive_synchronous = np.mean(steps, axis=0)
    assert total <= naive_total
    assert synchronous <= naive_synchronous


def test_64_ranks_with_4_micro_batches_finish_within_a_fifth_of_one_another() -> None:
    assert imbalances(0, 64, 4)[2] <= 1.21


@given(lengths=st.lists(st.integers(1, 1 << 20), max_size=30), hidden=st.integers(1, 1 << 14))
def test_cost_is_linear_and_square_in_each_segment(lengths: list[int], hidden: int) -> None:
    assert CostModel(6 * hidden).cost(lengths) == sum(6 * hidden * n + n * n for n in lengths)


def test_one_long_segment_costs_more_than_the_same_slots_in_short_ones() -> None:
    assert CostModel().cost([8192]) > CostModel().cost([512] * 16)
