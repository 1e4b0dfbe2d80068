"""Micro-batches to rows: the arrays of physical rows.

A segment of n ids has n-1 slots, tokens ``ids[:-1]`` and labels ``ids[1:]``, so there is no slot without a
target (Megatron-Bridge's convention); a source that brings its own labels keeps n slots. A dense micro-batch
of several rows is laid out as one row whose segments are those rows, each ``seq_length`` slots wide.

A row is made from beginning to end before the next one, while the processor's cache holds it. Its arrays are
joined from slices of memory: numpy takes longer to make an array of a segment than to copy it.

Shapes: S = segments that hold something; E = entries of an offset array; N = slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import ResolvedContract, TailPadding
from packhorse.errors import ContractError
from packhorse.rows.payload import narrowest
from packhorse.rows.row import Row, SampleKey
from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.prefetched_run import Piece
from packhorse_service.packing.modes import PackedMicroBatch, Segment

__all__ = ["build_rows", "count_loss_tokens", "row_offsets"]

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int32]
Word = TypeVar("Word", bound=np.generic)

NO_LOSS, ALL_LOSS = np.array(0, np.uint8), b"\1"


def build_rows(
    micro_batches: Iterable[PackedMicroBatch], contract: ResolvedContract, keys: Iterable[tuple[SampleKey, ...]]
) -> list[Row]:
    """A row of each micro-batch's segments, in the shape that the contract fixes; ids in their type on the wire."""
    padding, memory = np.array(contract.pad_id, narrowest(contract.vocab_size)), _Memory()
    return [
        _row(micro_batch, contract, padding, memory, of_row)
        for micro_batch, of_row in zip(micro_batches, keys, strict=True)
    ]


class _Memory(dict[TokenBlock, memoryview]):
    """The ids of blocks, as they lie in memory; and whether any block asked for has more than ids."""

    masked = labelled = False

    def __missing__(self, block: TokenBlock) -> memoryview:
        self.masked |= block.loss_mask is not None
        self.labelled |= block.labels is not None
        ids = self[block] = block.tokens.data
        return ids


def _row(
    micro_batch: PackedMicroBatch,
    contract: ResolvedContract,
    padding: npt.NDArray[Any],
    memory: _Memory,
    keys: tuple[SampleKey, ...],
) -> Row:
    """One row; ``padding`` is its id, in their type on the wire, and ``memory`` what is shared with other rows."""
    pieces, slots = _one_each(micro_batch), micro_batch.slots
    layout = LAYOUTS[contract.packed](slots, contract)
    parts = [memory[piece.block][piece.begin : piece.end] for piece in pieces]
    ids, places = np.frombuffer(b"".join(parts), np.uint32), _sums(map(len, parts))
    tokens = layout.placed(ids, places, padding)
    mask = None
    if memory.masked and any(piece.block.loss_mask is not None for piece in pieces):
        mask = layout.placed(_loss_mask(pieces), _sums(slots), NO_LOSS)
    if memory.labelled and any(piece.block.labels is not None for piece in pieces):
        labels = layout.placed(_targets(pieces), _sums(slots), padding)
        last = np.array([_predicted(piece.block).item(piece.end - 1) for piece in pieces], np.uint32)
        return Row(tokens, last, mask, layout.logical, layout.physical, labels, keys)
    row = Row(tokens, ids[np.array(places[1:]) - 1], mask, layout.logical, layout.physical, None, keys)
    row.hash_now(ids)
    return row


def _sums(counts: Iterable[int]) -> list[int]:
    """Where each of the parts begins, and where the last ends."""
    return list(accumulate(counts, initial=0))


# What a segment holds ----------------------------------------------------------------------------------


def count_loss_tokens(micro_batch: PackedMicroBatch) -> int:
    """Slots of a micro-batch that are trained on."""
    if all(piece.block.loss_mask is None for piece in micro_batch.pieces):
        return sum(micro_batch.slots)
    return int(np.count_nonzero(_loss_mask(_one_each(micro_batch))))


