"""Reading a Megatron-Bridge ConfigContainer by attribute: current names first, then the older ones."""

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
    def forces_fixed_width(self) -> bool:
        """True with pipeline or expert parallelism, where Bridge pads to the full width whatever is set."""
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
