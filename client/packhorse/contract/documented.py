"""Dataclass fields that carry a description, for readers of the code and for the reference written from it."""

from __future__ import annotations

from dataclasses import Field, field
from typing import Any

__all__ = ["description_of", "documented"]

DESCRIPTION = "description"


def documented(description: str, default: object = None) -> Any:
    """Return a dataclass field with a description; its default ``None`` stands for "not declared"."""
    return field(default=default, metadata={DESCRIPTION: description})


def description_of(described: Field[Any]) -> str:
    """Return the description of a field made by ``documented``."""
    description: str = described.metadata[DESCRIPTION]
    return description
