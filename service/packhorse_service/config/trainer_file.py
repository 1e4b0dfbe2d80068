"""What a trainer would declare, in a YAML file: the layout, the contract, facts about itself, its window.

    layout: {data: 8, context: 2}
    contract: {seq_length: 8192, loss_reduction: per_token}
    trainer: {stack: megatron_lm, transformer_impl: transformer_engine}
    window: 16

Every section and field may be left out; what is left out is not declared.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ConfigError

__all__ = ["TrainerFile", "load_trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFile:
    """The whole file."""

    layout: ParallelLayout | None = None
    contract: BatchContract = field(default_factory=BatchContract)
    trainer: TrainerFacts = field(default_factory=TrainerFacts)
    window: int | None = None


SECTIONS: dict[str, type] = {"layout": ParallelLayout, "contract": BatchContract, "trainer": TrainerFacts}


def load_trainer(path: Path) -> TrainerFile:
    """Read and check a trainer's file.

    Raises ``ConfigError`` that lists everything wrong with it.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"trainer file {str(path)!r} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping of {', '.join(_names(TrainerFile))}")
    unknown = list(_unknown(raw))
    if unknown:
        raise ConfigError(f"{path}:\n" + "\n".join(f"  {line}" for line in unknown))
    try:
        return TypeAdapter(TrainerFile).validate_python(raw)
    except ValidationError as error:
        lines = (f"  {'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{path}:\n" + "\n".join(lines)) from error


def _names(kind: type[Any]) -> list[str]:
    # Facts have a section of their own.
    return [f.name for f in fields(kind) if kind is TrainerFile or f.name != "trainer"]


def _unknown(raw: Mapping[str, object]) -> Iterator[str]:
    """A line for each name that no section has, with the nearest that there is."""
    yield from _strange(raw, _names(TrainerFile), "")
    for section, kind in SECTIONS.items():
        values = raw.get(section)
        if isinstance(values, Mapping):
            yield from _strange(values, _names(kind), f"{section}.")


def _strange(values: Mapping[str, object], known: list[str], prefix: str) -> Iterator[str]:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            yield f"{prefix}{name}: unknown field; {hint}"
