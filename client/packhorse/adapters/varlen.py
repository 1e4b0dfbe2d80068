"""Arguments of variable-length attention, and segment numbers for state-space layers.

The kernels themselves are not run on a GPU by our tests: names and dtypes are checked against recorded
signatures, and against ``torch.nn.attention.varlen`` where it is installed.

Offsets are physical: these kernels have no notion of padding inside a segment. They need the whole row, as
a context-parallel slice holds parts of each segment.

Shapes: T = slots of the row, S = segments.
"""

from __future__ import annotations

from typing import Any

import torch

from packhorse.adapters.row_offsets import row_offsets
from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import ContractError

__all__ = ["flash_attention_arguments", "seq_idx", "torch_varlen_arguments"]


def flash_attention_arguments(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return arguments of ``flash_attn_varlen_func``: ``cu_seqlens_q/k`` int32 [S+1], ``max_seqlen_q/k`` int.

    Raises ``ContractError`` for a dense micro-batch, a slice of a row, and offsets of several rows.
    """
    offsets = _whole_row_offsets(micro_batch)
    longest = micro_batch.max_seqlen
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}


def torch_varlen_arguments(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return arguments of ``torch.nn.attention.varlen.varlen_attn``: ``cu_seq_q/k`` int32 [S+1], ``max_q/k`` int.

    Raises ``ContractError`` for a dense micro-batch, a slice of a row, and offsets of several rows.
    """
    offsets = _whole_row_offsets(micro_batch)
    longest = micro_batch.max_seqlen
    return {"cu_seq_q": offsets, "cu_seq_k": offsets, "max_q": longest, "max_k": longest}


def _whole_row_offsets(micro_batch: MicroBatch) -> torch.Tensor:
    offsets = row_offsets(micro_batch)
    if offsets is None:
        raise ContractError("a dense micro-batch has no offsets; variable-length attention needs a packed mode")
    if not micro_batch.holds_whole_row:
        raise ContractError(
            f"variable-length attention needs the whole row; this rank holds a {micro_batch.partition} slice of it: "
            "set partition to whole, or use Transformer Engine's THD attention"
        )
    return offsets.physical


def seq_idx(cu_seqlens_padded: torch.Tensor, total: int) -> torch.Tensor:
    """Return the number of each slot's segment, int32 [T], on the device of the offsets.

    ``cu_seqlens_padded`` are physical offsets, int32 [S+1]; ``total`` is T. State-space layers carry state from
    slot to slot, and reset it where this number changes. Slots from the last offset up to ``total``
    count as one segment more.

    >>> seq_idx(torch.tensor([0, 2, 3]), 5).tolist()
    [0, 0, 1, 2, 2]
    """
    rest = (total - cu_seqlens_padded[-1:]).clamp(min=0)
    lengths = torch.cat([cu_seqlens_padded.diff(), rest])
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return numbers.repeat_interleave(lengths)
