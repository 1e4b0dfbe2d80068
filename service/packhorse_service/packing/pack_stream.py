"""Stream of packs: draws the samples that a packing mode asks for, and gives micro-batches one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from packhorse.contract.batch_contract import ResolvedContract
from packhorse_service.mixing.replay_log import StreamCursor
from packhorse_service.mixing.sample_stream import SampleStream
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.packing.modes import PackedMicroBatch, micro_batcher_for
from packhorse_service.packing.packing_plan import PackingPlan

__all__ = ["PackState", "PackStream"]


class PackState(NamedTuple):
    """Resumable state of a pack stream between two micro-batches; holds no sample, and stays as it is."""

    cursor: StreamCursor  # in the samples
    unit: ConsumedUnit
    consumed: int  # in that unit: how much of what is pending was packed already


class PackStream:
    """Iterator over the micro-batches of a stream of samples, in the order in which they are packed.

    The last ones may hold less than they have room for. Raises ``SourceError`` where the data cannot be used.
    """

    def __init__(self, samples: SampleStream, contract: ResolvedContract, plan: PackingPlan) -> None:
        self.watch: Callable[[PackedMicroBatch], None] | None = None  # is told of every micro-batch
        self._samples = samples
        self._contract, self._plan = contract, plan
        self._empty()

    def _empty(self) -> None:
        self._micro_batcher = micro_batcher_for(self._contract, self._plan)
        self._exhausted = False

    @property
    def unit(self) -> ConsumedUnit:
        """Unit in which this stream's states say how much was consumed."""
        return self._micro_batcher.consumed_unit

    def __iter__(self) -> PackStream:
        return self

    def __next__(self) -> PackedMicroBatch:
        samples, micro_batcher = self._samples, self._micro_batcher
        while micro_batcher.wants_more and not self._exhausted and not samples.at_snapshot_limit:
            pieces = samples.draw(micro_batcher.wanted)
            if pieces is None:
                self._exhausted = True
                break
            if pieces:
                micro_batcher.add(pieces)
        micro_batch = micro_batcher.next()
        if micro_batch is None:
            raise StopIteration
        samples.mark_packed(micro_batch.finished, micro_batch.slots_by_source())
        if self.watch is not None:
            self.watch(micro_batch)
        return micro_batch

    def state(self) -> PackState:
        """Return what the rest of this stream can be made from, elsewhere or later."""
        return PackState(self._samples.cursor(), self._micro_batcher.consumed_unit, self._micro_batcher.consumed)

    def restart(self) -> None:
        """Go back to the first sample."""
        self._samples.restart()
        self._empty()

    def resume(self, state: PackState) -> None:
        """Go to where the state was noted.

        Raises ``ProtocolError`` where its cursor is not one of our data, ``ContractError`` where it cannot be gone
        on from with these settings.
        """
        self._empty()
        pending = self._samples.resume(state.cursor)
        self._micro_batcher.resume(pending, state.consumed)
        if pending and state.unit is not ConsumedUnit.LOOKAHEAD:
            self._samples.mark_packed((), {pending[0].source: state.consumed})
