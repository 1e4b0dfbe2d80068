"""What a trainer would declare, in a YAML file: the layout, the contract, facts about itself, its window.

    layout: {data: 8, context: 2}
    contract: {seq_length: 8192, loss_reduction: per_token}
    trainer: {stack: megatron_lm, transformer_impl: transformer_engine}
    window: 16

Every section and field may be left out; what is left out is not declared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse_service.config.sections import DeclaredContract, FactsSection, LayoutSection, Section
from packhorse_service.config.yaml_check import checked, load_mapping

__all__ = ["TrainerFile", "load_trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFile:
    """Declaration of one trainer, as its file says it."""

    layout: ParallelLayout | None = None
    contract: BatchContract = field(default_factory=BatchContract)
    trainer: TrainerFacts = field(default_factory=TrainerFacts)
    window: int | None = None


class TrainerSections(Section):
    """Sections of a trainer's file, as they are checked."""

    layout: LayoutSection | None = None
    contract: DeclaredContract = Field(default_factory=DeclaredContract)
    trainer: FactsSection = Field(default_factory=FactsSection)
    window: int | None = None


def load_trainer(path: Path) -> TrainerFile:
    """Read and check a trainer's file.

    Raises ``ConfigError`` that lists everything wrong with it.
    """
    rule = f"must be a mapping of {', '.join(TrainerSections.model_fields)}"
    sections = checked(TrainerSections, load_mapping(path, "trainer file", rule), path)
    return TrainerFile(
        layout=None if sections.layout is None else sections.layout.layout(),
        contract=sections.contract.contract(),
        trainer=sections.trainer.facts(),
        window=sections.window,
    )
