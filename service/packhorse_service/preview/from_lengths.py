"""A stream of which nothing is known but the lengths of its samples, packed and planned as ``online`` does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from packhorse.contract.batch_contract import BatchContract, Packing, ResolvedContract, resolve
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ContractError
from packhorse.rounding import ceil_div
from packhorse.rules import RuleInput, check, errors
from packhorse_service.mixing.over_length import CUTS, OverLength
from packhorse_service.packing.packer import packer_for, packing_plan
from packhorse_service.packing.packing_plan import PackingAlgorithm
from packhorse_service.planning.balance import CostModel
from packhorse_service.planning.balance_window import BalanceWindow, plan_window
from packhorse_service.planning.planned_step import plan_step
from packhorse_service.preview.plan_collector import PlanCollector
from packhorse_service.preview.planning_facts import PLANNED_AS, MicroBatchFacts, PlannedSource, Planning, StepFacts
from packhorse_service.preview.statistics import Ints

__all__ = ["Advance", "LengthsOptions", "PlannedLengths", "broken_rules", "plan_lengths", "simulate"]

Advance = Callable[[int, int], None]  # is told of steps planned and samples drawn, now and then


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsOptions:
    """Options of ``packhorse plan --lengths``; sizes in slots, ``lookahead`` in packs' worth."""

    origin: str
    seq_length: int
    data_parallel: int
    global_batch_size: int
    segment_multiple: int = 1
    algorithm: PackingAlgorithm = PackingAlgorithm.FIFO_EXACT_TAIL
    lookahead: int | None = None
    window: int = 1
    hidden_size: int = 4096
    max_segments: int | None = None
    over_length: OverLength = OverLength.ERROR
    epochs: int = 1
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedLengths:
    """Samples in their order: slots of each, and the number of its source."""

    slots: Sequence[int]
    sources: Sequence[int]


def plan_lengths(lengths: Ints, options: LengthsOptions, advance: Advance) -> PlanCollector:
    """Plan samples of these lengths, each epoch in the order of the file. Raises ``ContractError``, ``ConfigError``."""
    usable = lengths[lengths > 0].tolist()
    samples = PlannedLengths(usable, [0] * len(usable))
    collector = simulate(samples, _planning(options), epochs=options.epochs, steps=options.steps, advance=advance)
    collector.samples.empty = (len(lengths) - len(usable)) * options.epochs
    return collector


def _planning(options: LengthsOptions) -> Planning:
    layout = ParallelLayout(data=options.data_parallel)
    declared = BatchContract(
        packing=Packing.ONLINE, segment_multiple=options.segment_multiple, max_segments=options.max_segments
    )
    contract = resolve(
        declared,
        layout,
        seq_length=options.seq_length,
        global_batch_size=options.global_batch_size,
        vocab_size=1,  # of no consequence for lengths
    )
    broken = broken_rules(contract, layout)
    if broken:
        raise ContractError("these sizes do not hold:\n" + "\n".join(f"  {violation}" for violation in broken))
    packing = packing_plan(contract, options.lookahead, algorithm=options.algorithm)
    return Planning(
        origin=options.origin,
        contract=contract,
        data_parallel=options.data_parallel,
        packing=packing,
        lookahead=options.lookahead,
        hidden_size=options.hidden_size,
        mixed_by=None,
        window=options.window,
        limit=packing.capacity_slots(contract.segment_multiple),
        sources=(PlannedSource("lengths", 1, options.over_length, 0, "--over-length"),),
    )


def broken_rules(contract: ResolvedContract, layout: ParallelLayout) -> Sequence[object]:
    """Return the rules that these sizes break, as far as a trainer that declares nothing shows."""
    return errors(check(RuleInput(layout, contract, TrainerFacts())))


def simulate(
    samples: PlannedLengths,
    planning: Planning,
    *,
    epochs: int = 1,
    steps: int | None = None,
    advance: Advance = lambda _steps, _samples: None,
) -> PlanCollector:
    """Pack and plan, to the end or for as many steps, the last window whole."""
    collector = PlanCollector(planning)
    for step in _steps(LengthPacks(samples, epochs, planning, collector), planning):
        collector.planned(step)
        advance(collector.steps, len(collector.samples.lengths))
        if steps is not None and collector.steps >= steps and collector.whole:
            collector.complete = False
            break
    return collector


def _steps(packs: LengthPacks, planning: Planning) -> Iterator[StepFacts]:
    """Assign and plan packs by the functions that serving plans by."""
    contract = planning.contract
    window = plan_window(planning.window, contract, planning.packing, packs.cost, seed=0)
    for assigned in BalanceWindow(packs, window):
        planned = plan_step(
            assigned,
            [pack.loss_tokens for pack in assigned.packs],
            packs=planning.micro_batches,
            data_parallel=planning.data_parallel,
            remainder=contract.remainder,
        )
        if planned is not None:
            yield StepFacts(planned.micro_batches, planned.ranks)


class LengthPacks:
    """Source of packs of lengths alone, cut, drawn and packed as the pipeline does it."""

    def __init__(self, samples: PlannedLengths, epochs: int, planning: Planning, collector: PlanCollector) -> None:
        self.cost = CostModel(6 * planning.hidden_size)
        self._samples, self._epochs = samples, epochs
        self._planning, self._collector = planning, collector
        self._cuts = [CUTS[PLANNED_AS[source.over_length]] for source in planning.sources]
        self._packer = packer_for(planning.packing)
        self._pieces: dict[int, tuple[int, int]] = {}  # pending: number -> (slots, source)
        self._arrived = 0
        self._made = self._packs()

    def __iter__(self) -> LengthPacks:
        return self

    def __next__(self) -> MicroBatchFacts:
        return next(self._made)

    def state(self) -> None:
        """Return nothing: a preview is never resumed."""

    def _packs(self) -> Iterator[MicroBatchFacts]:
        arrivals = self._arrivals()
        waiting = True
        while waiting or len(self._packer):
            while waiting and self._packer.wants_more:
                waiting = next(arrivals, None) is not None
            if len(self._packer):
                yield self._pack(self._packer.next_pack())

    def _arrivals(self) -> Iterator[int]:
        """Let one sample after the other arrive; yields how many pieces it made."""
        limit, multiple = self._planning.limit or 0, self._planning.contract.segment_multiple
        slots, sources = self._samples.slots, self._samples.sources
        for epoch in range(self._epochs):
            for index, (length, source) in enumerate(zip(slots, sources, strict=True)):
                pieces = [length] if length <= limit else [b - a for a, b in self._cuts[source](0, length, limit, 0)]
                self._collector.drawn(source, epoch, length, len(pieces), f"sample {index}")
                for piece in pieces:
                    self._pieces[self._arrived] = (piece, source)
                    self._packer.add(self._arrived, ceil_div(piece, multiple))
                    self._arrived += 1
                yield len(pieces)

    def _pack(self, numbers: list[int]) -> MicroBatchFacts:
        pieces = [self._pieces.pop(number) for number in numbers]
        slots = [length for length, _ in pieces]
        tokens = [0] * len(self._planning.sources)
        for length, source in pieces:
            tokens[source] += length
        cost = self.cost.cost(slots)
        self._collector.packed(numbers, cost)
        return MicroBatchFacts(slots, tokens, cost, sum(slots))
