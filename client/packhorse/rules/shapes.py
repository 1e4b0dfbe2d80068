"""Rules about shapes: widths that must not change, and who needs that."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packhorse.contract.trainer_facts import CudaGraph, Dispatcher
from packhorse.rules.conditions import varies
from packhorse.rules.model import Breach, RuleInput, Severity
from packhorse.rules.multiples import near_multiples

__all__ = [
    "cu_seqlens_fixed",
    "ep_uniform",
    "fp8_width",
    "graph_attention",
    "graph_width",
    "pp_uniform",
    "variable_dispatch",
]

GRAPHS_OF_TRAINING = (CudaGraph.FULL_ITERATION, CudaGraph.TRANSFORMER_ENGINE)
ATTENTION = "attn"  # Megatron's name of the module
FP8_UNIT = 8  # Transformer Engine: the product of all but the last dimension divides by 8


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


def graph_width(given: RuleInput) -> Iterator[Breach]:
    """CUDA graphs of a training step (full iteration, or Transformer Engine's) get rows of one width.

    A graph replays the shapes that it captured.

    Source: Megatron-Bridge training/config.py, "Offline packing with CUDA graphs requires".
    """
    if given.trainer.cuda_graph in GRAPHS_OF_TRAINING:
        yield Breach(*FIXED)


def graph_attention(given: RuleInput) -> Iterator[Breach]:
    """A CUDA graph that captures attention over packed rows gets a fixed number of offsets.

    Offsets are an input of packed attention. A graph of the MLP alone needs only the fixed width. Leaving
    the modules out captures the whole layer.

    Source: Megatron-Bridge training/config.py, "Packed attention CUDA graphs require".
    """
    graph, modules = given.trainer.cuda_graph, given.trainer.cuda_graph_modules
    captures = graph is CudaGraph.FULL_ITERATION or (
        graph is CudaGraph.TRANSFORMER_ENGINE and (not modules or ATTENTION in modules)
    )
    if captures and not given.contract.pad_cu_seqlens:
        remedy = "set static_shapes to true and max_segments to a number, or leave attention out of the graph"
        yield Breach("pad_cu_seqlens", "true", "false", remedy)


def pp_uniform(given: RuleInput) -> Iterator[Breach]:
    """Pipeline stages exchange rows of one width, or the trainer exchanges shapes first (variable_seq_lengths).

    Receive buffers have the width that the model was built for.

    Source: Megatron-LM core/pipeline_parallel/schedules.py, get_tensor_shapes; variable_seq_lengths.
    """
    if given.trainer.variable_seq_lengths is False:
        yield Breach(*FIXED[:3], "set pad_to_max_length to true, or the trainer's variable_seq_lengths")


def variable_dispatch(given: RuleInput) -> Iterator[Breach]:
    """Rows of varying width do not go through the all-gather dispatcher of mixture-of-experts layers.

    It gathers tensors of one shape.

    Source: Megatron-LM core/transformer/transformer_config.py, moe_token_dispatcher_type.
    """
    if given.trainer.moe_dispatcher is Dispatcher.ALLGATHER:
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


def fp8_width(given: RuleInput) -> Iterator[Breach]:
    """FP8: a rank's width divides by 8, and a row's by the width that the recipe needs.

    The recipe's width belongs into pack_multiple, so that rows of any length keep it.

    Source: Transformer Engine, assert_dim_for_fp8_exec.
    """
    contract, layout = given.contract, given.layout
    if not given.trainer.fp8:
        return
    unit = math.lcm(FP8_UNIT * layout.context, given.trainer.fp8_width or 1)
    want = f"a multiple of {unit} slots, for FP8"
    if not varies(given) and contract.seq_length % unit:
        whole = math.lcm(unit, contract.row_multiple)
        yield Breach("seq_length", want, str(contract.seq_length), near_multiples(contract.seq_length, whole))
    if varies(given) and contract.row_multiple % unit:
        remedy = f"set pack_multiple to {math.lcm(unit, contract.pack_multiple)}"
        yield Breach("pack_multiple", want, str(contract.pack_multiple), remedy)
