"""Samples in their one deterministic order, and the place to resume it from.

The order moves with each sample drawn. A *mark* is a place in it, noted every so many draws; of the marks, those
are kept that lie behind the last one before the oldest piece that is not packed yet. A snapshot is that first
mark, how many samples were drawn since and at which lengths they were cut, and one bit for each piece of them:
packed or pending. Resuming draws again from the mark and skips the packed. Where marks are made depends on the
draws since the one before alone, so a stream makes the same ones, and the same snapshots, wherever it was resumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from packhorse.errors import ContractError, ProtocolError, SourceError
from packhorse_service.loading.block import Fault
from packhorse_service.loading.engine import BlockStore
from packhorse_service.mixing.open_blocks import OpenBlock, OpenBlocks, SourcePlan, check_offsets, over_length_fault
from packhorse_service.mixing.order import Mixing, OrderCursor, SourceCursor
from packhorse_service.mixing.over_length import (
    UNLIMITED,
    CutLengthHistory,
    OverLength,
    Range,
    cut_again,
    first_cut,
)
from packhorse_service.mixing.prefetched_run import ONE_PIECE, DeferredCursor, Demand, Piece, PrefetchedRun, make_piece
from packhorse_service.mixing.replay_log import CHECKSUM_MASK, ReplayPoint, StreamCursor
from packhorse_service.mixing.source_counts import SourceCounts

__all__ = ["PIECES_LIMIT", "REPLAY_POINT_EVERY", "DrawnSample", "Piece", "SampleStream", "SourcePlan"]


DIFFERENT = (
    "the samples drawn since it are not those of our data; a shard was written anew under the same name and size "
    "(put it back), or is tokenised otherwise"
)
REPLAY_POINT_EVERY = 64  # draws, or as many as there are open shards: copying the order costs little by the draw
RUN_LIMIT = 512  # draws looked ahead at
PIECES_LIMIT = 1 << 18  # drawn since the first mark: 32 KiB of a snapshot


class DrawnSample(NamedTuple):
    """A sample in its place in the order, before it is cut; ``pieces`` are what it was cut to."""

    source: int
    epoch: int
    shard: int
    key: str
    slots: int
    pieces: int


class SampleStream:
    """Draws pieces of at most ``seq_length`` slots, in order; remembers what is not packed yet.

    ``seq_length`` is ``None`` where documents are cut later, to the rows they fall into. Where documents are
    ``joined`` to one run, the next one's first id is the target of the last, so every id has a slot.
    """

    def __init__(
        self,
        settings: Sequence[SourcePlan],
        blocks: BlockStore,
        seq_length: int | None,
        mixing: Mixing,
        *,
        concatenated: bool = False,
    ) -> None:
        self._settings = settings
        self._mixing = mixing
        self._blocks = blocks
        self._seq_length = UNLIMITED if seq_length is None else seq_length
        self._lengths = (self._seq_length,)
        self._concatenated = concatenated
        self.on_drawn: Callable[[DrawnSample], None] | None = None  # told of every sample drawn
        self.restart()

    def first_order(self) -> OrderCursor:
        return OrderCursor([SourceCursor.at_start(setting.order) for setting in self._settings], self._mixing)

    def restart(self) -> None:
        """Go to the beginning."""
        self._begin(self.first_order())

    def _begin(self, order: OrderCursor) -> None:
        self._counts = [SourceCounts() for _ in self._settings]
        self.order = order
        self._marks = deque([ReplayPoint(DeferredCursor(order.clone()))])
        self._since_mark = 0  # draws since the last one; those cut to several pieces count as so many
        self._mark_every = max(REPLAY_POINT_EVERY, sum(setting.order.open_at_once for setting in self._settings))
        self._draws = self._pieces = 0  # in all, and the pieces that they gave
        self._checksum = 0  # sum of those of their blocks
        self._packed = bytearray()  # a flag for each piece drawn since the first mark
        self.at_snapshot_limit = (
            False  # whether as much was drawn since as a snapshot can tell: pack before drawing more
        )
        self._cut_lengths = CutLengthHistory(self._seq_length)
        self._run: PrefetchedRun | None = None  # what is looked ahead at
        self._blocks.forget()
        self._open = [
            OpenBlocks(setting, self._blocks, source, concatenated=self._concatenated)
            for setting, source in zip(self._settings, order.sources, strict=True)
        ]

    @property
    def counts(self) -> Mapping[str, SourceCounts]:
        """What became of all that each source gave, by its name."""
        return {setting.order.name: counts for setting, counts in zip(self._settings, self._counts, strict=True)}

    # Drawing -----------------------------------------------------------------------------------------

    def draw(self, wanted: Demand = ONE_PIECE) -> list[Piece] | None:
        """The pieces of the next sample, or samples: at least one, and no more than give the pieces wanted.

        No pieces where it is dropped or skipped, ``None`` at the end. Raises ``SourceError`` where the data cannot
        be used.
        """
        run = self._run or self._begin_run()
        return self._draw_each(wanted) if run is None else self._draw_run(run, wanted)

    def _begin_run(self) -> PrefetchedRun | None:
        """Look ahead where one source gives all samples: nearly all that it gives are neither cut nor end a block.

        The order stands behind the run from here on; what was drawn is counted as it is.
        """
        source = self.order.alone
        if source is None or self.on_drawn is not None:
            return None
        blocks = self._open[source]
        draws = min(blocks.plain(self._seq_length), RUN_LIMIT)
        if not draws:
            return None
        self._run = PrefetchedRun(blocks.ahead(draws), self._pieces, source, self.order.clone())
        self.order.advance_by(source, draws, self._run.ids)
        return self._run

    def _draw_run(self, run: PrefetchedRun, wanted: Demand) -> list[Piece]:
        pieces, ids, slots, checksum = run.take(wanted, self._mark_every - self._since_mark)
        if run.taken:
            self._run = None
        drawn, counts = len(pieces), self._counts[pieces[0].source]
        counts.samples += drawn
        counts.ids += ids
        counts.targets += slots
        self._checksum += checksum
        self._draws += drawn
        self._pieces += drawn
        self._packed.extend(bytes(drawn))
        self._since_mark += drawn
        if self._since_mark >= self._mark_every:
            self._mark()
        return pieces

    def _draw_each(self, wanted: Demand) -> list[Piece] | None:
        """Draw samples one by one: several where their sources alternate, as nothing can be looked ahead at then."""
        drawn = self._draw(self._lengths)
        if not drawn or self.order.alone is not None:
            return drawn
        pieces, units = drawn, 0
        while drawn and not self.at_snapshot_limit:
            for piece in drawn:
                units += -(-piece.slots // wanted.multiple)
            if len(pieces) >= wanted.pieces or units >= wanted.units:
                break
            drawn = self._draw(self._lengths)
            pieces += drawn or ()
        return pieces

    def _draw(self, lengths: Sequence[int]) -> list[Piece] | None:
        """Draw a sample that is cut at each of ``lengths`` in turn."""
        number = self.order.choose(self._next_ids)
        if number is None:
            return None
        blocks = self._open[number]
        at = blocks.order.open[blocks.order.turn]
        reading = blocks.reading.get(at.shard) or blocks.open(at)
        if not reading.drawn_from:
            blocks.draw_from(at.shard, reading)
        shard, index, facts = at.shard, at.index, reading.facts
        spans, block = reading.spans, reading.block
        begin, end, slots = spans.begins[index], spans.ends[index], spans.slots[index]
        if reading.longest <= lengths[0] and len(lengths) == 1 and self.on_drawn is None:  # as in nearly every draw
            counts = self._counts[number]
            counts.samples += 1
            counts.ids += end - begin
            counts.targets += slots
            pieces = [make_piece((self._pieces, number, shard, block, spans.samples[index], begin, end, slots))]
            self._pieces += 1
            self._packed.append(0)
        else:
            pieces = self._draw_with_care(number, shard, reading, index, lengths)
            self._pieces += len(pieces)
            self._packed.extend(bytes(len(pieces)))
        self._draws += 1
        self._checksum += facts.checksum
        self.order.advance(number, end - begin, facts)
        if index + 1 == facts.samples:
            blocks.leave(shard, reading)
        self._since_mark += 1
        if self._since_mark >= self._mark_every:
            self._mark()
        return pieces

    def _next_ids(self, source: int) -> int:
        return self._open[source].next_ids()

    def _mark(self) -> None:
        stand = DeferredCursor(self.order.clone()) if self._run is None else self._run.stand
        self._marks.append(ReplayPoint(stand, self._draws, self._pieces, self._checksum))
        self._since_mark = 0
        self._pass_marks()  # nothing may be pending, and nobody settle anything, for as long as samples are dropped

    def _draw_with_care(
        self, source: int, shard: int, reading: OpenBlock, index: int, lengths: Sequence[int]
    ) -> list[Piece]:
        """The pieces of a sample that may be faulty or over length."""
        (sample, begin, end, slots), overlap = [column[index] for column in reading.spans], reading.overlap
        setting, whole = self._settings[source], (begin, end)
        fault = reading.faults.get(sample)
        if slots > lengths[0] and setting.over_length is OverLength.ERROR:
            fault = over_length_fault(sample, reading.request.shard, reading.block, slots, lengths[0])
        if fault is not None:
            self._skip(source, fault, end - begin, slots)
            return []
        ranges = self._cut(source, whole, slots, overlap, lengths)
        if self.on_drawn is not None:
            epoch, key = self._open[source].order.epoch, reading.block.keys[sample]
            self.on_drawn(DrawnSample(source, epoch, shard, key, slots, len(ranges)))
        return [
            Piece(number, source, shard, reading.block, sample, a, b, b - a - overlap)
            for number, (a, b) in enumerate(ranges, start=self._pieces)
        ]

    def _skip(self, source: int, fault: Fault, ids: int, slots: int) -> None:
        setting, order, counts = self._settings[source], self._open[source].order, self._counts[source]
        order.faults += 1
        counts.samples += 1
        counts.faults += 1
        if ids:  # sound, but over length
            counts.over_length += 1
            counts.ids += ids
            counts.targets += slots
            counts.lost_targets += slots
        if order.faults > setting.skip_budget:
            budget = f"skip_budget of {setting.skip_budget} is used up" if setting.skip_budget else "skip_budget is 0"
            raise SourceError(f"{fault} (source {setting.order.name!r}: {budget})")

    def _cut(self, source: int, whole: Range, slots: int, overlap: int, lengths: Sequence[int]) -> list[Range]:
        """What is kept of a sample of so many slots."""
        counts, policy = self._counts[source], self._settings[source].over_length
        ranges = first_cut(policy, whole, lengths[0], overlap)
        # Later cuts do not count: they may come long after the draw, which is to be marked the same then.
        self._since_mark += max(len(ranges) - 1, 0)
        counts.samples += 1
        counts.ids += slots + overlap
        counts.targets += slots
        counts.over_length += slots > lengths[0]
        counts.dropped_samples += not ranges
        ranges = cut_again(policy, ranges, lengths[1:], overlap)
        counts.lost_targets += slots - sum(b - a - overlap for a, b in ranges)
        return ranges

    # What is packed ----------------------------------------------------------------------------------

    def count_packed(self, source: int, slots: int) -> None:
        """So many targets of a source are in micro-batches now."""
        self._counts[source].packed += slots

    def mark_packed(self, numbers: Iterable[int]) -> None:
        """These pieces are packed: they need not be drawn again."""
        packed, base = self._packed, self._marks[0].pieces
        for number in numbers:
            packed[number - base] = 1
        self._pass_marks()

    def _pass_marks(self) -> None:
        """Go on to the last mark before which nothing is pending."""
        marks, base = self._marks, self._marks[0].pieces
        front = self._packed.find(0)
        oldest = self._pieces if front < 0 else base + front
        while len(marks) > 1 and marks[1].pieces <= oldest:
            marks.popleft()
        del self._packed[: marks[0].pieces - base]
        since = max(self._pieces - marks[0].pieces, self._draws - marks[0].draws)
        self.at_snapshot_limit = since + self._mark_every > PIECES_LIMIT

    def cursor(self) -> StreamCursor:
        """Where to resume from, now."""
        mark = self._marks[0]
        cut_lengths = self._cut_lengths.between(mark.draws, self._draws)
        packed = np.frombuffer(bytes(self._packed), np.uint8)
        return StreamCursor(mark.at.order(), cut_lengths, packed, (self._checksum - mark.checksum) & CHECKSUM_MASK)

    def resume(self, cursor: StreamCursor) -> list[Piece]:
        """Go to a place; returns the pending pieces, in arrival order, none longer than ``seq_length``.

        Raises ``ProtocolError`` where the place is not one of our data, ``ContractError`` where it cannot be
        gone on from with this ``seq_length``.
        """
        check_offsets(self._settings, cursor.order)
        self._begin(cursor.order.clone())
        try:
            draws = self._draw_again(cursor)
        except SourceError as error:
            raise ProtocolError(f"snapshot: the data it points to is not there: {error}") from error
        self._packed[:] = cursor.packed.tobytes()
        if self._cut_lengths.slots != self._seq_length:
            draws = self._cut_anew(draws)
        pieces = list(chain.from_iterable(draws))
        pending = [piece for piece in pieces if not self._packed[piece.number]]
        for piece in pieces:
            self._counts[piece.source].packed += piece.slots * self._packed[piece.number]
        for piece in pending:
            if piece.slots > self._seq_length:
                self._give_up(piece)
        self._pass_marks()
        return [piece for piece in pending if piece.slots <= self._seq_length]

    def _draw_again(self, cursor: StreamCursor) -> list[list[Piece]]:
        """All that was drawn since the place, by draws."""
        for blocks in self._open:
            blocks.check()
        if cursor.cut_lengths:
            self._cut_lengths = CutLengthHistory.after(cursor.cut_lengths)
        draws: list[list[Piece]] = []
        lengths = [cut.slots for cut in cursor.cut_lengths]
        for number, cut in enumerate(cursor.cut_lengths):
            for _ in range(cut.draws):
                drawn = self._draw(lengths[number:])
                if drawn is None or self._pieces > len(cursor.packed):
                    raise SourceError(DIFFERENT)
                draws.append(drawn)
        if self._pieces != len(cursor.packed) or self._checksum & CHECKSUM_MASK != cursor.checksum:
            raise SourceError(DIFFERENT)
        return draws

    def _cut_anew(self, draws: Sequence[list[Piece]]) -> list[list[Piece]]:
        """A new era begins: cut all that was drawn at this stream's length too. Nothing is settled yet."""
        self._cut_lengths.begin(self._draws, self._seq_length)
        anew, packed, before = list[list[Piece]](), bytearray(), [0]
        for drawn in draws:
            pieces: list[Piece] = []
            for piece in drawn:
                cut = self._cut_piece(piece, len(packed))
                packed += self._packed[piece.number : piece.number + 1] * len(cut)
                pieces += cut
            anew.append(pieces)
            before.append(len(packed))
        if len(packed) > max(self._pieces, PIECES_LIMIT):
            raise ContractError(
                f"snapshot: at seq_length={self._seq_length} the samples drawn since the place of the snapshot are "
                f"{len(packed)} pieces, of at most {PIECES_LIMIT}; resume with a longer one"
            )
        self._pieces, self._packed = len(packed), packed
        self._marks = deque(mark._replace(pieces=before[mark.draws]) for mark in self._marks)
        return anew

    def _cut_piece(self, piece: Piece, first: int) -> list[Piece]:
        """What is kept of a piece at this stream's length, numbered from ``first`` on."""
        setting, overlap = self._settings[piece.source], piece.end - piece.begin - piece.slots
        ranges = cut_again(setting.over_length, [(piece.begin, piece.end)], [self._seq_length], overlap)
        self._counts[piece.source].lost_targets += piece.slots - sum(end - begin - overlap for begin, end in ranges)
        return [
            piece._replace(number=number, begin=begin, end=end, slots=end - begin - overlap)
            for number, (begin, end) in enumerate(ranges, start=first)
        ]

    def _give_up(self, piece: Piece) -> None:
        """A pending sample is longer than this stream's rows, and its policy knows no cut."""
        setting = self._settings[piece.source]
        counts = self._counts[piece.source]
        self._packed[piece.number] = 1
        counts.over_length += 1
        counts.lost_targets += piece.slots
        if setting.over_length is OverLength.DROP:
            counts.dropped_samples += 1
            return
        counts.faults += 1
        for order in (self.order, *(mark.at.start for mark in self._marks)):
            order.sources[piece.source].faults += 1
        if self.order.sources[piece.source].faults > setting.skip_budget:
            shard = setting.shards[piece.shard]
            fault = over_length_fault(piece.sample, shard, piece.block, piece.slots, self._seq_length)
            raise ContractError(f"snapshot: a sample that waits is over length now: {fault}")
