"""Model families that opt out of packing, per mode, with the reason.

Read from Megatron-Bridge (067f987d, 2026-08-22). *Hard* rows are refusals in a family's own code: errors. The
others are defaults of its recipes, which are not enforced upstream and may be caution: warnings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packhorse.contract.batch_contract import Objective, Packing
from packhorse.rules.model import Breach, RuleInput, Severity

__all__ = ["FAMILIES", "Family", "family_of", "model_family"]


@dataclass(frozen=True, slots=True)
class Family:
    """Row of the table: a family that does not take packed rows in some modes, and the reason."""

    name: str
    modes: frozenset[Packing]
    severity: Severity
    reason: str
    source: str
    objective: Objective | None = None  # left out: whatever is trained


ONLINE = frozenset({Packing.ONLINE})
IN_BATCH = frozenset({Packing.IN_BATCH})
EVERY_PACKED = frozenset({Packing.ONLINE, Packing.IN_BATCH, Packing.CONCAT})

RECIPE = "its recipes turn packing in the batch off"
OWN_STEP = "the step of its recipes, qwen3_vl_step, refuses rows that arrive packed; vlm_step takes them"


def _recipe(name: str, source: str, reason: str = RECIPE, modes: frozenset[Packing] = IN_BATCH) -> Family:
    return Family(name, modes, Severity.WARN, reason, source, Objective.SFT)


def _hard(name: str, source: str, reason: str, modes: frozenset[Packing] = IN_BATCH) -> Family:
    return Family(name, modes, Severity.ERROR, reason, source)


FAMILIES: tuple[Family, ...] = (
    _recipe("qwen3-next", "recipes/qwen/h100/qwen3_next.py:163", "its SFT recipe trains unpacked", ONLINE),
    _recipe("glm-4.5", "recipes/glm/h100/glm45.py:299,436,583,727", "its SFT and PEFT recipes train unpacked", ONLINE),
    _recipe("qwen3-vl", "models/qwen_vl/qwen3_vl_step.py:61", OWN_STEP, EVERY_PACKED),
    _recipe("qwen3.5-vl", "models/qwen_vl/qwen3_vl_step.py:61", OWN_STEP, EVERY_PACKED),
    _recipe(
        "deepseek-v4",
        "recipes/deepseek/h100/deepseek_v4.py:356,433",
        "its base recipe trains unpacked, its packed one cuts rows contiguously for context parallelism",
        ONLINE,
    ),
    _recipe("kimi-k2.5-vl", "recipes/kimi_vl/h100/kimi_k25_vl.py:99"),
    _recipe("glm-4.5v", "recipes/glm_vl/h100/glm_45v.py:118"),
    _recipe(
        "gemma3-vl",
        "recipes/gemma3_vl/h100/gemma3_vl.py:115",
        "its mask lets the tokens of an image see each other, which packed rows do not carry",
        EVERY_PACKED,
    ),
    _recipe("qwen2-audio", "recipes/qwen2_audio/h100/qwen2_audio.py"),
    _recipe("ministral3", "recipes/ministral3/h100/ministral3.py:113"),
    _recipe("exaone-4.5", "recipes/exaone/h100/exaone45.py:65"),
    _recipe("nemotron-nano-v2-vl", "recipes/nemotron_vl/h100/nemotron_nano_v2_vl.py:135"),
    _recipe(
        "nemotron-omni",
        "recipes/nemotron_omni/h100/nemotron_omni.py:59",
        "its recipes turn packing in the batch off, but for one of long context",
    ),
    _hard(
        "gemma2",
        "models/gemma/gemma2_provider.py:187,375",
        "its only attention raises on packing parameters, though its recipes pack offline",
        EVERY_PACKED,
    ),
    _hard(
        "qwen3-omni",
        "models/qwen_omni/modeling_qwen3_omni/thinker_model.py:385, data/collate_fn.py:60",
        "its model does not take packed sequences, its collator refuses to make them",
        EVERY_PACKED,
    ),
    _hard(
        "nemotron-vl-v2",
        "models/nemotron_vl/data/collate_fn.py:70",
        "image embeddings expand after the boundaries of the samples were built",
    ),
    _hard(
        "qwen2.5-omni",
        "models/qwen_omni/modeling_qwen25_omni/thinker_model.py:229",
        "its model does not take packed sequences",
        EVERY_PACKED,
    ),
    _hard(
        "qwen3-asr",
        "models/qwen3_asr/modeling_qwen3_asr/thinker_model.py:214",
        "its model does not take packed sequences",
        EVERY_PACKED,
    ),
    _hard(
        "nemotron-labs-diffusion",
        "diffusion/models/common/nemotron_labs_diffusion_attention.py:255",
        "its attention does not take packed sequences",
        EVERY_PACKED,
    ),
    _hard(
        "step3.7",
        "models/stepfun/data/flickr8k/provider.py:249",
        "its own packer needs micro_batch_size 1",
    ),
)


def family_of(name: str) -> str:
    """A family's name as the table spells it: lower given, words joined by hyphens."""
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def model_family(given: RuleInput) -> Iterator[Breach]:
    """The model family takes packed rows in this mode.

    A table: a refusal in the family's own code is an error, a default of its recipes a warning. A family that
    is not in the table holds.

    Source: Megatron-Bridge, the file and line of each row.
    """
    if given.trainer.model_family is None or not given.contract.packed:
        return
    name, contract = family_of(given.trainer.model_family), given.contract
    for row in FAMILIES:
        if row.name == name and contract.packing in row.modes and row.objective in (None, contract.objective):
            others = " or ".join(mode for mode in (Packing.ONLINE, Packing.NONE) if mode not in row.modes)
            yield Breach(
                "packing",
                f"{others} for {name}: {row.reason}",
                str(contract.packing),
                f"set packing to {'none' if Packing.ONLINE in row.modes else 'online'} ({row.source})",
                row.severity,
            )
