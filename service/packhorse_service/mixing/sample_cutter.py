"""Samples of one source that need a look: faulty ones are skipped, those over length cut or dropped, all counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packhorse.errors import ContractError, SourceError
from packhorse_service.loading.block import Fault, TokenBlock
from packhorse_service.mixing.open_blocks import OpenBlock, SourcePlan
from packhorse_service.mixing.order import SourceCursor
from packhorse_service.mixing.over_length import OverLength, Range, cut_again, first_cut
from packhorse_service.mixing.piece import Piece
from packhorse_service.mixing.source_counts import SourceCounts
from packhorse_service.sources.shards import Shard

__all__ = ["CutSample", "SampleCutter"]


class CutSample(NamedTuple):
    """A sample as it was cut, or skipped. ``weight`` is what its draw counts towards the next replay point."""

    pieces: list[Piece]
    weight: int = 1  # pieces of the first cut, one at least; later cuts may come long after the draw and do not count
    skipped: bool = False


class SampleCutter:
    """Cutter of one source's samples, by its over-length policy and its skip budget. ``counts`` is its account."""

    def __init__(self, plan: SourcePlan, source: int) -> None:
        self.counts = SourceCounts()
        self._plan = plan
        self._source = source  # its number

    def cut(
        self, block: OpenBlock, index: int, lengths: Sequence[int], order: SourceCursor, first_number: int
    ) -> CutSample:
        """Cut sample ``index`` of an open block at each of ``lengths`` in turn; pieces are numbered on from the first.

        A sample that cannot be used counts in ``order.faults``. Raises ``SourceError`` beyond the skip budget.
        """
        (sample, begin, end, slots), overlap = [column[index] for column in block.ranges], block.overlap
        fault = block.faults.get(sample)
        if slots > lengths[0] and self._plan.over_length is OverLength.ERROR:
            fault = _over_length_fault(sample, block.request.shard, block.block, slots, lengths[0])
        if fault is not None:
            self._skip(fault, end - begin, slots, order)
            return CutSample([], skipped=True)
        ranges, weight = self._ranges((begin, end), slots, overlap, lengths)
        pieces = [
            Piece(number, self._source, block.shard, block.block, sample, a, b, b - a - overlap)
            for number, (a, b) in enumerate(ranges, start=first_number)
        ]
        return CutSample(pieces, weight)

    def cut_again(self, piece: Piece, slots: int, first_number: int) -> list[Piece]:
        """Cut a piece that was drawn at another length, to at most ``slots``; what is left of it is numbered anew."""
        overlap = piece.end - piece.begin - piece.slots
        ranges = cut_again(self._plan.over_length, [(piece.begin, piece.end)], [slots], overlap)
        self.counts.lost_targets += piece.slots - sum(end - begin - overlap for begin, end in ranges)
        return [
            piece._replace(number=number, begin=begin, end=end, slots=end - begin - overlap)
            for number, (begin, end) in enumerate(ranges, start=first_number)
        ]

    def drop(self, piece: Piece) -> bool:
        """Account for a pending piece that is over length now and cannot be cut; return whether it is a fault."""
        self.counts.over_length += 1
        self.counts.lost_targets += piece.slots
        fault = self._plan.over_length is not OverLength.DROP
        self.counts.faults += fault
        self.counts.dropped_samples += not fault
        return fault

    def check_budget(self, order: SourceCursor, piece: Piece, seq_length: int) -> None:
        """Raise ``ContractError`` where dropping ``piece`` was a fault too many."""
        if order.faults > self._plan.skip_budget:
            shard = self._plan.shards[piece.shard]
            fault = _over_length_fault(piece.sample, shard, piece.block, piece.slots, seq_length)
            raise ContractError(f"snapshot: a sample that waits is over length now: {fault}")

    def _skip(self, fault: Fault, ids: int, slots: int, order: SourceCursor) -> None:
        plan, counts = self._plan, self.counts
        order.faults += 1
        counts.samples += 1
        counts.faults += 1
        if ids:  # sound, but over length
            counts.over_length += 1
            counts.ids += ids
            counts.targets += slots
            counts.lost_targets += slots
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
        counts.lost_targets += slots - sum(b - a - overlap for a, b in ranges)
        return ranges, weight


def _over_length_fault(sample: int, shard: Shard, block: TokenBlock, slots: int, limit: int) -> Fault:
    """Return the fault of a sample that is too long, where the policy is not to have any."""
    return Fault(
        sample,
        f"shard {shard.name!r}, sample {block.keys[sample]!r}",
        f"{slots} slots are more than seq_length={limit}; set over_length to split, truncate_right, truncate_left or "
        "drop, or raise seq_length",
    )
