"""Megatron-Bridge's batch dictionaries, under current and legacy keys.

The meaning of the bare name flipped between its versions: legacy ``cu_seqlens`` is physical (and
``cu_seqlens_unpadded`` logical), current ``cu_seqlens_q`` is logical and ``cu_seqlens_q_padded`` physical.

Bridge's steps cut rows for context parallelism themselves, so a dictionary always holds the whole row. A
pipeline stage's dictionary has every key, with ``None`` for what the stage does not use: Bridge's steps look
keys up by name.

Shapes: T = slots of the row, n = segments.
"""

from __future__ import annotations

from typing import Any

import torch

from packhorse.adapters.row_offsets import row_offsets
from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import AttentionOffsets
from packhorse.errors import ContractError

__all__ = ["batch", "legacy_batch"]

ROWS = ("tokens", "labels", "loss_mask", "position_ids")
SENTINEL = -1


def batch(
    micro_batch: MicroBatch,
    *,
    attention_offsets: AttentionOffsets = AttentionOffsets.PHYSICAL,
    state_space: bool = True,
) -> dict[str, Any]:
    """Return a micro-batch as a dictionary under the current keys.

    Rows are [1, T] ([MBS, T] in the dense modes, which have no metadata). ``cu_seqlens_q/kv`` are int32 [n+1];
    ``max_seqlen_q/kv`` int32 scalars on the host; ``padding_mask``, bool [1, T], is there where the contract
    asks. Physical offsets come without ``*_padded`` keys: Bridge copies every tensor, so Transformer Engine
    would not see that they are one object, and would take its slower path for padding between segments.
    ``total_tokens`` is for state-space layers; without it their state leaks from segment to segment. A model
    without such layers may save the wait that it costs each forward: ``state_space=False``.

    Raises ``ContractError`` for a slice of a row, and for offsets of several rows.
    """
    values, offsets = _rows(micro_batch), row_offsets(micro_batch)
    if offsets is None:
        return values
    logical, physical = offsets
    if AttentionOffsets(attention_offsets) is AttentionOffsets.PHYSICAL:
        values |= {"cu_seqlens_q": physical, "cu_seqlens_kv": physical}
    else:
        values |= {"cu_seqlens_q": logical, "cu_seqlens_kv": logical}
        values |= {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
    longest = torch.tensor(micro_batch.max_seqlen, dtype=torch.int32)
    return values | {"max_seqlen_q": longest, "max_seqlen_kv": longest} | _total(micro_batch, state_space)


def legacy_batch(
    micro_batch: MicroBatch,
    *,
    attention_offsets: AttentionOffsets = AttentionOffsets.PHYSICAL,
    state_space: bool = True,
) -> dict[str, Any]:
    """Return a micro-batch as a dictionary under the keys of Bridge before mid-2026, which later versions read too.

    ``cu_seqlens``, int32 [1, n+2], is physical and ends in one -1; ``cu_seqlens_argmin``, int64 [1, 1] on the
    host, says where, so that no reader searches for it on a device. With logical offsets
    ``cu_seqlens_unpadded`` and its argmin stand beside them.

    Raises ``ContractError`` for a slice of a row, and for offsets of several rows.
    """
    values, offsets = _rows(micro_batch), row_offsets(micro_batch)
    if offsets is None:
        return values
    values |= _ended("cu_seqlens", offsets.physical)
    if AttentionOffsets(attention_offsets) is AttentionOffsets.LOGICAL:
        values |= _ended("cu_seqlens_unpadded", offsets.logical)
    longest = torch.tensor([[micro_batch.max_seqlen]], dtype=torch.int32)
    return values | {"max_seqlen": longest} | _total(micro_batch, state_space)


def _rows(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return the arrays that Bridge's steps slice; ``attention_mask`` is None, as offsets say all there is to say."""
    if not micro_batch.holds_whole_row:
        raise ContractError(
            f"PARTITION: Megatron-Bridge's step cuts the row itself, and this rank holds a {micro_batch.partition} "
            "slice of it, which would be cut twice; set partition to whole on both sides"
        )
    values = {name: _two_dimensional(getattr(micro_batch, name)) for name in ROWS}
    mask = {} if micro_batch.padding_mask is None else {"padding_mask": _two_dimensional(micro_batch.padding_mask)}
    return values | {"attention_mask": None} | mask


def _two_dimensional(array: Any) -> torch.Tensor | None:
    if array is None:
        return None
    tensor = torch.as_tensor(array)
    return tensor if tensor.dim() > 1 else tensor[None]


def _ended(key: str, offsets: torch.Tensor) -> dict[str, torch.Tensor]:
    ended = torch.cat([offsets, offsets.new_full((1,), SENTINEL)])
    return {key: ended[None], f"{key}_argmin": torch.tensor([[len(offsets)]])}


def _total(micro_batch: MicroBatch, state_space: bool) -> dict[str, int]:
    return {"total_tokens": micro_batch.width} if state_space else {}
