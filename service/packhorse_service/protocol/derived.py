"""Values that follow from a contract and a layout, for people: sizes in slots, bytes a token, ranks that read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from packhorse.contract.batch_contract import ResolvedContract, default_segment_multiple
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.rows.payload import narrowest
from packhorse_service.protocol.stream_spec import readers_of

__all__ = ["derived_values", "slot_bytes"]

MASK_BYTES = 1 / 8  # the loss mask travels as bits
CONTENT = ("tokens", "labels", "loss_mask")


def derived_values(contract: ResolvedContract, layout: ParallelLayout) -> dict[str, Any]:
    """Return what follows from the layout and the contract, by name; sizes in slots and bytes."""
    return {
        "layout": str(layout),
        "world_size": layout.world_size,
        "readers": len(readers_of(layout, contract.readers)),
        "packing": str(contract.packing),
        "segment_multiple": contract.segment_multiple,
        "default_segment_multiple": default_segment_multiple(layout, contract.partition, contract.evaluation_context),
        "pack_multiple": contract.pack_multiple,
        "row_multiple": contract.row_multiple,
        "row_slots": contract.max_width,
        "fixed_width": contract.fixed_width or not contract.packed,
        "num_microbatches": contract.num_microbatches(layout),
        "wire_bytes_per_token": slot_bytes(CONTENT, contract, layout),
    }


def slot_bytes(needs: Collection[str], contract: ResolvedContract, layout: ParallelLayout) -> float:
    """Return the bytes of one slot on the wire, without its row's offsets and header, to who ``needs`` these arrays.

    Slices carry their labels, whole rows imply them by their tokens.
    """
    ids = np.dtype(narrowest(contract.vocab_size)).itemsize
    whole = contract.partition is Partition.WHOLE or layout.context == 1
    labels = 0 if whole and "tokens" in needs else ids
    return sum(size for name, size in zip(CONTENT, (ids, labels, MASK_BYTES), strict=True) if name in needs)
