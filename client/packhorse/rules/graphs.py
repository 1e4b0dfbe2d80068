"""Rules about CUDA graphs: what replays must not change, and what they cannot take at all."""

from __future__ import annotations

from collections.abc import Iterator

from packhorse.contract.trainer_facts import CudaGraph
from packhorse.rules.model import Breach, RuleInput

__all__ = ["graph_attention", "graph_router", "graph_width"]

ATTENTION = frozenset({"attn"})  # Megatron's names of the modules
ROUTER = frozenset({"moe", "moe_router", "moe_preprocess"})
STATIC = "set static_shapes to true and max_segments to a number"


def _captures(given: RuleInput, modules: frozenset[str], *kinds: CudaGraph) -> bool:
    """Return whether graphs of these kinds capture one of the modules; none named: the whole layer."""
    facts = given.trainer
    named = frozenset(facts.cuda_graph_modules or ())
    return facts.cuda_graph in kinds and (not named or not named.isdisjoint(modules))


def graph_width(given: RuleInput) -> Iterator[Breach]:
    """CUDA graphs of a training step get rows of one width.

    A graph replays the shapes that it captured.

    Source: Megatron-Bridge training/config.py, "Offline packing with CUDA graphs requires".
    """
    if given.trainer.cuda_graph not in (None, CudaGraph.NONE):
        yield Breach("pad_to_max_length", "true", "false", "set pad_to_max_length to true")


def graph_attention(given: RuleInput) -> Iterator[Breach]:
    """A CUDA graph that captures attention over packed rows gets a fixed number of offsets, or captures it not.

    Offsets are an input of packed attention. A graph of the full iteration, and Megatron's local one of a layer, replay
    them where their number and max_seqlen are fixed. Transformer Engine's graph of a layer takes tensors alone and
    asserts at its first replay that there are no packing parameters: fixed shapes are no cure there. Leaving the
    modules out captures the whole layer. A graph of the MLP alone needs only the fixed width.

    Source: Megatron-LM core/transformer/transformer_layer.py, _te_cuda_graph_replay; core/transformer/cuda_graphs.py,
    "argument mismatch"; Megatron-Bridge training/config.py, "Packed attention CUDA graphs require". Megatron-LM's dev
    branch takes the packing parameters apart into tensors, which no release does.
    """
    if _captures(given, ATTENTION, CudaGraph.TRANSFORMER_ENGINE):
        got = ", ".join(given.trainer.cuda_graph_modules or ()) or "the whole layer"
        want = "modules without attn, as Transformer Engine's graph takes no offsets"
        remedy = f"leave attn out and name the modules to capture (mlp, moe_router), or use full_iteration: {STATIC}"
        yield Breach("cuda_graph_modules", want, got, remedy)
        return
    whole = given.trainer.cuda_graph is CudaGraph.FULL_ITERATION
    if (whole or _captures(given, ATTENTION, CudaGraph.LOCAL)) and not given.contract.pad_cu_seqlens:
        other = "turn the graph off" if whole else "leave attention out of the graph"
        yield Breach("pad_cu_seqlens", "true", "false", f"{STATIC}, or {other}")


def graph_router(given: RuleInput) -> Iterator[Breach]:
    """Megatron-Bridge's step takes no padding_mask where a Transformer Engine graph captures the experts' router.

    The mask is an input that the graph does not have.

    Source: Megatron-Bridge training/utils/packed_seq_utils.py (main), padding mask and the scope of the graph.
    """
    facts = given.trainer
    experts = facts.moe_dispatcher is not None or (facts.expert_parallel or 1) > 1
    if experts and _captures(given, ROUTER, CudaGraph.TRANSFORMER_ENGINE):
        remedy = "set padding_mask to false, or leave moe, moe_router and moe_preprocess out of cuda_graph_modules"
        yield Breach("padding_mask", "false", "true", remedy)
