"""Facts that a preview is made from: the planning, and its micro-batches and steps without their content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packhorse.contract.batch_contract import Packing, ResolvedContract
from packhorse_service.mixing.order import MixBy
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.packing.packing_plan import PackingPlan

__all__ = ["PLANNED_AS", "MicroBatchFacts", "PlannedSource", "Planning", "StepFacts"]

# A sample over length cannot be planned where it would stop the stream: it is left out, and the report says so.
PLANNED_AS = {policy: policy for policy in OverLength} | {OverLength.ERROR: OverLength.DROP}


@dataclass(frozen=True, slots=True)
class PlannedSource:
    """Source of samples, as far as the report needs to know it."""

    name: str
    weight: int
    over_length: OverLength
    skip_budget: int
    setting: str  # where the policy is set


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """Planning that a report is about: contract, layout and how packs are made."""

    origin: str
    contract: ResolvedContract
    data_parallel: int
    packing: PackingPlan
    lookahead: int | None  # packs' worth, as configured
    hidden_size: int
    window: int
    mixed_by: MixBy | None  # None where there is nothing to mix
    limit: int | None  # slots at which samples are cut
    sources: tuple[PlannedSource, ...]
    warnings: tuple[str, ...] = ()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return self.contract.global_batch_size // self.contract.micro_batch_size

    @property
    def online(self) -> bool:
        return self.contract.packing is Packing.ONLINE


class MicroBatchFacts(NamedTuple):
    """A micro-batch without its content."""

    slots: list[int]  # of each segment
    tokens: Sequence[int]  # of each source
    cost: int
    loss_tokens: int


class StepFacts(NamedTuple):
    """A planned step; ``ranks[rank][index]`` behind the last micro-batch is a filler."""

    micro_batches: Sequence[MicroBatchFacts]
    ranks: Sequence[Sequence[int]]
