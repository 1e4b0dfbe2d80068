"""``packhorse plan --lengths``: every figure against a plain computation of what it says it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.errors import ConfigError, ContractError
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingAlgorithm, PackingPlan
from packhorse_service.planning.balance import CostModel, assign_to_ranks
from packhorse_service.preview.compare import compared
from packhorse_service.preview.from_lengths import LengthsOptions, plan_lengths
from packhorse_service.preview.plan_report import PlanReport
from tests.shared_data import shared

SMALL = LengthsOptions(origin="test", seq_length=64, data_parallel=2, global_batch_size=4, lookahead=4)

OPTIONS = st.builds(
    LengthsOptions,
    origin=st.just("test"),
    seq_length=st.sampled_from([32, 48, 64]),
    data_parallel=st.sampled_from([1, 2]),
    global_batch_size=st.sampled_from([2, 4]),
    segment_multiple=st.sampled_from([1, 4, 16]),
    algorithm=st.sampled_from(PackingAlgorithm),
    lookahead=st.sampled_from([None, 1, 4]),
    window=st.sampled_from([1, 2, 3]),
    hidden_size=st.sampled_from([1, 4096]),
    max_segments=st.sampled_from([None, 3]),
    over_length=st.sampled_from(OverLength),
    epochs=st.sampled_from([1, 2]),
)
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=60)


def planned(lengths: Sequence[int], options: LengthsOptions) -> PlanReport:
    return plan_lengths(np.array(lengths, dtype=np.int64), options, lambda _steps, _samples: None).report()


def fitting(lengths: Sequence[int], options: LengthsOptions) -> list[int]:
    """The lengths of one epoch that need no policy."""
    return [slots for slots in lengths if slots <= options.seq_length]


def packed_by_hand(lengths: Sequence[int], options: LengthsOptions) -> list[tuple[int, list[int]]]:
    """(samples arrived, samples in it) of each pack, by the packer alone; no sample is over length."""
    capacity = options.seq_length // options.segment_multiple
    packs = options.lookahead or min(64, options.global_batch_size)
    packer = FifoExactTailPacker(
        PackingPlan(capacity=capacity, lookahead=packs * capacity, max_segments=options.max_segments)
    )
    made: list[tuple[int, list[int]]] = []
    arrived = 0
    while True:
        while packer.wants_more and arrived < len(lengths):
            packer.add(arrived, -(-lengths[arrived] // options.segment_multiple))
            arrived += 1
        if not len(packer):
            return made
        made.append((arrived, packer.next_pack()))


# Fill, waits, segments -----------------------------------------------------------------------------------


@given(lengths=LENGTHS, options=OPTIONS)
def test_fill_waits_and_segments_are_those_of_the_packs(lengths: list[int], options: LengthsOptions) -> None:
    options = replace(options, epochs=1, algorithm=PackingAlgorithm.FIFO_EXACT_TAIL)
    lengths = [1, *fitting(lengths, options)]
    report, packs = planned(lengths, options), packed_by_hand(lengths, options)
    aligned = sum(math.ceil(slots / options.segment_multiple) * options.segment_multiple for slots in lengths)
    slots = len(packs) * options.seq_length
    assert report.fill.slot == round(aligned / slots, 6)
    assert report.fill.useful == round(sum(lengths) / slots, 6)
    assert report.fill.useful_at_most == round(sum(lengths) / aligned, 6)
    assert (report.micro_batches, report.fill.packs_at_least) == (len(packs), math.ceil(aligned / options.seq_length))
    counts = sorted(len(samples) for _, samples in packs)
    assert report.segments is not None
    assert (report.segments.p50, report.segments.max) == (counts[(len(counts) - 1) // 2], counts[-1])
    waits, late, place = [], [], itertools.count()
    for number, (_, samples) in enumerate(packs):
        for sample in samples:
            waits.append(number - next(i for i, (arrived, _) in enumerate(packs) if arrived > sample))
            late.append(next(place) - sample)
    assert report.order is not None
    assert (report.order.longest_wait, report.order.most_late) == (max(waits), max(late))


@given(lengths=LENGTHS, options=OPTIONS)
def test_every_token_is_planned_or_lost_by_its_policy(lengths: list[int], options: LengthsOptions) -> None:
    lengths = [1, *lengths]
    limit = options.seq_length
    cut = {OverLength.SPLIT: 0, OverLength.TRUNCATE_LEFT: 1, OverLength.TRUNCATE_RIGHT: 1}
    over = [slots for slots in lengths if slots > limit]
    lost = sum(over) if options.over_length not in cut else cut[options.over_length] * sum(s - limit for s in over)
    report = planned(lengths, options)
    assert report.fill.tokens == options.epochs * (sum(lengths) - lost)
    assert report.sources[0].lost == options.epochs * lost
    assert report.samples.count == options.epochs * len(lengths)
    assert sum(bin_.samples for bin_ in report.samples.histogram) == report.samples.count
    assert sum(bin_.tokens for bin_ in report.samples.histogram) == report.samples.tokens


@given(lengths=LENGTHS, options=OPTIONS)
def test_every_pack_is_in_a_step_and_only_the_last_step_has_fillers(
    lengths: list[int], options: LengthsOptions
) -> None:
    report = planned([1, *lengths], options)
    size = options.global_batch_size
    assert report.steps == len(report.per_step) == math.ceil(report.micro_batches / size)
    assert [step.fillers for step in report.per_step[:-1]] == [0] * (report.steps - 1)
    assert report.fillers == report.per_step[-1].fillers == report.steps * size - report.micro_batches


# Balance -------------------------------------------------------------------------------------------------


@given(lengths=LENGTHS, options=OPTIONS)
def test_imbalance_is_that_of_the_costs(lengths: list[int], options: LengthsOptions) -> None:
    """Without a window. Fillers repeat the last pack."""
    options = replace(options, epochs=1, window=1, algorithm=PackingAlgorithm.FIFO_EXACT_TAIL)
    lengths = [1, *fitting(lengths, options)]
    model, ranks, size = CostModel(6 * options.hidden_size), options.data_parallel, options.global_batch_size
    packs = [[lengths[sample] for sample in samples] for _, samples in packed_by_hand(lengths, options)]
    for step, found in enumerate(planned(lengths, options).per_step):
        costs = [model.cost(pack) for pack in packs[step * size : (step + 1) * size]]
        missing = size - len(costs)
        costs += costs[-1:] * missing
        mean = sum(costs) / ranks
        arrived = sum(max(costs[i : i + ranks]) for i in range(0, size, ranks)) / mean
        supervised = [*(sum(pack) for pack in packs[step * size : (step + 1) * size]), *[None] * missing]
        dealt = assign_to_ranks(costs, ranks, supervised)
        as_planned = sum(max(costs[pack] for pack in row) for row in zip(*dealt, strict=True)) / mean
        assert found.synchronous_before == round(arrived, 6)
        assert found.synchronous_after == round(as_planned, 6)


def test_rank_costs_are_of_the_step_that_arrival_order_balances_worst() -> None:
    lengths = [*[16] * 8, 64, *[16] * 4, 64, *[16] * 8]  # packs of four and of one; only step 1 is uneven
    options = replace(SMALL, global_batch_size=2, hidden_size=1, lookahead=1)
    report = planned(lengths, options)
    few, one = CostModel(6).cost([16] * 4), CostModel(6).cost([64])
    costs = report.rank_costs
    assert costs is not None
    assert costs.step == 1
    assert sorted(costs.before) == [round(2 * few / (few + one), 6), round(2 * one / (few + one), 6)]
    assert sum(costs.after) == pytest.approx(options.data_parallel)


def test_a_window_balances_better_and_keeps_the_packs() -> None:
    lengths = np.random.default_rng(0).lognormal(3, 1.2, 4000).astype(int).clip(1, 512).tolist()
    options = replace(SMALL, seq_length=512, global_batch_size=16, data_parallel=16, hidden_size=64)
    alone, together = planned(lengths, options), planned(lengths, replace(options, window=4))
    assert together.fill == alone.fill
    assert alone.balance is not None
    assert together.balance is not None
    assert together.balance.synchronous.before.mean == pytest.approx(alone.balance.synchronous.before.mean)
    assert together.balance.synchronous.after.mean < alone.balance.synchronous.after.mean
    assert alone.balance.synchronous.after.mean <= alone.balance.synchronous.before.mean


def test_a_window_is_planned_whole() -> None:
    report = planned([64] * 40, replace(SMALL, window=4, steps=2))
    assert (report.steps, report.complete) == (4, False)


# Over-length ---------------------------------------------------------------------------------------------


def test_each_policy_is_costed_whichever_is_chosen() -> None:
    report = planned([64, 65, 200, 10], replace(SMALL, over_length=OverLength.SPLIT))
    over = report.over_length
    assert over is not None
    assert (over.samples, over.tokens, over.share, over.stop) == (2, 265, round(265 / 339, 6), None)
    assert {policy: (cost.samples, cost.tokens_lost, cost.extra_pieces) for policy, cost in over.policies.items()} == {
        "split": (2, 0, 1 + 3),
        "truncate_left": (2, 137, 0),
        "truncate_right": (2, 137, 0),
        "drop": (2, 265, 0),
    }


def test_the_policy_error_is_planned_without_the_samples_and_says_where_serving_would_stop() -> None:
    report = planned([64, 65, 200, 10], SMALL)
    assert report.fill.tokens == 74
    assert report.over_length is not None
    stop = report.over_length.stop
    assert stop is not None
    assert (stop.setting, stop.place, stop.slots) == ("--over-length", "sample 1", 65)


def test_lengths_of_no_slot_are_counted_and_left_out() -> None:
    report = planned([0, 5, 0], replace(SMALL, epochs=2))
    assert (report.samples.empty, report.samples.count) == (4, 2)


def test_nothing_to_plan_is_an_error_that_says_what_was_found() -> None:
    with pytest.raises(ConfigError, match=r"nothing to plan: 1 samples with 65 slots, 1 of them over 64 slots"):
        planned([65], SMALL)


def test_sizes_that_break_a_rule_are_refused_with_its_remedy() -> None:
    with pytest.raises(ContractError, match=r"GBS_DIVIDES(.|\n)*PACK_ALIGN|PACK_ALIGN(.|\n)*GBS_DIVIDES"):
        planned([5], replace(SMALL, data_parallel=3, segment_multiple=5))


# Pack lengths --------------------------------------------------------------------------------------------


def comparison(lengths: Sequence[int], options: LengthsOptions) -> PlanReport:
    return compared(plan_lengths(np.array(lengths), options, lambda _steps, _samples: None))


def test_other_pack_lengths_keep_the_slots_of_a_step_and_are_planned_as_if_configured() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 400).tolist()
    report = comparison(lengths, SMALL)
    assert report.comparison is not None
    assert [(each.seq_length, each.global_batch_size) for each in report.comparison] == [(32, 8), (64, 4), (128, 2)]
    for each in report.comparison:
        own = planned(lengths, replace(SMALL, seq_length=each.seq_length, global_batch_size=each.global_batch_size))
        assert own.balance is not None
        assert own.over_length is not None
        assert each.useful_fill == own.fill.useful
        assert each.segments == own.segments
        assert each.synchronous == own.balance.synchronous.after.mean
        assert each.whole == pytest.approx(1 - own.over_length.share)
        assert each.worth == pytest.approx(each.useful_fill / each.synchronous * each.whole, abs=1e-5)


def test_longer_packs_are_recommended_where_samples_do_not_fit() -> None:
    report = comparison([*[100] * 200, *[5] * 200], SMALL)
    assert report.recommendation is not None
    assert report.recommendation.seq_length == 128
    assert "take seq_length 128 and global_batch_size 2" in report.recommendation.reason


def test_nothing_is_changed_where_nothing_is_gained() -> None:
    report = comparison([16] * 640, SMALL)
    assert report.recommendation is not None
    assert report.recommendation.seq_length == SMALL.seq_length
    assert report.recommendation.reason.startswith("stay with seq_length 64")


# Real lengths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["dolly_hhrlhf.qwen3_chatml", "tau_bench_airline.gpt2_plain", "python_docs.gpt2_plain"]
)
def test_real_lengths_are_planned_near_what_alignment_allows(name: str) -> None:
    lengths = np.load(shared(f"data/lengths/{name}.npy")).astype(np.int64) - 1
    options = LengthsOptions(
        origin=name,
        seq_length=16_384,
        data_parallel=4,
        global_batch_size=16,
        segment_multiple=16,
        over_length=OverLength.SPLIT,
        epochs=10,
    )
    report = planned(lengths.tolist(), options)
    lost_in_last_pack = 1 / report.micro_batches
    assert report.fill.useful_at_most is not None
    assert report.fill.useful_at_most - report.fill.useful < 0.01 + lost_in_last_pack
    assert report.fill.tokens == 10 * int(lengths[lengths > 0].sum())


@pytest.mark.parametrize("policy", OverLength)
@pytest.mark.parametrize("longest", [64, 65, 250, 251, 3000])
def test_a_sample_that_is_split_over_much_of_a_step_is_warned_of(policy: OverLength, longest: int) -> None:
    """Of a step of 20 rows of 64 a fifth is 256 slots; of 4 rows a row is more than that."""
    large = replace(SMALL, over_length=policy, global_batch_size=20)
    warnings = planned([64] * 40 + [longest], large).warnings
    assert any("sample 40 has" in warning for warning in warnings) == (policy is OverLength.SPLIT and longest > 256)
    small = planned([64] * 40 + [longest], replace(SMALL, over_length=policy)).warnings
    assert any("sample 40 has" in warning for warning in small) == (policy is OverLength.SPLIT and longest > 64)
