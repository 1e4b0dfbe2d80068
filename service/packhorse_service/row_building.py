"""Micro-batches to rows: the arrays of one physical row.

A segment of n ids has n-1 slots, tokens ``ids[:-1]`` and labels ``ids[1:]``, so there is no slot without a
target (Megatron-Bridge's convention); a source that brings its own labels keeps n slots. A dense micro-batch
of several rows is laid out as one row whose segments are those rows, each ``seq_length`` slots wide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packhorse.contract import ResolvedContract
from packhorse.offsets import align, fix_count, pad_to_width
from packhorse.row import Row, SampleKey
from packhorse_service.assembling import Segment

__all__ = ["build_row", "segment_slots", "slots_by_source", "supervised_slots"]

Ids = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int32]


def segment_slots(segment: Segment) -> int:
    """Logical slots of a segment."""
    ids = sum(piece.end - piece.begin for piece in segment)
    return ids if segment[0].block.labels is not None else ids - 1


def slots_by_source(segments: Sequence[Segment]) -> Counter[int]:
    """Logical slots of a micro-batch, by the source that gave each slot's input."""
    slots = Counter[int]()
    for segment in segments:
        for piece in segment:
            slots[piece.source] += piece.end - piece.begin
        slots[segment[-1].source] -= segment[0].block.labels is None  # its last id is a target only
    return slots


def supervised_slots(segment: Segment) -> int:
    """Slots of a segment that are trained on."""
    supervised = 0
    shift = 1 if segment[0].block.labels is None else 0  # the segment's first id is nobody's target
    for piece in segment:
        targets, mask = slice(piece.begin + shift, piece.end), piece.block.loss_mask
        supervised += targets.stop - targets.start if mask is None else int(np.count_nonzero(mask[targets]))
        shift = 0
    return supervised


def build_row(segments: Sequence[Segment], contract: ResolvedContract, keys: tuple[SampleKey, ...] = ()) -> Row:
    """One row from a micro-batch's segments, in the shape that the contract fixes."""
    slots = np.array([segment_slots(segment) for segment in segments])
    logical, physical = LAYOUTS[contract.packed](slots, contract)
    width = int(physical[-1])
    tokens = np.full(width, contract.pad_id, np.uint32)
    mask = np.zeros(width, np.uint8)
    own = np.zeros(width, np.uint32) if any(s[0].block.labels is not None for s in segments) else None
    last_targets = np.zeros(len(segments), np.uint32)
    for i, (segment, start, n) in enumerate(zip(segments, physical.tolist(), slots.tolist(), strict=False)):
        last_targets[i] = _place(segment, slice(start, start + n), tokens, mask, own)
    return Row(tokens, last_targets, mask, logical, physical, own, keys)


def _place(segment: Segment, at: slice, tokens: Ids, mask: Mask, own: Ids | None) -> int:
    """Copy one segment into its slots; returns its last target."""
    ids, supervised, labels = _joined(segment)
    shift = 1 if labels is None else 0
    targets = ids[1:] if labels is None else labels
    tokens[at] = ids[: len(ids) - shift]
    mask[at] = 1 if supervised is None else supervised[shift:]
    if own is not None:
        own[at] = targets
    return int(targets[-1])


def _joined(segment: Segment) -> tuple[Ids, Mask | None, Ids | None]:
    """(ids, loss mask by id, own labels) of a segment; views of the block where it is one piece."""
    first, block = segment[0], segment[0].block
    if len(segment) == 1:
        at = slice(first.begin, first.end)
        mask = None if block.loss_mask is None else block.loss_mask[at]
        return block.tokens[at], mask, None if block.labels is None else block.labels[at]
    ids = np.concatenate([piece.block.tokens[piece.begin : piece.end] for piece in segment])
    masks = [
        np.ones(piece.end - piece.begin, np.uint8)
        if piece.block.loss_mask is None
        else piece.block.loss_mask[piece.begin : piece.end]
        for piece in segment
    ]
    return ids, np.concatenate(masks), None


# Offsets -----------------------------------------------------------------------------------------------


def _packed_layout(slots: npt.NDArray[np.int64], contract: ResolvedContract) -> tuple[Offsets, Offsets]:
    """Aligned segments, then the tail, then entries up to a fixed number."""
    logical, physical = align(slots, contract.segment_multiple)
    trimmed = -(-int(physical[-1]) // contract.row_multiple) * contract.row_multiple
    width = contract.max_width if contract.pad_to_max_length else trimmed
    logical, physical = pad_to_width(logical, physical, width, contract.tail_padding)
    if contract.pad_cu_seqlens and contract.max_segments is not None:
        logical, physical = fix_count(logical, physical, contract.max_segments, width)
    return logical, physical


def _dense_layout(slots: npt.NDArray[np.int64], contract: ResolvedContract) -> tuple[Offsets, Offsets]:
    """A row for each segment, and empty rows where the last micro-batch has too few."""
    rows = contract.micro_batch_size
    filled = np.pad(slots, (0, rows - len(slots)))
    logical, _ = align(filled, 1)
    return logical, np.arange(rows + 1, dtype=np.int32) * np.int32(contract.seq_length)


LAYOUTS = {True: _packed_layout, False: _dense_layout}
