"""Megatron-Core's ``PackedSeqParams``, with the fields that the installed version has.

Run against megatron-core 0.16.1; later fields are set where the class has them:

| field                            | set to                                                       |
|----------------------------------|--------------------------------------------------------------|
| ``total_tokens``                 | slots of the whole row: state-space layers need it           |
| ``seq_idx``                      | what the class makes of ``total_tokens``, else made here     |
| ``pad_between_seqs``             | True with logical offsets, else left alone                   |
| ``cp_partition_mode``            | how this rank's slice was cut                                |

Transformer Engine's attention is not run on a GPU by our tests.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

from packhorse.adapters.row_offsets import RowOffsets, row_offsets
from packhorse.adapters.varlen import seq_idx
from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import AttentionOffsets
from packhorse.contract.partition import Partition
from packhorse.errors import ConfigError, ContractError

__all__ = ["packed_seq_params"]

MODULE = "megatron.core.packed_seq_params"


def packed_seq_params(
    micro_batch: MicroBatch,
    *,
    attention_offsets: AttentionOffsets = AttentionOffsets.PHYSICAL,
    state_space: bool | None = None,
    cls: type | None = None,
) -> Any:
    """Return the ``PackedSeqParams`` of a micro-batch; ``None`` in the dense modes, as Megatron's models expect there.

    Physical offsets are *one* tensor in all four fields: Transformer Engine takes the very same object as
    "nothing lies between segments" and keeps every backend. ``cls`` is the class to build, by default the
    installed one. ``state_space`` says whether the model has state-space layers. If it has, a version whose
    class cannot keep their state inside a segment is refused; if it has none, ``total_tokens`` is left out,
    which saves a wait for the device each forward; left open, it is set where the class has it.

    Raises ``ConfigError`` without Megatron-Core, ``ContractError`` for such a version and for offsets of several rows.
    """
    offsets = row_offsets(micro_batch)
    if offsets is None:
        return None
    cls = cls or _installed()
    known = {f.name for f in fields(cls)}
    if state_space and "total_tokens" not in known:
        raise ContractError(
            "this Megatron-Core's PackedSeqParams has no total_tokens: state would leak from one segment into the "
            "next in state-space layers; use a later Megatron-Core (0.16.1 lacks it)"
        )
    total = None if state_space is False else micro_batch.width
    values = _offsets(offsets, attention_offsets) | {
        "qkv_format": "thd",
        "max_seqlen_q": micro_batch.max_seqlen,
        "max_seqlen_kv": micro_batch.max_seqlen,
        "total_tokens": total,
        "cp_partition_mode": "contiguous" if micro_batch.partition is Partition.CONTIGUOUS else "zigzag",
    }
    params = cls(**{name: value for name, value in values.items() if name in known})
    if total is not None and "seq_idx" in known and params.seq_idx is None:
        params.seq_idx = seq_idx(offsets.physical, total)[None]
    return params


def _installed() -> type:
    try:
        found: type = import_module(MODULE).PackedSeqParams
    except ImportError as error:
        raise ConfigError(f"{MODULE} cannot be imported; install megatron-core, or pass cls") from error
    return found


def _offsets(offsets: RowOffsets, attention_offsets: AttentionOffsets) -> dict[str, Any]:
    """Return the four offset fields, and the flag, as the contract fixes them for the whole job."""
    logical, physical = offsets
    if AttentionOffsets(attention_offsets) is AttentionOffsets.PHYSICAL:
        seen, flag = physical, {}
    else:
        seen, flag = logical, {"pad_between_seqs": True}
    padded = {"cu_seqlens_q_padded": physical, "cu_seqlens_kv_padded": physical}
    return {"cu_seqlens_q": seen, "cu_seqlens_kv": seen} | padded | flag
