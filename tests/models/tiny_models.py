"""Tiny models of every causal language model that Transformers names, from configurations with small numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packhorse.hf.experiment import Measured, make_row, measure
from packhorse.hf.model_check import _text_ids
from packhorse.rules.transformers_families import FOUR_ROWS, Separation

__all__ = ["ATTENTIONS", "build", "families", "outcome_of"]

ATTENTIONS = ("eager", "sdpa")
MOST_PARAMETERS = 30_000_000
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 128),
    # shorter than a row, so that a window or chunk counted from the row's start shows
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), 8),
    **{"encoder_layers": 1, "num_experts_per_tok": 2, "encoder_ffn_dim": 48, "attention_hidden_size": 32},
    **{"vocab_size": 97, "image_size": 28, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 4, "is_decoder": True},
    **{"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    **{"n_group": 1, "topk_group": 1, "num_kv_shared_layers": 0, "n_shared_experts": 1},
}
STATE_SPACE = {
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **{"mamba_d_head": 16, "mamba_head_dim": 16, "mamba_expand": 2, "expand": 2, "mamba_d_ssm": 64, "chunk_size": 8},
    **{"mamba_chunk_size": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "n_groups": 1},
    **{"ssm_state_size": 8, "state_size": 8},
}
# Changes of SMALL that are tried in turn until one builds and runs: families disagree on what a name means.
VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"without": ("head_dim",)},
    {"without": ("head_dim",), **STATE_SPACE},
    {**STATE_SPACE, "head_dim": 16},
    {"pad_token_id": 0},
    {"pad_token_id": 0, "without": ("head_dim",)},
    {"without": ("num_key_value_heads", "head_dim", "num_attention_heads")},
    {"without": ("is_decoder", "rotary_dim", "head_dim", "window_size", "depth")},
    {"only": ("vocab_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size", "num_experts")},
    {"only": ("vocab_size", "num_hidden_layers"), "hidden_size": 64},
    {"only": ("vocab_size",)},
)
OWN: Mapping[str, Mapping[str, Any]] = {}


def families() -> list[str]:
    """Every model type that Transformers maps to a causal or a multimodal language model."""
    named = {**modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return sorted(named)


def shrunk(config: Any, changes: Mapping[str, Any]) -> Any:
    """``config`` with small numbers, and its parts'."""
    without, only = changes.get("without", ()), changes.get("only")
    kept = {name: value for name, value in SMALL.items() if name not in without and (only is None or name in only)}
    own = {name: value for name, value in changes.items() if name not in ("without", "only")}
    for name, value in {**kept, **own}.items():
        if name in vars(config) or name in getattr(config, "attribute_map", {}):
            try:
                setattr(config, name, value)
            except AttributeError:  # of each layer its own, in this family
                continue
    for part in list(vars(config).values()):
        if isinstance(part, PreTrainedConfig):
            shrunk(part, changes)
    return config


def build(family: str, attention: str, changes: Mapping[str, Any]) -> Any:
    """A model whose weights make attention matter. Raises what Transformers does, ``ValueError`` for a large one."""
    causal = family in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = AutoModelForCausalLM if causal else AutoModelForMultimodalLM
    config = shrunk(CONFIG_MAPPING[family](), changes)
    with torch.device("meta"):
        count = sum(p.numel() for p in auto.from_config(config, attn_implementation=attention).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} M parameters are not tiny")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    return model


def outcome_of(family: str, attention: str) -> tuple[Separation, str, Measured | None]:
    """What the experiment finds of a family, and why nothing was found."""
    why = ""
    for model in variants(family, attention):
        if isinstance(model, Exception):
            why = why or f"{type(model).__name__}: {model}"
            continue
        try:
            measured = measure(model, make_row(_text_ids(model)), 4 if family in FOUR_ROWS else 1)
        except Exception as error:  # noqa: BLE001 - whatever a model raises is the finding
            why = f"{type(error).__name__}: {error}"
            if "packed sequences" in why:
                return Separation.RAISES, why, None
            continue
        if measured.separation is not Separation.UNKNOWN:
            return measured.separation, "", measured
        why = "its logits do not depend on its input"
    return Separation.UNKNOWN, why, None


def variants(family: str, attention: str) -> Iterator[Any]:
    for changes in (OWN[family],) if family in OWN else VARIANTS:
        try:
            yield build(family, attention, changes)
        except Exception as error:  # noqa: BLE001
            yield error
