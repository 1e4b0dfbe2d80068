"""Megatron-LM's batch dictionaries, as ``get_batch`` of its ``pretrain_gpt.py`` takes them from an iterator.

Its stock step moves what it knows by name, broadcasts it from tensor rank 0, and cuts rows for context parallelism
itself; ``--dataloader-type external`` hands it the iterator as it is:

    feed = Feed(endpoint, contract=BatchContract.from_megatron(args), layout=ParallelLayout.from_megatron(args))

    def datasets(num_samples, vp_stage=None):
        return map(megatron_lm.batch, feed), None, None  # None, None, None on ranks that do not read

Attention of that step is over the physical offsets, whatever the batch holds beside them: they are all that is given.

Held against megatron-core 0.19.2 and Megatron-LM d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from typing import Any

import torch

from packhorse.adapters.row_offsets import row_offsets
from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import ContractError

__all__ = ["batch"]

ROWS = ("tokens", "labels", "loss_mask", "position_ids")


def batch(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return a micro-batch as the dictionary that Megatron-LM's ``get_batch`` takes.

    Rows are [1, T] ([MBS, T] in the dense modes, which have no offsets), ``None`` where this stage does not use them.
    ``cu_seqlens`` is int32 [1, n+1], physical, without segments of no slots; ``max_seqlen`` int32 [1]. There is no
    ``cu_seqlens_padded``: tensor rank 0 would keep it to itself at CP 1, and its peers would attend by other offsets.

    Raises ``ContractError`` for a slice of a row, which would be cut twice, for a padding mask, which that step does
    not take, and for offsets of several rows.
    """
    if not micro_batch.holds_whole_row:
        raise ContractError(
            f"PARTITION: Megatron-LM's step cuts the row itself, and this rank holds a {micro_batch.partition} "
            "slice of it, which would be cut twice; set partition to whole on both sides"
        )
    if micro_batch.padding_mask is not None:
        raise ContractError(
            "padding_mask is in the contract, and Megatron-LM's step would leave it out in silence; set padding_mask "
            "to false on both sides"
        )
    values = {name: _two_dimensional(getattr(micro_batch, name)) for name in ROWS} | {"attention_mask": None}
    offsets = row_offsets(micro_batch)
    if offsets is None:
        return values
    # A fixed number of offsets ends in several of one value; behind the first of them there are no slots.
    held = int((micro_batch.host_offsets[1] < micro_batch.width).sum()) + 1
    longest = torch.tensor([micro_batch.max_seqlen], dtype=torch.int32)
    return values | {"cu_seqlens": offsets.physical[None, :held], "cu_seqlens_padded": None, "max_seqlen": longest}


def _two_dimensional(array: Any) -> torch.Tensor | None:
    if array is None:
        return None
    tensor = torch.as_tensor(array)
    return tensor if tensor.dim() > 1 else tensor[None]
