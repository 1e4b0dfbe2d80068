"""Samples in their one deterministic order, as pieces to be packed, and how that resumes.

``OrderCursor`` says which source and shard give the next sample, ``OpenBlocks`` where its ids are, ``SampleCutter``
what is kept of it. Where one source gives all samples, a ``PrefetchedRun`` of them is drawn at once. ``ReplayLog``
keeps what a snapshot needs. Resuming draws again from the log's first replay point and skips the packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from packhorse.errors import ProtocolError, SourceError
from packhorse_service.loading.engine import BlockStore
from packhorse_service.mixing.open_blocks import OpenBlocks, SourcePlan, check_offsets
from packhorse_service.mixing.order import DeferredCursor, Mixing, OrderCursor
from packhorse_service.mixing.over_length import UNLIMITED, CutLengthHistory
from packhorse_service.mixing.piece import ONE_PIECE, Demand, Piece, make_piece
from packhorse_service.mixing.prefetched_run import PrefetchedRun
from packhorse_service.mixing.replay_log import ReplayLog, StreamCursor
from packhorse_service.mixing.sample_cutter import SampleCutter
from packhorse_service.mixing.source_counts import SourceCounts

__all__ = ["DrawnSample", "SampleStream"]

DATA_DIFFERS = (
    "the samples drawn since it are not those of our data; a shard was written anew under the same name and size "
    "(put it back), or is tokenised otherwise"
)
RUN_LIMIT = 512  # draws looked ahead at
NONE_PACKED: Mapping[int, int] = MappingProxyType({})


class DrawnSample(NamedTuple):
    """A sample in its place in the order, before it is cut; ``pieces`` counts what it was cut to."""

    source: int
    epoch: int
    shard: int
    key: str
    slots: int
    pieces: int


class SampleStream:
    """Stream of pieces of at most ``seq_length`` slots, in order, which remembers what is not packed yet.

    ``seq_length`` is ``None`` where documents are cut later, to the rows they fall into. Where documents are
    ``concatenated`` to one run, the next one's first id is the target of the last, so every id has a slot.
    """

    def __init__(
        self,
        plans: Sequence[SourcePlan],
        store: BlockStore,
        seq_length: int | None,
        mixing: Mixing,
        *,
        concatenated: bool = False,
    ) -> None:
        self._plans = plans
        self._mixing = mixing
        self._store = store
        self._lengths = (UNLIMITED if seq_length is None else seq_length,)  # of every draw that is not drawn again
        self._concatenated = concatenated
        self.on_drawn: Callable[[DrawnSample], None] | None = None  # told of every sample drawn
        self.restart()

    def restart(self) -> None:
        """Go to the beginning, as if nothing had been drawn yet."""
        self._begin(OrderCursor.at_start((plan.order for plan in self._plans), self._mixing))

    def _begin(self, order: OrderCursor) -> None:
        self.order = order
        self._log = ReplayLog(order, sum(plan.order.open_at_once for plan in self._plans), self._lengths[0])
        self._cutters = [SampleCutter(plan, number) for number, plan in enumerate(self._plans)]
        self._run: PrefetchedRun | None = None  # behind which ``order`` stands
        self._store.forget()
        self._open = [
            OpenBlocks(plan, self._store, source, concatenated=self._concatenated)
            for plan, source in zip(self._plans, order.sources, strict=True)
        ]
        self._next_ids = [blocks.next_ids for blocks in self._open]

    @property
    def counts(self) -> Mapping[str, SourceCounts]:
        """Account of all that each source gave, by its name."""
        return {plan.order.name: cutter.counts for plan, cutter in zip(self._plans, self._cutters, strict=True)}

    @property
    def at_snapshot_limit(self) -> bool:
        """True where as much was drawn ahead as a snapshot can tell: pack before drawing more."""
        return self._log.at_limit

    # Drawing -----------------------------------------------------------------------------------------

    def draw(self, demand: Demand = ONE_PIECE) -> list[Piece] | None:
        """Return the pieces of the next sample, or samples: at least one, and no more than give the pieces in demand.

        No pieces where it is dropped or skipped, ``None`` at the end. Raises ``SourceError`` where the data cannot
        be used.
        """
        run = self._run or self._begin_run()
        return self._draw_each(demand) if run is None else self._draw_run(run, demand)

    def _begin_run(self) -> PrefetchedRun | None:
        """Look ahead where one source gives all samples: nearly all that it gives are neither cut nor end a block.

        The order stands behind the run from here on; what was drawn is counted as it is.
        """
        source = self.order.only_source
        if source is None or self.on_drawn is not None:
            return None
        blocks = self._open[source]
        draws = min(blocks.uncut_run_length(self._lengths[0]), RUN_LIMIT)
        if not draws:
            return None
        self._run = PrefetchedRun(blocks.uncut_run(draws), self._log.pieces, source, self.order.clone())
        self.order.advance_by(source, draws, self._run.ids)
        return self._run

    def _draw_run(self, run: PrefetchedRun, demand: Demand) -> list[Piece]:
        log = self._log
        pieces, ids, slots, checksum = run.take(demand, log.until_point)
        if run.exhausted:
            self._run = None
        drawn, counts = len(pieces), self._cutters[pieces[0].source].counts
        counts.samples += drawn
        counts.ids += ids
        counts.targets += slots
        if log.record(drawn, drawn, checksum, drawn):
            log.add_point(DeferredCursor(self.order.clone()) if self._run is None else run.cursor)
        return pieces

    def _draw_each(self, demand: Demand) -> list[Piece] | None:
        """Draw samples one by one: several where their sources alternate, as nothing can be looked ahead at then."""
        drawn = self._draw(self._lengths)
        if not drawn or self.order.only_source is not None:
            return drawn
        pieces, units = drawn, 0
        while drawn and not self._log.at_limit:
            for piece in drawn:
                units += -(-piece.slots // demand.multiple)
            if len(pieces) >= demand.pieces or units >= demand.units:
                break
            drawn = self._draw(self._lengths)
            pieces += drawn or ()
        return pieces

    def _draw(self, lengths: Sequence[int]) -> list[Piece] | None:
        """Draw a sample that is cut at each of ``lengths`` in turn."""
        source = self.order.choose(self._next_ids)
        if source is None:
            return None
        blocks, log = self._open[source], self._log
        at = blocks.order.open[blocks.order.next_open]
        shard, index = at.shard, at.index
        block = blocks.in_use.get(shard) or blocks.open(at)
        if not block.drawn_from:
            blocks.begin(shard, block)
        ranges, facts, cutter, weight = block.ranges, block.facts, self._cutters[source], 1
        begin, end, slots = ranges.begins[index], ranges.ends[index], ranges.slots[index]
        if block.longest <= lengths[0] and len(lengths) == 1 and self.on_drawn is None:  # as in nearly every draw
            counts = cutter.counts
            counts.samples += 1
            counts.ids += end - begin
            counts.targets += slots
            pieces = [make_piece((log.pieces, source, shard, block.block, ranges.samples[index], begin, end, slots))]
        else:
            pieces, weight, skipped = cutter.cut(block, index, lengths, blocks.order, log.pieces)
            if self.on_drawn is not None and not skipped:
                key = block.block.keys[ranges.samples[index]]
                self.on_drawn(DrawnSample(source, blocks.order.epoch, shard, key, slots, len(pieces)))
        self.order.advance(source, end - begin, facts)
        if index + 1 == facts.samples:
            blocks.close(shard, block)
        if log.record(1, len(pieces), facts.checksum, weight):
            log.add_point(DeferredCursor(self.order.clone()))
        return pieces

    # What is packed ----------------------------------------------------------------------------------

    def mark_packed(self, numbers: Iterable[int], slots_by_source: Mapping[int, int] = NONE_PACKED) -> None:
        """Note that pieces, by number, need not be drawn again, and how many targets of each source are packed."""
        self._log.mark_packed(numbers)
        for source, slots in slots_by_source.items():
            self._cutters[source].counts.packed += slots

    def cursor(self) -> StreamCursor:
        """Return where to resume from now."""
        return self._log.cursor()

    def resume(self, cursor: StreamCursor) -> list[Piece]:
        """Go to a cursor; returns the pending pieces, in arrival order, none longer than ``seq_length``.

        Raises ``ProtocolError`` where the cursor is not one of our data, ``ContractError`` where it cannot be
        gone on from with this ``seq_length``.
        """
        check_offsets(self._plans, cursor.order)
        self._begin(cursor.order.clone())
        try:
            draws = self._replay(cursor)
        except SourceError as error:
            raise ProtocolError(f"snapshot: the data it points to is not there: {error}") from error
        log, (seq_length,) = self._log, self._lengths
        log.packed[:] = cursor.packed.tobytes()
        if log.cut_lengths.current != seq_length:
            draws = log.recut(
                draws, seq_length, lambda piece, first: self._cutters[piece.source].cut_again(piece, seq_length, first)
            )
        pieces = list(chain.from_iterable(draws))
        pending = [piece for piece in pieces if not log.packed[piece.number]]
        for piece in pieces:
            self._cutters[piece.source].counts.packed += piece.slots * log.packed[piece.number]
        for piece in pending:
            if self._cutters[piece.source].is_refused(piece, seq_length):
                self._drop(piece)
        pending = [piece for piece in pending if not log.packed[piece.number]]
        log.drop_passed_points()
        return pending

    def _replay(self, cursor: StreamCursor) -> list[list[Piece]]:
        """Draw again all that was drawn since the cursor's order; returns the pieces by draws."""
        for blocks in self._open:
            blocks.check()
        log = self._log
        if cursor.cut_lengths:
            log.cut_lengths = CutLengthHistory.after(cursor.cut_lengths)
        draws: list[list[Piece]] = []
        lengths = [cut.slots for cut in cursor.cut_lengths]
        for number, cut in enumerate(cursor.cut_lengths):
            for _ in range(cut.draws):
                drawn = self._draw(lengths[number:])
                if drawn is None or log.pieces > len(cursor.packed):
                    raise SourceError(DATA_DIFFERS)
                draws.append(drawn)
        if not log.leads_to(cursor):
            raise SourceError(DATA_DIFFERS)
        return draws

    def _drop(self, piece: Piece) -> None:
        """Drop a pending piece that, cut to this stream's rows, cannot be packed."""
        cutter = self._cutters[piece.source]
        self._log.packed[piece.number] = 1
        fault = cutter.drop(piece, self._lengths[0])
        if fault is not None:
            for order in (self.order, *(point.order.start for point in self._log.points)):
                order.sources[piece.source].faults += 1
            cutter.check_budget(self.order.sources[piece.source], fault)
