"""Tables of the settings of Megatron-LM and Megatron-Bridge that declare something, and what follows from them.

Both call most facts of a model the same.
"""

from __future__ import annotations

from typing import Any

from packhorse.contract.batch_contract import LossReduction
from packhorse.contract.trainer_facts import CudaGraph, Dispatcher, TrainerFacts
from packhorse.declare.attributes import FieldSource, get, has, is_on, names_of, positive_or_none

__all__ = [
    "BRIDGE_FACTS",
    "BRIDGE_LENGTHS",
    "MEGATRON_CONTRACT",
    "MEGATRON_FACTS",
    "UNREAD",
    "ignores_ramp_up",
    "listed",
    "loss_reduction",
    "trainer_facts",
    "unread_settings",
]

FULL_ITERATION = "full_iteration"
NOT_MODULES = {FULL_ITERATION, "full_iteration_inference", "full"}


def loss_reduction(per_token: object) -> LossReduction:
    """Return the reduction of ``calculate_per_token_loss``: over the tokens of all ranks, else of each micro-batch."""
    return LossReduction.PER_TOKEN if per_token else LossReduction.MEAN


def cuda_graph(value: object) -> CudaGraph | None:
    """Return the kind of graph that ``cuda_graph_impl``, a string or an enum member, names."""
    name = str(getattr(value, "value", value))
    return CudaGraph(name) if name in list(CudaGraph) else None


def communication(value: object) -> str:
    """Return the kinds of context-parallel communication: one for all layers, or a list by layer."""
    return ",".join(names_of(value))


def recipe_name(value: object) -> str:
    """Return the name of a number format's recipe, a string or an enum member."""
    return str(getattr(value, "value", value))


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value)


def _scheduler(value: object) -> str:
    return str(value) if value else ""


