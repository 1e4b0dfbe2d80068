"""Packs are dealt so that ranks finish each micro-batch, and the step, together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.balance import STRATA, CostModel, assign_to_ranks, assign_to_steps


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
    plan = assign_to_ranks(costs, data_parallel, [1] * len(costs))
    assert sorted(pack for of_rank in plan for pack in of_rank) == list(range(len(costs)))
    assert [len(of_rank) for of_rank in plan] == [len(costs) // data_parallel] * data_parallel


@given(STEPS)
def test_the_packs_of_a_row_are_neighbours_in_cost(step: tuple[list[int], int]) -> None:
    """No pack of a later row costs more than one of an earlier row."""
    costs, data_parallel = step
    rows = [
        [costs[pack] for pack in row]
        for row in zip(*assign_to_ranks(costs, data_parallel, [1] * len(costs)), strict=True)
    ]
    assert all(min(row) >= max(following) for row, following in pairwise(rows))


@given(STEPS)
def test_equal_costs_keep_the_order_of_the_packs(step: tuple[list[int], int]) -> None:
    costs, data_parallel = step
    plan = assign_to_ranks(costs, data_parallel, [1] * len(costs))
    rows = [row if number % 2 == 0 else row[::-1] for number, row in enumerate(zip(*plan, strict=True))]
    dealt = [pack for row in rows for pack in row]
    assert dealt == sorted(range(len(costs)), key=lambda pack: (-costs[pack], pack))
    assert plan == assign_to_ranks(list(costs), data_parallel, [1] * len(costs))


def test_rows_are_dealt_in_a_snake() -> None:
    assert assign_to_ranks([9, 8, 7, 6, 5, 4, 3, 2, 1], 3, [1] * 9) == [[0, 5, 6], [1, 4, 7], [2, 3, 8]]


def test_one_rank_gets_the_packs_by_cost() -> None:
    assert assign_to_ranks([3, 9, 5], 1, [1] * 3) == [[1, 2, 0]]


def imbalances(seed: int, data_parallel: int, rows: int) -> tuple[float, float, float, float]:
    """(max ÷ mean of rank totals, sum of row maxima ÷ mean), as planned and as packs arrive."""
    random = np.random.default_rng(seed)
    model = CostModel()
    packs = [random.multinomial(32_768, random.dirichlet(np.full(n, 0.3))) for n in random.integers(1, 40, 64 * rows)]
    costs = np.array([model.cost(pack.tolist()) for pack in packs[: data_parallel * rows]])
    planned = costs[np.array(assign_to_ranks(costs.tolist(), data_parallel, [1] * len(costs)))]
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


# Supervision -----------------------------------------------------------------------------------------


@st.composite
def partly_supervised(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    """A step of which some packs, often most, have no supervised slots."""
    costs, data_parallel = draw(STEPS)
    slots = st.sampled_from([0, 0, 0, 5, 90]) if draw(st.booleans()) else st.integers(0, 3)
    return costs, data_parallel, draw(st.lists(slots, min_size=len(costs), max_size=len(costs)))


@given(partly_supervised())
def test_no_row_is_without_supervised_slots_if_there_are_packs_enough(step: tuple[list[int], int, list[int]]) -> None:
    """And if there are not, each of those few has a row of its own."""
    costs, data_parallel, supervised = step
    plan = assign_to_ranks(costs, data_parallel, supervised)
    assert sorted(pack for of_rank in plan for pack in of_rank) == list(range(len(costs)))
    rows = list(zip(*plan, strict=True))
    trained = sum(any(supervised[pack] for pack in row) for row in rows)
    assert trained == min(len(rows), sum(slots > 0 for slots in supervised))


@given(partly_supervised())
def test_packs_are_swapped_only_where_a_row_has_no_supervised_slots(step: tuple[list[int], int, list[int]]) -> None:
    costs, data_parallel, supervised = step
    plain = assign_to_ranks(costs, data_parallel, [1] * len(costs))
    swapped = any(not any(supervised[pack] for pack in row) for row in zip(*plain, strict=True)) and any(supervised)
    assert (assign_to_ranks(costs, data_parallel, supervised) != plain) <= swapped


def test_a_row_of_fillers_alone_needs_no_supervised_slots() -> None:
    """Nothing is trained on there whoever swaps: the balance is kept."""
    assert assign_to_ranks([9, 9, 1, 1], 2, [5, 5, None, None]) == [[0, 3], [1, 2]]
    assert assign_to_ranks([9, 9, 1, 1], 2, [5, 5, 0, None]) != [[0, 3], [1, 2]]


def test_spreading_supervision_hardly_harms_the_balance() -> None:
    """One pack of five is supervised; a row has two to eight packs, so many rows must swap."""
    random = np.random.default_rng(0)
    for data_parallel in (2, 4, 8):
        harm = []
        for _ in range(20):
            costs = random.lognormal(0, 0.3, 8 * data_parallel) * 1000
            supervised = [int(slots < 0.2) for slots in random.random(len(costs))]
            supervised[:8] = [1] * 8  # enough for the eight rows
            some_or_all = (supervised, [1] * len(costs))
            plans = [assign_to_ranks(costs.astype(int).tolist(), data_parallel, of_each) for of_each in some_or_all]
            made, plain = (costs[np.array(plan)].max(axis=0).sum() for plan in plans)
            harm.append(made / plain)
        assert np.mean(harm) <= 1.05


# Windows ---------------------------------------------------------------------------------------------


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Costs of a window's packs, many of them equal; its steps; a seed."""
    steps, per_step = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    costs = draw(st.lists(st.integers(0, 50), min_size=steps * per_step, max_size=steps * per_step))
    return costs, steps, draw(st.integers(0, (1 << 64) - 1))


