"""Micro-batches to rows: the arrays of physical rows.

A segment of n ids has n-1 slots, tokens ``ids[:-1]`` and labels ``ids[1:]``, so there is no slot without a
target (Megatron-Bridge's convention); a source that brings its own labels keeps n slots. A dense micro-batch
of several rows is laid out as one row whose segments are those rows, each ``seq_length`` slots wide.

The rows of a step are laid out as one long array and cut from it at the end: what numpy takes for an
operation on a small array is more than the copying.

Shapes, of all rows one after the other: S = segments that hold something; E = entries of an offset array; N = slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise, starmap
from operator import sub
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from packhorse.contract import ResolvedContract, TailPadding
from packhorse.errors import ContractError
from packhorse.payload import narrowest
from packhorse.row import Row, SampleKey
from packhorse_service.assembling import Assembled, Segment
from packhorse_service.blocks import TokenBlock
from packhorse_service.pieces import Piece

__all__ = ["build_rows", "row_offsets", "supervised_slots"]

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]
Word = TypeVar("Word", bound=np.generic)

UNSUPERVISED = np.array(0, np.uint8)


def build_rows(
    micro_batches: Sequence[Assembled], contract: ResolvedContract, keys: Iterable[tuple[SampleKey, ...]]
) -> list[Row]:
    """A row of each micro-batch's segments, in the shape that the contract fixes; ids in their type on the wire."""
    segments = list(chain.from_iterable(map(_one_each, micro_batches)))
    _, _, _, blocks, _, begins, ends, slots = zip(*segments, strict=True)
    used = {id(block): block for block in blocks}
    layout = LAYOUTS[contract.packed](slots, [len(each.slots) for each in micro_batches], contract)
    padding = np.array(contract.pad_id, narrowest(contract.vocab_size))
    ids = _ids(used, blocks, begins, ends)
    places = _sums(map(sub, ends, begins))
    tokens = layout.placed(ids, places, padding)
    last, mask, own = ids[np.array(places[1:]) - 1], None, None
    if any(block.loss_mask is not None for block in used.values()):
        mask = layout.placed(_loss_mask(segments), _sums(slots), UNSUPERVISED)
    if any(block.labels is not None for block in used.values()):
        own = layout.placed(_targets(segments), _sums(slots), padding)
        last = np.array([_predicted(block).item(end - 1) for block, end in zip(blocks, ends, strict=True)], np.uint32)
    rows = []
    for (first, end), at, offsets, row_keys in zip(layout.segments, layout.rows, layout.offsets, keys, strict=True):
        supervised = None if mask is None else mask[at]
        labels = None if own is None or all(block.labels is None for block in blocks[first:end]) else own[at]
        row = Row(tokens[at], last[first:end], supervised, *offsets, labels, row_keys)
        if labels is None:
            row.hash_now(ids[places[first] : places[end]])
        rows.append(row)
    return rows


def _ids(
    used: Mapping[int, TokenBlock], blocks: Sequence[TokenBlock], begins: Sequence[int], ends: Sequence[int]
) -> Ids:
    """Those of all pieces, one after the other. Making a view of numpy takes longer than to copy what it shows."""
    tokens = {identity: block.tokens.data for identity, block in used.items()}
    parts = [tokens[id(block)][begin:end] for block, begin, end in zip(blocks, begins, ends, strict=True)]
    return np.frombuffer(b"".join(parts), np.uint32)


def _sums(counts: Iterable[int]) -> list[int]:
    """Where each of the parts begins, and where the last ends."""
    return list(accumulate(counts, initial=0))


# What a segment holds ----------------------------------------------------------------------------------


def supervised_slots(micro_batch: Assembled) -> int:
    """Slots of a micro-batch that are trained on."""
    if all(piece.block.loss_mask is None for piece in micro_batch.pieces):
        return sum(micro_batch.slots)
    return int(np.count_nonzero(_loss_mask(_one_each(micro_batch))))


def _one_each(micro_batch: Assembled) -> Sequence[Piece]:
    """The segments of a micro-batch, each as one piece."""
    return list(map(_as_piece, micro_batch.segments)) if micro_batch.counts else micro_batch.pieces


def _as_piece(segment: Segment) -> Piece:
    """A run of pieces, joined to a block of its own."""
    ids = np.concatenate([piece.block.tokens[piece.begin : piece.end] for piece in segment])
    mask = None
    if any(piece.block.loss_mask is not None for piece in segment):
        # All ids of a piece: as if the one before its first were a slot of it too.
        mask = _loss_mask([piece._replace(slots=piece.end - piece.begin) for piece in segment])
    block = TokenBlock(ids, np.array([0, len(ids)]), mask, None, (), None)
    return segment[0]._replace(block=block, begin=0, end=len(ids), slots=len(ids) - 1)


def _predicted(block: TokenBlock) -> Ids:
    return block.tokens if block.labels is None else block.labels


def _targets(pieces: Sequence[Piece]) -> Ids:
    """Those of all pieces, one after the other."""
    return np.concatenate([_predicted(piece.block)[piece.end - piece.slots : piece.end] for piece in pieces])


def _loss_mask(pieces: Sequence[Piece]) -> npt.NDArray[np.uint8]:
    """That of all pieces, one after the other."""
    masks = ((piece, piece.block.loss_mask) for piece in pieces)
    return np.concatenate(
        [
            np.ones(piece.slots, np.uint8) if mask is None else mask[piece.end - piece.slots : piece.end]
            for piece, mask in masks
        ]
    )


