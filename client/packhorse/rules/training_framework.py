"""Rules about the trainer's stack: who packs, who cuts, which step and schedule consume the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packhorse.contract.batch_contract import AttentionOffsets, Packing
from packhorse.contract.trainer_facts import Stack
from packhorse.rules.conditions import pipelined
from packhorse.rules.model import Breach, RuleInput
from packhorse.rules.multiples import next_multiple

__all__ = [
    "MINIMUM_WINDOW",
    "cp_hierarchy",
    "dynamic_cp",
    "middle_stages",
    "modes_exclusive",
    "packed_step",
    "partition",
    "pp_interleave",
    "settings_read",
    "stock_dense",
    "stock_thd",
    "thd_backend",
    "weight_shards",
    "window",
]

MINIMUM_WINDOW = 2
CUTS_ITSELF = {
    Stack.MEGATRON_LM: "get_batch",
    Stack.MEGATRON_BRIDGE: "gpt_step and vlm_step",
    Stack.TORCHTITAN: "context parallelism",
}
HIERARCHICAL = "a2a+p2p"


PACKERS = {
    "packs_offline": "let it read the stream, not files packed before (Bridge: enable_offline_packing)",
    "packs_in_batch": "turn its packing in the batch off (Bridge: enable_in_batch_packing)",
    "defers_packing": "train with vlm_step or gpt_step and set defer_in_batch_packing_to_step to false; or serve dense "
    "rows (packing: none) to a step that packs them itself, as qwen3_vl_step and megatron_mimo_step do",
}


def modes_exclusive(given: RuleInput) -> Iterator[Breach]:
    """There is one packing owner: the trainer does not pack again what arrives packed.

    Packing twice loses the offsets of the first packing, and attention crosses samples. A packing that is put off
    to the training step may pack dense rows: those are not packed yet. gpt_step packs nothing itself: where a trainer
    declares that step, the flag does nothing.

    Source: Megatron-Bridge training/config.py, "mutually exclusive"; training/vlm_step.py, "set
    defer_in_batch_packing_to_step=False".
    """
    for name, remedy in PACKERS.items():
        if getattr(given.trainer, name) and (given.contract.packed or name != "defers_packing"):
            yield Breach(name, f"off, as the server packs ({given.contract.packing})", "on", f"set it to off: {remedy}")


def thd_backend(given: RuleInput) -> Iterator[Breach]:
    """Packed rows reach an attention that reads offsets: not Megatron's local implementation.

    Its DotProductAttention refuses packed sequences. A model that brings an attention of its own declares
    custom_attention.

    Source: Megatron-LM core/transformer/dot_product_attention.py.
    """
    if given.trainer.transformer_impl == "local" and not given.trainer.custom_attention:
        remedy = "set transformer_impl to transformer_engine, or declare custom_attention"
        yield Breach("transformer_impl", "transformer_engine", "local", remedy)


# What Megatron-LM's stock step needs of a trainer that gets packed rows: (fact, value, what else happens).
STOCK = (
    ("external_dataloader", True, "set --dataloader-type external, so that the iterator is used as it is"),
    ("sft", True, "set --sft; without it rows are cut as a whole, not by segment"),
    ("makes_attention_mask", False, "set --no-create-attention-mask-in-dataloader; its broadcast would hang"),
)


def stock_thd(given: RuleInput) -> Iterator[Breach]:
    """Megatron-LM's own step takes packed rows from an external loader, with --sft, no mask, width seq_length.

    Tensor rank 0 broadcasts into buffers of [micro_batch_size, seq_length], and the other ranks wait for an
    attention mask if one is announced. A step of one's own declares another stack.

    Source: Megatron-LM pretrain_gpt.py, get_batch; training/utils.py, get_batch_on_this_tp_rank.
    """
    if given.trainer.stack is not Stack.MEGATRON_LM:
        return
    for name, want, remedy in STOCK:
        got = getattr(given.trainer, name)
        if got not in (None, want):
            yield Breach(name, str(want).lower(), str(got).lower(), remedy)
    if given.contract.attention_offsets is AttentionOffsets.LOGICAL:
        yield Breach("attention_offsets", "physical", "logical", "set attention_offsets to physical: its attention is")
    if given.contract.packing is Packing.IN_BATCH:
        yield Breach("packing", "online or concat, of width seq_length", "in_batch", "set packing to online")
    elif not given.contract.fixed_width:
        yield Breach("pad_to_max_length", "true", "false", "set pad_to_max_length to true")


def stock_dense(given: RuleInput) -> Iterator[Breach]:
    """Megatron-LM's own step gets dense rows without inter-document masking.

    With it tensor rank 0 broadcasts one tensor less than the others wait for, as dense rows have no offsets: they
    hang, and with TP 1 attention crosses documents.

    Source: Megatron-LM pretrain_gpt.py, get_batch; training/arguments.py, --dataloader-inter-document-masking.
    """
    if given.trainer.inter_document_masking:
        remedy = "set it off, or serve packed rows: packing concat with isolate_documents, and --sft on the trainer"
        yield Breach("inter_document_masking", "off", "on", remedy)


# Steps of Megatron-Bridge that refuse rows that arrive packed, with what they say.
STEPS_THAT_PACK = {
    "qwen3_vl_step": "it builds the packed metadata itself",
    "megatron_mimo_step": "it wants the packing put off to itself",
}


def packed_step(given: RuleInput) -> Iterator[Breach]:
    """The training step takes rows that arrive packed.

    Of Megatron-Bridge's, qwen3_vl_step and megatron_mimo_step refuse every such batch; gpt_step and vlm_step take them.

    Source: Megatron-Bridge models/qwen_vl/qwen3_vl_step.py, "does not support collate-time in-batch packing";
    training/megatron_mimo_step.py.
    """
    name = given.trainer.forward_step or ""
    why = STEPS_THAT_PACK.get(name)
    if why is not None:
        remedy = "train with vlm_step, or set packing to none"
        yield Breach("forward_step", f"gpt_step, vlm_step or one that takes packed rows, as {why}", name, remedy)


def weight_shards(given: RuleInput) -> Iterator[Breach]:
    """Weights are sharded along the tensor-parallel axis alone, not over a further one (GTP).

    The ranks of that axis read data of their own and data_parallel_size leaves them out: no layout here says which.

    Source: Megatron-LM training/arguments.py, --tensor-parallel-num-weight-shards; core/parallel_state.py.
    """
    shards = given.trainer.weight_shards or 1
    if shards > 1:
        remedy = "leave tensor_parallel_num_weight_shards out, or set it to the tensor-parallel size"
        yield Breach("weight_shards", "1: no further axis", str(shards), remedy)


def settings_read(given: RuleInput) -> Iterator[Breach]:
    """Every setting about the data that the trainer has set is read by a rule.

    What it does to the data is not checked. The trainer is served.

    Source: `packhorse.declare.settings`, the settings that are known and not read.
    """
    for name in given.trainer.unread_settings or ():
        yield Breach(name, "left out, as no rule reads it", "set", f"leave {name} out, or make sure that the rows hold")


def middle_stages(given: RuleInput) -> Iterator[Breach]:
    """With packed rows the step reads on middle pipeline stages too: their attention needs the offsets.

    Megatron-Bridge asks the data set's configuration whether to. Where that does not say that rows are packed, as a
    class of one's own may not, middle stages read nothing and attend across segments, in silence.

    Source: Megatron-Bridge 0.6.2 training/gpt_step.py, _middle_pp_stage_needs_batch.
    """
    if given.trainer.middle_stages_read is False:
        remedy = (
            "set enable_offline_packing to true on the data set's configuration, and offline_packing_specs with "
            "packed_sequence_size = seq_length, in a step that reads there, as gpt_step and vlm_step do "
            "(Megatron-Bridge); --sft in Megatron-LM"
        )
        yield Breach("middle_stages_read", "true, as rows are packed", "false", remedy)


def _group(given: RuleInput) -> int:
    """Micro-batches that one model chunk of a virtual pipeline runs before the next."""
    return given.trainer.microbatch_group_size or given.layout.pipeline


def _interleaves(given: RuleInput) -> bool:
    return pipelined(given) and (given.trainer.virtual_pipeline_chunks or 1) > 1


def pp_interleave(given: RuleInput) -> Iterator[Breach]:
    """With interleaved stages PP ≤ group ≤ M, and M % group is 0 or at least PP (M: micro-batches a step).

    A last group smaller than the pipeline leaves stages waiting for each other. Megatron-LM refuses virtual stages
    of a pipeline of one.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving;
    training/arguments.py, "When interleaved schedule is used".
    """
    chunks = given.trainer.virtual_pipeline_chunks or 1
    if given.trainer.stack is Stack.MEGATRON_LM and chunks > 1 and not pipelined(given):
        remedy = "leave virtual stages out, or use a pipeline of 2 or more"
        yield Breach("virtual_pipeline_chunks", "1 at PP = 1", str(chunks), remedy)
    if not _interleaves(given):
        return
    group, stages, contract = _group(given), given.layout.pipeline, given.contract
    count = contract.num_microbatches(given.layout)
    if group < stages:
        yield Breach("microbatch_group_size", f"at least PP = {stages}", str(group), f"set it to {stages}")
        group = stages
    if count < group or 0 < count % group < stages:
        share = group * contract.micro_batch_size * given.layout.data
        remedy = f"set global_batch_size to {next_multiple(contract.global_batch_size, share)}"
        want = f"a number of micro-batches of at least {group} that leaves 0 or at least {stages} beyond groups"
        yield Breach("global_batch_size", want, f"{contract.global_batch_size} ({count} micro-batches)", remedy)


def cp_hierarchy(given: RuleInput) -> Iterator[Breach]:
    """cp_comm_type a2a+p2p comes with hierarchical sizes, whose product is CP, at CP 1 too.

    Without them context-parallel communication is silently off, and each rank attends to its own chunk.

    Source: Megatron-Bridge training/config.py, _validate_cp_comm_type; Megatron-LM training/arguments.py.
    """
    sizes, context = given.trainer.hierarchical_cp_sizes, given.layout.context
    hierarchical = HIERARCHICAL in (given.trainer.cp_comm_type or "")
    remedy = f"set hierarchical_context_parallel_sizes to [{context}, 1], or as the nodes divide it"
    if context == 1:
        remedy = "set cp_comm_type to p2p and leave hierarchical_context_parallel_sizes out"
    if sizes is None and hierarchical:
        yield Breach("hierarchical_cp_sizes", f"sizes whose product is CP = {context}", "not set", remedy)
    elif sizes is not None and math.prod(sizes) != context:
        yield Breach("hierarchical_cp_sizes", f"sizes whose product is CP = {context}", str(list(sizes)), remedy)


def dynamic_cp(given: RuleInput) -> Iterator[Breach]:
    """The trainer moves no samples after loading: no hybrid or dynamic context parallelism, no packing scheduler.

    They deal the samples of a step to other ranks and change the number of micro-batches.

    Source: Megatron-LM core/datasets/data_schedule.py; --hybrid-context-parallel, --sequence-packing-scheduler.
    """
    if given.trainer.dynamic_context_parallel:
        yield Breach("dynamic_context_parallel", "off", "on", "turn hybrid and dynamic context parallelism off")
    if given.trainer.packing_scheduler:
        remedy = "leave sequence_packing_scheduler out; the server balances the ranks of a step"
        yield Breach("packing_scheduler", "off", given.trainer.packing_scheduler, remedy)


def partition(given: RuleInput) -> Iterator[Breach]:
    """Both sides agree who cuts rows for the context-parallel ranks; stock steps cut them, so they get whole rows.

    zigzag and contiguous are cut by the server. A stock step would cut such a slice a second time, and a model that
    says how its rows are cut (cp_partition_mode) gets no others.

    Source: Megatron-LM pretrain_gpt.py, get_batch_on_this_cp_rank; Megatron-Bridge training/gpt_step.py and
    models/deepseek/deepseek_v4_step.py.
    """
    mode = given.trainer.cp_partition_mode
    if mode not in (None, given.contract.partition):
        got = str(given.contract.partition)
        yield Breach("partition", f"{mode} or whole, as cp_partition_mode says", got, "set partition to whole")
        return
    cutter = None if given.trainer.stack is None else CUTS_ITSELF.get(given.trainer.stack)
    if cutter is not None:
        want = f"whole, as {given.trainer.stack} cuts the row itself ({cutter})"
        yield Breach("partition", want, str(given.contract.partition), "set partition to whole")


def window(given: RuleInput) -> Iterator[Breach]:
    """The delivery window is at least 2, and more than a group where a virtual pipeline interleaves.

    The first model chunk reads a whole group before the last reads its first micro-batch: a smaller window
    blocks the rank against itself.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving.
    """
    least = max(MINIMUM_WINDOW, _group(given) + 1 if _interleaves(given) else 0)
    if given.window is not None and given.window < least:
        yield Breach("window", f"at least {least}", str(given.window), f"set window to {least} or more")
