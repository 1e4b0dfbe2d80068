"""Megatron-Bridge's batch dictionaries, current and legacy keys, and how Bridge reads their offsets back.

The meaning of the bare name flipped between its versions: legacy ``cu_seqlens`` is physical (and
``cu_seqlens_unpadded`` logical), current ``cu_seqlens_q`` is logical and ``cu_seqlens_q_padded`` physical.

Bridge's steps cut rows for context parallelism themselves, so a dictionary always holds the whole row. A
pipeline stage's dictionary has every key, with ``None`` for what the stage does not use: Bridge's steps look
keys up by name. Those steps are not run by our tests, as Bridge does not import without a GPU.

Shapes: T = slots of the row, n = segments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from packhorse.adapters.varlen import seq_idx
from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import AttentionOffsets
from packhorse.errors import ContractError

__all__ = ["PackedMetadata", "batch", "legacy_batch", "packed_metadata", "partition_offsets"]

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

    Raises ``ContractError`` for a slice of a row.
    """
    values = _rows(micro_batch)
    if micro_batch.cu_seqlens_padded is None:
        return values
    physical = torch.as_tensor(micro_batch.cu_seqlens_padded)
    if AttentionOffsets(attention_offsets) is AttentionOffsets.PHYSICAL:
        values |= {"cu_seqlens_q": physical, "cu_seqlens_kv": physical}
    else:
        logical = torch.as_tensor(micro_batch.cu_seqlens)
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

    Raises ``ContractError`` for a slice of a row.
    """
    values = _rows(micro_batch)
    if micro_batch.cu_seqlens_padded is None:
        return values
    values |= _ended("cu_seqlens", micro_batch.cu_seqlens_padded)
    if AttentionOffsets(attention_offsets) is AttentionOffsets.LOGICAL:
        values |= _ended("cu_seqlens_unpadded", micro_batch.cu_seqlens)
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


def _ended(key: str, offsets: Any) -> dict[str, torch.Tensor]:
    tensor = torch.as_tensor(offsets)
    ended = torch.cat([tensor, tensor.new_full((1,), SENTINEL)])
    return {key: ended[None], f"{key}_argmin": torch.tensor([[len(tensor)]])}


def _total(micro_batch: MicroBatch, state_space: bool) -> dict[str, int]:
    return {"total_tokens": micro_batch.width} if state_space else {}


# Reading back --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMetadata:
    """Packing metadata as Bridge makes it of a batch: the fields of ``PackedSeqParams``.

    Offsets are int32 [n+1], of queries and of keys and values; those ``_padded`` are there where a batch has both.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    total_tokens: int | None = None
    qkv_format: str = "thd"

    @property
    def logical(self) -> torch.Tensor:
        """Logical offsets, [n+1]; the physical ones, where a batch has no others."""
        return self.cu_seqlens_q

    @property
    def physical(self) -> torch.Tensor:
        """Physical offsets, [n+1], of which each segment's padding is part."""
        return self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded

    @property
    def seq_idx(self) -> torch.Tensor | None:
        """Segment numbers, int32 [1, total_tokens], for state-space layers; ``None`` without ``total_tokens``."""
        return None if self.total_tokens is None else seq_idx(self.physical, self.total_tokens)[None]


def packed_metadata(batch: Mapping[str, Any]) -> PackedMetadata:
    """Read the packing metadata of a batch, under current or legacy keys, as Bridge reads it.

    Raises ``ContractError`` for several rows, or where a single number is several.
    """
    if "cu_seqlens_q" in batch:
        return _current_metadata(batch)
    physical = _trimmed(batch, "cu_seqlens")
    padded, seen = None, physical
    if batch.get("cu_seqlens_unpadded") is not None:
        padded, seen = physical, _trimmed(batch, "cu_seqlens_unpadded")
    longest = _number(batch, "max_seqlen")
    return PackedMetadata(
        cu_seqlens_q=seen,
        cu_seqlens_kv=seen,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=_number(batch, "total_tokens"),
    )


def _current_metadata(batch: Mapping[str, Any]) -> PackedMetadata:
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    offsets = {name: _one_row(batch[name]) for name in names if batch.get(name) is not None}
    longest = _number(batch, "max_seqlen_q")
    longest_kv = _number(batch, "max_seqlen_kv")
    return PackedMetadata(
        **{"cu_seqlens_kv": offsets["cu_seqlens_q"], **offsets},
        max_seqlen_q=longest,
        max_seqlen_kv=longest if longest_kv is None else longest_kv,
        total_tokens=_number(batch, "total_tokens"),
    )


def _trimmed(batch: Mapping[str, Any], key: str) -> torch.Tensor:
    """Return legacy offsets up to their argmin; without one up to their smallest entry, the -1 if there is one."""
    offsets: torch.Tensor = _one_row(batch[key])
    end = _number(batch, f"{key}_argmin")
    return offsets[: int(offsets.argmin()) if end is None else end]


def _number(batch: Mapping[str, Any], key: str) -> int | None:
    value = batch.get(key)
    if value is None:
        return None
    tensor = torch.as_tensor(value)
    if tensor.numel() != 1:
        raise ContractError(f"{key} must contain exactly one value, got {tensor.numel()}")
    return int(tensor)


def _one_row(offsets: Any) -> Any:
    """Return the offsets of one row in one dimension: [1, n] is squeezed, several rows are refused.

    A numpy array or a torch tensor, and the same is returned. Raises ``ContractError`` (``THD_ROWS``): the
    offsets of a second row would be read as going on in the first.
    """
    rows = math.prod(offsets.shape[:-1])
    if rows != 1:
        raise ContractError(
            f"THD_ROWS: offsets of {rows} rows; packed THD micro-batches expect micro-batch size 1: "
            "set micro_batch_size to 1"
        )
    return offsets.reshape(-1)


def partition_offsets(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the physical offsets, [n+1], by which Bridge's step cuts a batch's rows for context parallelism.

    Legacy offsets end at their argmin; without one at the first negative entry, or all count. Neither is
    looked for on a device, which would wait for it: argmin must then be given, and lie on the host.

    Raises ``ContractError`` for several rows, and where a device would have to be waited for.
    """
    if "cu_seqlens_q" in batch:
        padded = batch.get("cu_seqlens_q_padded")
        return torch.as_tensor(_one_row(batch["cu_seqlens_q"] if padded is None else padded))
    offsets: torch.Tensor = _one_row(batch["cu_seqlens"])
    argmin = batch.get("cu_seqlens_argmin")
    if argmin is not None:
        if torch.as_tensor(argmin).device.type != "cpu":
            raise ContractError("packed batches need cu_seqlens_argmin on CPU; leave it there when moving a batch")
        return offsets[: _number(batch, "cu_seqlens_argmin")]
    if offsets.device.type != "cpu":
        raise ContractError("packed batches on a device require cu_seqlens_argmin, on CPU; send it with cu_seqlens")
    negative = (offsets < 0).nonzero()
    return offsets[: int(negative[0])] if len(negative) else offsets
