"""Rules about the trainer's stack: who packs, who cuts, which step and schedule consume the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packhorse.contract.batch_contract import Packing
from packhorse.contract.trainer_facts import Stack
from packhorse.rules.conditions import pipelined
from packhorse.rules.model import Breach, RuleInput
from packhorse.rules.multiples import next_multiple

__all__ = [
    "MINIMUM_WINDOW",
    "cp_hierarchy",
    "dynamic_cp",
    "modes_exclusive",
    "partition",
    "pp_interleave",
    "stock_thd",
    "thd_backend",
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
    "defers_packing": "turn the deferred packing step off (Bridge: defer_in_batch_packing_to_step)",
}


def modes_exclusive(given: RuleInput) -> Iterator[Breach]:
    """There is one packing owner: the trainer does not pack again what arrives packed.

    Packing twice loses the offsets of the first packing, and attention crosses samples.

    Source: Megatron-Bridge training/config.py, "mutually exclusive"; data/builders/energon.py, "one packing owner".
    """
    for name, remedy in PACKERS.items():
        if getattr(given.trainer, name):
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
    if given.contract.packing is Packing.IN_BATCH:
        yield Breach("packing", "online or concat, of width seq_length", "in_batch", "set packing to online")
    elif not given.contract.fixed_width:
        yield Breach("pad_to_max_length", "true", "false", "set pad_to_max_length to true")


def _group(given: RuleInput) -> int:
    """Micro-batches that one model chunk of a virtual pipeline runs before the next."""
    return given.trainer.microbatch_group_size or given.layout.pipeline


def _interleaves(given: RuleInput) -> bool:
    return pipelined(given) and (given.trainer.virtual_pipeline_chunks or 1) > 1


def pp_interleave(given: RuleInput) -> Iterator[Breach]:
    """With interleaved stages PP ≤ group ≤ M, and M % group is 0 or at least PP (M: micro-batches a step).

    A last group smaller than the pipeline leaves stages waiting for each other.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving.
    """
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
    """cp_comm_type a2a+p2p comes with hierarchical sizes, whose product is CP.

    Without them context-parallel communication is silently off, and each rank attends to its own chunk.

    Source: Megatron-Bridge training/config.py, _validate_cp_comm_type.
    """
    sizes, context = given.trainer.hierarchical_cp_sizes, given.layout.context
    hierarchical = HIERARCHICAL in (given.trainer.cp_comm_type or "")
    if sizes is None and hierarchical:
        remedy = f"set hierarchical_context_parallel_sizes to [{context}, 1], or as the nodes divide it"
        yield Breach("hierarchical_cp_sizes", f"sizes whose product is CP = {context}", "not set", remedy)
    elif sizes is not None and math.prod(sizes) != context:
        remedy = f"set hierarchical_context_parallel_sizes to [{context}, 1], or as the nodes divide it"
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

    zigzag and contiguous are cut by the server. A stock step would cut such a slice a second time.

    Source: Megatron-LM pretrain_gpt.py, get_batch_on_this_cp_rank; Megatron-Bridge training/gpt_step.py.
    """
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
