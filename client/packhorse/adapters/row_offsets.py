"""Offsets of one packed row, as every adapter hands them on: [n+1] for n segments, int32, never of several rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import ContractError

__all__ = ["RowOffsets", "row_offsets"]


class RowOffsets(NamedTuple):
    """Offsets of a row, int32 [n+1] each, the tensors of the micro-batch themselves."""

    logical: torch.Tensor
    physical: torch.Tensor


def row_offsets(micro_batch: MicroBatch) -> RowOffsets | None:
    """Return the offsets of a packed micro-batch, ``None`` in the dense modes; [1, n+1] loses its first dimension.

    Raises ``ContractError`` (``THD_ROWS``) for several rows, as micro-batches that were stacked have: those of a
    second row would be read as going on in the first.
    """
    if micro_batch.cu_seqlens_padded is None:
        return None
    return RowOffsets(_one_row(micro_batch.cu_seqlens), _one_row(micro_batch.cu_seqlens_padded))


def _one_row(offsets: Any) -> torch.Tensor:
    tensor = torch.as_tensor(offsets)
    if tensor.dim() == 1:
        return tensor  # the very object: Transformer Engine compares objects
    rows = math.prod(tensor.shape[:-1])
    if rows != 1:
        raise ContractError(
            f"THD_ROWS: offsets of {rows} rows; packed THD micro-batches expect micro-batch size 1: "
            "set micro_batch_size to 1, and stack no micro-batches"
        )
    return tensor.reshape(-1)
