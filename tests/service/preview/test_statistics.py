"""Figures of a report: a number for whatever steps hold, and 1 for ranks that are even because none has anything."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from packhorse_service.preview.from_lengths import LengthsOptions, plan_lengths
from packhorse_service.preview.plan_collector import PlanCollector
from packhorse_service.preview.plan_report import as_json
from packhorse_service.preview.planning_facts import MicroBatchFacts, StepFacts
from packhorse_service.preview.statistics import Floats, quotients, relative, synchronous, totals

COSTS = arrays(np.float64, array_shapes(min_dims=3, max_dims=3, max_side=4), elements=st.sampled_from([0.0, 1.0, 2e19]))
OPTIONS = LengthsOptions(origin="test", seq_length=64, data_parallel=2, global_batch_size=4)


@given(COSTS)
@example(np.zeros((2, 2, 2)))
def test_imbalance_is_at_least_one_and_one_where_no_rank_has_anything_to_do(costs: Floats) -> None:
    for figures in (synchronous(costs), totals(costs)):
        assert np.isfinite(figures).all()
        assert (figures >= 1 - 1e-9).all()
        assert (figures[costs.sum(axis=(1, 2)) == 0] == 1).all()
    assert np.isfinite(relative(costs[0])).all()


def test_a_quotient_by_nothing_is_what_the_caller_says() -> None:
    assert quotients([1, 2, 0], [4, 0, 0], of_nothing=7.0).tolist() == [0.25, 7.0, 7.0]


@given(st.lists(st.lists(st.sampled_from([0, 0, 5, 30]), min_size=4, max_size=4), min_size=1, max_size=3))
@example([[0, 0, 0, 0]])
@example([[0, 0, 0, 0], [5, 0, 0, 0]])
def test_a_report_has_numbers_alone_also_where_the_micro_batches_of_a_step_hold_no_token(
    steps: list[list[int]],
) -> None:
    planning = plan_lengths(np.array([5] * 8), OPTIONS, lambda _steps, _samples: None).planning
    collector = PlanCollector(planning)
    for tokens in steps:
        for number, slots in enumerate(tokens):
            collector.drawn(0, 0, 5, 1, "a sample")
            collector.packed([number], slots)
        facts = [MicroBatchFacts([slots], [slots], slots, slots) for slots in tokens]
        collector.planned(StepFacts(facts, [[0, 1], [2, 3]]))
    report = collector.report()
    text = as_json(report)
    assert "NaN" not in text
    assert "Infinity" not in text
    (source,) = report.sources
    assert (source.least, source.most) == ((1.0, 1.0) if any(map(any, steps)) else (0.0, 0.0))
