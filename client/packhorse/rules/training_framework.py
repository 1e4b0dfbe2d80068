"""Rules about the trainer's stack: who packs, who cuts, which step and schedule consume the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packhorse.contract.batch_contract import Packing
from packhorse.contract.partition import Partition
from packhorse.contract.trainer_facts import Stack
from packhorse.rules.model import Case, Finding, next_multiple

__all__ = [
    "MINIMUM_WINDOW",
    "cp_hierarchy",
    "dynamic_cp",
    "modes_exclusive",
    "packed",
    "partition",
    "pipelined",
    "pp_interleave",
    "ranks_agree",
    "sliced",
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


def packed(case: Case) -> bool:
    return case.contract.packed


def pipelined(case: Case) -> bool:
    return case.layout.pipeline > 1


def sliced(case: Case) -> bool:
    """Whether the server cuts rows for the context-parallel ranks."""
    return case.layout.context > 1 and case.contract.partition is not Partition.WHOLE


PACKERS = {
    "packs_offline": "let it read the stream, not files packed before (Bridge: enable_offline_packing)",
    "packs_in_batch": "turn its packing in the batch off (Bridge: enable_in_batch_packing)",
    "defers_packing": "turn the deferred packing step off (Bridge: defer_in_batch_packing_to_step)",
}


def modes_exclusive(case: Case) -> Iterator[Finding]:
    """There is one packing owner: the trainer does not pack again what arrives packed.

    Packing twice loses the offsets of the first packing, and attention crosses samples.

    Source: Megatron-Bridge training/config.py, "mutually exclusive"; data/builders/energon.py, "one packing owner".
    """
    for name, remedy in PACKERS.items():
        if getattr(case.trainer, name):
            yield Finding(name, f"off, as the server packs ({case.contract.packing})", "on", f"set it to off: {remedy}")


def thd_backend(case: Case) -> Iterator[Finding]:
    """Packed rows reach an attention that reads offsets: not Megatron's local implementation.

    Its DotProductAttention refuses packed sequences. A model that brings an attention of its own declares
    custom_attention.

    Source: Megatron-LM core/transformer/dot_product_attention.py.
    """
    if case.trainer.transformer_impl == "local" and not case.trainer.custom_attention:
        remedy = "set transformer_impl to transformer_engine, or declare custom_attention"
        yield Finding("transformer_impl", "transformer_engine", "local", remedy)


# What Megatron-LM's stock step needs of a trainer that gets packed rows: (fact, value, what else happens).
STOCK = (
    ("external_dataloader", True, "set --dataloader-type external, so that the iterator is used as it is"),
    ("sft", True, "set --sft; without it rows are cut as a whole, not by segment"),
    ("makes_attention_mask", False, "set --no-create-attention-mask-in-dataloader; its broadcast would hang"),
)


def stock_thd(case: Case) -> Iterator[Finding]:
    """Megatron-LM's own step takes packed rows from an external loader, with --sft, no mask, width seq_length.

    Tensor rank 0 broadcasts into buffers of [micro_batch_size, seq_length], and the other ranks wait for an
    attention mask if one is announced. A step of one's own declares another stack.

    Source: Megatron-LM pretrain_gpt.py, get_batch; training/utils.py, get_batch_on_this_tp_rank.
    """
    if case.trainer.stack is not Stack.MEGATRON_LM:
        return
    for name, want, remedy in STOCK:
        got = getattr(case.trainer, name)
        if got not in (None, want):
            yield Finding(name, str(want).lower(), str(got).lower(), remedy)
    if case.contract.packing is Packing.IN_BATCH:
        yield Finding("packing", "online or concat, of width seq_length", "in_batch", "set packing to online")
    elif not case.contract.fixed_width:
        yield Finding("pad_to_max_length", "true", "false", "set pad_to_max_length to true")


def _group(case: Case) -> int:
    """Micro-batches that one model chunk of a virtual pipeline runs before the next."""
    return case.trainer.microbatch_group_size or case.layout.pipeline


def _interleaves(case: Case) -> bool:
    return pipelined(case) and (case.trainer.virtual_pipeline_chunks or 1) > 1


def pp_interleave(case: Case) -> Iterator[Finding]:
    """With interleaved stages PP ≤ group ≤ M, and M % group is 0 or at least PP (M: micro-batches a step).

    A last group smaller than the pipeline leaves stages waiting for each other.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving.
    """
    if not _interleaves(case):
        return
    group, stages, contract = _group(case), case.layout.pipeline, case.contract
    count = contract.num_microbatches(case.layout)
    if group < stages:
        yield Finding("microbatch_group_size", f"at least PP = {stages}", str(group), f"set it to {stages}")
        group = stages
    if count < group or 0 < count % group < stages:
        share = group * contract.micro_batch_size * case.layout.data
        remedy = f"set global_batch_size to {next_multiple(contract.global_batch_size, share)}"
        want = f"a number of micro-batches of at least {group} that leaves 0 or at least {stages} beyond groups"
        yield Finding("global_batch_size", want, f"{contract.global_batch_size} ({count} micro-batches)", remedy)


def cp_hierarchy(case: Case) -> Iterator[Finding]:
    """cp_comm_type a2a+p2p comes with hierarchical sizes, whose product is CP.

    Without them context-parallel communication is silently off, and each rank attends to its own chunk.

    Source: Megatron-Bridge training/config.py, _validate_cp_comm_type.
    """
    sizes, context = case.trainer.hierarchical_cp_sizes, case.layout.context
    hierarchical = HIERARCHICAL in (case.trainer.cp_comm_type or "")
    if sizes is None and hierarchical:
        remedy = f"set hierarchical_context_parallel_sizes to [{context}, 1], or as the nodes divide it"
        yield Finding("hierarchical_cp_sizes", f"sizes whose product is CP = {context}", "not set", remedy)
    elif sizes is not None and math.prod(sizes) != context:
        remedy = f"set hierarchical_context_parallel_sizes to [{context}, 1], or as the nodes divide it"
        yield Finding("hierarchical_cp_sizes", f"sizes whose product is CP = {context}", str(list(sizes)), remedy)


def dynamic_cp(case: Case) -> Iterator[Finding]:
    """The trainer moves no samples after loading: no hybrid or dynamic context parallelism, no packing scheduler.

    They deal the samples of a step to other ranks and change the number of micro-batches.

    Source: Megatron-LM core/datasets/data_schedule.py; --hybrid-context-parallel, --sequence-packing-scheduler.
    """
    if case.trainer.dynamic_context_parallel:
        yield Finding("dynamic_context_parallel", "off", "on", "turn hybrid and dynamic context parallelism off")
    if case.trainer.packing_scheduler:
        remedy = "leave sequence_packing_scheduler out; the server balances the ranks of a step"
        yield Finding("packing_scheduler", "off", case.trainer.packing_scheduler, remedy)


def partition(case: Case) -> Iterator[Finding]:
    """Both sides agree who cuts rows for the context-parallel ranks; stock steps cut them, so they get whole rows.

    zigzag and contiguous are cut by the server. A stock step would cut such a slice a second time.

    Source: Megatron-LM pretrain_gpt.py, get_batch_on_this_cp_rank; Megatron-Bridge training/gpt_step.py.
    """
    cutter = None if case.trainer.stack is None else CUTS_ITSELF.get(case.trainer.stack)
    if cutter is not None:
        want = f"whole, as {case.trainer.stack} cuts the row itself ({cutter})"
        yield Finding("partition", want, str(case.contract.partition), "set partition to whole")


def window(case: Case) -> Iterator[Finding]:
    """The delivery window is at least 2, and more than a group where a virtual pipeline interleaves.

    The first model chunk reads a whole group before the last reads its first micro-batch: a smaller window
    blocks the rank against itself.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving.
    """
    least = max(MINIMUM_WINDOW, _group(case) + 1 if _interleaves(case) else 0)
    if case.window is not None and case.window < least:
        yield Finding("window", f"at least {least}", str(case.window), f"set window to {least} or more")


def ranks_agree(_case: Case) -> Iterator[Finding]:
    """All readers of a stream declare one contract, each coordinate once, and none is missing at the deadline.

    Checked at the handshake, across the readers; the missing ones are listed.

    Source: Megatron-LM core/pipeline_parallel/schedules.py: ranks that disagree on a step wait for each other.
    """
    return iter(())


def key_rank(_case: Case) -> Iterator[Finding]:
    """Where the server has keys, each reader's may claim its rank.

    Checked at the handshake, before everything else. The server's list of clients says which ranks a key may claim.

    Source: ZeroMQ's CURVE (rfc.zeromq.org/spec/26) proves who holds a key; it knows of no ranks.
    """
    return iter(())
