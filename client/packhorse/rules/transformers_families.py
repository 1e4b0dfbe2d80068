"""Which of Transformers' model families keep the samples of a packed row apart, as measured.

``tests/models/test_families.py`` builds a tiny model of every causal language model that Transformers names and changes
one sample of a row: no other sample's logits may move, and each sample's must be those it has alone. This table is
held against what it measures there, with ``HELD_AGAINST``, in float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

__all__ = [
    "FAMILIES_OF_TRANSFORMERS",
    "FOUR_ROWS",
    "HELD_AGAINST",
    "RECURRENT",
    "UNMEASURED",
    "Separation",
    "separation_of",
]

HELD_AGAINST = "5.24.0"
"""Version of Transformers that the table was held against."""


class Separation(StrEnum):
    """Treatment of the samples of a packed row by a model."""

    SEPARATE = "separate"
    """Each sample's logits are those it has alone."""
    CROSSES = "crosses"
    """Samples move each other's logits: attention that ignores packing, or states that run on."""
    DIFFERS = "differs"
    """Samples do not move each other, and still are not what they are alone: positions, or windows, of the row."""
    RAISES = "raises"
    """The model refuses packed rows itself, before anything is trained."""
    UNKNOWN = "unknown"
    """Not measured."""


FOUR_ROWS = frozenset(
    {
        *("cosmos3_edge", "ernie4_5_vl_moe", "glm4v", "glm4v_moe", "glm_image", "glm_ocr", "hy_v4_vl", "paddleocr_vl"),
        *("qwen2_5_omni", "qwen2_5_vl", "qwen2_vl"),
    }
)
"""Families that see packed rows only by a text row above the three rows of mRoPE: positions of [4, 1, T]."""

# The table ------------------------------------------------------------------------------------------------

_ROWS: tuple[tuple[Separation, tuple[str, ...], str], ...] = (
    (
        Separation.CROSSES,
        ("eager",),
        """
        big_bird bigbird_pegasus bloom cpmant falcon_mamba gpt_oss inkling2_loop inkling2_text mamba mamba2
        megatron-bert mpt mvp openai-gpt prophetnet rembert roformer rwkv trocr xglm xlm xlnet
        """,
    ),
    (
        Separation.CROSSES,
        ("eager", "sdpa"),
        """
        afmoe bailing_hybrid bamba bart bert bert-generation biogpt blenderbot blenderbot-small camembert data2vec-text
        electra ernie falcon_h1 granitemoehybrid inkling_text jamba kimi_linear lfm3 lfm3_vl marian mbart minimax
        nemotron_h nemotron_h_omni opt pegasus plbart recurrent_gemma roberta roberta-prelayernorm roc_bert xlm-roberta
        xlm-roberta-xl zaya
        """,
    ),
    (
        Separation.DIFFERS,
        ("sdpa",),
        """
        paligemma
        """,
    ),
    (
        Separation.RAISES,
        ("eager", "sdpa"),
        """
        lara_mini olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text
        """,
    ),
    (
        Separation.SEPARATE,
        ("eager",),
        """
        deepseek_v4 flint gemma2 git got_ocr2 gpt_neo gpt_neox_japanese granite_swa granitemoe_swa hy_v4 hy_v4_vl
        mimo_v2_flash paligemma pp_chart2table vaultgemma
        """,
    ),
    (
        Separation.SEPARATE,
        ("eager", "sdpa"),
        """
        apertus apertus1p5_text arcee aria aria_text axk1 axk2 aya_vision beam bitnet codegen cohere cohere2 cohere2_moe
        cosmos3_edge cosmos3_omni ctrl cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl diffllama doge dory dots1
        dots3_note dots3_note_text emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone4_5 exaone_moe falcon flex_olmo
        fun_asr_nano fuyu gemma gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa glmasr gpt-sw3 gpt2
        gpt_bigcode gpt_neox gptj granite granite_docling granite_speech granite_speech_plus granitemoe granitemoeshared
        helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax hyperclovax_vision_v2 idefics2 idefics3
        internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm2_vl lighton_ocr llama llama4 llama4_text llava
        llava_next llava_next_video llava_onevision longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text
        ministral ministral3 mistral mistral3 mixtral mllama modernbert-decoder moshi moss_transcribe_diarize
        muse_glimmer muse_spark nanochat nemotron olmo olmo2 olmo3 olmoe omniasr ovis2 persimmon phi phi3
        phi4_multimodal phimoe qwen2 qwen2_audio qwen2_moe qwen3 qwen3_asr qwen3_moe qwen3_omni_moe_thinker qwen3_vl
        qwen3_vl_moe sarvam_mla sarvam_moe seed_oss shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7
        video_llama_3 video_llava vipllava voxtral whisper youtu
        unlimited_ocr
        """,
    ),
)
_REASONS: Mapping[str, str] = {
    "needs timm": """
        fast_vlm gemma3n perception_lm
    """,
    "no tiny model of it": """
        apertus1p5 blt cohere2_vision deepseek_vl_hybrid glm5_next inkling2 inkling2_loop_text
    """,
    "not built tiny: its configuration asks for numbers of its own": """
        chameleon cohere_compass cohere_compass_text dbrx deepseek_ocr2 diffusion_gemma ernie4_5_vl_moe evolla florence2
        gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text
        glm46v glm4v glm4v_moe glm_ocr glmga granite4_vision hunyuan_vl inkling_mm_model instructblip internvl janus
        kimi_k25 kosmos-2.5 kyutai_speech_to_text lfm2_moe minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral4
        mistral_large4 molmo2 musicgen musicgen_melody nemo_speechlm paddleocr_vl pp_formulanet qianfan_ocr qwen2_5_omni
        qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe reformer udop vibevoice_asr xlstm xmod zamba zamba2
    """,
    "takes no text alone": """
        blip blip-2 idefics instructblipvideo kosmos-2 pi0 pix2struct t5gemma2 vision-encoder-decoder voxtral_realtime
    """,
}

FAMILIES_OF_TRANSFORMERS: Mapping[str, Mapping[str, Separation]] = MappingProxyType(
    {
        family: {name: kind for kind, names, families in _ROWS for name in names if family in families.split()}
        for family in sorted({family for _, _, families in _ROWS for family in families.split()})
    }
)
"""What each measured family does, by attention implementation; those that it refuses to have are left out."""

UNMEASURED: Mapping[str, str] = MappingProxyType(
    {family: reason for reason, families in _REASONS.items() for family in families.split()}
)
"""Families that were not measured, with the reason; a small model of them is measured when it is checked."""

# Layers that hand a state from slot to slot cross whatever the attention beside them.
RECURRENT = frozenset(
    {
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
        *("lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "recurrent_gemma", "rwkv", "xlstm", "zamba"),
        *("zamba2",),
    }
)
"""Families with recurrent or convolution layers."""


def separation_of(family: str, attention: str) -> tuple[Separation, str]:
    """Return what the table says of a family with an attention, and how that is known."""
    measured = FAMILIES_OF_TRANSFORMERS.get(family, {})
    if attention in measured:
        return measured[attention], f"measured on a tiny model with transformers {HELD_AGAINST}"
    if family in RECURRENT and Separation.CROSSES in measured.values():
        return Separation.CROSSES, f"its recurrent or convolution layers do, with transformers {HELD_AGAINST}"
    if measured:
        return Separation.UNKNOWN, f"{attention} was not measured, but {', '.join(measured)}"
    return Separation.UNKNOWN, f"the family was not measured: {UNMEASURED.get(family, 'it is not in the table')}"
