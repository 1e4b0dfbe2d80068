"""Samples in their one deterministic order, and the place to resume it from.

Two copies of the order run over the same blocks. The *head* stands where the next sample is drawn; the
*tail* stands just before the oldest sample that is not packed yet. A snapshot is the tail plus one bit
for each piece drawn since: packed or pending. Resuming draws again from the tail and skips the packed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.errors import ProtocolError, SourceError
from packhorse_service.accounting import SourceCounts
from packhorse_service.blocks import BlockRequest, Fault, Shard, TokenBlock
from packhorse_service.loading import BlockStore
from packhorse_service.mixing import BlockFacts, Mixing, OpenShard, Order, SourceOrder, SourcePlan
from packhorse_service.shuffling import permutation, seed_of

__all__ = ["OverLength", "Piece", "SampleStream", "SourceSetting", "StreamPlace"]


COMPRESSION_LIMIT = 1100  # what deflate can reach


class OverLength(StrEnum):
    """What happens to a sample with more slots than a pack."""

    ERROR = "error"
    SPLIT = "split"  # pieces that overlap by one id, so that no target is lost
    TRUNCATE_LEFT = "truncate_left"  # the end is kept
    TRUNCATE_RIGHT = "truncate_right"  # the beginning is kept
    DROP = "drop"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetting:
    """How one source is read."""

    plan: SourcePlan
    shards: tuple[Shard, ...]
    over_length: OverLength
    skip_budget: int  # samples whose content may be unusable before the stream stops


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
    packed: npt.NDArray[np.uint8]  # [pieces drawn since] 1 = packed


@dataclass(slots=True)
class _Reading:
    """A block being drawn from."""

    request: BlockRequest
    block: TokenBlock
    facts: BlockFacts
    ends: list[int]  # offsets of the block's samples, as plain integers
    order: list[int]  # which sample is drawn i-th
    faults: Mapping[int, Fault]


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
        self._seq_length = sys.maxsize if seq_length is None else seq_length
        self._joined = joined
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
        self._packed = bytearray()  # a flag for each piece drawn since the tail
        self._base = 0  # number of the first of them
        self._reading: dict[tuple[int, int], _Reading] = {}  # (source, shard) -> block in use
        self._keys: dict[tuple[int, int], set[str]] = {}  # of the open shards, to find a key given twice
        self._blocks.forget()
        for number, source in enumerate(self._head.sources):
            self._blocks.announce(self._request(number, s.shard, s.offset, s.first_sample) for s in source.open)

    # Drawing -----------------------------------------------------------------------------------------

    def draw(self) -> list[Piece] | None:
        """The pieces of the next sample: none where it is dropped or skipped. ``None`` at the end.

        Raises ``SourceError`` where the data cannot be used.
        """
        source = self._head.choose(self._next_ids)
        if source is None:
            return None
        at = self._head.sources[source].current
        shard, index = at.shard, at.index
        reading = self._block_at(source, at)
        sample = reading.order[index]
        begin, end = reading.ends[sample], reading.ends[sample + 1]
        fault = reading.faults.get(sample) or self._too_long(source, reading, sample, end - begin)
        pieces = [] if fault else self._cut(source, shard, reading.block, sample, begin, end)
        self._head.advance(source, end - begin, reading.facts, faulty=fault is not None)
        if fault is not None:
            self._skip(source, reading, fault, end - begin)
        if index + 1 == reading.facts.samples:
            self._leave(source, shard, reading)
        self._log.append(_Drawn(source, end - begin, reading.facts, fault is not None, len(pieces)))
        self._packed.extend(bytes(len(pieces)))
        self._settle_front()
        return pieces

    def _next_ids(self, source: int) -> int:
        """Ids of the source's next sample."""
        at = self._head.sources[source].current
        reading = self._block_at(source, at)
        sample = reading.order[at.index]
        return reading.ends[sample + 1] - reading.ends[sample]

    def _block_at(self, source: int, at: OpenShard) -> _Reading:
        """The block that an open shard stands in, loading the one behind it meanwhile."""
        reading = self._reading.get((source, at.shard))
        if reading is None:
            request = self._request(source, at.shard, at.offset, at.first_sample)
            block = self._blocks.get(request)
            reading = self._open_block(source, at.shard, request, block)
            self._reading[source, at.shard] = reading
            self._blocks.announce(self._requests_behind(source, at.shard, at.first_sample, block))
        return reading

    def _open_block(self, source: int, shard: int, request: BlockRequest, block: TokenBlock) -> _Reading:
        setting = self._settings[source]
        keys = self._keys.setdefault((source, shard), set())
        twice = next((key for key in block.keys if key in keys), None)
        if twice is not None:
            raise SourceError(
                f"shard {request.shard.name!r} of source {request.source!r}: duplicate key {twice!r}; "
                "a key names one sample in a shard: write the shard again with keys that differ"
            )
        keys.update(block.keys)
        order = list(range(block.count))
        if setting.plan.shuffle:
            place = self._head.sources[source]
            seed = seed_of(setting.plan.seed, setting.plan.name, place.epoch, shard, request.first_sample)
            order = permutation(block.count, seed).tolist()
        facts = BlockFacts(block.count, block.next_offset)
        faults = {fault.index: fault for fault in block.faults}
        return _Reading(request, block, facts, block.offsets.tolist(), order, faults)

    def _requests_behind(self, source: int, shard: int, first: int, block: TokenBlock) -> list[BlockRequest]:
        if block.next_offset is not None:
            return [self._request(source, shard, block.next_offset, first + block.count)]
        upcoming = self._head.sources[source].next_shard()
        return [] if upcoming is None else [self._request(source, upcoming, 0, 0)]

    def _request(self, source: int, shard: int, offset: int, first_sample: int) -> BlockRequest:
        setting = self._settings[source]
        return BlockRequest(setting.plan.name, setting.shards[shard], offset, first_sample)

    def _leave(self, source: int, shard: int, reading: _Reading) -> None:
        del self._reading[source, shard]
        if reading.facts.next_offset is None:
            del self._keys[source, shard]

    def _skip(self, source: int, reading: _Reading, fault: Fault, ids: int) -> None:
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

    def _cut(self, source: int, shard: int, block: TokenBlock, sample: int, begin: int, end: int) -> list[Piece]:
        counts = self.counts[self._settings[source].plan.name]
        counts.samples += 1
        counts.tokens += end - begin
        overlap = self._overlap(block)
        counts.targets += end - begin - overlap
        ranges = [(begin, end)]
        if end - begin - overlap > self._seq_length:
            ranges = CUTS[self._settings[source].over_length](begin, end, self._seq_length, overlap)
            counts.over_length += 1
            counts.lost_samples += not ranges
            counts.lost_tokens += end - begin - overlap - sum(b - a - overlap for a, b in ranges)
        first = self._base + len(self._packed)
        return [
            Piece(first + i, source, shard, block, sample, a, b, b - a - overlap) for i, (a, b) in enumerate(ranges)
        ]

    def _overlap(self, block: TokenBlock) -> int:
        """Ids a piece needs beyond its slots: the last target, unless the source brings its own labels."""
        return 1 if block.labels is None and not self._joined else 0

    def _too_long(self, source: int, reading: _Reading, sample: int, ids: int) -> Fault | None:
        setting, slots = self._settings[source], ids - self._overlap(reading.block)
        if slots <= self._seq_length or setting.over_length is not OverLength.ERROR:
            return None
        place = f"shard {reading.request.shard.name!r}, sample {reading.block.keys[sample]!r}"
        return Fault(
            sample,
            place,
            f"{slots} slots are more than seq_length={self._seq_length}; set over_length to split, truncate_right, "
            "truncate_left or drop, or raise seq_length",
        )

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
            done += drawn.pieces
        del self._packed[:done]
        self._base += done

    def place(self) -> StreamPlace:
        """Where to resume from, now."""
        return StreamPlace(self._tail, np.frombuffer(bytes(self._packed), np.uint8))

    def resume(self, place: StreamPlace) -> list[Piece]:
        """Go to a place; returns the pending pieces, in arrival order."""
        self._check_offsets(place.order)
        self._begin(place.order.clone())
        try:
            pieces = self._draw_again(len(place.packed))
        except SourceError as error:
            raise ProtocolError(f"snapshot: the data it points to is not there: {error}") from error
        if len(pieces) != len(place.packed):
            raise ProtocolError("snapshot: the samples drawn since it are not those of our data; the shards differ")
        packed = place.packed.tolist()
        self.settle(piece.number for piece in pieces if packed[piece.number])
        for piece in pieces:
            self.counts[self._settings[piece.source].plan.name].packed += piece.slots * packed[piece.number]
        return [piece for piece in pieces if not packed[piece.number]]

    def _check_offsets(self, order: Order) -> None:
        for setting, source in zip(self._settings, order.sources, strict=True):
            for at in source.open:
                shard = setting.shards[at.shard]
                # Only a compressed shard can be longer than its file.
                if at.offset > shard.size * COMPRESSION_LIMIT:
                    raise ProtocolError(f"snapshot: shard {shard.name!r} has no block at byte {at.offset}")

    def _draw_again(self, count: int) -> list[Piece]:
        """About as many pieces as were drawn; every open shard must hold what the snapshot says of it."""
        for source, order in enumerate(self._head.sources):
            for at in order.open:
                shard = self._settings[source].shards[at.shard]
                if at.index >= self._block_at(source, at).block.count:
                    raise SourceError(f"shard {shard.name!r} has no sample {at.index} in the block at {at.offset}")
        pieces: list[Piece] = []
        while len(pieces) < count and (drawn := self.draw()) is not None:
            pieces += drawn
        return pieces


def _split(begin: int, end: int, slots: int, overlap: int) -> list[tuple[int, int]]:
    return [(a, min(a + slots + overlap, end)) for a in range(begin, end - overlap, slots)]


# An over-long sample to the ranges that are kept of it. (ERROR is a fault and never gets here.)
CUTS: dict[OverLength, Callable[[int, int, int, int], list[tuple[int, int]]]] = {
    OverLength.SPLIT: _split,
    OverLength.TRUNCATE_LEFT: lambda begin, end, slots, overlap: [(end - slots - overlap, end)],
    OverLength.TRUNCATE_RIGHT: lambda begin, end, slots, overlap: [(begin, begin + slots + overlap)],
    OverLength.DROP: lambda begin, end, slots, overlap: [],
}
