"""Micro-batches to rows: the arrays of physical rows.

A segment of n ids has n-1 slots, tokens ``ids[:-1]`` and labels ``ids[1:]``, so there is no slot without a
target (Megatron-Bridge's convention); a source that brings its own labels keeps n slots. A dense micro-batch
of several rows is laid out as one row whose segments are those rows, each ``seq_length`` slots wide.

A row is made from beginning to end before the next one, while the processor's cache holds it. Its arrays are
joined from slices of memory: numpy takes longer to make an array of a segment than to copy it.

Shapes: S = segments that hold something; N = slots of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.rows.payload import narrowest
from packhorse.rows.row import Row, SampleKey
from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.piece import Piece
from packhorse_service.packing.modes import PackedMicroBatch, Segment
from packhorse_service.planning.row_layout import RowLayout, boundaries, lay_out

__all__ = ["build_rows", "count_loss_tokens"]

Ids = npt.NDArray[np.uint32]
Word = TypeVar("Word", bound=np.generic)

NO_LOSS, ALL_LOSS = np.array(0, np.uint8), b"\1"  # of a slot of padding, and of a slot without a mask


def build_rows(
    micro_batches: Sequence[PackedMicroBatch], contract: ResolvedContract, keys: Iterable[tuple[SampleKey, ...]]
) -> list[Row]:
    """Build a row of each micro-batch's segments, in the shape that the contract fixes; ids in their type on the wire.

    ``keys`` are those of each micro-batch's samples. Raises ``ContractError`` for segments that do not fit their row.
    """
    padding = np.array(contract.pad_id, narrowest(contract.vocab_size))
    blocks = {piece.block for micro_batch in micro_batches for piece in micro_batch.pieces}
    columns = _Columns(
        any(block.loss_mask is not None for block in blocks), any(block.labels is not None for block in blocks)
    )
    return [
        _row(micro_batch, contract, padding, columns, of_row)
        for micro_batch, of_row in zip(micro_batches, keys, strict=True)
    ]


class _Columns(NamedTuple):
    """Columns beside ids that a block of the step has: asked once for all its rows, as most have none."""

    loss_mask: bool
    labels: bool


def _row(
    micro_batch: PackedMicroBatch,
    contract: ResolvedContract,
    padding: npt.NDArray[Any],
    columns: _Columns,
    keys: tuple[SampleKey, ...],
) -> Row:
    """Build one row; ``padding`` is the id of padding, in the type of ids on the wire."""
    pieces, slots = _one_piece_each(micro_batch), micro_batch.slots
    layout = lay_out(slots, contract)
    parts = [piece.block.tokens.data[piece.begin : piece.end] for piece in pieces]
    ids, begins = np.frombuffer(b"".join(parts), np.uint32), boundaries(map(len, parts))
    tokens = _place(layout, ids, begins, padding)
    mask = None
    if columns.loss_mask and any(piece.block.loss_mask is not None for piece in pieces):
        mask = _place(layout, _loss_mask(pieces), boundaries(slots), NO_LOSS)
    if columns.labels and any(piece.block.labels is not None for piece in pieces):
        labels = _place(layout, _targets(pieces), boundaries(slots), padding)
        last = np.array([_target_ids(piece.block).item(piece.end - 1) for piece in pieces], np.uint32)
        return Row(tokens, last, mask, layout.logical, layout.physical, labels, keys)
    last = ids[np.array(begins[1:]) - 1]
    return Row(tokens, last, mask, layout.logical, layout.physical, None, keys, joined_ids=ids)


def _place(
    layout: RowLayout, values: npt.NDArray[Any], begins: Sequence[int], padding: npt.NDArray[Word]
) -> npt.NDArray[Word]:
    """Place a part of ``values`` for each segment, followed by its padding, which gives the type of all: [N]."""
    source, blank = values.astype(padding.dtype, casting="same_kind", copy=False).data, padding.tobytes()
    parts: list[memoryview | bytes]
    parts = [source[begin : begin + length] for begin, length in zip(begins, layout.lengths, strict=False)]
    if layout.gaps:
        parts = list(chain.from_iterable(zip(parts, [blank * gap for gap in layout.gaps], strict=True)))
    parts.append(blank * layout.tail)
    return np.frombuffer(b"".join(parts), padding.dtype)


# What a segment holds ----------------------------------------------------------------------------------


def count_loss_tokens(micro_batch: PackedMicroBatch) -> int:
    """Return the number of slots of a micro-batch that count in the loss."""
    if all(piece.block.loss_mask is None for piece in micro_batch.pieces):
        return sum(micro_batch.slots)
    return int(np.count_nonzero(_loss_mask(_one_piece_each(micro_batch))))


def _one_piece_each(micro_batch: PackedMicroBatch) -> Sequence[Piece]:
    """Return the segments of a micro-batch, each as one piece."""
    return list(map(_joined, micro_batch.segments)) if micro_batch.segment_sizes else micro_batch.pieces


def _joined(segment: Segment) -> Piece:
    """Join a run of pieces to one, of a block of its own."""
    ids = np.concatenate([piece.block.tokens[piece.begin : piece.end] for piece in segment])
    mask = None
    if any(piece.block.loss_mask is not None for piece in segment):
        # All ids of a piece: as if the one before its first were a slot of it too.
        mask = _loss_mask([piece._replace(slots=piece.end - piece.begin) for piece in segment])
    block = TokenBlock(ids, np.array([0, len(ids)]), mask, None, (), None)
    return segment[0]._replace(block=block, begin=0, end=len(ids), slots=len(ids) - 1)


def _target_ids(block: TokenBlock) -> Ids:
    """Return what the slots of a block predict: labels of its own, or its ids."""
    return block.tokens if block.labels is None else block.labels


def _targets(pieces: Sequence[Piece]) -> Ids:
    """Return the targets of all pieces, one after the other."""
    return np.concatenate([_target_ids(piece.block)[piece.end - piece.slots : piece.end] for piece in pieces])


def _loss_mask(pieces: Sequence[Piece]) -> npt.NDArray[np.uint8]:
    """Return the loss mask of all pieces, one after the other."""
    masks = ((piece, piece.block.loss_mask) for piece in pieces)
    parts = [
        ALL_LOSS * piece.slots if mask is None else mask.data[piece.end - piece.slots : piece.end]
        for piece, mask in masks
    ]
    return np.frombuffer(b"".join(parts), np.uint8)
