"""Micro-batches to rows: the arrays of physical rows.

A segment of n ids has n-1 slots, tokens ``ids[:-1]`` and labels ``ids[1:]``, so there is no slot without a
target (Megatron-Bridge's convention); a source that brings its own labels keeps n slots. A dense micro-batch
of several rows is laid out as one row whose segments are those rows, each ``seq_length`` slots wide.

The rows of a step are laid out as one long array and cut from it at the end: what numpy takes for an
operation on a small array is more than the copying.

Shapes: E = entries of the offset arrays of all rows, one row after the other; N = slots of all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import sub
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from packhorse.contract import ResolvedContract, TailPadding
from packhorse.errors import ContractError
from packhorse.payload import narrowest
from packhorse.row import Row, SampleKey
from packhorse_service.assembling import Segment
from packhorse_service.blocks import TokenBlock
from packhorse_service.stream import Piece

__all__ = ["build_rows", "row_offsets", "segment_slots", "slots_by_source", "supervised_slots"]

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]
Word = TypeVar("Word", bound=np.generic)

UNSUPERVISED = np.array(0, np.uint8)


def build_rows(
    micro_batches: Sequence[Sequence[Segment]], contract: ResolvedContract, keys: Iterable[tuple[SampleKey, ...]]
) -> list[Row]:
    """A row of each micro-batch's segments, in the shape that the contract fixes; ids in their type on the wire."""
    packs = [[_as_piece(segment) for segment in segments] for segments in micro_batches]
    pieces = list(chain.from_iterable(packs))
    _, _, _, blocks, _, begins, ends, slots = zip(*pieces, strict=True)
    used = {id(block): block for block in blocks}.values()
    masked = any(block.loss_mask is not None for block in used)
    labelled = any(block.labels is not None for block in used)
    edges = list(accumulate(map(len, packs), initial=0))
    layout = LAYOUTS[contract.packed]([slots[first:end] for first, end in pairwise(edges)], contract)
    ids = np.concatenate([block.tokens[begin:end] for block, begin, end in zip(blocks, begins, ends, strict=True)])
    places = list(accumulate(map(sub, ends, begins), initial=0))
    padding = np.array(contract.pad_id, narrowest(contract.vocab_size))
    tokens = layout.placed([ids[at : at + each] for at, each in zip(places, slots, strict=False)], padding)
    mask = layout.placed(list(map(_loss_mask, pieces)), UNSUPERVISED) if masked else None
    own = layout.placed(list(map(_targets, pieces)), padding) if labelled else None
    last = ids[np.array(places[1:]) - 1]
    if labelled:
        last = np.array([_predicted(piece.block).item(piece.end - 1) for piece in pieces], np.uint32)
    rows = []
    slot = 0
    for number, (pack, row_keys) in enumerate(zip(packs, keys, strict=True)):
        logical, physical = layout.of_row(number)
        at = slice(slot, slot := slot + physical.item(-1))
        first, end = edges[number : number + 2]
        supervised = None if mask is None else mask[at]
        labels = None if own is None or not any(piece.block.labels is not None for piece in pack) else own[at]
        row = Row(tokens[at], last[first:end], supervised, logical, physical, labels, row_keys)
        if labels is None:
            row.hash_now(ids[places[first] : places[end]])
        rows.append(row)
    return rows


# What a segment holds ----------------------------------------------------------------------------------


def segment_slots(segment: Segment) -> int:
    """Logical slots of a segment: of a piece, or of a run of pieces, joined."""
    return segment[0].slots if len(segment) == 1 else sum(piece.end - piece.begin for piece in segment) - 1


def slots_by_source(segments: Sequence[Segment]) -> Mapping[int, int]:
    """Logical slots of a micro-batch, by the source that gave each slot's input."""
    slots: defaultdict[int, int] = defaultdict(int)
    for segment in segments:
        if len(segment) == 1:
            (piece,) = segment
            slots[piece.source] += piece.slots
            continue
        for piece in segment:
            slots[piece.source] += piece.end - piece.begin
        slots[segment[-1].source] -= 1  # its last id is a target only
    return slots


def supervised_slots(segment: Segment) -> int:
    """Slots of a segment that are trained on."""
    piece = segment[0] if len(segment) == 1 else _as_piece(segment)
    return piece.slots if piece.block.loss_mask is None else int(np.count_nonzero(_loss_mask(piece)))


def _as_piece(segment: Segment) -> Piece:
    """A segment as one piece; a run of pieces is joined to a block of its own."""
    if len(segment) == 1:
        return segment[0]
    ids = np.concatenate([piece.block.tokens[piece.begin : piece.end] for piece in segment])
    mask = None
    if any(piece.block.loss_mask is not None for piece in segment):
        # All ids of a piece: as if the one before its first were a slot of it too.
        mask = np.concatenate([_loss_mask(piece._replace(slots=piece.end - piece.begin)) for piece in segment])
    block = TokenBlock(ids, np.array([0, len(ids)]), mask, None, (), None)
    return segment[0]._replace(block=block, begin=0, end=len(ids), slots=len(ids) - 1)


def _predicted(block: TokenBlock) -> Ids:
    return block.tokens if block.labels is None else block.labels


