"""Seeded configurations of Megatron-Bridge: valid ones with up to three changes, of all settings that rules read."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
from megatron.bridge.data.builders.energon import (
    EnergonDatasetConfig,
    HFEnergonTaskEncoderConfig,
    QwenVLEnergonTaskEncoderConfig,
)
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetConfig
from megatron.bridge.data.packing.config import PackedSequenceSpecs
from megatron.bridge.data.sources.hf import HFDatasetSourceConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config as bridge

__all__ = ["Case", "draw"]

SEQ_LENGTH = 512


def _offline(case: Case) -> object:
    specs = PackedSequenceSpecs(packed_sequence_size=SEQ_LENGTH, pad_seq_to_mult=case.alignment)
    kwargs: dict[str, Any] = {"pad_to_max_length": True} if case.fixed else {}
    return GPTSFTDatasetConfig(
        seq_length=SEQ_LENGTH,
        dataset_root="data",
        enable_offline_packing=True,
        offline_packing_specs=specs,
        dataset_kwargs=kwargs,
    )


def _source() -> Any:
    return HFDatasetSourceConfig(dataset_name="gsm8k")


DATASETS: dict[str, Callable[[Case], object]] = {
    "pretrain": lambda _: bridge.GPTDatasetConfig(
        seq_length=SEQ_LENGTH,
        random_seed=1,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    ),
    "offline": _offline,
    "unpacked": lambda _: GPTSFTDatasetConfig(seq_length=SEQ_LENGTH, dataset_root="data"),
    "hf": lambda case: DirectHFSFTDatasetConfig(
        seq_length=SEQ_LENGTH, source=_source(), do_validation=False, do_test=False, pad_to_max_length=case.fixed
    ),
    "hf_in_batch": lambda _: DirectHFSFTDatasetConfig(
        seq_length=SEQ_LENGTH, source=_source(), do_validation=False, do_test=False, enable_in_batch_packing=True
    ),
    "mock_vlm": lambda case: MockVLMSFTDatasetConfig(
        seq_length=SEQ_LENGTH, hf_processor_path="model", pad_to_max_length=case.fixed
    ),
    "mock_vlm_in_batch": lambda _: MockVLMSFTDatasetConfig(
        seq_length=SEQ_LENGTH, hf_processor_path="model", enable_in_batch_packing=True
    ),
    "energon": lambda case: EnergonDatasetConfig(
        path="data",
        seq_length=SEQ_LENGTH,
        micro_batch_size=case.micro_batch_size,
        task_encoder=HFEnergonTaskEncoderConfig(hf_processor_path="model"),
    ),
    "energon_in_batch": lambda case: EnergonDatasetConfig(
        path="data",
        seq_length=SEQ_LENGTH,
        micro_batch_size=case.micro_batch_size,
        task_encoder=QwenVLEnergonTaskEncoderConfig(hf_processor_path="model"),
        enable_in_batch_packing=True,
    ),
}

# Settings by path, and the values that a changed one may get: valid ones and others.
CHANGES: dict[str, tuple[Any, ...]] = {
    "model.seq_length": (256, 500, 514, 1024),
    "dataset.seq_length": (256, 500, 514, 1024),
    "train.micro_batch_size": (0, 1, 2, 3, 4),
    "train.global_batch_size": (0, 1, 6, 8, 12, 16, 32),
    "train.rampup_batch_size": ([4, 4, 100],),
    "train.decrease_batch_size_if_needed": (True,),
    "train.step_batch_size_schedule": ("0:8 1000:32",),
    "validation.eval_micro_batch_size": (1, 2, 3),
    "validation.eval_global_batch_size": (6, 8, 12, 16),
    "dist.eval_context_parallel_size": (1, 2, 3, 4),
    "dist.use_tp_pp_dp_mapping": (True,),
    "dist.use_torch_fsdp2": (True,),
    "dist.use_megatron_fsdp": (True,),
    "model.context_parallel_size": (1, 2, 3, 4),
    "model.tensor_model_parallel_size": (1, 2, 4),
    "model.pipeline_model_parallel_size": (1, 2, 4),
    "model.expert_model_parallel_size": (1, 2, 4),
    "model.virtual_pipeline_model_parallel_size": (1, 2),
    "model.microbatch_group_size_per_vp_stage": (1, 2, 3, 4),
    "model.sequence_parallel": (True, False),
    "model.calculate_per_token_loss": (True, False),
    "ddp.average_in_collective": (True, False),
    "model.mtp_num_layers": (1, 2),
    "model.variable_seq_lengths": (True,),
    "model.transformer_impl": ("local", "transformer_engine"),
    "model.cuda_graph_impl": ("local", "transformer_engine", "full_iteration"),
    "model.cuda_graph_modules": (["attn"], ["mlp"], ["attn", "mlp"], ["moe_router"]),
    "model.cp_comm_type": ("p2p", "a2a", "all_gather", "a2a+p2p", ["p2p"] * 4, ["p2p", "a2a"]),
    "model.hierarchical_context_parallel_sizes": ([2, 1], [1, 2], [2, 2], [4]),
    "model.num_moe_experts": (8,),
    "model.moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "model.moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "model.moe_hybridep_pad_uneven_dispatch_inputs": (True,),
    "model.dynamic_context_parallel": (True,),
    "model.sequence_packing_scheduler": ("dp_balanced",),
    "model.fp8": ("hybrid", "e4m3"),
    "model.fp8_recipe": ("delayed", "tensorwise", "mxfp8", "blockwise"),
    "model.fp4": ("e2m1",),
    "mixed_precision": (
        "bf16_mixed",
        "bf16_with_fp8_delayed_scaling_mixed",
        "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_mxfp8_mixed",
        "bf16_with_nvfp4_mixed",
    ),
    "rng.te_rng_tracker": (True,),
    "rerun_state_machine.check_for_nan_in_loss": (False,),
    "dataset.enable_in_batch_packing": (True, False),
    "dataset.defer_in_batch_packing_to_step": (True,),
    "dataset.enable_offline_packing": (True, False),
    "dataset.offline_packing_specs": (None,),
    "dataset.offline_packing_specs.packed_sequence_size": (0, 256, 500, 514, 1024),
    "dataset.offline_packing_specs.pad_seq_to_mult": (None, 0, 1, 2, 4, 8, 16),
    "dataset.offline_packing_specs.pad_cu_seqlens": (True,),
    "dataset.offline_packing_specs.max_single_sequence_length": (0, 64, 512, 2048),
    "dataset.dataset_kwargs": ({"pad_to_max_length": True}, {"pad_to_max_length": False}, None),
    "dataset.pad_to_max_length": (True, False),
    "dataset.pad_to_multiple_of": (0, 1, 64, 96),
    "dataset.in_batch_packing_pad_to_multiple_of": (0, 1, 16),
    "dataset.packing_buffer_size": (None, 0, 16),
    "dataset.micro_batch_size": (1, 2, 3),
    "dataset.do_validation": (True, False),
}


@dataclass(frozen=True)
class Case:
    """One configuration, described: it is built anew each time, as validation changes what it is given."""

    dataset: str
    tensor: int
    context: int
    pipeline: int
    data: int
    experts: bool
    fixed: bool
    micro_batch_size: int
    changes: tuple[tuple[str, Any], ...]

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def alignment(self) -> int:
        """Multiple of a segment that the layout needs."""
        return 2 * self.context * self.tensor

    @property
    def fine_tunes(self) -> bool:
        """True for every dataset but the one of pretraining."""
        return self.dataset != "pretrain"

    @property
    def step(self) -> str:
        """Training step: that of models that see, for data sets that may hold images."""
        return "vlm_step" if self.dataset.startswith(("mock_vlm", "energon")) else "gpt_step"

    def build(self) -> bridge.ConfigContainer:
        """Return the configuration, its changes applied as a command line applies them."""
        cfg = bridge.ConfigContainer(
            train=bridge.TrainingConfig(
                micro_batch_size=self.micro_batch_size,
                global_batch_size=4 * self.micro_batch_size * self.data,
                train_iters=10,
            ),
            model=self._model(),
            optimizer=bridge.OptimizerConfig(lr=1e-4, bf16=True),
            scheduler=bridge.SchedulerConfig(),
            dataset=DATASETS[self.dataset](self),
            logger=bridge.LoggerConfig(),
            tokenizer=bridge.TokenizerConfig(),
            checkpoint=bridge.CheckpointConfig(),
            ddp=bridge.DistributedDataParallelConfig(average_in_collective=not self.fine_tunes),
        )
        for path, value in self.changes:
            _set(cfg, path, value)
        return cfg

    def _model(self) -> GPTModelProvider:
        experts: dict[str, Any] = {}
        if self.experts:
            experts = {"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall", "moe_router_topk": 2}
        return GPTModelProvider(
            num_layers=8,
            hidden_size=64,
            ffn_hidden_size=128,
            num_attention_heads=8,
            num_query_groups=8,
            seq_length=SEQ_LENGTH,
            vocab_size=1000,
            add_bias_linear=False,
            bf16=True,
            tensor_model_parallel_size=self.tensor,
            context_parallel_size=self.context,
            pipeline_model_parallel_size=self.pipeline,
            sequence_parallel=self.tensor > 1,
            calculate_per_token_loss=self.fine_tunes,
            **experts,
        )


def _set(cfg: object, path: str, value: Any) -> None:
    """Set a setting, but none that this configuration, or this release, does not have."""
    *sections, name = path.split(".")
    for section in sections:
        cfg = getattr(cfg, section, None)
    if cfg is not None and hasattr(cfg, name):
        setattr(cfg, name, value)


def draw(generator: random.Random) -> Case:
    """Return a case that is valid but for its changes, of which it has up to three."""
    dataset = generator.choice(list(DATASETS))
    in_batch = dataset.endswith("in_batch")
    experts = generator.random() < 0.3
    changes = generator.sample(sorted(CHANGES), generator.randint(0, 3))
    return Case(
        dataset=dataset,
        tensor=generator.choice((1, 2)),
        context=generator.choice((1, 1, 2)),
        pipeline=generator.choice((1, 1, 2)),
        data=generator.choice((1, 2)),
        experts=experts,
        fixed=generator.random() < 0.5,
        micro_batch_size=2 if in_batch else 1,
        changes=tuple((path, generator.choice(CHANGES[path])) for path in changes),
    )
