"""Fields that say what they mean, for whoever reads the code and for the reference that is written from it."""

from __future__ import annotations

from dataclasses import Field, field
from typing import Any

__all__ = ["meaning_of", "means"]

MEANING = "meaning"


def means(text: str, default: object = None) -> Any:
    """A field of a dataclass; ``None`` stands for "not declared"."""
    return field(default=default, metadata={MEANING: text})


def meaning_of(described: Field[Any]) -> str:
    """What such a field means."""
    meaning: str = described.metadata[MEANING]
    return meaning
