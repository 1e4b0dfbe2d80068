"""Declaring a Megatron-LM job from its argument namespace, after ``validate_args``.

``settings`` lists what is read, field by field. What follows besides: ``partition`` is ``whole``, as
``get_batch`` cuts rows itself; the stack is Megatron-LM; the loss over no supervised token is 0, as Megatron
clamps the denominator; with ``--sft`` rows are packed ``online`` and tensor rank 0 of every stage reads,
without it they are the dense rows of an endless stream and only the edges of the pipeline read.
"""

from __future__ import annotations

from typing import Any

from packhorse.contract.batch_contract import BatchContract, Objective, Packing, ReaderPolicy
from packhorse.contract.layout import DEFAULT_ORDER, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import Stack
from packhorse.declare.attributes import get, has, read_fields
from packhorse.declare.pipeline_layout import mtp_stages_of
from packhorse.declare.settings import (
    MEGATRON_CONTRACT,
    MEGATRON_FACTS,
    ignores_ramp_up,
    trainer_facts,
    unread_settings,
)

__all__ = ["PIPELINE_FIRST", "contract_from_megatron", "layout_from_megatron", "layout_from_sizes", "model_ranks"]

PIPELINE_FIRST = "tp-cp-pp-dp"  # --use-tp-pp-dp-mapping
SIZE_ARGUMENTS = {
    "context": "context_parallel_size",
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
}


def model_ranks(model: object) -> int:
    """Return the number of ranks of one data-parallel coordinate: CP·TP·PP."""
    ranks = 1
    for name in SIZE_ARGUMENTS.values():
        ranks *= get(model, name) or 1
    return ranks


def layout_from_sizes(model: object, data: int, order: str = DEFAULT_ORDER) -> ParallelLayout:
    """Return the layout of a model's parallel sizes; what it does not set is 1."""
    sizes: dict[str, Any] = {axis: get(model, name) or 1 for axis, name in SIZE_ARGUMENTS.items()}
    return ParallelLayout(
        data=data,
        **sizes,
        sequence_parallel=bool(get(model, "sequence_parallel")),
        order=order,
        mtp_stages=mtp_stages_of(get(model, "pipeline_model_parallel_layout"), sizes["pipeline"]),
    )


def layout_from_megatron(args: object) -> ParallelLayout:
    """Read the layout of Megatron-LM's arguments; ``--use-tp-pp-dp-mapping`` gives the order.

    DP is ``data_parallel_size``, or what the other sizes leave of ``world_size``.
    """
    data = get(args, "data_parallel_size") or max(1, (get(args, "world_size") or 1) // model_ranks(args))
    return layout_from_sizes(args, data, PIPELINE_FIRST if get(args, "use_tp_pp_dp_mapping") else DEFAULT_ORDER)


def _weight_shards(args: object) -> int | None:
    """Return the size of the further axis over which weights are sharded; ``None`` in versions that have none."""
    names = ("tensor_parallel_num_weight_shards", "gtp_weight_remat_size")
    if not any(has(args, name) for name in names):
        return None
    shards = get(args, names[0])
    if shards is None:
        return get(args, names[1]) or 1
    return max(1, -(-int(shards) // (get(args, "tensor_model_parallel_size") or 1)))


def contract_from_megatron(args: object, packing: Packing | None = None) -> BatchContract:
    """Declare what a Megatron-LM job relies on; ``packing`` where it is not what ``--sft`` says."""
    sft = bool(get(args, "sft"))
    mode = packing or (Packing.ONLINE if sft else Packing.CONCAT)
    isolated = False if packing is None and not sft else None
    dense = mode is Packing.NONE or isolated is False
    declared = {"stack": Stack.MEGATRON_LM, "clamps_zero_loss": True, **read_fields(args, MEGATRON_FACTS)}
    declared["megatron_ddp"] = not get(args, "use_torch_fsdp2")
    if ignores_ramp_up(args):
        declared["rampup_batch_size"] = False
    if declared.get("packs_in_batch"):  # a flag of reinforcement learning, which does nothing without it
        declared["packs_in_batch"] = bool(get(args, "perform_rl_step"))
    declared["weight_shards"] = _weight_shards(args)
    declared["unread_settings"] = unread_settings(args) or None
    masked = bool(get(args, "dataloader_inter_document_masking"))
    # With offsets in its batches every stage reads them; no model of its own takes a row apart by segments.
    declared |= {"refuses_empty_segments": False, "tokens_on_every_stage": False}
    if get(args, "sft") is not None:
        declared["middle_stages_read"] = sft or masked
    return BatchContract(
        **read_fields(args, MEGATRON_CONTRACT),
        packing=mode,
        isolate_documents=isolated,
        partition=Partition.WHOLE,
        readers=ReaderPolicy.TENSOR_ZERO_EDGES if dense else ReaderPolicy.TENSOR_ZERO,
        objective=Objective.SFT if sft else Objective.PRETRAIN,
        trainer=trainer_facts(args, declared, pads_when_eager=False),
    )
