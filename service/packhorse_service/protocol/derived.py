"""Values that follow from a contract and a layout, for people: sizes in slots, bytes a token, ranks that read."""

from __future__ import annotations

from typing import Any

import numpy as np

from packhorse.contract.batch_contract import ResolvedContract, default_segment_multiple
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.rows.payload import narrowest
from packhorse_service.protocol.stream_spec import readers_of

__all__ = ["MASK_BYTES", "derived_values"]

MASK_BYTES = 1 / 8  # the loss mask travels as bits


def derived_values(contract: ResolvedContract, layout: ParallelLayout) -> dict[str, Any]:
    """What follows from the layout and the contract; sizes in slots and bytes."""
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
        "wire_bytes_per_token": _wire_bytes_per_token(contract, layout),
    }


def _wire_bytes_per_token(contract: ResolvedContract, layout: ParallelLayout) -> float:
    """Of a full row, without its offsets and header. Slices carry their labels, whole rows imply them."""
    sliced = layout.context > 1 and contract.partition is not Partition.WHOLE
    return np.dtype(narrowest(contract.vocab_size)).itemsize * (2 if sliced else 1) + MASK_BYTES
