"""Pipeline: runs the plan of a stream, from shards to framed steps. Its stages: ``packhorse_service.pipeline``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

from packhorse.errors import ContractError
from packhorse.rows.row import SampleKey
from packhorse_service.framing import FramedStep, frame_step
from packhorse_service.loading.engine import BlockStore, Engine
from packhorse_service.mixing.order import OrderCursor
from packhorse_service.mixing.sample_stream import DrawnSample, SampleStream
from packhorse_service.mixing.source_counts import PipelineProgress, SourceCounts
from packhorse_service.packing.modes import PackedMicroBatch
from packhorse_service.packing.pack_stream import PackState, PackStream
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.pipeline.provenance import Provenance
from packhorse_service.pipeline.resume import adapt_snapshot, resume_warnings
from packhorse_service.planning.balance_window import BalanceWindow, ResumePoint
from packhorse_service.planning.planned_step import PlannedStep, plan_step
from packhorse_service.planning.rows import build_rows, count_loss_tokens
from packhorse_service.snapshot.codec import PackShape, StreamSnapshot, decode_snapshot, encode_snapshot

__all__ = ["Pipeline", "PipelineObserver"]


class PipelineObserver(Protocol):
    """Observer of a pipeline: is told what happens, in the order in which it happens; changes nothing."""

    def drawn(self, sample: DrawnSample) -> None:
        """Note that a sample was drawn: it waits to be packed."""

    def packed(self, micro_batch: PackedMicroBatch) -> None:
        """Note the next micro-batch of the pack stream."""


class Pipeline:
    """Runs a plan: whole steps in order, from the beginning or from a snapshot.

    Raises ``SourceError`` where the data cannot be used; only ``restore`` helps then.
    """

    def __init__(self, plan: StreamPlan, engine: Engine, observer: PipelineObserver | None = None) -> None:
        self.plan = plan
        self.step = 0  # the next to make
        self._blocks = BlockStore(engine)
        self._samples = SampleStream(
            plan.sources, self._blocks, plan.cut_length, plan.mixing, concatenated=plan.contract.concatenated
        )
        self._packs = PackStream(self._samples, plan.contract, plan.packing)
        self._steps = BalanceWindow(self._packs, plan.window)
        if observer is not None:
            self._samples.on_drawn, self._packs.watch = observer.drawn, observer.packed

    @property
    def counts(self) -> Mapping[str, SourceCounts]:
        """Counts of what became of all that each source gave, by its name."""
        return self._samples.counts

    @property
    def progress(self) -> PipelineProgress:
        """Place of the stream, for those who watch from another thread: numbers that may be a draw apart."""
        epochs = [(order.epoch, order.opened) for order in self._samples.order.sources]
        return PipelineProgress(self.counts, epochs, self._blocks.loading, self._blocks.waiting_for)

    # Making steps ------------------------------------------------------------------------------------

    def next_step(self) -> FramedStep | None:
        """Make one whole step; ``None`` at the end of a finite stream."""
        planned = self.next_planned_step()
        return None if planned is None else self._framed(planned)

    def next_planned_step(self) -> PlannedStep[PackedMicroBatch] | None:
        """Plan the next step: what its micro-batches hold and who gets them. No row is built; ``None`` at the end."""
        assigned = next(self._steps, None)
        if assigned is None:
            return None
        planned = plan_step(
            assigned,
            list(map(count_loss_tokens, assigned.packs)),
            packs=self.plan.window.packs,
            data_parallel=self.plan.layout.data,
            remainder=self.plan.contract.remainder,
            snapshot=self._snapshot(assigned.behind),
        )
        if planned is None:
            self._leave_over(assigned.packs)
            return None
        self.step = planned.step + 1
        return planned

    def _snapshot(self, behind: ResumePoint[PackState]) -> bytes:
        contract = self.plan.contract
        shape = PackShape(contract.seq_length, contract.segment_multiple)
        snapshot = StreamSnapshot(behind.step, *behind.packs, shape, behind.window)
        return encode_snapshot(snapshot, self.plan.fingerprint)

    def _framed(self, planned: PlannedStep[PackedMicroBatch]) -> FramedStep:
        contract, layout = self.plan.contract, self.plan.layout
        rows = build_rows(planned.micro_batches, contract, map(self._keys, planned.micro_batches))
        if planned.fillers:
            rows += [rows[-1].as_filler()] * planned.fillers
        of_ranks = [[rows[number] for number in of_rank] for of_rank in planned.ranks]
        step = frame_step(planned.step, of_ranks, planned.snapshot, contract, layout, with_keys=self.plan.with_keys)
        step.provenance = Provenance(planned.micro_batches, planned.ranks, self.plan.sources)
        return step

    def _keys(self, micro_batch: PackedMicroBatch) -> tuple[SampleKey, ...]:
        if not self.plan.with_keys:
            return ()
        sources = self.plan.sources
        return tuple(
            (sources[p.source].order.name, sources[p.source].shards[p.shard].name, p.block.keys[p.sample])
            for p in micro_batch.pieces
        )

    def _leave_over(self, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Count what the micro-batches of an incomplete last step hold as left over: the step is not made."""
        for source, slots in chain.from_iterable(each.slots_by_source().items() for each in micro_batches):
            counts = self._samples.counts[self.plan.sources[source].order.name]
            counts.packed -= slots
            counts.dropped_remainder += slots

    # Going elsewhere ---------------------------------------------------------------------------------

    def begin_pass(self) -> bytes:
        """Go to the beginning again, behind the end, which counts as a step; return the snapshot of that place."""
        self._begin(self.step + 1)
        return self._snapshot(ResumePoint(self.step, self._packs.state(), self.plan.window.position()))

    def _begin(self, step: int) -> None:
        self._packs.restart()
        self._steps = BalanceWindow(self._packs, self.plan.window, step)
        self.step = step

    def restore(self, snapshot: bytes | None, step: int | None = None) -> tuple[str, ...]:
        """Go to where the snapshot was taken, or to the beginning; return what should be said of the rest.

        ``step``: the one that whoever holds the snapshot says it is before.

        Raises ``ProtocolError`` or ``ContractError`` where it is not a snapshot of this stream.
        """
        if snapshot is None:
            self._begin(0)
            return ()
        plan, contract = self.plan, self.plan.contract
        first = OrderCursor.at_start((source.order for source in plan.sources), plan.mixing)
        read = decode_snapshot(snapshot, plan.fingerprint, first, plan.allow_changes)
        if step is not None and step != read.stands_before:
            raise ContractError(
                f"snapshot: it is of the stream before step {read.stands_before}, and is named as that before {step}: "
                "the two are not of one state; load the checkpoint as it was saved"
            )
        taken = adapt_snapshot(read, self._packs.unit)
        self._steps = BalanceWindow(self._packs, plan.window, taken.step, taken.window)
        self.step = taken.step + taken.window.offset
        self._packs.resume(PackState(taken.cursor, taken.consumed_unit, taken.consumed))
        return tuple(resume_warnings(read, PackShape(contract.seq_length, contract.segment_multiple), plan.window))
