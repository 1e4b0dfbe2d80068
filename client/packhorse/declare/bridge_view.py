"""Reading a Megatron-Bridge ConfigContainer by attribute: current names first, then the older ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packhorse.contract.batch_contract import Objective, Packing
from packhorse.declare.attributes import get, has

__all__ = ["BridgeView"]

OBJECTIVES = {
    "GPTSFTDatasetConfig": Objective.SFT,
    "FinetuningDatasetConfig": Objective.SFT,  # the older name
    "DirectHFSFTDatasetConfig": Objective.SFT,
    "EnergonDatasetConfig": Objective.SFT,
    "MockVLMSFTDatasetConfig": Objective.SFT,
    "GPTDatasetConfig": Objective.PRETRAIN,
}
ENERGON = "EnergonDatasetConfig"

# Families of the table of families that have a provider of their own.
FAMILY_OF_PROVIDER = {
    "Exaone45ModelProvider": "exaone-4.5",
    "GLM45VModelProvider": "glm-4.5v",
    "Gemma2ModelProvider": "gemma2",
    "Gemma3VLModelProvider": "gemma3-vl",
    "KimiK25VLModelProvider": "kimi-k2.5-vl",
    "Ministral3ModelProvider": "ministral3",
    "NemotronLabsDiffusionModelProvider": "nemotron-labs-diffusion",
    "NemotronOmniModelProvider": "nemotron-omni",
    "NemotronVLModelProvider": "nemotron-vl-v2",
    "Qwen25OmniModelProvider": "qwen2.5-omni",
    "Qwen2AudioModelProvider": "qwen2-audio",
    "Qwen35VLMoEModelProvider": "qwen3.5-vl",
    "Qwen35VLModelProvider": "qwen3.5-vl",
    "Qwen3ASRModelProvider": "qwen3-asr",
    "Qwen3OmniModelProvider": "qwen3-omni",
    "Qwen3VLMoEModelProvider": "qwen3-vl",
    "Qwen3VLModelProvider": "qwen3-vl",
    "Step37ModelProvider": "step3.7",
}


def class_names(value: object) -> list[str]:
    """Return the names of an object's class and its bases, nearest first."""
    return [kind.__name__ for kind in type(value).__mro__]


@dataclass(frozen=True, slots=True)
class BridgeView:
    """Megatron-Bridge configuration as declaring and checking read it."""

    cfg: object

    @property
    def model(self) -> Any:
        """Section of the model, ``cfg.model``."""
        return get(self.cfg, "model")

    @property
    def dataset(self) -> Any:
        """Section of the dataset, ``cfg.dataset``."""
        return get(self.cfg, "dataset")

    @property
    def specs(self) -> Any:
        """Settings of offline packing: ``offline_packing_specs``, or ``packed_sequence_specs`` as it was called."""
        return get(self.dataset, "offline_packing_specs", "packed_sequence_specs")

    @property
    def has_older_names(self) -> bool:
        """True where the dataset has the older names, under which the specs alone turn packing on."""
        return not hasattr(self.dataset, "enable_offline_packing") and (
            get(self.dataset, "packed_sequence_specs") is not None
        )

    @property
    def pack_size(self) -> int | None:
        """Slots of an offline pack."""
        size: int | None = get(self.specs, "packed_sequence_size")
        return size

    @property
    def packs_offline(self) -> bool:
        """True where the dataset is packed before training."""
        if self.has_older_names:
            return (self.pack_size or 0) > 0
        return bool(get(self.dataset, "enable_offline_packing"))

    @property
    def packs_in_batch(self) -> bool:
        """True where the samples of a micro-batch are packed to one row."""
        return bool(get(self.dataset, "enable_in_batch_packing", "pack_sequences_in_batch"))

    @property
    def packing_buffer_size(self) -> int | None:
        """Samples of the buffer from which Energon packs online."""
        size: int | None = get(self.dataset, "packing_buffer_size")
        return size

    @property
    def is_energon(self) -> bool:
        """True for an Energon dataset, by the name of its class or of a base of it."""
        return ENERGON in class_names(self.dataset)

    @property
    def objective(self) -> Objective | None:
        """Kind of training that the dataset is for, by the name of its class."""
        return next((OBJECTIVES[name] for name in class_names(self.dataset) if name in OBJECTIVES), None)

    @property
    def packing(self) -> Packing:
        """Packing mode that a stream in place of the dataset has."""
        if self.packs_offline or self.packing_buffer_size is not None:
            return Packing.ONLINE
        if self.packs_in_batch:
            return Packing.IN_BATCH
        return Packing.CONCAT if self.objective is Objective.PRETRAIN else Packing.NONE

    @property
    def packed(self) -> bool:
        """True where the rows of that stream hold several samples."""
        return self.packing in (Packing.ONLINE, Packing.IN_BATCH)

    @property
    def pads_to_max_length(self) -> bool | None:
        """``pad_to_max_length`` of the dataset or of its ``dataset_kwargs``; ``None`` where it has neither."""
        declared = [get(self.dataset, name) for name in ("pad_to_max_length", "dataset_kwargs.pad_to_max_length")]
        return None if declared == [None, None] else True in declared

    @property
    def needs_fixed_width(self) -> bool:
        """True with pipeline or expert parallelism, where rows of one width are needed."""
        return any(
            (get(self.model, name) or 1) > 1 for name in ("pipeline_model_parallel_size", "expert_model_parallel_size")
        )

    @property
    def forces_fixed_width(self) -> bool:
        """True where Bridge pads to the full width whatever is set: of datasets that have the field themselves."""
        return self.needs_fixed_width and has(self.dataset, "pad_to_max_length")

    @property
    def defers_packing(self) -> bool:
        """True where packing in the batch is put off to the step; without it the flag does nothing."""
        return self.packs_in_batch and bool(get(self.dataset, "defer_in_batch_packing_to_step"))

    @property
    def packs_global_batch(self) -> bool:
        """True where the dataset packs across the global batch, which no release of Bridge has yet."""
        return bool(get(self.dataset, "enable_global_batch_packing"))

    @property
    def chooses_attention(self) -> bool:
        """True for model providers: they build Transformer Engine's layers whatever ``transformer_impl`` says."""
        return any(name.endswith("Provider") for name in class_names(self.model))

    @property
    def model_family(self) -> str | None:
        """Family of the table of families, told by the class of the model's provider or a base of it."""
        return next((FAMILY_OF_PROVIDER[name] for name in class_names(self.model) if name in FAMILY_OF_PROVIDER), None)

    @property
    def world_size(self) -> int | None:
        """Ranks that train the language model, where the configuration knows."""
        if get(self.model, "dist_train.use_dist_train"):
            language: int | None = get(self.model, "dist_train.language_world_size")
            return language
        known: int | None = get(self.cfg, "world_size", "dist.world_size")
        return known
