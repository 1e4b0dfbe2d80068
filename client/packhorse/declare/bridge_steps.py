"""What Megatron-Bridge's training steps and models read on each pipeline stage, by configuration and step.

Source: Megatron-Bridge 0.6.2. ``vlm_step`` (get_batch_from_iterator) takes tokens on all stages. ``gpt_step``
(_forward_step_common) sizes the segment numbers of state-space layers by the tokens, and where a stage has none by
``model.seq_length``, which rows of another width do not have; and it asks the data set's configuration
(_middle_pp_stage_needs_batch) whether middle stages read at all. Two vision models take rows apart by segments
(unpack_mcore_thd_tensor_for_position_ids), and no empty ones.
"""

from __future__ import annotations

import re

from packhorse.declare.attributes import get
from packhorse.declare.bridge_view import BridgeView, class_names

__all__ = ["stage_facts"]

TEXT_STEP = "gpt_step"
# Names in the classes of providers whose models see or hear; they are trained by vlm_step and its like.
MULTIMODAL = re.compile(r"VL|4\dV|Omni|Vision|Audio|ASR|Llava|MIMO|Ministral3|Exaone45|Step37")
# Providers whose models take a row apart by segments for their positions.
ROWS_BY_SEGMENT = frozenset({"GLM45VModelProvider", "Qwen25VLModelProvider"})


def stage_facts(view: BridgeView, forward_step: str | None) -> dict[str, bool]:
    """Return the facts about stages, by field of ``TrainerFacts``; ``forward_step`` names the step, if known."""
    everywhere = _reads_everywhere(view, forward_step)
    hybrid = get(view.model, "is_hybrid_model") or get(view.model, "hybrid_layer_pattern")
    pipelined = (get(view.model, "pipeline_model_parallel_size") or 1) > 1
    masked = get(view.dataset, "skip_getting_attention_mask_from_dataset") is False
    return {
        "tokens_on_every_stage": pipelined and (everywhere or (bool(hybrid) and view.packed)),
        "middle_stages_read": masked or everywhere or view.packs_offline or view.packs_in_batch,
        "refuses_empty_segments": not ROWS_BY_SEGMENT.isdisjoint(class_names(view.model)),
    }


def _reads_everywhere(view: BridgeView, forward_step: str | None) -> bool:
    """Return whether a step reads tokens on every stage: any but ``gpt_step``; unknown, by the model's class."""
    if forward_step is not None:
        return forward_step != TEXT_STEP
    return any(MULTIMODAL.search(name) for name in class_names(view.model))
