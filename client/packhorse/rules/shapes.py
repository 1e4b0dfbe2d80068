"""Rules about shapes: widths that must not change, and who needs that."""

from __future__ import annotations

from collections.abc import Iterator

from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, Stack
from packhorse.rules.conditions import varies
from packhorse.rules.model import Breach, RuleInput, Severity

__all__ = [
    "cu_seqlens_fixed",
    "empty_segments",
    "ep_uniform",
    "pp_uniform",
    "variable_dispatch",
]

FIXED = ("pad_to_max_length", "true", "false", "set pad_to_max_length to true")


def cu_seqlens_fixed(given: RuleInput) -> Iterator[Breach]:
    """pad_cu_seqlens comes with pad_to_max_length and max_segments.

    A fixed number of offsets needs to know that number, and the last offset is the fixed width.

    Source: Megatron-Bridge data/packing/gpt_sft.py takes both from the metadata of packed files; a stream has none.
    """
    if varies(given):
        yield Breach(*FIXED)
    if given.contract.max_segments is None:
        widest = max(1, given.contract.max_width // given.contract.segment_multiple)
        remedy = f"set max_segments, at most {widest}: a row holds no more segments of segment_multiple slots"
        yield Breach("max_segments", "a number", "not set", remedy)


def empty_segments(given: RuleInput) -> Iterator[Breach]:
    """A model that takes rows apart by segments gets no segment without length.

    Its positions are made of each segment as a row of its own, and an empty one is refused at the first step. A fixed
    number of offsets is filled up with such segments; and with logical offsets a tail of its own is one.

    Source: Megatron-Bridge 0.6.2 training/utils/packed_seq_utils.py, unpack_mcore_thd_tensor_for_position_ids, which
    models/qwen_vl/modeling_qwen25_vl.py and models/glm_vl/modeling_glm_45v.py call.
    """
    if not given.trainer.refuses_empty_segments:
        return
    if given.contract.pad_cu_seqlens:
        remedy = "set static_shapes and pad_cu_seqlens to false; pad_to_max_length keeps the width"
        yield Breach("pad_cu_seqlens", "false, for a model that refuses empty segments", "true", remedy)
    else:
        remedy = "set tail_padding to extend_last, or attention_offsets to physical"
        yield Breach("tail_padding", "extend_last, for a model that refuses empty segments", "own_segment", remedy)


def pp_uniform(given: RuleInput) -> Iterator[Breach]:
    """Pipeline stages exchange rows of one width, or the trainer exchanges shapes first (variable_seq_lengths).

    Receive buffers have the width that the model was built for. Megatron refuses variable_seq_lengths with the
    all-gather dispatcher, its default, in dense models too.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, get_tensor_shapes; core/transformer/transformer_config.py,
    "does not support variable sequence length".
    """
    if given.trainer.variable_seq_lengths is False:
        flags = "the trainer's variable_seq_lengths and moe_token_dispatcher_type alltoall (in dense models too)"
        yield Breach(*FIXED[:3], f"set pad_to_max_length to true, or {flags}")


def variable_dispatch(given: RuleInput) -> Iterator[Breach]:
    """Rows of varying width do not go through the all-gather dispatcher of mixture-of-experts layers.

    It gathers tensors of one shape from the ranks that share experts; where none do (EP 1) they are ranks of one row.
    Megatron-LM refuses it beside variable_seq_lengths whatever the rows.

    Source: Megatron-LM core/transformer/transformer_config.py, moe_token_dispatcher_type.
    """
    facts = given.trainer
    shared = facts.expert_parallel != 1 or bool(facts.variable_seq_lengths and facts.stack is Stack.MEGATRON_LM)
    if facts.moe_dispatcher is Dispatcher.ALLGATHER and shared:
        remedy = "use alltoall or flex, or set pad_to_max_length to true"
        yield Breach("moe_dispatcher", "alltoall or flex", "allgather", remedy)


def ep_uniform(given: RuleInput) -> Iterator[Breach]:
    """With expert parallelism rows have one width, or the dispatcher pads uneven token counts.

    Ranks that dispatch different numbers of tokens slow the kernels down or hang them. HybridEP in a CUDA
    graph cannot pad, there it is an error.

    Source: Megatron-Bridge models/transformer_config.py, moe_hybridep_pad_uneven_dispatch_inputs; its issue 5270.
    """
    facts = given.trainer
    if (facts.expert_parallel or 1) == 1:
        return
    graphs = facts.cuda_graph not in (None, CudaGraph.NONE)
    if graphs and facts.moe_dispatcher is Dispatcher.HYBRID_EP:
        yield Breach(*FIXED, Severity.ERROR)
    elif facts.moe_pads_uneven is False:
        yield Breach(*FIXED[:3], "set pad_to_max_length to true, or let the dispatcher pad")
