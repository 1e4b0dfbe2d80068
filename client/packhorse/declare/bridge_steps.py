"""What Megatron-Bridge's training steps and models read on each pipeline stage, by configuration and step.

Source: Megatron-Bridge 0.6.2. ``vlm_step`` (get_batch_from_iterator) and its like take tokens on all stages.
``gpt_step`` (_forward_step_common) and ``deepseek_v4_step`` size the segment numbers of state-space layers by the
tokens, and where a stage has none by ``model.seq_length``, which rows of another width do not have; and they ask the
data set's configuration (_middle_pp_stage_needs_batch) whether middle stages read at all, as ``nemotron_omni_step``
does. Those of ``llava_step`` read nothing. Two vision models take rows apart by segments
(unpack_mcore_thd_tensor_for_position_ids), and no empty ones.
"""

from __future__ import annotations

import re
from enum import StrEnum, auto

from packhorse.declare.attributes import get
from packhorse.declare.bridge_view import BridgeView, class_names

__all__ = ["TEXT_STEP", "stage_facts"]


class Middle(StrEnum):
    """Reading of a step on its middle pipeline stages."""

    ALL = auto()  # what the other stages read, tokens too
    AS_CONFIGURED = auto()  # offsets, where the data set's configuration says that rows are packed or masked
    NOTHING = auto()


TEXT_STEP = "gpt_step"
MIDDLE_OF_STEP = {
    TEXT_STEP: Middle.AS_CONFIGURED,
    "deepseek_v4_step": Middle.AS_CONFIGURED,
    "nemotron_omni_step": Middle.AS_CONFIGURED,
    "llava_step": Middle.NOTHING,
    "vlm_step": Middle.ALL,
    "audio_lm_step": Middle.ALL,
    "qwen3_vl_step": Middle.ALL,
    "qwen3_omni_step": Middle.ALL,
    "step37_flickr8k_step": Middle.ALL,
}
# Names in the classes of providers whose models see or hear; they are trained by vlm_step and its like.
MULTIMODAL = re.compile(r"VL|4\dV|Omni|Vision|Audio|ASR|Llava|MIMO|Ministral3|Exaone45|Step37")
# Providers whose models take a row apart by segments for their positions.
ROWS_BY_SEGMENT = frozenset({"GLM45VModelProvider", "Qwen25VLModelProvider"})


def stage_facts(view: BridgeView, forward_step: str | None) -> dict[str, bool | None]:
    """Return the facts about stages, by field of ``TrainerFacts``; ``forward_step`` names the step, if known.

    ``None`` is a fact that is not known: what middle stages read in a step that is in no table here.
    """
    middle = _middle(view, forward_step)
    hybrid = get(view.model, "is_hybrid_model") or get(view.model, "hybrid_layer_pattern")
    pipelined = (get(view.model, "pipeline_model_parallel_size") or 1) > 1
    masked = get(view.dataset, "skip_getting_attention_mask_from_dataset") is False
    reads = {
        Middle.ALL: True,
        Middle.AS_CONFIGURED: masked or view.packs_offline or view.packs_in_batch,
        Middle.NOTHING: False,
        None: None,
    }
    return {
        # Tokens that an unknown step does not read cost bytes; those that it misses end the job.
        "tokens_on_every_stage": pipelined and (middle in (Middle.ALL, None) or (bool(hybrid) and view.packed)),
        "middle_stages_read": reads[middle],
        "refuses_empty_segments": not ROWS_BY_SEGMENT.isdisjoint(class_names(view.model)),
    }


def _middle(view: BridgeView, forward_step: str | None) -> Middle | None:
    """Return what middle stages read; ``None`` for a step of one's own, and for a model that sees without its step."""
    if forward_step is not None:
        return MIDDLE_OF_STEP.get(forward_step)
    sees = any(MULTIMODAL.search(name) for name in class_names(view.model))
    return None if sees else MIDDLE_OF_STEP[TEXT_STEP]
