"""Samples over length: what a source's policy keeps of them, at one length and at the next.

A sample is cut when it is drawn. A stream that resumes with another ``seq_length`` cuts what it had drawn
once more, piece by piece: a piece is a range of ids. So the samples drawn since a snapshot's order have a
history of *cut lengths*: each was cut at the length of its draw and then at all later ones, in turn. Pieces
that were packed are cut along on paper, and are then several that are packed: what was drawn follows from
the data and the cut lengths alone, whatever was packed in between.

Only ``split`` gives several pieces, and no cut loses or repeats a target of it. A policy that shortens
samples shortens pieces. ``drop`` and ``error`` decide about whole samples, so later cuts leave them as they
are, and whoever resumes decides about those that are pending and do not fit any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple, Self

from packhorse.errors import ContractError

__all__ = [
    "CUT_LENGTHS_LIMIT",
    "UNLIMITED",
    "CutLength",
    "CutLengthHistory",
    "OverLength",
    "Range",
    "cut_again",
    "first_cut",
]

UNLIMITED = sys.maxsize  # the length of documents that are cut later, to the rows they fall into
CUT_LENGTHS_LIMIT = 16  # changes of length within one lookahead

Range = tuple[int, int]


class OverLength(StrEnum):
    """Policy for a sample with more slots than a pack."""

    ERROR = "error"
    SPLIT = "split"  # pieces that overlap by one id, so that no target is lost
    TRUNCATE_LEFT = "truncate_left"  # the end is kept
    TRUNCATE_RIGHT = "truncate_right"  # the beginning is kept
    DROP = "drop"


class CutLength(NamedTuple):
    """A run of draws, one after the other, whose samples were cut at ``slots`` first."""

    draws: int
    slots: int


class CutLengthHistory:
    """Cut lengths of a stream's draws, each with the number of the draw that it begins with."""

    def __init__(self, slots: int) -> None:
        self._begun = [(0, slots)]

    @classmethod
    def after(cls, cut_lengths: Sequence[CutLength]) -> Self:
        """Return the history of a stream that has drawn nothing but these draws; one cut length at least."""
        history, draws = cls(0), 0
        history._begun.clear()
        for cut in cut_lengths:
            history._begun.append((draws, cut.slots))
            draws += cut.draws
        return history

    @property
    def current(self) -> int:
        """Slots at which samples are cut now."""
        return self._begun[-1][1]

    def change(self, draw: int, slots: int) -> None:
        """Begin another cut length with draw number ``draw``. Raises ``ContractError`` where there are too many."""
        if len(self._begun) == CUT_LENGTHS_LIMIT:
            raise ContractError(
                f"snapshot: the samples that wait were cut at {CUT_LENGTHS_LIMIT} lengths one after the other, the "
                f"last of them {self.current} slots; make some steps at that length, and change it to {slots} then"
            )
        self._begun.append((draw, slots))

    def since(self, first_draw: int, drawn: int) -> list[CutLength]:
        """Return the cut lengths of the draws from number ``first_draw`` to ``drawn``, and forget those before."""
        while len(self._begun) > 1 and self._begun[1][0] <= first_draw:
            del self._begun[0]
        edges = [first_draw, *(first for first, _ in self._begun[1:]), drawn]
        return [
            CutLength(end - first, slots) for (first, end), (_, slots) in zip(pairwise(edges), self._begun, strict=True)
        ]


def first_cut(policy: OverLength, whole: Range, slots: int, overlap: int) -> list[Range]:
    """Return the ranges of ids kept of a sample, each of ``slots`` slots at most and ``overlap`` ids more."""
    return _cut(CUTS[policy], whole, slots, overlap)


def cut_again(policy: OverLength, ranges: Sequence[Range], lengths: Sequence[int], overlap: int) -> list[Range]:
    """Return the ranges kept of ``ranges``, cut at each of ``lengths`` in turn."""
    kept = list(ranges)
    for slots in lengths:
        kept = [part for each in kept for part in _cut(CUTS_AGAIN[policy], each, slots, overlap)]
    return kept


Cut = Callable[[int, int, int, int], list[Range]]


def _cut(cut: Cut, whole: Range, slots: int, overlap: int) -> list[Range]:
    begin, end = whole
    return [whole] if end - begin - overlap <= slots else cut(begin, end, slots, overlap)


def _split(begin: int, end: int, slots: int, overlap: int) -> list[Range]:
    return [(a, min(a + slots + overlap, end)) for a in range(begin, end - overlap, slots)]


def _keep(begin: int, end: int, _slots: int, _overlap: int) -> list[Range]:
    return [(begin, end)]


CUTS: dict[OverLength, Cut] = {
    OverLength.SPLIT: _split,
    OverLength.TRUNCATE_LEFT: lambda begin, end, slots, overlap: [(end - slots - overlap, end)],
    OverLength.TRUNCATE_RIGHT: lambda begin, end, slots, overlap: [(begin, begin + slots + overlap)],
    OverLength.DROP: lambda begin, end, slots, overlap: [],
    OverLength.ERROR: lambda begin, end, slots, overlap: [],  # a fault: the sample keeps its place, with nothing in it
}
CUTS_AGAIN: dict[OverLength, Cut] = {**CUTS, OverLength.DROP: _keep, OverLength.ERROR: _keep}
