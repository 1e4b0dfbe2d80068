"""What a trainer says of itself: facts that no side can check from the data, and that rules need.

Every field may be left out; ``None`` means "not declared", and the rules that need it stay silent and are
listed as not checked. ``BatchContract.from_megatron`` and its like fill them from a stack's own settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CudaGraph", "Dispatcher", "Stack", "TrainerFacts"]


class Stack(StrEnum):
    """Whose training step consumes the micro-batches."""

    MEGATRON_LM = "megatron_lm"
    MEGATRON_BRIDGE = "megatron_bridge"
    TORCHTITAN = "torchtitan"
    TRANSFORMERS = "transformers"
    OWN = "own"


class CudaGraph(StrEnum):
    """What a CUDA graph captures, if any."""

    NONE = "none"
    LOCAL = "local"  # Megatron's per-layer graphs, not with packed data in Bridge
    TRANSFORMER_ENGINE = "transformer_engine"
    FULL_ITERATION = "full_iteration"


class Dispatcher(StrEnum):
    """How MoE tokens reach their experts."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"
    FLEX = "flex"  # DeepEP
    HYBRID_EP = "hybrid_ep"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFacts:
    """One trainer's declaration. Lengths count slots."""

    stack: Stack | None = None
    world_size: int | None = None
    model_family: str | None = None  # a name of the family table, lower case: "qwen3-next"
    model_seq_length: int | None = None
    data_seq_length: int | None = None
    max_position_embeddings: int | None = None  # a table's size, or a limit: seq_length may be smaller
    transformer_impl: str | None = None  # Megatron: "local", "transformer_engine", "inference_optimized"
    custom_attention: bool | None = None  # brings an attention that reads the offsets itself
    megatron_ddp: bool | None = None
    average_in_collective: bool | None = None
    clamps_zero_loss: bool | None = None  # a mean over no supervised token is 0, not 0/0
    rampup_batch_size: bool | None = None
    decrease_batch_size_if_needed: bool | None = None
    packs_offline: bool | None = None  # packing of the trainer's own, beside ours
    packs_in_batch: bool | None = None
    defers_packing: bool | None = None
    dynamic_context_parallel: bool | None = None
    packing_scheduler: str | None = None
    mtp_num_layers: int | None = None
    virtual_pipeline_chunks: int | None = None  # model chunks a rank
    microbatch_group_size: int | None = None  # interleaved schedule; left out: the pipeline size
    variable_seq_lengths: bool | None = None
    expert_parallel: int | None = None
    moe_dispatcher: Dispatcher | None = None
    moe_pads_uneven: bool | None = None  # the dispatcher pads uneven token counts
    cuda_graph: CudaGraph | None = None
    cuda_graph_modules: tuple[str, ...] | None = None  # Megatron's module names; () = the whole layer
    fp8: bool | None = None
    fp8_width: int | None = None  # what the recipe needs a row to be a multiple of
    cp_comm_type: str | None = None
    hierarchical_cp_sizes: tuple[int, ...] | None = None
    external_dataloader: bool | None = None  # Megatron-LM: dataloader_type external
    sft: bool | None = None  # Megatron-LM: --sft
    makes_attention_mask: bool | None = None  # Megatron-LM: create_attention_mask_in_dataloader