def _one_each(micro_batch: PackedMicroBatch) -> Sequence[Piece]:
    """The segments of a micro-batch, each as one piece."""
    return list(map(_as_piece, micro_batch.segments)) if micro_batch.segment_sizes else micro_batch.pieces


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
    parts = [
        ALL_LOSS * piece.slots if mask is None else mask.data[piece.end - piece.slots : piece.end]
        for piece, mask in masks
    ]
    return np.frombuffer(b"".join(parts), np.uint8)


# Where it stands ---------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where the segments of a row stand."""

    lengths: Sequence[int]  # [S] logical slots of each …
    gaps: Sequence[int]  # [S] … and the slots of padding behind it; empty where none has any
    tail: int  # slots of padding behind all of them
    logical: Offsets  # [E]
    physical: Offsets  # [E]

    def placed(self, values: npt.NDArray[Any], begins: Sequence[int], padding: npt.NDArray[Word]) -> npt.NDArray[Word]:
        """[N] a part of ``values`` for each segment, followed by its padding, which gives the type of all."""
        source, blank = values.astype(padding.dtype, casting="same_kind", copy=False).data, padding.tobytes()
        parts: list[memoryview | bytes]
        parts = [source[begin : begin + length] for begin, length in zip(begins, self.lengths, strict=False)]
        if self.gaps:
            parts = list(chain.from_iterable(zip(parts, [blank * gap for gap in self.gaps], strict=True)))
        parts.append(blank * self.tail)
        return np.frombuffer(b"".join(parts), padding.dtype)


def row_offsets(slots: Iterable[Sequence[int]], contract: ResolvedContract) -> list[tuple[Offsets, Offsets]]:
    """(logical, physical) offsets of rows whose segments have these slots; the last physical one is a row's width."""
    layouts = [LAYOUTS[contract.packed](of_row, contract) for of_row in slots]
    return [(layout.logical, layout.physical) for layout in layouts]


def _packed_layout(slots: Sequence[int], contract: ResolvedContract) -> _Layout:
    """Aligned segments, then the tail, then entries up to a fixed number."""
    multiple, logical = contract.segment_multiple, _sums(slots)
    gaps = [-length % multiple for length in slots] if multiple > 1 else []
    physical = _sums(map(add, slots, gaps)) if gaps else logical.copy()
    used = physical[-1]
    width = contract.max_width if contract.pad_to_max_length else used + -used % contract.row_multiple
    if used > width:  # a pack that does not fit its row cannot be: better said than trained on
        raise ContractError(f"segments of {used} slots do not fit a row of {width}; raise seq_length")
    if used < width and contract.tail_padding is TailPadding.OWN_SEGMENT:
        logical.append(logical[-1])
        physical.append(width)
    physical[-1] = width
    if contract.pad_cu_seqlens and contract.max_segments:
        _fill_up(logical, physical, len(slots), contract.max_segments)
    return _Layout(slots, gaps, width - used, np.array(logical, np.int32), np.array(physical, np.int32))


def _fill_up(logical: list[int], physical: list[int], segments: int, most: int) -> None:
    """Repeat the last entries of both, up to those of a row of so many segments and its tail."""
    if segments > most:
        raise ContractError(f"a row of {segments} segments where max_segments={most}; raise max_segments")
    missing = most + 2 - len(logical)
    logical += logical[-1:] * missing
    physical += physical[-1:] * missing


def _dense_layout(slots: Sequence[int], contract: ResolvedContract) -> _Layout:
    """A row for each segment, and empty rows where the last micro-batch has too few."""
    rows, width = contract.micro_batch_size, contract.seq_length
    empty = rows - len(slots)
    gaps = [width - length for length in slots]
    logical, physical = _sums([*slots, *[0] * empty]), range(0, width * rows + 1, width)
    return _Layout(slots, gaps, width * empty, np.array(logical, np.int32), np.array(physical, np.int32))


LAYOUTS = {True: _packed_layout, False: _dense_layout}