@given(windows())
def test_every_pack_of_a_window_is_dealt_once_and_every_step_gets_the_same_number(
    window: tuple[list[int], int, int],
) -> None:
    costs, steps, seed = window
    dealt = assign_to_steps(costs, steps, seed)
    assert sorted(pack for of_step in dealt for pack in of_step) == list(range(len(costs)))
    assert [len(of_step) for of_step in dealt] == [len(costs) // steps] * steps
    assert all(of_step == sorted(of_step) for of_step in dealt), "in the order in which they came"
    assert assign_to_steps(list(costs), steps, seed) == dealt


@given(windows())
def test_each_step_of_a_window_gets_one_run_of_neighbours_from_every_stratum(
    window: tuple[list[int], int, int],
) -> None:
    costs, steps, seed = window
    per_step = len(costs) // steps
    place = {pack: i for i, pack in enumerate(sorted(range(len(costs)), key=lambda pack: (-costs[pack], pack)))}
    edges = [per_step * stratum // STRATA * steps for stratum in range(STRATA + 1)]
    for of_step in assign_to_steps(costs, steps, seed) if steps > 1 else []:
        places = sorted(place[pack] for pack in of_step)
        for low, high in pairwise(edges):
            run = [at for at in places if low <= at < high]
            assert len(run) == (high - low) // steps
            assert run == list(range(run[0], run[0] + len(run))) if run else True


def test_which_run_a_step_gets_is_drawn_anew_for_every_stratum_and_window() -> None:
    costs = list(range(64, 0, -1))
    firsts = [tuple(of_step[0] for of_step in assign_to_steps(costs, 4, seed)) for seed in range(40)]
    assert len(set(firsts)) > 12, "of the 24 orders of four steps"
    runs = [{pack % 16 // 4 for pack in of_step} for of_step in assign_to_steps(costs, 4, 1)]
    assert max(map(len, runs)) > 1, "no step gets the same run of every stratum"


# Balance of real packs -------------------------------------------------------------------------------

SEQ_LENGTH = 32_768
Lengths = npt.NDArray[np.int64]


def log_normal(random: np.random.Generator, count: int, mean: float) -> npt.NDArray[np.float64]:
    return random.lognormal(np.log(mean) - 1.2**2 / 2, 1.2, count)


def bimodal(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    return np.where(random.random(count) < 0.1, random.uniform(8_000, 32_000, count), log_normal(random, count, 1000))


STREAMS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "log-normal": lambda random, count: log_normal(random, count, 500),
    "bimodal": bimodal,
    "uniform": lambda random, count: random.uniform(1, SEQ_LENGTH + 1, count),
}


def packed_costs(stream: str, seed: int, count: int) -> list[int]:
    """Costs of the first packs of a stream of lengths, at a lookahead of 64 packs."""
    random, sizes = np.random.default_rng(seed), list[int]()
    packer = FifoExactTailPacker(PackingPlan(capacity=SEQ_LENGTH, lookahead=64 * SEQ_LENGTH))
    model, costs, drawn = CostModel(), list[int](), 0
    while len(costs) < count:
        while packer.wants_more:
            if drawn == len(sizes):
                sizes += np.clip(STREAMS[stream](random, 20_000).astype(int), 1, SEQ_LENGTH).tolist()
            packer.add(drawn, sizes[drawn])
            drawn += 1
        costs.append(model.cost([sizes[sample] for sample in packer.next_pack()]))
    return costs


def synchronous_imbalance(costs: list[int], window: int, data_parallel: int, per_step: int) -> float:
    """Sum of the dearest of each row ÷ mean of the ranks' totals, averaged over the steps."""
    found = []
    for first in range(0, len(costs), window * per_step):
        of_window = costs[first : first + window * per_step]
        for dealt in assign_to_steps(of_window, window, first):
            of_step = [of_window[pack] for pack in dealt]
            rows = np.array(of_step)[np.array(assign_to_ranks(of_step, data_parallel, [1] * per_step))]
            found.append(rows.max(axis=0).sum() / (rows.sum() / data_parallel))
    return float(np.mean(found))


@pytest.mark.parametrize("stream", STREAMS)
def test_64_ranks_with_4_micro_batches_wait_little_for_each_other_and_less_with_a_window(stream: str) -> None:
    """Averaged over 12 steps of three seeds. Rows sorted by cost are the best there are for given packs."""
    runs = [packed_costs(stream, seed, 12 * 256) for seed in range(3)]
    one, two, four = (np.mean([synchronous_imbalance(c, window, 64, 256) for c in runs]) for window in (1, 2, 4))
    assert one <= 1.21
    assert two <= 1.12
    assert four <= 1.07
    assert four < two < one


# Cost ------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 1 << 20), max_size=30), hidden=st.integers(1, 1 << 14))
def test_cost_is_linear_and_square_in_each_segment(lengths: list[int], hidden: int) -> None:
    assert CostModel(6 * hidden).cost(lengths) == sum(6 * hidden * n + n * n for n in lengths)


def test_one_long_segment_costs_more_than_the_same_slots_in_short_ones() -> None:
    assert CostModel().cost([8192]) > CostModel().cost([512] * 16)
