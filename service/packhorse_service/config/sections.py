"""Sections of a YAML file: pydantic models that know no other field, some with the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.documented import description_of
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts

__all__ = ["ContractSection", "DeclaredContract", "FactsSection", "LayoutSection", "Section", "values_of"]


class Section(BaseModel):
    """Mapping of a YAML file with exactly these fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


S = TypeVar("S", bound=Section)


def values_of(section: Section) -> dict[str, Any]:
    """Return the values of a section by the names of its fields."""
    return {name: getattr(section, name) for name in type(section).model_fields}


def with_fields_of(described_by: type, without: Collection[str] = ()) -> Callable[[type[S]], type[S]]:
    """Give a section the fields of a dataclass of the client, which checks the values itself."""
    hints = get_type_hints(described_by)
    columns: dict[str, Any] = {
        f.name: (hints[f.name], Field(f.default, description=description_of(f)))
        for f in fields(described_by)
        if f.name not in without
    }

    def build(section: Section) -> Section:
        described_by(**values_of(section))
        return section

    def decorate(section: type[S]) -> type[S]:
        checks: dict[str, Any] = {"build": model_validator(mode="after")(build)}
        made: type[S] = create_model(
            section.__name__, __base__=section, __doc__=section.__doc__, __validators__=checks, **columns
        )
        return made

    return decorate


@with_fields_of(ParallelLayout)
class LayoutSection(Section):
    """Parallel layout of a job."""

    def layout(self) -> ParallelLayout:
        """Return the layout that the section describes."""
        return ParallelLayout(**values_of(self))


@with_fields_of(BatchContract)
class ContractSection(Section):
    """Contract that a server declares."""

    def contract(self) -> BatchContract:
        """Return the contract that the section describes."""
        return BatchContract(**values_of(self))


@with_fields_of(BatchContract, without=("trainer",))
class DeclaredContract(Section):
    """Contract that a trainer declares; its facts have a section of their own."""

    def contract(self) -> BatchContract:
        """Return the contract that the section describes."""
        return BatchContract(**values_of(self))


@with_fields_of(TrainerFacts)
class FactsSection(Section):
    """Facts that a trainer declares about itself."""

    def facts(self) -> TrainerFacts:
        """Return the facts that the section describes."""
        return TrainerFacts(**values_of(self))
