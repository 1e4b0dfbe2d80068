"""Where a pipeline layout puts multi-token prediction, in every form that Megatron and Bridge keep it in."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from packhorse import BatchContract, ConfigError, ParallelLayout
from packhorse.declare.pipeline_layout import mtp_stages_of


class LayerType(Enum):
    """As Megatron-Core's."""

    embedding = 1
    decoder = 3
    mtp = 4
    loss = 5


@pytest.mark.parametrize(
    ("layout", "pipeline", "stages"),
    [
        (None, 4, ()),
        ("Et*3|(tt|)*5m|L", 4, (2,)),
        ("Ett|tt|tt,m|L", 4, (2,)),
        ("Ett|tt|tt|mL", 4, (3,)),
        ("E|(t|)*4m*2|tL", 7, (5,)),
        ([["embedding", "decoder"], ["decoder"], [" MTP "], ["loss"]], 4, (2,)),
        ([["embedding"], ["decoder"], ["decoder"], ["mtp", "loss"]], 2, (1,)),  # two chunks a rank
        ([["embedding"], ["decoder"], ["mtp"], ["loss"]], 2, (0,)),
        ([[LayerType.embedding], [LayerType.mtp], [LayerType.loss]], 3, (1,)),
        (SimpleNamespace(layout=[[[LayerType.embedding], []], [[LayerType.decoder], [LayerType.mtp]]]), 2, (1,)),
        ([["embedding", "decoder"], ["decoder", "loss"]], 2, ()),
    ],
)
def test_stages_with_prediction_layers_are_found(layout: object, pipeline: int, stages: tuple[int, ...]) -> None:
    assert mtp_stages_of(layout, pipeline) == stages


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("Et|x|L", "'x'"),
        ("Et|t|L", "3 stages"),
        (["embedding", "loss"], "list of lists"),
        (7, "must be text"),
        ("t*99999", "repeats"),
    ],
)
def test_what_cannot_be_read_is_refused_by_setting_and_value(layout: object, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"pipeline_model_parallel_layout.*{says}"):
        mtp_stages_of(layout, 2)


class Qwen25VLModelProvider(SimpleNamespace):
    """As Bridge's, by name."""


class GPTModelProvider(SimpleNamespace):
    """As Bridge's, by name."""


def bridge(model: type[SimpleNamespace] = GPTModelProvider, pipeline: int = 4, **changed: Any) -> SimpleNamespace:
    settings = {"seq_length": 64, "pipeline_model_parallel_size": pipeline, "calculate_per_token_loss": True}
    dataset = {
        "seq_length": 64,
        "enable_offline_packing": True,
        "offline_packing_specs": SimpleNamespace(packed_sequence_size=64),
    }
    dataset |= {name: changed.pop(name) for name in dataset.keys() & changed.keys()}
    return SimpleNamespace(
        model=model(**settings, **changed),
        dataset=SimpleNamespace(**dataset),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=8),
    )


def facts(cfg: SimpleNamespace) -> Any:
    return BatchContract.from_megatron_bridge(cfg).trainer


def test_both_stacks_declare_the_stages_of_their_layout() -> None:
    layout = "Ett|tt|ttm|L"
    cfg = bridge(pipeline_model_parallel_layout=layout)
    assert ParallelLayout.from_megatron_bridge(cfg, 4).mtp_stages == (2,)
    args = SimpleNamespace(pipeline_model_parallel_size=4, world_size=4, pipeline_model_parallel_layout=layout)
    assert ParallelLayout.from_megatron(args).mtp_stages == (2,)


def test_bridge_asks_for_tokens_on_every_stage_where_its_step_reads_them() -> None:
    assert facts(bridge()).tokens_on_every_stage is False
    assert facts(bridge(Qwen25VLModelProvider)).tokens_on_every_stage is True
    assert facts(bridge(is_hybrid_model=True)).tokens_on_every_stage is True
    assert facts(bridge(hybrid_layer_pattern="M*M-")).tokens_on_every_stage is True
    assert facts(bridge(Qwen25VLModelProvider, pipeline=1)).tokens_on_every_stage is False


def test_bridge_declares_whether_its_middle_stages_read() -> None:
    assert facts(bridge()).middle_stages_read is True
    own = bridge(enable_offline_packing=False, offline_packing_specs=None)
    assert facts(own).middle_stages_read is False
    own.dataset.skip_getting_attention_mask_from_dataset = False
    assert facts(own).middle_stages_read is True


CONFIGURED = ("gpt_step", "deepseek_v4_step", "nemotron_omni_step")


@pytest.mark.parametrize(
    ("step", "packed", "read"),
    [
        *((step, packed, packed) for step in CONFIGURED for packed in (True, False)),
        *((step, False, True) for step in ("vlm_step", "audio_lm_step", "qwen3_omni_step", "step37_flickr8k_step")),
        ("llava_step", True, False),
        ("a_step_of_our_own", True, None),
    ],
)
def test_what_middle_stages_read_goes_by_the_step_and_is_unknown_of_others(
    step: str, packed: bool, read: bool | None
) -> None:
    cfg = bridge() if packed else bridge(enable_offline_packing=False, offline_packing_specs=None)
    declared = BatchContract.from_megatron_bridge(cfg, step).trainer
    assert declared is not None
    assert declared.middle_stages_read is read
    everywhere = step not in (*CONFIGURED, "llava_step")
    assert declared.tokens_on_every_stage is everywhere, "an unknown step rather gets too much"


def test_bridge_declares_models_that_refuse_empty_segments() -> None:
    assert facts(bridge()).refuses_empty_segments is False
    assert facts(bridge(Qwen25VLModelProvider)).refuses_empty_segments is True
