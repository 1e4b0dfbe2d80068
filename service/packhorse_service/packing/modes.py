"""Samples to micro-batches, by packing mode.

An assembler takes pieces in arrival order and gives micro-batches: pieces in segments. It says which pieces
are finished, so that the stream need not draw them again, and how far the oldest pending piece (or a closed
lookahead) was used: that number, and what it counts, is all it adds to a snapshot.

| mode | a micro-batch is |
|---|---|
| ``online`` | one pack of the lookahead (``packing``) |
| ``in_batch`` | the next ``micro_batch_size`` samples |
| ``none`` | the same, each on a row of its own |
| ``concat``, isolated | documents one after the other; the last is cut where the row ends and goes on in the next |
| ``concat``, not isolated | ``micro_batch_size`` rows of one endless run of ids |
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

from packhorse.contract.batch_contract import Packing, ResolvedContract
from packhorse.errors import ContractError
from packhorse_service.mixing.over_length import UNLIMITED
from packhorse_service.mixing.piece import Demand, Piece
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.packing.packer import packer_for
from packhorse_service.packing.packing_plan import PackingPlan

__all__ = ["MicroBatcher", "PackedMicroBatch", "Segment", "micro_batcher_for"]

Segment = Sequence[Piece]  # consecutive runs of ids: one piece, or several of an endless run


class PackedMicroBatch(NamedTuple):
    """Micro-batch as it is packed: its pieces, one segment after the other, and those that are used up with it."""

    pieces: Sequence[Piece]
    slots: Sequence[int]  # logical ones of each segment
    finished: Sequence[int]
    segment_sizes: Sequence[int] = ()  # pieces of each segment, where it is not one

    @classmethod
    def of(cls, segments: Sequence[Segment], finished: Sequence[int] = ()) -> PackedMicroBatch:
        pieces, segment_sizes = list(chain.from_iterable(segments)), list(map(len, segments))
        slots = [sum([piece.slots for piece in segment]) for segment in segments]
        return cls(pieces, slots, finished, segment_sizes if len(segment_sizes) < len(pieces) else ())

    @classmethod
    def of_pieces(cls, pieces: Sequence[Piece], numbers: Sequence[int]) -> PackedMicroBatch:
        """Make one of whole pieces, each of them a segment."""
        return cls(pieces, [piece.slots for piece in pieces], numbers)

    @property
    def segments(self) -> Sequence[Segment]:
        pieces = iter(self.pieces)
        return [list(islice(pieces, count)) for count in self.segment_sizes or [1] * len(self.pieces)]

    def slots_by_source(self) -> Mapping[int, int]:
        """Logical slots, by the source that gave each slot's input."""
        sources = {piece.source for piece in self.pieces}
        if len(sources) == 1:  # as in nearly every micro-batch
            return {sources.pop(): sum(self.slots)}
        by_source: defaultdict[int, int] = defaultdict(int)
        for piece in self.pieces:
            by_source[piece.source] += piece.slots
        return by_source


