"""Facts that a trainer declares of itself: no side can check them from the data, and rules need them.

Every field may be left out; ``None`` means "not declared", and the rules that need it stay silent and are
listed as not checked. ``BatchContract.from_megatron`` and its like fill them from a stack's own settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from packhorse.contract.documented import documented
from packhorse.contract.field_checks import as_member, require_type, require_types

__all__ = ["CudaGraph", "Dispatcher", "Stack", "TrainerFacts"]


class Stack(StrEnum):
    """Training framework whose step consumes the micro-batches."""

    MEGATRON_LM = "megatron_lm"
    MEGATRON_BRIDGE = "megatron_bridge"
    TORCHTITAN = "torchtitan"
    TRANSFORMERS = "transformers"
    OWN = "own"


class CudaGraph(StrEnum):
    """Part of a training step that a CUDA graph captures, by Megatron's ``cuda_graph_impl``."""

    NONE = "none"
    LOCAL = "local"
    """Megatron's own graphs of a layer; Bridge has them not with packed data."""
    TRANSFORMER_ENGINE = "transformer_engine"
    """Transformer Engine's graphs of a layer, or of modules of it."""
    FULL_ITERATION = "full_iteration"


class Dispatcher(StrEnum):
    """Way in which the tokens of a mixture of experts reach their experts."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"
    FLEX = "flex"
    """DeepEP."""
    HYBRID_EP = "hybrid_ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """Facts of one trainer, for the rules: each is left out (``None``) or declared. Lengths count slots.

    The two sides do not compare them. The fields are listed in ``docs/configuration.md``.

    Raises ``ConfigError`` for a value of another kind: an unknown name, a number for a flag.
    """

    stack: Stack | None = documented("Whose training step consumes the micro-batches.")
    world_size: int | None = documented("Ranks of the job.")
    model_family: str | None = documented("A name of the table of families, lower case: `qwen3-next`.")
    model_seq_length: int | None = documented("Slots that the model is configured for.")
    data_seq_length: int | None = documented("Slots that the trainer's data is configured for.")
    max_position_embeddings: int | None = documented(
        "Size of a table of positions, or a limit; seq_length may be smaller."
    )
    transformer_impl: str | None = documented("Megatron: `local`, `transformer_engine` or `inference_optimized`.")
    custom_attention: bool | None = documented("It brings an attention that reads the offsets itself.")
    megatron_ddp: bool | None = documented("Gradients go through Megatron's DDP.")
    average_in_collective: bool | None = documented("Megatron's DDP averages gradients in the collective.")
    clamps_zero_loss: bool | None = documented("A mean over no supervised token is 0, not 0/0.")
    rampup_batch_size: bool | None = documented("The batch grows over time.")
    step_batch_size_schedule: bool | None = documented("The batch changes over time, by a schedule of steps.")
    decrease_batch_size_if_needed: bool | None = documented("The batch shrinks where it does not divide by the ranks.")
    eval_micro_batch_size: int | None = documented("Samples of a micro-batch in its evaluations, where they differ.")
    eval_global_batch_size: int | None = documented("Samples of a step in its evaluations, where they differ.")
    packs_offline: bool | None = documented("It packs by itself too, before training.")
    packs_in_batch: bool | None = documented("It packs by itself too, in the batch.")
    defers_packing: bool | None = documented("It packs by itself too, in a later step.")
    dynamic_context_parallel: bool | None = documented(
        "It moves samples between context-parallel groups after loading."
    )
    packing_scheduler: str | None = documented("The scheduler that packs again after loading.")
    tokens_on_every_stage: bool | None = documented(
        "Its step reads tokens on every pipeline stage (Bridge's `vlm_step`): every stage gets them."
    )
    middle_stages_read: bool | None = documented("Its step reads the offsets on middle pipeline stages.")
    refuses_empty_segments: bool | None = documented("Its model takes rows apart by segments, and no empty ones.")
    mtp_num_layers: int | None = documented("Layers of multi-token prediction.")
    virtual_pipeline_chunks: int | None = documented("Model chunks of a rank.")
    microbatch_group_size: int | None = documented("Interleaved schedule; left out: the pipeline size.")
    variable_seq_lengths: bool | None = documented("Pipeline stages exchange shapes first.")
    expert_parallel: int | None = documented("Expert-parallel size (EP).")
    moe_dispatcher: Dispatcher | None = documented("How tokens reach their experts.")
    moe_pads_uneven: bool | None = documented("The dispatcher pads uneven token counts.")
    cuda_graph: CudaGraph | None = documented("What a CUDA graph captures.")
    cuda_graph_modules: tuple[str, ...] | None = documented("Megatron's names of modules; none: the whole layer.")
    fp8: bool | None = documented("It trains in FP8.")
    fp8_recipe: str | None = documented("Megatron: `delayed`, `tensorwise`, `blockwise`, `mxfp8` or `custom`.")
    fp8_width: int | None = documented("What the recipe needs a row to be a multiple of.")
    fp4: bool | None = documented("It trains in FP4 (NVFP4).")
    cp_comm_type: str | None = documented("How context-parallel ranks exchange: `p2p`, `a2a`, `a2a+p2p` …")
    hierarchical_cp_sizes: tuple[int, ...] | None = documented(
        "Sizes of `a2a+p2p`; their product is the context-parallel size."
    )
    external_dataloader: bool | None = documented("Megatron-LM: `dataloader_type external`.")
    sft: bool | None = documented("Megatron-LM: `--sft`.")
    inter_document_masking: bool | None = documented("Megatron-LM: `--dataloader-inter-document-masking`.")
    weight_shards: int | None = documented(
        "Megatron: `tensor_parallel_num_weight_shards` over the tensor-parallel size; 1 is none."
    )
    cp_partition_mode: str | None = documented("How its step cuts rows for context-parallel ranks, where it says so.")
    forward_step: str | None = documented(
        "Module of the training step: `gpt_step`, `vlm_step`, `qwen3_vl_step` … of Megatron-Bridge."
    )
    unread_settings: tuple[str, ...] | None = documented(
        "Settings about the data that are set and that no rule reads: reported as not checked."
    )
    makes_attention_mask: bool | None = documented("Megatron-LM: `create_attention_mask_in_dataloader`.")

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if get_origin(kind) is tuple:
                require_types(get_args(kind)[0], f"trainer.{name}", value)
            elif issubclass(kind, StrEnum):
                object.__setattr__(self, name, as_member(kind, f"trainer.{name}", value))
            else:
                require_type(kind, f"trainer.{name}", value)


# Of each fact: the type that it has where it is declared.
KINDS: dict[str, Any] = {name: get_args(hint)[0] for name, hint in get_type_hints(TrainerFacts).items()}
