"""Samples of one source that need a look: faulty ones are skipped, those over length cut or dropped, all counted.

So are those of which nothing is trained on, cut or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packhorse.errors import ContractError, SourceError
from packhorse_service.loading.block import Fault, TokenBlock
from packhorse_service.mixing.open_blocks import OpenBlock, SourcePlan
from packhorse_service.mixing.order import SourceCursor
from packhorse_service.mixing.over_length import OverLength, Range, cut_again, first_cut
from packhorse_service.mixing.piece import Piece, make_piece
from packhorse_service.mixing.source_counts import SourceCounts
from packhorse_service.mixing.unsupervised import Unsupervised, is_supervised

__all__ = ["CutSample", "SampleCutter"]


class CutSample(NamedTuple):
    """A sample as it was cut, or skipped. ``weight`` is what its draw counts towards the next replay point."""

    pieces: list[Piece]
    weight: int = 1  # pieces of the first cut, one at least; later cuts may come long after the draw and do not count
    skipped: bool = False


class FruitlessRun(NamedTuple):
    """Run of samples, one after the other, that gave no piece."""

    begun: int  # the epoch
    drawn: int  # how many samples were drawn with the last of them


class SampleCutter:
    """Cutter of one source's samples, by its over-length policy and its skip budget. ``counts`` is its account."""

    def __init__(self, plan: SourcePlan, source: int) -> None:
        self.counts = SourceCounts()
        self._plan = plan
        self._source = source  # its number
        self._fruitless = FruitlessRun(0, -1)  # the last

    def cut(
        self, block: OpenBlock, index: int, lengths: Sequence[int], order: SourceCursor, first_number: int
    ) -> CutSample:
        """Cut sample ``index`` of an open block at each of ``lengths`` in turn; pieces are numbered on from the first.

        A sample that cannot be used counts in ``order.faults``. Raises ``SourceError`` beyond the skip budget.
        """
        (sample, begin, end, slots), overlap = [column[index] for column in block.ranges], block.overlap
        whole = make_piece((first_number, self._source, block.shard, block.block, sample, begin, end, slots))
        fault = block.faults.get(sample) or self._refusal(whole, lengths[0])
        if fault is not None:
            self._skip(fault, end - begin, slots, order)
            self._note_fruitless(order.epoch)
            return CutSample([], skipped=True)
        ranges, weight = self._ranges((begin, end), slots, overlap, lengths)
        pieces = self._numbered(whole, ranges, first_number)
        if not pieces:
            self._note_fruitless(order.epoch)
        return CutSample(pieces, weight)

    def _note_fruitless(self, epoch: int) -> None:
        """Note that a sample gave no piece. Raises ``SourceError`` where none of a whole epoch has given one.

        A source that never ends would be read for ever, and whoever waits for a step would wait as long.
        """
        drawn = self.counts.samples
        begun = self._fruitless.begun if drawn == self._fruitless.drawn + 1 else epoch
        self._fruitless = FruitlessRun(begun, drawn)
        if epoch >= begun + 2:
            plan = self._plan
            raise SourceError(NOTHING.format(plan.order.name, begun + 2, plan.over_length, plan.unsupervised))

    def cut_again(self, piece: Piece, slots: int, first_number: int) -> list[Piece]:
        """Cut a piece that was drawn at another length, to at most ``slots``; what is left of it is numbered anew."""
        overlap = _overlap(piece)
        ranges = cut_again(self._plan.over_length, [(piece.begin, piece.end)], [slots], overlap)
        self.counts.lost_targets += piece.slots - _targets(ranges, overlap)
        return self._numbered(piece, ranges, first_number)

    def is_refused(self, piece: Piece, limit: int) -> bool:
        """Return whether a pending piece that was cut again cannot be packed, in rows of ``limit`` slots."""
        return piece.slots > limit or (self._plan.unsupervised is Unsupervised.ERROR and not _is_supervised(piece))

    def drop(self, piece: Piece, limit: int) -> Fault | None:
        """Account for a pending piece that ``is_refused``; return the fault that it is, if it is one."""
        if piece.slots > limit and self._plan.over_length is OverLength.DROP:
            self.counts.over_length += 1
            self.counts.lost_targets += piece.slots
            self.counts.dropped_samples += 1
            return None
        self.counts.faults += 1
        return self._refusal(piece, limit)

    def check_budget(self, order: SourceCursor, fault: Fault) -> None:
        """Raise ``ContractError`` where dropping a pending piece was a ``fault`` too many."""
        if order.faults > self._plan.skip_budget:
            raise ContractError(f"snapshot: a sample that waits cannot be used any more: {fault}")

    def _numbered(self, piece: Piece, ranges: list[Range], first_number: int) -> list[Piece]:
        """Return the ranges of ids kept of a piece as pieces of their own, without those that are dropped."""
        _, source, shard, block, sample, *_ = piece
        overlap = _overlap(piece)
        if self._plan.unsupervised is Unsupervised.DROP:
            ranges = self._supervised(block, ranges, overlap)
        return [
            make_piece((number, source, shard, block, sample, begin, end, end - begin - overlap))
            for number, (begin, end) in enumerate(ranges, start=first_number)
        ]

    def _supervised(self, block: TokenBlock, ranges: list[Range], overlap: int) -> list[Range]:
        """Return the ranges in which something is trained on, and account for the others."""
        kept = [part for part in ranges if is_supervised(block, part, overlap)]
        self.counts.unsupervised_pieces += len(ranges) - len(kept)
        self.counts.unsupervised_targets += _targets(ranges, overlap) - _targets(kept, overlap)
        return kept

    def _refusal(self, piece: Piece, limit: int) -> Fault | None:
        """Return why a sound sample, or piece of one, is refused in rows of ``limit`` slots, and account for it."""
        plan, counts, over = self._plan, self.counts, piece.slots > limit
        if over and plan.over_length is OverLength.ERROR:
            counts.lost_targets += piece.slots
            reason = OVER_LENGTH.format(piece.slots, limit)
        elif plan.unsupervised is Unsupervised.ERROR and (part := self._unsupervised_part(piece, limit)) is not None:
            counts.unsupervised_targets += piece.slots
            reason = NOT_TRAINED.format(*part)
        else:
            return None
        counts.over_length += over
        shard, key = plan.shards[piece.shard].name, piece.block.keys[piece.sample]
        return Fault(piece.sample, f"shard {shard!r}, sample {key!r}", reason)

    def _unsupervised_part(self, piece: Piece, limit: int) -> Range | None:
        """Return the first range of ids, counted from the sample's first, that is kept and has no trained target."""
        first, overlap = int(piece.block.offsets[piece.sample]), _overlap(piece)
        for begin, end in first_cut(self._plan.over_length, (piece.begin, piece.end), limit, overlap):
            if not is_supervised(piece.block, (begin, end), overlap):
                return begin - first, end - first - 1
        return None

    def _skip(self, fault: Fault, ids: int, slots: int, order: SourceCursor) -> None:
        plan, counts = self._plan, self.counts
        order.faults += 1
        counts.samples += 1
        counts.faults += 1
        if ids:  # sound, but not to be used
            counts.ids += ids
            counts.targets += slots
        if order.faults > plan.skip_budget:
            budget = f"skip_budget of {plan.skip_budget} is used up" if plan.skip_budget else "skip_budget is 0"
            raise SourceError(f"{fault} (source {plan.order.name!r}: {budget})")

    def _ranges(self, whole: Range, slots: int, overlap: int, lengths: Sequence[int]) -> tuple[list[Range], int]:
        """Return the ranges kept of a sample of so many slots, and its weight."""
        counts, policy = self.counts, self._plan.over_length
        ranges = first_cut(policy, whole, lengths[0], overlap)
        weight = max(len(ranges), 1)
        counts.samples += 1
        counts.ids += slots + overlap
        counts.targets += slots
        counts.over_length += slots > lengths[0]
        counts.dropped_samples += not ranges
        ranges = cut_again(policy, ranges, lengths[1:], overlap)
        counts.lost_targets += slots - _targets(ranges, overlap)
        return ranges, weight


OVER_LENGTH = (
    "{} slots are more than seq_length={}; set over_length to split, truncate_right, truncate_left or drop, or raise "
    "seq_length"
)
NOT_TRAINED = (
    "nothing is trained on in its ids {} … {}: their loss mask is 0; set unsupervised to drop or keep, or take the "
    "sample out of the data"
)
NOTHING = (
    "source {!r}: none of its samples in the whole of epoch {} (the first is 1) gave anything to pack: all were "
    "dropped or skipped, by over_length: {}, unsupervised: {} or skip_budget; change these, or take the source out"
)


def _overlap(piece: Piece) -> int:
    return piece.end - piece.begin - piece.slots


def _targets(ranges: Sequence[Range], overlap: int) -> int:
    return sum(end - begin - overlap for begin, end in ranges)


def _is_supervised(piece: Piece) -> bool:
    return is_supervised(piece.block, (piece.begin, piece.end), _overlap(piece))
