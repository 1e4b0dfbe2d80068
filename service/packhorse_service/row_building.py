"""Packs to rows: the arrays of one physical row.

A piece of n ids becomes a segment of n-1 slots, tokens ``ids[:-1]`` and labels ``ids[1:]``, so there is
no slot without a target (Megatron-Bridge's convention); a source that brings its own labels keeps n slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from packhorse.contract import ResolvedContract, TailPadding
from packhorse.row import Row, SampleKey
from packhorse_service.stream import Piece

__all__ = ["build_row"]

Ids = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]


def build_row(pieces: Sequence[Piece], contract: ResolvedContract, keys: tuple[SampleKey, ...] = ()) -> Row:
    """One row of ``seq_length`` slots, or trimmed without ``pad_to_max_length``, from a pack's pieces."""
    slots = np.array([piece.slots for piece in pieces])
    padded = -(-slots // contract.segment_multiple) * contract.segment_multiple
    logical, physical = _offsets(slots), _offsets(padded)
    filled = int(physical[-1])
    width = (
        contract.seq_length
        if contract.pad_to_max_length
        else -(-filled // contract.row_multiple) * contract.row_multiple
    )
    tokens = np.full(width, contract.pad_id, np.uint32)
    mask = np.zeros(width, np.uint8)
    own = np.zeros(width, np.uint32) if any(piece.block.labels is not None for piece in pieces) else None
    last_targets = np.zeros(len(pieces), np.uint32)
    for i, (piece, start) in enumerate(zip(pieces, physical.tolist(), strict=False)):
        last_targets[i] = _place(piece, slice(start, start + piece.slots), tokens, mask, own)
    if filled < width:
        logical, physical = TAILS[contract.tail_padding](logical, physical, width)
    return Row(tokens, last_targets, mask, logical, physical, own, keys)


def _place(piece: Piece, at: slice, tokens: Ids, mask: Mask, own: Ids | None) -> int:
    """Copy one piece into its slots; returns its last target."""
    block, begin, end = piece.block, piece.begin, piece.end
    shift = 1 if block.labels is None else 0
    tokens[at] = block.tokens[begin : end - shift]
    mask[at] = 1 if block.loss_mask is None else block.loss_mask[begin + shift : end]
    targets = block.tokens[begin + 1 : end] if block.labels is None else block.labels[begin:end]
    if own is not None:
        own[at] = targets
    return int(targets[-1])


def _offsets(lengths: npt.NDArray[np.int64]) -> Offsets:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _own_segment(logical: Offsets, physical: Offsets, width: int) -> tuple[Offsets, Offsets]:
    return np.append(logical, logical[-1]), np.append(physical, np.int32(width))


def _extend_last(logical: Offsets, physical: Offsets, width: int) -> tuple[Offsets, Offsets]:
    return logical, np.append(physical[:-1], np.int32(width))


TAILS: dict[TailPadding, Callable[[Offsets, Offsets, int], tuple[Offsets, Offsets]]] = {
    TailPadding.OWN_SEGMENT: _own_segment,
    TailPadding.EXTEND_LAST: _extend_last,
}