class MicroBatcher(Protocol):
    """Interface of a packing mode: pieces in, micro-batches out."""

    @property
    def wants_more(self) -> bool:
        """True where a piece must be added, if there is one, before the next micro-batch is asked for."""

    @property
    def wanted(self) -> Demand:
        """Demand: how much must be added until no more is wanted."""

    @property
    def consumed_unit(self) -> ConsumedUnit:
        """Unit in which ``consumed`` counts."""

    @property
    def consumed(self) -> int:
        """Part of the oldest pending piece, or of the lookahead, that was packed already."""

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add pieces in the order of their arrival."""

    def next(self) -> PackedMicroBatch | None:
        """Return the next micro-batch; ``None`` where nothing is pending. Short only at the end of the stream."""

    def resume(self, pending: Iterable[Piece], consumed: int, /) -> None:
        """Take up what was pending at a snapshot."""


class Online:
    """Packs built over a lookahead."""

    consumed_unit = ConsumedUnit.LOOKAHEAD

    def __init__(self, plan: PackingPlan, segment_multiple: int) -> None:
        self._packer = packer_for(plan)
        self._multiple = segment_multiple
        self._pieces: dict[int, Piece] = {}

    @property
    def wants_more(self) -> bool:
        return self._packer.wants_more

    @property
    def wanted(self) -> Demand:
        return Demand(units=self._packer.plan.lookahead - self._packer.units, multiple=self._multiple)

    @property
    def consumed(self) -> int:
        return int(self._packer.closed)

    def add(self, pieces: Sequence[Piece]) -> None:
        numbers, units = [piece.number for piece in pieces], [piece.slots for piece in pieces]
        if self._multiple > 1:
            units = [-(-slots // self._multiple) for slots in units]
        self._pieces.update(zip(numbers, pieces, strict=True))
        self._packer.add_all(numbers, units)

    def next(self) -> PackedMicroBatch | None:
        if not len(self._packer):
            return None
        numbers = self._packer.next_pack()
        return PackedMicroBatch.of_pieces(list(map(self._pieces.pop, numbers)), numbers)

    def resume(self, pending: Iterable[Piece], consumed: int, /) -> None:
        self.add(list(pending))
        if consumed:
            self._packer.close()


class InBatch:
    """``size`` samples in the order of arrival."""

    consumed_unit = ConsumedUnit.LOOKAHEAD  # which is never closed
    consumed = 0

    def __init__(self, size: int) -> None:
        self._size = size
        self._pending: deque[Piece] = deque()

    @property
    def wants_more(self) -> bool:
        return len(self._pending) < self._size

    @property
    def wanted(self) -> Demand:
        return Demand(pieces=self._size - len(self._pending))

    def add(self, pieces: Sequence[Piece]) -> None:
        self._pending.extend(pieces)

    def next(self) -> PackedMicroBatch | None:
        taken = [self._pending.popleft() for _ in range(min(self._size, len(self._pending)))]
        return PackedMicroBatch.of_pieces(taken, [piece.number for piece in taken]) if taken else None

    def resume(self, pending: Iterable[Piece], _consumed: int, /) -> None:
        self.add(list(pending))


class ConcatIsolated:
    """Documents as segments; the last one is cut at the row's end and continues in the next row."""

    consumed_unit = ConsumedUnit.SLOTS

    def __init__(self, width: int, segment_multiple: int, max_segments: int | None) -> None:
        self._width = width
        self._multiple = segment_multiple
        self._max_segments = max_segments
        self._pending: deque[Piece] = deque()
        self._slots = 0  # pending, with alignment
        self.consumed = 0

    @property
    def wants_more(self) -> bool:
        enough = self._max_segments is not None and len(self._pending) >= self._max_segments
        return self._slots < self._width and not enough

    @property
    def wanted(self) -> Demand:
        pieces = UNLIMITED if self._max_segments is None else self._max_segments - len(self._pending)
        return Demand(pieces, -(-(self._width - self._slots) // self._multiple), self._multiple)

    def _aligned(self, slots: int) -> int:
        return -(-slots // self._multiple) * self._multiple

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._pending.append(piece)
            self._slots += self._aligned(piece.slots)

    def next(self) -> PackedMicroBatch | None:
        segments: list[Segment] = []
        finished: list[int] = []
        room = self._width
        while self._pending and room and len(segments) != self._max_segments:
            piece = self._pending.popleft()
            self._slots -= self._aligned(piece.slots)
            taken = piece
            if piece.slots > room:
                taken, rest = _cut(piece, room)
                self._pending.appendleft(rest)
                self._slots += self._aligned(rest.slots)
                self.consumed += room
            else:
                finished.append(piece.number)
                self.consumed = 0
            segments.append((taken,))
            room -= self._aligned(taken.slots)
        return PackedMicroBatch.of(segments, finished) if segments else None

    def resume(self, pending: Iterable[Piece], consumed: int, /) -> None:
        self.add(_after(pending, consumed))
        self.consumed = consumed


class ConcatContinuous:
    """Rows of ``width`` ids of one run; each row's labels reach one id into the next row."""

    consumed_unit = ConsumedUnit.IDS

    def __init__(self, width: int, rows: int) -> None:
        self._width = width
        self._rows = rows
        self._pending: deque[Piece] = deque()
        self._ids = 0
        self.consumed = 0

    @property
    def wants_more(self) -> bool:
        return self._ids < self._width * self._rows + 1

    @property
    def wanted(self) -> Demand:
        return Demand(units=self._width * self._rows + 1 - self._ids)  # joined: a slot for every id

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.block.labels is not None:
                raise ContractError(
                    "samples with labels of their own cannot be joined to one run of ids; "
                    "set isolate_documents to true, or leave the labels out"
                )
            self._pending.append(piece)
            self._ids += piece.end - piece.begin

    def next(self) -> PackedMicroBatch | None:
        segments: list[Segment] = []
        finished: list[int] = []
        for _ in range(self._rows):
            if self._ids >= 2:
                segments.append(self._row(finished))
        return PackedMicroBatch.of(segments, finished) if segments else None

    def _row(self, finished: list[int]) -> Segment:
        """Take ``width`` ids, and look at one more."""
        row: list[Piece] = []
        room = min(self._width, self._ids - 1)
        while room:
            piece = self._pending[0]
            size = piece.end - piece.begin
            if size <= room:
                row.append(self._pending.popleft())
                finished.append(piece.number)
                self.consumed = 0
                used = size
            else:
                taken, self._pending[0] = _cut(piece, room)
                row.append(taken)
                self.consumed += room
                used = room
            room -= used
            self._ids -= used
        ahead = self._pending[0]
        row.append(ahead._replace(end=ahead.begin + 1, slots=0))  # it is a target only
        return row

    def resume(self, pending: Iterable[Piece], consumed: int, /) -> None:
        self.consumed = consumed
        for piece in pending:
            _check_consumed(consumed, piece.end - piece.begin)
            self.add([_cut(piece, consumed)[1]])
            consumed = 0


def _cut(piece: Piece, slots: int) -> tuple[Piece, Piece]:
    """Return the first ``slots`` of a piece and the rest; the two share an id, so that no target is lost."""
    overlap = piece.end - piece.begin - piece.slots
    middle = piece.begin + slots
    first = piece._replace(end=middle + overlap, slots=slots)
    return first, piece._replace(begin=middle, slots=piece.slots - slots)


def _after(pending: Iterable[Piece], consumed: int) -> Iterable[Piece]:
    """Return the pending pieces without what was delivered of the first."""
    for piece in pending:
        _check_consumed(consumed, piece.slots)
        yield _cut(piece, consumed)[1] if consumed else piece
        consumed = 0


def _check_consumed(consumed: int, size: int) -> None:
    if consumed >= size:
        raise ContractError("snapshot: more of a document was delivered than it has; the shards differ")


def micro_batcher_for(contract: ResolvedContract, plan: PackingPlan) -> MicroBatcher:
    """Return the micro-batcher of a contract's packing mode."""
    mbs, width = contract.micro_batch_size, contract.seq_length
    if contract.concatenated:
        return ConcatContinuous(width, mbs)
    if contract.packing is Packing.CONCAT:
        return ConcatIsolated(width, contract.segment_multiple, contract.max_segments)
    if contract.packing is Packing.ONLINE:
        return Online(plan, contract.segment_multiple)
    return InBatch(mbs)
