"""The same samples in shorter and longer packs, with the same slots in a step, and which to take.

Longer packs leave more samples whole, but a step has fewer of them to balance, and a row takes more memory. The
*worth* of a length is the share of a step that ranks spend on tokens of samples that fit whole: useful fill ÷
synchronous imbalance · share of such tokens. Recommended is the configured length where none is worth over 1 %
more, else the shortest that is nearly the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from packhorse.contract.layout import ParallelLayout
from packhorse_service.packing.packer import packing_plan
from packhorse_service.preview.from_lengths import PlannedLengths, broken_rules, simulate
from packhorse_service.preview.plan_collector import PlanCollector
from packhorse_service.preview.plan_report import Candidate, PlanReport, Recommendation
from packhorse_service.preview.planning_facts import Planning

__all__ = ["compared"]

FACTORS = (Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8))
NEARLY_BEST = 0.99  # of the best worth: as good
SAMPLES = 1_000_000  # compared at most: the first of the stream


def compared(collector: PlanCollector) -> PlanReport:
    """Return the report of a collector, with a comparison where samples are packed online."""
    planning, report = collector.planning, collector.report()
    if not planning.online:
        return report
    lengths = PlannedLengths(collector.samples.lengths[:SAMPLES], collector.samples.sources[:SAMPLES])
    resized = [each for factor in FACTORS if (each := _at_length(planning, factor)) is not None]
    # A stream that was stopped is compared up to the same step: at its end, packs of what is left are poorer.
    steps = None if collector.complete or len(collector.samples.lengths) > SAMPLES else collector.steps
    collectors = (simulate(lengths, each, steps=steps) for each in resized)
    candidates = tuple(found for each in collectors if (found := _candidate(each)) is not None)
    if not candidates:
        return report
    return replace(report, comparison=candidates, recommendation=_recommend(candidates, planning.contract.seq_length))


def _at_length(planning: Planning, factor: Fraction) -> Planning | None:
    """Plan the same with packs ``factor`` times as long; ``None`` where that breaks a rule."""
    contract, multiple = planning.contract, planning.contract.segment_multiple
    seq_length, batch = contract.seq_length * factor, contract.global_batch_size / factor
    tail = contract.seq_length - planning.packing.capacity_slots(multiple)
    if seq_length.denominator > 1 or batch.denominator > 1 or seq_length < tail + multiple:
        return None
    segments = None if contract.max_segments is None else max(1, int(contract.max_segments * factor))
    resized = replace(contract, seq_length=int(seq_length), global_batch_size=int(batch), max_segments=segments)
    if broken_rules(resized, ParallelLayout(data=planning.data_parallel)):
        return None
    packing = packing_plan(resized, planning.lookahead, tail, planning.packing.algorithm)
    return replace(planning, contract=resized, packing=packing, limit=packing.capacity_slots(multiple))


def _candidate(collector: PlanCollector) -> Candidate | None:
    if not collector.steps:
        return None
    report, contract = collector.report(), collector.planning.contract
    segments, over, balance = report.segments, report.over_length, report.balance
    if segments is None or over is None or balance is None:
        return None  # nothing to compare; packs made online have all three
    synchronous = balance.synchronous.after.mean
    busy = report.fill.useful / synchronous
    return Candidate(
        seq_length=contract.seq_length,
        global_batch_size=contract.global_batch_size,
        num_microbatches=report.setting.num_microbatches,
        slot_fill=report.fill.slot,
        useful_fill=report.fill.useful,
        segments=segments,
        whole=round(1 - over.share, 6),
        lost=round(sum(source.lost for source in report.sources) / report.samples.tokens, 6),
        synchronous=synchronous,
        busy=round(busy, 6),
        worth=round(busy * (1 - over.share), 6),
    )


def _recommend(candidates: Sequence[Candidate], configured: int) -> Recommendation:
    best = max(each.worth for each in candidates)
    good = [each for each in candidates if each.worth >= NEARLY_BEST * best]
    present = next((each for each in candidates if each.seq_length == configured), None)
    taken = present if present in good and present is not None else good[0]
    verb = "stay with" if taken is present else "take"
    against = "" if present in (None, taken) else f"; at {configured:,} it is {present.worth:.1%}"
    return Recommendation(
        taken.seq_length,
        taken.global_batch_size,
        f"{verb} seq_length {taken.seq_length:,} and global_batch_size {taken.global_batch_size:,}: ranks spend "
        f"{taken.worth:.1%} of a step on tokens of samples that fit whole, and no other length here gives over 1% "
        f"more{against}",
    )
