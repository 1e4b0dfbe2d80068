"""What ``packhorse plan`` found, as values: the JSON object is these classes, field by field.

A field that does not apply to a packing mode is ``None`` and left out of the JSON. Lengths and tokens count
slots. ``docs/plan.md`` explains every key; a test compares it with these classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Balance",
    "BeforeAfter",
    "Candidate",
    "Displacement",
    "Fill",
    "LengthBin",
    "MeanWorst",
    "OverLengthReport",
    "Percentiles",
    "PlanReport",
    "PlanSetting",
    "PlanStepReport",
    "PolicyCost",
    "RankCosts",
    "Recommendation",
    "Samples",
    "SourceReport",
    "Stop",
    "as_json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """Setting that was planned, as the report names it."""

    origin: str  # the configuration, or the file of lengths
    packing: str
    data_parallel: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int  # of one rank in a step
    segment_multiple: int
    algorithm: str | None  # of packing; online only
    lookahead: int | None  # packs' worth; online only
    window: int  # steps that are balanced together
    max_segments: int | None
    hidden_size: int  # of the cost model
    mixed_by: str | None  # what the weights of sources are shares of


@dataclass(frozen=True, slots=True)
class Percentiles:
    """By nearest rank, so each is a value that occurs."""

    p50: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Samples with ``low`` … ``high`` slots."""

    low: int
    high: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Every sample that was drawn, before over-long ones are cut."""

    count: int
    empty: int  # without a slot: left out
    tokens: int
    mean: float
    lengths: Percentiles
    histogram: tuple[LengthBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """``slot`` = physical ÷ row slots, ``useful`` = tokens ÷ row slots; ``useful_at_most`` = tokens ÷ physical."""

    row_slots: int
    physical_slots: int  # of segments, with their alignment padding
    tokens: int
    slot: float
    useful: float
    useful_at_most: float | None  # what alignment leaves; no packer can do better
    packs_at_least: int | None  # physical slots ÷ slots of a pack, rounded up
    packs_over: int | None  # more than that


@dataclass(frozen=True, slots=True)
class Displacement:
    """Displacement of samples by packing; as it leaves the packer, before a window is assigned to its steps."""

    longest_wait: int  # packs emitted while a sample was pending
    most_late: int  # output position less arrival position, in samples


@dataclass(frozen=True, slots=True)
class MeanWorst:
    """Over the steps without fillers; over all where each has some."""

    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Packs assigned to ranks as they arrive, and as planned."""

    before: MeanWorst
    after: MeanWorst


@dataclass(frozen=True, slots=True)
class Balance:
    """Slowest against mean rank, where rows differ in cost: dense ones do not.

    ``totals`` = max ÷ mean of the ranks' totals of a step. ``synchronous`` = Σ over micro-batches of the dearest
    rank ÷ that mean: ranks wait after each micro-batch.
    """

    synchronous: BeforeAfter
    totals: BeforeAfter


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Cost of each rank in the step that arrival order balances worst, relative to the mean."""

    step: int
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Report of one source. ``share`` is of the tokens planned, ``least`` and ``most`` of those of one step."""

    name: str
    weight: float  # its share, as configured
    share: float
    least: float
    most: float
    tokens: int  # planned
    samples: int  # drawn
    epochs: int  # begun
    skipped: int  # samples with unusable content, within the budget
    over_length: int  # samples
    lost: int  # tokens of these that are not planned
    unsupervised: int  # tokens that its policy leaves out, as nothing around them is trained on


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Cost of a policy: what it would do to the samples over length."""

    samples: int  # cut or dropped
    tokens_lost: int
    extra_pieces: int


@dataclass(frozen=True, slots=True)
class Stop:
    """``serve`` would stop here: a source whose policy is ``error`` has a sample over length."""

    setting: str  # of the policy
    place: str
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLengthReport:
    """Samples of more than ``limit`` slots."""

    limit: int
    samples: int
    tokens: int  # in them, all counted
    share: float  # of all tokens
    stop: Stop | None
    policies: Mapping[str, PolicyCost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The same samples at another pack length, with the same slots in a step."""

    seq_length: int
    global_batch_size: int
    num_microbatches: int
    slot_fill: float
    useful_fill: float
    segments: Percentiles
    whole: float  # share of the tokens that are in samples that fit whole
    lost: float  # share of the tokens, under the policies planned
    synchronous: float  # mean of the steps, as planned
    busy: float  # useful fill ÷ synchronous: share of a step in which a rank computes tokens
    worth: float  # busy · whole


@dataclass(frozen=True, slots=True)
class Recommendation:
    seq_length: int
    global_batch_size: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStepReport:
    """Report of one step. ``synchronous`` is as in ``Balance``."""

    micro_batches: int  # fillers not counted
    fillers: int
    unsupervised: int  # micro-batches with nothing to train on
    slot_fill: float
    useful_fill: float
    tokens: tuple[int, ...]  # of each source
    synchronous_before: float | None
    synchronous_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Report of a plan: everything that ``packhorse plan`` tells."""

    setting: PlanSetting
    warnings: tuple[str, ...]  # what serve would warn of
    complete: bool  # planned to the end of the stream
    steps: int
    micro_batches: int  # packs, where one pack is a micro-batch; fillers not counted
    fillers: int
    dropped: int  # micro-batches that did not fill a step, under remainder: drop
    unsupervised: int
    samples: Samples
    fill: Fill
    segments: Percentiles | None  # of a micro-batch
    order: Displacement | None
    balance: Balance | None
    rank_costs: RankCosts | None
    sources: tuple[SourceReport, ...]
    over_length: OverLengthReport | None
    comparison: tuple[Candidate, ...] | None
    recommendation: Recommendation | None
    per_step: tuple[PlanStepReport, ...]


def as_json(report: PlanReport) -> str:
    """Return the report as one JSON object, with the keys of the classes above."""
    return json.dumps(_without_none(asdict(report)), indent=2, ensure_ascii=False)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value