def _model(prefix: str) -> tuple[FieldSource, ...]:
    """List what is read of a model's settings, under the prefix where a stack keeps them."""

    def at(*names: str) -> tuple[str, ...]:
        return tuple(prefix + name for name in names)

    return (
        FieldSource("model_seq_length", at("seq_length")),
        FieldSource("transformer_impl", at("transformer_impl")),
        FieldSource("mtp_num_layers", at("mtp_num_layers"), off=0),
        FieldSource(
            "virtual_pipeline_chunks",
            at("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
            off=1,
        ),
        FieldSource("microbatch_group_size", at("microbatch_group_size_per_vp_stage")),
        FieldSource("variable_seq_lengths", at("variable_seq_lengths")),
        FieldSource("expert_parallel", at("expert_model_parallel_size")),
        FieldSource("cuda_graph", at("cuda_graph_impl"), cuda_graph),
        FieldSource("fp8", at("fp8"), is_on, off=False),
        FieldSource("fp8_recipe", at("fp8_recipe"), recipe_name),
        FieldSource("fp4", at("fp4"), is_on, off=False),
        FieldSource("cp_partition_mode", at("cp_partition_mode"), str),
        FieldSource("cp_comm_type", at("cp_comm_type"), communication, off="p2p"),
        FieldSource("hierarchical_cp_sizes", at("hierarchical_context_parallel_sizes"), _sizes),
        # The first name is that of Megatron-LM's dev branch.
        FieldSource("dynamic_context_parallel", at("dynamic_context_parallel", "hybrid_context_parallel"), is_on),
        FieldSource("packing_scheduler", at("sequence_packing_scheduler"), _scheduler),
    )


# Megatron-LM: one flat namespace of arguments ------------------------------------------------------------

MEGATRON_CONTRACT: tuple[FieldSource, ...] = (
    FieldSource("seq_length", ("seq_length",)),
    FieldSource("micro_batch_size", ("micro_batch_size",)),
    FieldSource("global_batch_size", ("global_batch_size",)),
    FieldSource("vocab_size", ("padded_vocab_size", "vocab_size")),
    FieldSource("loss_reduction", ("calculate_per_token_loss",), loss_reduction),
)

MEGATRON_FACTS: tuple[FieldSource, ...] = (
    *_model(""),
    FieldSource("world_size", ("world_size",), positive_or_none),
    FieldSource("max_position_embeddings", ("max_position_embeddings",)),
    FieldSource("average_in_collective", ("ddp_average_in_collective",)),
    FieldSource("rampup_batch_size", ("rampup_batch_size",), is_on, off=False),
    FieldSource("step_batch_size_schedule", ("step_batch_size_schedule",), is_on, off=False),
    FieldSource("decrease_batch_size_if_needed", ("decrease_batch_size_if_needed",)),
    FieldSource("eval_micro_batch_size", ("eval_micro_batch_size",)),
    FieldSource("eval_global_batch_size", ("eval_global_batch_size",)),
    FieldSource("packs_in_batch", ("rl_use_sequence_packing",), is_on),
    FieldSource("inter_document_masking", ("dataloader_inter_document_masking",), is_on, off=False),
    FieldSource("external_dataloader", ("dataloader_type",), lambda kind: kind == "external"),
    FieldSource("sft", ("sft",)),
    FieldSource("makes_attention_mask", ("create_attention_mask_in_dataloader",)),
)

# Megatron-Bridge: a ConfigContainer with sections ----------------------------------------------------------

BRIDGE_LENGTHS: tuple[FieldSource, ...] = (
    FieldSource("seq_length", ("dataset.seq_length", "dataset.sequence_length", "model.seq_length")),
    FieldSource("micro_batch_size", ("train.micro_batch_size",)),
    FieldSource("global_batch_size", ("train.global_batch_size",)),
    FieldSource("evaluation_context", ("dist.eval_context_parallel_size",)),
    FieldSource("vocab_size", ("model.vocab_size", "tokenizer.vocab_size")),
    FieldSource("loss_reduction", ("model.calculate_per_token_loss",), loss_reduction),
)

BRIDGE_FACTS: tuple[FieldSource, ...] = (
    *_model("model."),
    FieldSource("data_seq_length", ("dataset.seq_length", "dataset.sequence_length")),
    FieldSource("average_in_collective", ("ddp.average_in_collective",)),
    FieldSource("rampup_batch_size", ("train.rampup_batch_size",), is_on, off=False),
    FieldSource("step_batch_size_schedule", ("train.step_batch_size_schedule",), is_on, off=False),
    FieldSource("decrease_batch_size_if_needed", ("train.decrease_batch_size_if_needed",)),
)


# Settings about the data that are known and that no rule reads, by the beginning of their names: a trainer that sets
# one is told that it is not checked.
UNREAD = ("varlen_", "sft_mock_", "attention_cp_layout")


def unread_settings(settings: object) -> tuple[str, ...]:
    """Return the names of those that are set."""
    values = getattr(settings, "__dict__", {})
    return tuple(sorted(name for name, value in values.items() if name.startswith(UNREAD) and value))


def ignores_ramp_up(settings: object, section: str = "") -> bool:
    """Return whether the stack's version ignores rampup_batch_size: those that have the schedule in its place do."""
    return has(settings, f"{section}step_batch_size_schedule")


def listed(value: object) -> tuple[str, ...]:
    """Return names of modules, also of one string with commas between them."""
    return tuple(part for name in names_of(value) for part in name.split(",") if part)


def _scopes(model: object) -> tuple[str, ...]:
    """Return ``cuda_graph_modules``, and ``cuda_graph_scope`` as it was called."""
    return listed(get(model, "cuda_graph_modules")) + listed(get(model, "cuda_graph_scope"))


def captured_modules(model: object) -> tuple[str, ...] | None:
    """Return the names of modules that a graph captures; none: the whole layer."""
    if get(model, "cuda_graph_modules", "cuda_graph_scope") is None:
        return None
    return tuple(dict.fromkeys(name for name in _scopes(model) if name not in NOT_MODULES))


def moe_dispatcher(model: object) -> Dispatcher | None:
    """Return the dispatcher of a model with experts, from ``moe_token_dispatcher_type`` and its backend.

    Dense models carry the field too, at its default of allgather: it says nothing there.
    """
    experts = get(model, "num_moe_experts", "num_experts")
    if not experts and (get(model, "expert_model_parallel_size") or 1) == 1:
        return None
    kind = get(model, "moe_token_dispatcher_type")
    if kind == Dispatcher.FLEX and get(model, "moe_flex_dispatcher_backend") == "hybridep":
        return Dispatcher.HYBRID_EP
    return Dispatcher(kind) if kind in list(Dispatcher) else None


def trainer_facts(model: object, declared: dict[str, Any], *, pads_when_eager: bool) -> TrainerFacts:
    """Return the facts that were read, and those that follow from several settings of a model together.

    ``pads_when_eager``: the stack itself lets HybridEP pad uneven token counts where no graph is captured.
    """
    graph, dispatcher = declared.get("cuda_graph"), moe_dispatcher(model)
    if graph is CudaGraph.LOCAL and FULL_ITERATION in _scopes(model):  # how older releases spell it
        graph = CudaGraph.FULL_ITERATION
    pads = None
    if dispatcher is Dispatcher.HYBRID_EP:
        eager = graph in (None, CudaGraph.NONE)
        pads = (eager and pads_when_eager) or bool(get(model, "moe_hybridep_pad_uneven_dispatch_inputs"))
    derived = {
        "cuda_graph": graph,
        "cuda_graph_modules": captured_modules(model),
        "moe_dispatcher": dispatcher,
        "moe_pads_uneven": pads,
    }
    return TrainerFacts(**{**declared, **derived})
