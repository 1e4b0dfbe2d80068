"""A Megatron-Bridge ConfigContainer, read by attribute: current names first, then the older ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packhorse.contract.batch_contract import Objective, Packing
from packhorse.declare.attributes import get

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


def class_names(value: object) -> list[str]:
    """The names of an object's class and its bases, nearest first."""
    return [kind.__name__ for kind in type(value).__mro__]


@dataclass(frozen=True, slots=True)
class BridgeView:
    """What a configuration says, once, for declaring and for checking."""

    cfg: object

    @property
    def model(self) -> Any:
        return get(self.cfg, "model")

    @property
    def dataset(self) -> Any:
        return get(self.cfg, "dataset")

    @property
    def specs(self) -> Any:
        """``offline_packing_specs``, or ``packed_sequence_specs`` as it was called."""
        return get(self.dataset, "offline_packing_specs", "packed_sequence_specs")

    @property
    def older(self) -> bool:
        """Whether the dataset has the older names, under which the specs alone turn packing on."""
        return not hasattr(self.dataset, "enable_offline_packing") and (
            get(self.dataset, "packed_sequence_specs") is not None
        )

    @property
    def pack_size(self) -> int | None:
        size: int | None = get(self.specs, "packed_sequence_size")
        return size

    @property
    def packs_offline(self) -> bool:
        if self.older:
            return (self.pack_size or 0) > 0
        return bool(get(self.dataset, "enable_offline_packing"))

    @property
    def packs_in_batch(self) -> bool:
        return bool(get(self.dataset, "enable_in_batch_packing", "pack_sequences_in_batch"))

    @property
    def packing_buffer_size(self) -> int | None:
        """Energon packs online from a buffer of so many samples."""
        size: int | None = get(self.dataset, "packing_buffer_size")
        return size

    @property
    def is_energon(self) -> bool:
        return ENERGON in class_names(self.dataset)

    @property
    def objective(self) -> Objective | None:
        return next((OBJECTIVES[name] for name in class_names(self.dataset) if name in OBJECTIVES), None)

    @property
    def packing(self) -> Packing:
        if self.packs_offline or self.packing_buffer_size is not None:
            return Packing.ONLINE
        if self.packs_in_batch:
            return Packing.IN_BATCH
        return Packing.CONCAT if self.objective is Objective.PRETRAIN else Packing.NONE

    @property
    def packed(self) -> bool:
        return self.packing in (Packing.ONLINE, Packing.IN_BATCH)

    @property
    def pads_to_max_length(self) -> bool | None:
        """Of the dataset, or of its ``dataset_kwargs``; a dataset that cannot say does not."""
        declared = [get(self.dataset, name) for name in ("pad_to_max_length", "dataset_kwargs.pad_to_max_length")]
        return None if declared == [None, None] else True in declared

    @property
    def forces_fixed_width(self) -> bool:
        """Bridge pads to the full width with pipeline or expert parallelism."""
        return any(
            (get(self.model, name) or 1) > 1 for name in ("pipeline_model_parallel_size", "expert_model_parallel_size")
        )

    @property
    def world_size(self) -> int | None:
        """Ranks that train the language model, where the configuration knows."""
        if get(self.model, "dist_train.use_dist_train"):
            language: int | None = get(self.model, "dist_train.language_world_size")
            return language
        known: int | None = get(self.cfg, "world_size", "dist.world_size")
        return known
