"""Which settings of Megatron-LM and Megatron-Bridge declare what. Both call most facts of a model the same."""

from __future__ import annotations

from typing import Any

from packhorse.contract.batch_contract import LossReduction
from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, TrainerFacts
from packhorse.declare.attributes import Setting, look_up, names_of, positive, switch

__all__ = [
    "BRIDGE_FACTS",
    "BRIDGE_LENGTHS",
    "MEGATRON_CONTRACT",
    "MEGATRON_FACTS",
    "facts_of",
    "loss_reduction",
]

FULL_ITERATION = "full_iteration"
NOT_MODULES = {FULL_ITERATION, "full_iteration_inference", "full"}


def loss_reduction(per_token: object) -> LossReduction:
    """``calculate_per_token_loss`` sums over the tokens of all ranks; without it each micro-batch is averaged."""
    return LossReduction.PER_TOKEN if per_token else LossReduction.MEAN


def cuda_graph(value: object) -> CudaGraph | None:
    name = str(getattr(value, "value", value))
    return CudaGraph(name) if name in list(CudaGraph) else None


def communication(value: object) -> str:
    """One kind for all layers, or a list by layer."""
    return ",".join(names_of(value))


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value)


def _scheduler(value: object) -> str:
    return str(value) if value else ""


def _model(prefix: str) -> tuple[Setting, ...]:
    """What is read of a model's settings, under the prefix where a stack keeps them."""

    def at(*names: str) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    return (
        Setting("model_seq_length", at("seq_length")),
        Setting("transformer_impl", at("transformer_impl")),
        Setting("mtp_num_layers", at("mtp_num_layers"), off=0),
        Setting("virtual_pipeline_chunks", at("virtual_pipeline_model_parallel_size"), off=1),
        Setting("microbatch_group_size", at("microbatch_group_size_per_vp_stage")),
        Setting("variable_seq_lengths", at("variable_seq_lengths")),
        Setting("expert_parallel", at("expert_model_parallel_size")),
        Setting("cuda_graph", at("cuda_graph_impl"), cuda_graph),
        Setting("fp8", at("fp8"), switch, off=False),
        Setting("cp_comm_type", at("cp_comm_type"), communication, off="p2p"),
        Setting("hierarchical_cp_sizes", at("hierarchical_context_parallel_sizes"), _sizes),
        # The first name is that of Megatron-LM's dev branch.
        Setting("dynamic_context_parallel", at("dynamic_context_parallel", "hybrid_context_parallel"), switch),
        Setting("packing_scheduler", at("sequence_packing_scheduler"), _scheduler),
    )


# Megatron-LM: one flat namespace of arguments ------------------------------------------------------------

MEGATRON_CONTRACT: tuple[Setting, ...] = (
    Setting("seq_length", ("seq_length",)),
    Setting("micro_batch_size", ("micro_batch_size",)),
    Setting("global_batch_size", ("global_batch_size",)),
    Setting("vocab_size", ("padded_vocab_size", "vocab_size")),
    Setting("loss_reduction", ("calculate_per_token_loss",), loss_reduction),
)

MEGATRON_FACTS: tuple[Setting, ...] = (
    *_model(""),
    Setting("world_size", ("world_size",), positive),
    Setting("max_position_embeddings", ("max_position_embeddings",)),
    Setting("average_in_collective", ("ddp_average_in_collective",)),
    Setting("rampup_batch_size", ("rampup_batch_size",), switch, off=False),
    Setting("decrease_batch_size_if_needed", ("decrease_batch_size_if_needed",)),
    Setting("packs_in_batch", ("rl_use_sequence_packing",), switch),
    Setting("external_dataloader", ("dataloader_type",), lambda kind: kind == "external"),
    Setting("sft", ("sft",)),
    Setting("makes_attention_mask", ("create_attention_mask_in_dataloader",)),
)

# Megatron-Bridge: a ConfigContainer with sections ----------------------------------------------------------

BRIDGE_LENGTHS: tuple[Setting, ...] = (
    Setting("seq_length", ("dataset.seq_length", "dataset.sequence_length", "model.seq_length")),
    Setting("micro_batch_size", ("train.micro_batch_size",)),
    Setting("global_batch_size", ("train.global_batch_size",)),
    Setting("evaluation_context", ("dist.eval_context_parallel_size",)),
    Setting("vocab_size", ("model.vocab_size", "tokenizer.vocab_size")),
    Setting("loss_reduction", ("model.calculate_per_token_loss",), loss_reduction),
)

BRIDGE_FACTS: tuple[Setting, ...] = (
    *_model("model."),
    Setting("data_seq_length", ("dataset.seq_length", "dataset.sequence_length")),
    Setting("average_in_collective", ("ddp.average_in_collective",)),
    Setting("rampup_batch_size", ("train.rampup_batch_size",), switch, off=False),
    Setting("decrease_batch_size_if_needed", ("train.decrease_batch_size_if_needed",)),
    Setting("defers_packing", ("dataset.defer_in_batch_packing_to_step",)),
)


def _scopes(model: object) -> tuple[str, ...]:
    """``cuda_graph_modules``, and ``cuda_graph_scope`` as it was called."""
    return names_of(look_up(model, "cuda_graph_modules")) + names_of(look_up(model, "cuda_graph_scope"))


def captured_modules(model: object) -> tuple[str, ...] | None:
    """The modules that a graph captures; empty: the whole layer."""
    if look_up(model, "cuda_graph_modules", "cuda_graph_scope") is None:
        return None
    return tuple(dict.fromkeys(name for name in _scopes(model) if name not in NOT_MODULES))


def moe_dispatcher(model: object) -> Dispatcher | None:
    """``moe_token_dispatcher_type`` with ``moe_flex_dispatcher_backend``, of a model with experts.

    Dense models carry the field too, at its default of allgather: it says nothing there.
    """
    experts = look_up(model, "num_moe_experts", "num_experts")
    if not experts and (look_up(model, "expert_model_parallel_size") or 1) == 1:
        return None
    kind = look_up(model, "moe_token_dispatcher_type")
    if kind == Dispatcher.FLEX and look_up(model, "moe_flex_dispatcher_backend") == "hybridep":
        return Dispatcher.HYBRID_EP
    return Dispatcher(kind) if kind in list(Dispatcher) else None


def facts_of(model: object, declared: dict[str, Any], *, pads_when_eager: bool) -> TrainerFacts:
    """The facts that were read, and those that follow from several settings of a model together.

    ``pads_when_eager``: the stack itself lets HybridEP pad uneven token counts where no graph is captured.
    """
    graph, dispatcher = declared.get("cuda_graph"), moe_dispatcher(model)
    if graph is CudaGraph.LOCAL and FULL_ITERATION in _scopes(model):  # how older releases spell it
        graph = CudaGraph.FULL_ITERATION
    pads = None
    if dispatcher is Dispatcher.HYBRID_EP:
        eager = graph in (None, CudaGraph.NONE)
        pads = (eager and pads_when_eager) or bool(look_up(model, "moe_hybridep_pad_uneven_dispatch_inputs"))
    derived = {
        "cuda_graph": graph,
        "cuda_graph_modules": captured_modules(model),
        "moe_dispatcher": dispatcher,
        "moe_pads_uneven": pads,
    }
    return TrainerFacts(**{**declared, **derived})
