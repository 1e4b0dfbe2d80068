"""Slots of a packed row that each context-parallel rank holds.

Zigzag (Transformer Engine's THD partition): each physical segment ``[a, b)`` of length n is cut into
2·CP chunks of s = n / (2·CP) slots, and rank r owns chunks r and 2·CP-1-r, so that causal work is equal.
A zigzag over the whole row would be wrong for THD kernels: they cut per segment. Offsets are never sliced.

Shapes: T = row width in slots, S = segments, t = T / CP local slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packhorse.contract.partition import Partition
from packhorse.errors import ContractError

__all__ = ["held_slots", "local_slots"]

IntArray = npt.NDArray[np.int64]


def local_slots(partition: Partition, cu_seqlens_padded: npt.ArrayLike, context: int, rank: int) -> IntArray:
    """Return the slots of a row that ``rank`` of ``context`` ranks holds, in its own order.

    ``cu_seqlens_padded``: int [S+1], physical offsets; the last entry is the row's width T.
    Returns int64 [T] for ``whole`` (or one rank), int64 [T / CP] otherwise.
    Raises ``ContractError`` where a segment cannot be cut evenly.
    """
    offsets = np.asarray(cu_seqlens_padded, dtype=np.int64)
    if not 0 <= rank < context:
        raise ContractError(f"context-parallel rank {rank} is outside 0 … {context - 1}")
    if context == 1 or partition is Partition.WHOLE:
        return np.arange(offsets[-1])
    if partition is Partition.CONTIGUOUS:
        return _contiguous(int(offsets[-1]), context, rank)
    return _zigzag(offsets, context, rank)


def held_slots(
    partition: Partition, cu_seqlens_padded: npt.ArrayLike, context: int, rank: int, *, dense: bool
) -> IntArray:
    """Return the ``local_slots`` of a whole micro-batch.

    A dense micro-batch is several rows of one width, one segment each, and every row is cut on its own.
    """
    offsets = np.asarray(cu_seqlens_padded, dtype=np.int64)
    if not dense or context == 1 or partition is Partition.WHOLE:
        return local_slots(partition, offsets, context, rank)
    in_row = local_slots(partition, offsets[:2], context, rank)
    return (offsets[:-1, None] + in_row).ravel()


def _contiguous(width: int, context: int, rank: int) -> IntArray:
    if width % context:
        raise ContractError(f"row width {width} is not divisible by CP={context}; set pack_multiple to {context}")
    share = width // context
    return np.arange(rank * share, (rank + 1) * share)


def _zigzag(offsets: IntArray, context: int, rank: int) -> IntArray:
    lengths = np.diff(offsets)
    if np.any(lengths % (2 * context)):
        worst = int(lengths[lengths % (2 * context) != 0][0])
        raise ContractError(
            f"a segment of {worst} slots is not divisible by 2·CP={2 * context}; "
            f"set segment_multiple to a multiple of {2 * context}"
        )
    chunk = lengths // (2 * context)
    # Interleave the starts of both chunks of each segment, then expand each start to its run of slots.
    starts = np.stack([offsets[:-1] + rank * chunk, offsets[:-1] + (2 * context - 1 - rank) * chunk], axis=1).ravel()
    runs = np.repeat(chunk, 2)
    ends = np.cumsum(runs)
    return np.repeat(starts - (ends - runs), runs) + np.arange(int(ends[-1]) if len(ends) else 0)