# Where it stands ---------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where segments stand, in rows one after the other."""

    lengths: Sequence[int]  # [S] logical slots of each segment that holds something …
    gaps: list[int]  # [S] … and the slots of padding behind it
    segments: list[tuple[int, int]]  # first and last + 1 of each row
    rows: list[slice]  # the slots of each
    offsets: list[tuple[Offsets, Offsets]]  # of each row, logical and physical

    @classmethod
    def of(cls, entries: _Entries, logical: Lengths, physical: Lengths, ends: Lengths) -> _Layout:
        """From lengths by entry, [E], of which each row keeps those before the one in ``ends``."""

        def offsets(lengths: Lengths) -> Offsets:
            ends = lengths.cumsum()
            of_row: Offsets = (ends - ends[entries.firsts].repeat(entries.of_row)).astype(np.int32)
            return of_row

        cut = list(map(slice, entries.firsts.tolist(), ends.tolist()))
        both = offsets(logical), offsets(physical)
        widths = np.add.reduceat(physical, entries.firsts).tolist()
        return cls(
            lengths=logical[entries.segments].tolist(),
            gaps=np.add.reduceat(physical - logical, entries.segments).tolist(),
            segments=list(pairwise(_sums(entries.counts.tolist()))),
            rows=list(starmap(slice, pairwise(_sums(widths)))),
            offsets=[(both[0][at], both[1][at]) for at in cut],
        )

    def placed(self, values: npt.NDArray[Any], begins: Sequence[int], padding: npt.NDArray[Word]) -> npt.NDArray[Word]:
        """[N] a part of ``values`` for each segment, followed by its padding, which gives the type of all."""
        source = values.astype(padding.dtype, casting="same_kind", copy=False).data
        blank = np.full(max(self.gaps), padding).data
        parts = []
        for begin, length, gap in zip(begins, self.lengths, self.gaps, strict=False):
            parts.append(source[begin : begin + length])
            if gap:
                parts.append(blank[:gap])
        return np.frombuffer(b"".join(parts), padding.dtype)


class _Entries(NamedTuple):
    """The entries of both offset arrays of every row, one row after the other; each row's begin with a 0."""

    counts: Lengths  # segments of each row that hold something
    of_row: Lengths  # entries of each row
    firsts: Lengths  # the first entry of each row
    segments: Lengths  # [S] the entry at which each segment ends

    @classmethod
    def of(cls, segments: Sequence[int], of_row: Callable[[Lengths], Lengths]) -> _Entries:
        """Of rows with so many segments each, and so many entries for that."""
        counts = np.array(segments)
        entries = of_row(counts)
        firsts = entries.cumsum() - entries
        before = firsts + 1 - (counts.cumsum() - counts)
        return cls(counts, entries, firsts, np.arange(counts.sum()) + before.repeat(counts))

    def lengths(self, slots: Sequence[int]) -> Lengths:
        """[E] slots of each segment at its entry, 0 at all others."""
        lengths = np.zeros(int(self.of_row.sum()), np.int64)
        lengths[self.segments] = slots
        return lengths


def row_offsets(slots: Sequence[Sequence[int]], contract: ResolvedContract) -> list[tuple[Offsets, Offsets]]:
    """(logical, physical) offsets of rows whose segments have these slots; the last physical one is a row's width."""
    return LAYOUTS[contract.packed](list(chain.from_iterable(slots)), list(map(len, slots)), contract).offsets


def _packed_layout(slots: Sequence[int], segments: Sequence[int], contract: ResolvedContract) -> _Layout:
    """Aligned segments, then the tail, then entries up to a fixed number."""
    own_tail = contract.tail_padding is TailPadding.OWN_SEGMENT
    fixed = contract.max_segments + 2 if contract.pad_cu_seqlens and contract.max_segments else 0
    entries = _Entries.of(segments, lambda counts: np.maximum(counts + 1 + own_tail, fixed))
    logical = entries.lengths(slots)
    physical = -(-logical // contract.segment_multiple) * contract.segment_multiple
    used = np.add.reduceat(physical, entries.firsts)
    trimmed = -(-used // contract.row_multiple) * contract.row_multiple
    missing = contract.max_width - used if contract.pad_to_max_length else trimmed - used
    _check_room(missing, used, entries.of_row, fixed)
    physical[entries.firsts + entries.counts + own_tail] += missing
    no_tail = (missing == 0) & (own_tail and not fixed)
    return _Layout.of(entries, logical, physical, entries.firsts + entries.of_row - no_tail)


def _check_room(missing: Lengths, used: Lengths, entries: Lengths, fixed: int) -> None:
    """A pack that does not fit its row cannot be: better said than trained on."""
    if missing.min() < 0:
        raise ContractError(f"segments of {used.max()} slots do not fit their row; raise seq_length")
    if fixed and entries.max() > fixed:
        raise ContractError(f"a row of {entries.max() - 2} segments where max_segments={fixed - 2}; raise max_segments")


def _dense_layout(slots: Sequence[int], segments: Sequence[int], contract: ResolvedContract) -> _Layout:
    """A row for each segment, and empty rows where the last micro-batch has too few."""
    rows = contract.micro_batch_size
    entries = _Entries.of(segments, lambda counts: np.full_like(counts, rows + 1))
    physical = np.tile([0] + [contract.seq_length] * rows, len(segments))
    return _Layout.of(entries, entries.lengths(slots), physical, entries.firsts + entries.of_row)


LAYOUTS = {True: _packed_layout, False: _dense_layout}