def _targets(piece: Piece) -> Ids:
    return _predicted(piece.block)[piece.end - piece.slots : piece.end]


def _loss_mask(piece: Piece) -> npt.NDArray[np.uint8]:
    mask = piece.block.loss_mask
    return np.ones(piece.slots, np.uint8) if mask is None else mask[piece.end - piece.slots : piece.end]


# Where it stands ---------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Both offset arrays of every row, one row after the other; each row's begin with a 0."""

    logical: Offsets  # [E]
    physical: Offsets  # [E]
    pads: list[int]  # [E] slots of padding that end at this entry
    rows: list[tuple[int, int]]  # first and last + 1 entry of each row
    segments: list[int]  # of each row that hold something; padding may follow

    @classmethod
    def of(
        cls, logical: Lengths, physical: Lengths, rows: list[tuple[int, int]], slots: Sequence[Sequence[int]]
    ) -> _Layout:
        """From lengths of segments, [E], 0 where a row begins."""
        firsts = [first for first, _ in rows]
        counts = np.diff([*firsts, len(logical)])

        def offsets(lengths: Lengths) -> Offsets:
            ends = np.cumsum(lengths)
            return (ends - np.repeat(ends[firsts], counts)).astype(np.int32)

        return cls(offsets(logical), offsets(physical), (physical - logical).tolist(), rows, list(map(len, slots)))

    def of_row(self, number: int) -> tuple[Offsets, Offsets]:
        first, end = self.rows[number]
        return self.logical[first:end], self.physical[first:end]

    def placed(self, parts: Sequence[npt.NDArray[Any]], padding: npt.NDArray[Word]) -> npt.NDArray[Word]:
        """[N] a part for each segment, followed by its padding, which gives the type of all."""
        blank = np.full(max(self.pads), padding)
        placed: list[npt.NDArray[Any]] = []
        at = 0
        for (first, end), segments in zip(self.rows, self.segments, strict=True):
            of_row, pads = parts[at : at + segments], self.pads[first + 1 : end]
            at += segments
            if any(pads[:segments]):
                placed += chain.from_iterable(zip(of_row, (blank[:pad] for pad in pads), strict=False))
            else:
                placed += of_row
            placed += [blank[:pad] for pad in pads[segments:] if pad]
        return np.concatenate(placed, dtype=padding.dtype, casting="same_kind")


def row_offsets(slots: Sequence[Sequence[int]], contract: ResolvedContract) -> list[tuple[Offsets, Offsets]]:
    """(logical, physical) offsets of rows whose segments have these slots; the last physical one is a row's width."""
    layout = LAYOUTS[contract.packed](slots, contract)
    return list(map(layout.of_row, range(len(slots))))


def _packed_layout(slots: Sequence[Sequence[int]], contract: ResolvedContract) -> _Layout:
    """Aligned segments, then the tail, then entries up to a fixed number."""
    own_tail = contract.tail_padding is TailPadding.OWN_SEGMENT
    fixed = contract.max_segments + 2 if contract.pad_cu_seqlens and contract.max_segments else 0
    lengths: list[int] = []
    firsts, tails = [], []
    for of_row in slots:
        firsts.append(len(lengths))
        lengths += (0, *of_row, 0) if own_tail else (0, *of_row)
        tails.append(len(lengths) - 1)
        lengths += [0] * (fixed - (len(lengths) - firsts[-1]))
    logical = np.array(lengths)
    physical = -(-logical // contract.segment_multiple) * contract.segment_multiple
    used = np.add.reduceat(physical, firsts)
    trimmed = -(-used // contract.row_multiple) * contract.row_multiple
    missing = contract.max_width - used if contract.pad_to_max_length else trimmed - used
    _check_room(missing, used, np.diff([*firsts, len(lengths)]), fixed)
    physical[tails] += missing
    ends = [*firsts[1:], len(lengths)]
    if own_tail and not fixed:
        ends = [end - (not room) for end, room in zip(ends, missing.tolist(), strict=True)]
    return _Layout.of(logical, physical, list(zip(firsts, ends, strict=True)), slots)


def _check_room(missing: Lengths, used: Lengths, entries: Lengths, fixed: int) -> None:
    """A pack that does not fit its row cannot be: better said than trained on."""
    if missing.min() < 0:
        raise ContractError(f"segments of {used.max()} slots do not fit their row; raise seq_length")
    if fixed and entries.max() > fixed:
        raise ContractError(f"a row of {entries.max() - 2} segments where max_segments={fixed - 2}; raise max_segments")


def _dense_layout(slots: Sequence[Sequence[int]], contract: ResolvedContract) -> _Layout:
    """A row for each segment, and empty rows where the last micro-batch has too few."""
    rows = contract.micro_batch_size
    logical = np.array(list(chain.from_iterable((0, *of, *[0] * (rows - len(of))) for of in slots)))
    physical = np.tile([0] + [contract.seq_length] * rows, len(slots))
    firsts = range(0, len(logical), rows + 1)
    return _Layout.of(logical, physical, [(first, first + rows + 1) for first in firsts], slots)


LAYOUTS = {True: _packed_layout, False: _dense_layout}
