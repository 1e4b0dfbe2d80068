"""Micro-batch as keyword arguments of a causal language model's ``forward``.

Shapes: MBS rows (1 where rows are packed), T = width in slots, S = segments.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache
from typing import Any

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import IGNORE_INDEX
from packhorse.errors import ContractError
from packhorse.hf.model_check import check

__all__ = ["arguments"]


def arguments(
    micro_batch: MicroBatch, *, shift_labels: bool | None = None, model: torch.nn.Module | None = None
) -> dict[str, Any]:
    """Return keyword arguments of a causal language model's ``forward``.

    ``input_ids``, ``position_ids``, ``labels`` int64 [MBS, T]; for packed rows ``cu_seq_lens_q`` and ``_k``
    int32 [S+1], physical, and ``max_length_q`` and ``_k``, integers. Labels are ``ignore_index`` wherever
    nothing is trained on, as these models know no loss mask. Pass ``num_items_in_batch`` for the
    denominator: ``Trainer`` does, a loop of one's own passes ``max(micro_batch.step_loss_tokens, 1)``.

    ``shift_labels``: whether the model's loss takes labels that stand at their slot (left out: what the
    installed version's causal loss takes). Where it does not, labels are rolled right by one over the row.

    ``model``: the model that is to be called. It is checked once, as ``check`` does, where rows are packed, and gets
    ``position_ids`` as its family takes them: [4, 1, T] for mRoPE. Left out, nothing is known of it; that is logged.

    Raises ``ContractError`` for a slice of a row, for another ``ignore_index`` than -100, and, where labels
    are rolled, for a row whose last slot has a target; ``ConfigError`` for a model that trains across samples.
    """
    if not micro_batch.holds_whole_row:
        raise ContractError("partition must be 'whole' for Hugging Face models; this rank was sent a slice of its row")
    if micro_batch.ignore_index != IGNORE_INDEX:  # Trainer counts targets by this number, whatever the loss ignores
        raise ContractError(f"ignore_index={micro_batch.ignore_index} must be {IGNORE_INDEX} for Hugging Face models")
    shifted = _takes_shifted() if shift_labels is None else shift_labels
    labels = _rows(micro_batch.masked_labels())
    return {
        "input_ids": _rows(micro_batch.tokens),
        "position_ids": _positions(micro_batch, model),
        **({"labels": labels, "shift_labels": labels} if shifted else {"labels": _rolled(labels)}),
        **_offsets(micro_batch),
        "use_cache": False,
    }


@cache
def _takes_shifted() -> bool:
    return "shift_labels" in inspect.signature(ForCausalLMLoss).parameters


def _rows(array: Any) -> torch.Tensor:
    """Return an array of [T] or [MBS, T] as a tensor of [MBS, T]."""
    tensor = torch.as_tensor(array)
    return tensor.reshape(-1, tensor.shape[-1])


def _positions(micro_batch: MicroBatch, model: torch.nn.Module | None) -> torch.Tensor:
    """Return positions [MBS, T], or [4, 1, T] where the model finds packed rows by the first of four."""
    positions = _rows(micro_batch.position_ids)
    if micro_batch.cu_seqlens_padded is None:
        return positions
    if model is None:
        _log_that_no_model_was_named()
        return positions
    rows = check(model).position_rows
    return positions if rows == 1 else positions.expand(rows, *positions.shape)


@cache
def _log_that_no_model_was_named() -> None:
    """Say once what was not checked."""
    logging.getLogger(__name__).warning(
        "not checked: arguments() was given no model, and some families train across the samples of packed rows or "
        "take other positions; pass arguments(micro_batch, model=model)"
    )


def _offsets(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return the offsets that flash kernels read; dense rows have none."""
    if micro_batch.cu_seqlens_padded is None:
        return {}
    offsets, longest = torch.as_tensor(micro_batch.cu_seqlens_padded), micro_batch.max_seqlen
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}


def _rolled(labels: torch.Tensor) -> torch.Tensor:
    """Move labels [MBS, T] one slot on, for a loss that moves them back."""
    if bool((labels[:, -1] != IGNORE_INDEX).any()):
        raise ContractError(
            "a row's last slot has a target, which a loss that shifts labels itself cannot reach; set "
            "packing.tail_slots to 1 on the server, or install a transformers whose ForCausalLMLoss takes shift_labels"
        )
    return torch.roll(labels, 1, dims=1)
