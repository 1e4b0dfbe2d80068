"""Planned steps, from a pipeline or from lengths alone, to one report.

A collector is told what happens in the order in which it happens: samples drawn, micro-batches packed, steps
planned. It keeps a few integers of each, and computes at the end.

Shapes: D = data-parallel ranks, M = micro-batches of a rank in a step, S = steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from packhorse.contract.batch_contract import Packing, Remainder
from packhorse.errors import ConfigError
from packhorse.rounding import ceil_div, round_up
from packhorse_service.planning.row_layout import row_offsets
from packhorse_service.preview.drawn_samples import DrawnSamples, Waits
from packhorse_service.preview.plan_report import (
    Balance,
    Displacement,
    Fill,
    PlanReport,
    PlanSetting,
    PlanStepReport,
    RankCosts,
    SourceReport,
)
from packhorse_service.preview.planning_facts import Planning, StepFacts
from packhorse_service.preview.statistics import (
    Floats,
    before_after,
    percentiles,
    quotients,
    ratio,
    relative,
    rounded,
    synchronous,
    totals,
)

__all__ = ["PlanCollector"]


class _Balance(NamedTuple):
    """Balance of the stream, of the step that arrival order balances worst, and of each step."""

    of_stream: Balance
    of_worst: RankCosts
    before: tuple[float, ...]
    after: tuple[float, ...]


class _Planned(NamedTuple):
    """Facts kept of one planned step."""

    fillers: int
    unsupervised: int
    row_slots: int
    physical_slots: int
    tokens: list[int]  # of each source
    costs: Floats  # [D, M]; the sums of a step may be beyond int64


class PlanCollector:
    """Collector of what a stream does: samples drawn, micro-batches packed, steps planned."""

    def __init__(self, planning: Planning) -> None:
        self.planning = planning
        self.samples = DrawnSamples(planning)
        self.complete = True  # planned to the end of the stream
        self.packed_costs: list[int] = []  # of each micro-batch, in the order of the pack stream
        self._waits = Waits()
        self._segments: list[int] = []  # of each micro-batch
        self._planned: list[_Planned] = []

    @property
    def steps(self) -> int:
        return len(self._planned)

    @property
    def whole(self) -> bool:
        """True where all that was packed is planned: no window is half assigned."""
        return len(self.packed_costs) == len(self._segments)

    # What happens ------------------------------------------------------------------------------------

    def drawn(self, source: int, epoch: int, slots: int, pieces: int, place: str) -> None:
        """Note that a sample was drawn, and cut into so many pieces."""
        self.samples.drawn(source, epoch, slots, place)
        self._waits.arrived += pieces

    def packed(self, numbers: Sequence[int], cost: int) -> None:
        """Note the next micro-batch of the pack stream; ``numbers`` are its pieces as they arrived."""
        self.packed_costs.append(cost)
        if self.planning.online:
            self._waits.packed(numbers)

    def planned(self, step: StepFacts) -> None:
        """Note the next step that was planned."""
        contract = self.planning.contract
        multiple = contract.segment_multiple if contract.packed else 1
        packs, missing = step.micro_batches, sum(map(len, step.ranks)) - len(step.micro_batches)
        costs = [pack.cost for pack in packs] + [packs[-1].cost] * missing
        offsets = row_offsets([pack.slots for pack in packs], contract)
        self._segments += [len(pack.slots) for pack in packs]
        self._planned.append(
            _Planned(
                fillers=missing,
                unsupervised=sum(pack.loss_tokens == 0 for pack in packs),
                row_slots=sum(physical.item(-1) for _, physical in offsets),
                physical_slots=sum(round_up(slots, multiple) for pack in packs for slots in pack.slots),
                tokens=[sum(of_source) for of_source in zip(*(pack.tokens for pack in packs), strict=True)],
                costs=np.array(costs, dtype=np.float64)[np.array(step.ranks)],
            )
        )

    # The report --------------------------------------------------------------------------------------

    def report(self) -> PlanReport:
        """Return the report of what was seen so far. Raises ``ConfigError`` where that is not even one step."""
        if not self._planned:
            raise ConfigError(self._nothing())
        contract = self.planning.contract
        balance = self._balance() if contract.packed else None
        return PlanReport(
            setting=self._setting(),
            warnings=(*self.planning.warnings, *self.samples.split_warnings()),
            complete=self.complete,
            steps=self.steps,
            micro_batches=len(self._segments),
            fillers=sum(step.fillers for step in self._planned),
            dropped=len(self.packed_costs) - len(self._segments),
            unsupervised=sum(step.unsupervised for step in self._planned),
            samples=self.samples.report(),
            fill=self._fill(),
            segments=percentiles(self._segments) if contract.packed else None,
            order=Displacement(self._waits.longest, self._waits.most_late) if self.planning.online else None,
            balance=None if balance is None else balance.of_stream,
            rank_costs=None if balance is None else balance.of_worst,
            sources=self._sources(),
            over_length=self.samples.over_length_report(),
            comparison=None,
            recommendation=None,
            per_step=tuple(self._step(step, balance) for step in range(self.steps)),
        )

    def _nothing(self) -> str:
        found = f"{len(self.samples.lengths):,} samples with {sum(self.samples.lengths):,} slots"
        if self.packed_costs:
            return (
                f"contract.remainder=drop: {found} make {len(self.packed_costs)} micro-batches, a step takes "
                f"{self.planning.micro_batches}; lower contract.global_batch_size, or set remainder to pad"
            )
        over = (
            f", {sum(self.samples.over_length)} of them over {self.planning.limit:,} slots"
            if self.planning.limit
            else ""
        )
        return f"{self.planning.origin}: nothing to plan: {found}{over}; set over_length to split, or add data"

    def _setting(self) -> PlanSetting:
        planning, contract = self.planning, self.planning.contract
        return PlanSetting(
            origin=planning.origin,
            packing=str(contract.packing),
            data_parallel=planning.data_parallel,
            seq_length=contract.seq_length,
            micro_batch_size=contract.micro_batch_size,
            global_batch_size=contract.global_batch_size,
            num_microbatches=planning.micro_batches // planning.data_parallel,
            segment_multiple=contract.segment_multiple,
            algorithm=str(planning.packing.algorithm) if planning.online else None,
            lookahead=planning.packing.lookahead // planning.packing.capacity if planning.online else None,
            window=planning.window,
            max_segments=contract.max_segments,
            hidden_size=planning.hidden_size,
            mixed_by=None if planning.mixed_by is None else str(planning.mixed_by),
        )

    def _fill(self) -> Fill:
        contract, packing = self.planning.contract, self.planning.packing
        row_slots = sum(step.row_slots for step in self._planned)
        physical = sum(step.physical_slots for step in self._planned)
        tokens = sum(sum(step.tokens) for step in self._planned)
        sizes = {Packing.ONLINE: packing.capacity_slots(contract.segment_multiple), Packing.CONCAT: contract.seq_length}
        size = sizes.get(contract.packing)
        rows = contract.micro_batch_size if not contract.packed else 1
        least = None if size is None else ceil_div(physical, size * rows)
        return Fill(
            row_slots=row_slots,
            physical_slots=physical,
            tokens=tokens,
            slot=ratio(physical, row_slots),
            useful=ratio(tokens, row_slots),
            useful_at_most=ratio(tokens, physical) if contract.packed else None,
            packs_at_least=least,
            packs_over=None if least is None else len(self._segments) - least,
        )

    def _arrival_costs(self) -> Floats:
        """[S, D, M] with micro-batches assigned in the order of the pack stream."""
        costs, size = list(self.packed_costs), self.planning.micro_batches
        if self.planning.contract.remainder is Remainder.PAD:
            costs += costs[-1:] * (-len(costs) % size)
        ranks = self.planning.data_parallel
        rows = np.array(costs[: self.steps * size], dtype=np.float64).reshape(-1, size // ranks, ranks)
        return rows.transpose(0, 2, 1)

    def _balance(self) -> _Balance:
        """Means and worst are over whole steps, where there is one: fillers concern the last step alone."""
        before, after = self._arrival_costs(), np.stack([step.costs for step in self._planned])
        whole = [number for number, step in enumerate(self._planned) if not step.fillers] or list(range(self.steps))
        in_time, in_all = (synchronous(before), synchronous(after)), (totals(before), totals(after))
        worst = whole[int(in_all[0][whole].argmax())]
        return _Balance(
            of_stream=Balance(before_after(*in_time, whole), before_after(*in_all, whole)),
            of_worst=RankCosts(worst, relative(before[worst]), relative(after[worst])),
            before=rounded(in_time[0]),
            after=rounded(in_time[1]),
        )

    def _step(self, number: int, balance: _Balance | None) -> PlanStepReport:
        step = self._planned[number]
        return PlanStepReport(
            micro_batches=self.planning.micro_batches - step.fillers,
            fillers=step.fillers,
            unsupervised=step.unsupervised,
            slot_fill=ratio(step.physical_slots, step.row_slots),
            useful_fill=ratio(sum(step.tokens), step.row_slots),
            tokens=tuple(step.tokens),
            synchronous_before=None if balance is None else balance.before[number],
            synchronous_after=None if balance is None else balance.after[number],
        )

    def _sources(self) -> tuple[SourceReport, ...]:
        tokens = np.array([step.tokens for step in self._planned], dtype=np.int64)  # [S, sources]
        of_steps = tokens.sum(axis=1, keepdims=True)
        shares = quotients(tokens, of_steps, of_nothing=0.0)[of_steps[:, 0] > 0]  # a step without tokens has no shares
        drawn = self.samples.by_source()
        weights = sum(source.weight for source in self.planning.sources)
        return tuple(
            SourceReport(
                name=source.name,
                weight=ratio(source.weight, weights),
                share=ratio(int(tokens[:, i].sum()), int(tokens.sum())),
                least=round(float(shares[:, i].min(initial=1.0 if len(shares) else 0.0)), 6),
                most=round(float(shares[:, i].max(initial=0.0)), 6),
                tokens=int(tokens[:, i].sum()),
                samples=drawn[i],
                epochs=self.samples.epochs[i],
                skipped=self.samples.skipped[i],
                over_length=self.samples.over_length[i],
                lost=self.samples.lost[i],
                unsupervised=self.samples.unsupervised[i],
            )
            for i, source in enumerate(self.planning.sources)
        )
