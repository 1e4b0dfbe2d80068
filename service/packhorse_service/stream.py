"""Samples in their one deterministic order, and the place to resume it from.

Two copies of the order run over the same blocks. The *head* stands where the next sample is drawn; the
*tail* stands just before the oldest sample that is not packed yet. A snapshot is the tail, how many samples
were drawn since and at which lengths they were cut, and one bit for each piece of them: packed or pending.
Resuming draws again from the tail and skips the packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import ContractError, ProtocolError, SourceError
from packhorse_service.accounting import SourceCounts
from packhorse_service.blocks import Fault, Shard, TokenBlock
from packhorse_service.cutting import NEVER, Era, Eras, OverLength, cut_again, first_cut
from packhorse_service.loading import BlockStore
from packhorse_service.mixing import BlockFacts, Mixing, Order, SourceOrder
from packhorse_service.reading import OpenBlocks, Reading, SourceSetting, check_offsets

__all__ = ["PIECES_LIMIT", "DrawnSample", "Piece", "SampleStream", "SourceSetting", "StreamPlace"]


DIFFERENT = "the samples drawn since it are not those of our data; a shard was written anew, or is tokenised otherwise"
CHECKSUM_MASK = 0xFFFFFFFF
PIECES_LIMIT = 1 << 18  # drawn since the oldest pending one: 32 KiB of a snapshot


class Piece(NamedTuple):
    """A sample, or a run of one: ids ``begin`` … ``end`` of its block. ``number`` counts pieces drawn."""

    number: int
    source: int
    shard: int
    block: TokenBlock
    sample: int  # within the block
    begin: int
    end: int
    slots: int


class DrawnSample(NamedTuple):
    """A sample in its place in the order, before it is cut; ``pieces`` are what it was cut to."""

    source: int
    epoch: int
    shard: int
    key: str
    slots: int
    pieces: int


class _Drawn(NamedTuple):
    """One draw, as the tail will repeat it."""

    source: int
    ids: int
    facts: BlockFacts
    faulty: bool
    pieces: int


class StreamPlace(NamedTuple):
    """Where to resume: the order before the oldest pending piece, and what was packed since."""

    order: Order
    eras: Sequence[Era]  # the draws since; none of them where all that was drawn is packed
    packed: npt.NDArray[np.uint8]  # [pieces drawn since] 1 = packed
    checksum: int = 0  # sum of those of the blocks of all draws since, 32 bits of it


class SampleStream:
    """Draws pieces of at most ``seq_length`` slots, in order; remembers what is not packed yet.

    ``seq_length`` is ``None`` where documents are cut later, to the rows they fall into. Where documents are
    ``joined`` to one run, the next one's first id is the target of the last, so every id has a slot.
    """

    def __init__(
        self,
        settings: Sequence[SourceSetting],
        blocks: BlockStore,
        seq_length: int | None,
        mixing: Mixing,
        *,
        joined: bool = False,
    ) -> None:
        self._settings = settings
        self._mixing = mixing
        self._blocks = blocks
        self._seq_length = NEVER if seq_length is None else seq_length
        self._lengths = (self._seq_length,)
        self._joined = joined
        self.watch: Callable[[DrawnSample], None] | None = None  # told of every sample drawn
        self.restart()

    def first_order(self) -> Order:
        return Order([SourceOrder.at_start(setting.plan) for setting in self._settings], self._mixing)

    def restart(self) -> None:
        """Go to the beginning."""
        self._begin(self.first_order())

    def _begin(self, order: Order) -> None:
        self.counts = {setting.plan.name: SourceCounts() for setting in self._settings}
        self._tail = order
        self._head = order.clone()
        self._log: deque[_Drawn] = deque()  # draws since the tail
        self._checksum = 0  # sum of those of their blocks
        self._packed = bytearray()  # a flag for each piece drawn since the tail
        self._base = 0  # number of the first of them
        self._settled = 0  # draws before the tail
        self._eras = Eras(self._seq_length)
        self._open = OpenBlocks(self._settings, self._blocks, self._head)

    # Drawing -----------------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether as much was drawn since the oldest pending piece as a snapshot can tell: pack before drawing more."""
        return len(self._packed) >= PIECES_LIMIT or len(self._log) >= PIECES_LIMIT

    def draw(self) -> list[Piece] | None:
        """The pieces of the next sample: none where it is dropped or skipped. ``None`` at the end.

        Raises ``SourceError`` where the data cannot be used.
        """
        pieces = self._draw(self._lengths)
        self._settle_front()
        return pieces

    def _draw(self, lengths: Sequence[int]) -> list[Piece] | None:
        """Draw a sample that is cut at each of ``lengths`` in turn."""
        source = self._head.choose(self._next_ids)
        if source is None:
            return None
        at = self._head.sources[source].current
        shard, index = at.shard, at.index
        reading = self._open.at(source, at)
        if not reading.drawn_from:
            self._open.draw_from(source, shard, reading)
        sample = reading.order[index]
        begin, end = reading.ends[sample], reading.ends[sample + 1]
        fault = reading.faults.get(sample) or self._too_long(source, reading, sample, end - begin, lengths[0])
        pieces = [] if fault else self._cut(source, shard, reading.block, sample, (begin, end), lengths)
        self._head.advance(source, end - begin, reading.facts, faulty=fault is not None)
        if fault is not None:
            self._skip(source, reading, fault, end - begin)
        if index + 1 == reading.facts.samples:
            self._open.leave(source, shard, reading)
        self._log.append(_Drawn(source, end - begin, reading.facts, fault is not None, len(pieces)))
        self._packed.extend(bytes(len(pieces)))
        self._checksum += reading.facts.checksum
        return pieces

    def _next_ids(self, source: int) -> int:
        """Ids of the source's next sample."""
        at = self._head.sources[source].current
        reading = self._open.at(source, at)
        sample = reading.order[at.index]
        return reading.ends[sample + 1] - reading.ends[sample]

    def _skip(self, source: int, reading: Reading, fault: Fault, ids: int) -> None:
        setting, faults = self._settings[source], self._head.sources[source].faults
        counts = self.counts[setting.plan.name]
        counts.samples += 1
        counts.faults += 1
        if ids:  # sound, but over length
            slots = ids - self._overlap(reading.block)
            counts.over_length += 1
            counts.tokens += ids
            counts.targets += slots
            counts.lost_tokens += slots
        if faults > setting.skip_budget:
            budget = f"skip_budget of {setting.skip_budget} is used up" if setting.skip_budget else "skip_budget is 0"
            raise SourceError(f"{fault} (source {setting.plan.name!r}: {budget})")

    # Cutting -----------------------------------------------------------------------------------------

    def _cut(
        self, source: int, shard: int, block: TokenBlock, sample: int, whole: tuple[int, int], lengths: Sequence[int]
    ) -> list[Piece]:
        counts = self.counts[self._settings[source].plan.name]
        overlap = self._overlap(block)
        slots = whole[1] - whole[0] - overlap
        counts.samples += 1
        counts.tokens += slots + overlap
        counts.targets += slots
        ranges = [whole]
        if slots > lengths[0] or len(lengths) > 1:
            policy = self._settings[source].over_length
            ranges = first_cut(policy, whole, lengths[0], overlap)
            counts.over_length += slots > lengths[0]
            counts.lost_samples += not ranges
            ranges = cut_again(policy, ranges, lengths[1:], overlap)
            counts.lost_tokens += slots - sum(b - a - overlap for a, b in ranges)
        if self.watch is not None:
            epoch, key = self._head.sources[source].epoch, block.keys[sample]
            self.watch(DrawnSample(source, epoch, shard, key, slots, len(ranges)))
        first = self._base + len(self._packed)
        return [
            Piece(first + i, source, shard, block, sample, a, b, b - a - overlap) for i, (a, b) in enumerate(ranges)
        ]

    def _overlap(self, block: TokenBlock) -> int:
        """Ids a piece needs beyond its slots: the last target, unless the source brings its own labels."""
        return 1 if block.labels is None and not self._joined else 0

    def _too_long(self, source: int, reading: Reading, sample: int, ids: int, limit: int) -> Fault | None:
        setting, slots = self._settings[source], ids - self._overlap(reading.block)
        if slots <= limit or setting.over_length is not OverLength.ERROR:
            return None
        return _over_length(sample, reading.request.shard, reading.block, slots, limit)

    # What is packed ----------------------------------------------------------------------------------

    def settle(self, numbers: Iterable[int]) -> None:
        """These pieces are packed: they need not be drawn again."""
        for number in numbers:
            self._packed[number - self._base] = 1
        self._settle_front()

    def _settle_front(self) -> None:
        """Move the tail over draws of which nothing is pending."""
        done = 0
        while self._log:
            drawn = self._log[0]
            if 0 in self._packed[done : done + drawn.pieces]:
                break
            self._tail.advance(drawn.source, drawn.ids, drawn.facts, faulty=drawn.faulty)
            self._log.popleft()
            self._checksum -= drawn.facts.checksum
            done += drawn.pieces
            self._settled += 1
        del self._packed[:done]
        self._base += done

    def place(self) -> StreamPlace:
        """Where to resume from, now."""
        eras = self._eras.between(self._settled, self._settled + len(self._log))
        packed = np.frombuffer(bytes(self._packed), np.uint8)
        return StreamPlace(self._tail, eras, packed, self._checksum & CHECKSUM_MASK)

    def resume(self, place: StreamPlace) -> list[Piece]:
        """Go to a place; returns the pending pieces, in arrival order, none longer than ``seq_length``.

        Raises ``ProtocolError`` where the place is not one of our data, ``ContractError`` where it cannot be
        gone on from with this ``seq_length``.
        """
        check_offsets(self._settings, place.order)
        self._begin(place.order.clone())
        try:
            pieces = self._draw_again(place)
        except SourceError as error:
            raise ProtocolError(f"snapshot: the data it points to is not there: {error}") from error
        self._packed[:] = place.packed.tobytes()
        if self._eras.slots != self._seq_length:
            pieces = self._cut_anew(pieces)
        pending = [piece for piece in pieces if not self._packed[piece.number]]
        for piece in pieces:
            self.counts[self._settings[piece.source].plan.name].packed += piece.slots * self._packed[piece.number]
        for piece in pending:
            if piece.slots > self._seq_length:
                self._give_up(piece)
        self._settle_front()
        return [piece for piece in pending if piece.slots <= self._seq_length]

    def _draw_again(self, place: StreamPlace) -> list[Piece]:
        """All that was drawn since the place."""
        self._open.check()
        if place.eras:
            self._eras = Eras.after(place.eras)
        pieces: list[Piece] = []
        lengths = [era.slots for era in place.eras]
        for number, era in enumerate(place.eras):
            for _ in range(era.draws):
                drawn = self._draw(lengths[number:])
                if drawn is None or len(pieces) + len(drawn) > len(place.packed):
                    raise SourceError(DIFFERENT)
                pieces += drawn
        if len(pieces) != len(place.packed) or self._checksum & CHECKSUM_MASK != place.checksum:
            raise SourceError(DIFFERENT)
        return pieces

    def _cut_anew(self, drawn: Sequence[Piece]) -> list[Piece]:
        """A new era begins: cut all that was drawn at this stream's length too. Nothing is settled yet."""
        self._eras.begin(len(self._log), self._seq_length)
        pieces, packed, log, arriving = list[Piece](), bytearray(), deque[_Drawn](), iter(drawn)
        for each in self._log:
            before = len(pieces)
            for piece in islice(arriving, each.pieces):
                setting, overlap = self._settings[piece.source], self._overlap(piece.block)
                ranges = cut_again(setting.over_length, [(piece.begin, piece.end)], [self._seq_length], overlap)
                for begin, end in ranges:
                    packed.append(self._packed[piece.number])
                    slots = end - begin - overlap
                    pieces.append(piece._replace(number=len(pieces), begin=begin, end=end, slots=slots))
                left = sum(end - begin - overlap for begin, end in ranges)
                self.counts[setting.plan.name].lost_tokens += piece.slots - left
            log.append(each._replace(pieces=len(pieces) - before))
        if len(pieces) > max(len(drawn), PIECES_LIMIT):
            raise ContractError(
                f"snapshot: at seq_length={self._seq_length} the samples drawn since the oldest that waits are "
                f"{len(pieces)} pieces, of at most {PIECES_LIMIT}; resume with a longer one"
            )
        self._log, self._packed = log, packed
        return pieces

    def _give_up(self, piece: Piece) -> None:
        """A pending sample is longer than this stream's rows, and its policy knows no cut."""
        setting = self._settings[piece.source]
        counts = self.counts[setting.plan.name]
        self._packed[piece.number] = 1
        counts.over_length += 1
        counts.lost_tokens += piece.slots
        if setting.over_length is OverLength.DROP:
            counts.lost_samples += 1
            return
        counts.faults += 1
        for order in (self._tail, self._head):
            order.sources[piece.source].faults += 1
        if self._head.sources[piece.source].faults > setting.skip_budget:
            shard = setting.shards[piece.shard]
            fault = _over_length(piece.sample, shard, piece.block, piece.slots, self._seq_length)
            raise ContractError(f"snapshot: a sample that waits is over length now: {fault}")


def _over_length(sample: int, shard: Shard, block: TokenBlock, slots: int, limit: int) -> Fault:
    return Fault(
        sample,
        f"shard {shard.name!r}, sample {block.keys[sample]!r}",
        f"{slots} slots are more than seq_length={limit}; set over_length to split, truncate_right, truncate_left or "
        "drop, or raise seq_length",
    )
