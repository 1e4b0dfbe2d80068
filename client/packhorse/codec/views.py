"""A rank's view of a row, as the arrays on the wire; ``rebuild`` is the way back.

What can be rebuilt exactly does not travel: positions follow from the offsets; the labels of a whole row
follow from its tokens and the last target of each segment; ids are 16 bits wide where the vocabulary
allows; the loss mask is bits. A context-parallel slice carries its labels, as its neighbours are elsewhere.

Shapes: T = local slots, S = segments, L = segments of at least one real slot.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.rows.context_parallel import held_slots
from packhorse.rows.payload import AnyArray, ArrayEntry, bits, join_arrays, narrowest
from packhorse.rows.row import Row
from packhorse.schema import pack

__all__ = ["EVERYTHING", "RowView", "view_arrays"]

Slots = npt.NDArray[np.int64]

# The fields that travel; a pipeline stage may need fewer.
EVERYTHING = frozenset({"tokens", "position_ids", "labels", "loss_mask"})


class RowView(NamedTuple):
    """Part of a row that one rank gets, as arrays in one payload."""

    table: tuple[ArrayEntry, ...]
    payload: bytearray
    slots: int  # local slots
    loss_tokens: int  # those among them that count in the loss


def view_arrays(
    row: Row,
    contract: ResolvedContract,
    layout: ParallelLayout,
    context_rank: int,
    needs: Collection[str] = EVERYTHING,
    *,
    with_keys: bool = False,
) -> RowView:
    """Return the arrays of a row for one context-parallel rank; ``needs`` are the fields that its stage uses.

    ``with_keys``: the keys of its samples travel too.
    """
    ids = narrowest(contract.vocab_size)
    slots = _slots(contract, row.cu_seqlens_padded, layout, context_rank)
    arrays: dict[str, AnyArray] = {"cu_seqlens": row.cu_seqlens, "cu_seqlens_padded": row.cu_seqlens_padded}
    if "tokens" in needs:
        arrays["tokens"] = (row.tokens if slots is None else row.tokens[slots]).astype(ids, copy=False)
    if "labels" in needs:
        arrays.update(_label_arrays(row, slots, ids, derivable="tokens" in needs))
    mask = None if slots is None else row.loss_mask[slots]
    if "loss_mask" in needs:
        arrays["loss_mask"] = row.mask_bits if mask is None else bits(mask)
    if with_keys:
        arrays["keys"] = np.frombuffer(pack(row.keys), np.uint8)
    if mask is None:
        return RowView(*join_arrays(arrays), row.width, row.num_loss_tokens)
    return RowView(*join_arrays(arrays), len(mask), int(np.count_nonzero(mask)))


def _label_arrays(row: Row, slots: Slots | None, ids: np.dtype[np.generic], *, derivable: bool) -> dict[str, AnyArray]:
    """Return the labels as they travel: only last targets, where the rest follows from tokens that are sent too."""
    if slots is None and row.labels is None and derivable:
        return {"last_targets": row.last_targets.astype(ids, copy=False)}
    targets = row.targets() if slots is None else row.targets()[slots]
    return {"labels" if row.labels is None else "own_labels": targets.astype(ids, copy=False)}


def _slots(
    contract: ResolvedContract, physical: npt.NDArray[np.int32], layout: ParallelLayout, context_rank: int
) -> Slots | None:
    """Return the local slots; ``None`` stands for the whole row in order."""
    if layout.context == 1 or contract.partition is Partition.WHOLE:
        return None
    return held_slots(contract.partition, physical, layout.context, context_rank, dense=not contract.packed)
