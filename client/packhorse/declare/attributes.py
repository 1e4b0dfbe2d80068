"""Reading a stack's settings by attribute, from tables that say which attribute declares which field.

A setting that is missing is not declared; nor is ``None``, but where a stack means "off" by it. No stack is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["FieldSource", "get", "has", "is_on", "names_of", "positive_or_none", "read_fields"]


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class FieldSource:
    """Source of one declared field: the dotted attribute names that hold it, the newest first.

    ``off``: what is declared where a stack has the attribute and spells "off" as ``None``.
    """

    field: str
    names: tuple[str, ...]
    convert: Callable[[Any], Any] = _unchanged
    off: object = None


MISSING = object()


def _resolve(settings: object, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value.get(part, MISSING) if isinstance(value, dict) else getattr(value, part, MISSING)
    return value


def get(settings: object, *names: str) -> Any:
    """Return the first of these dotted attributes that is there and not ``None``, else ``None``.

    Mappings are read by key.
    """
    found = (_resolve(settings, name) for name in names)
    return next((value for value in found if value is not None and value is not MISSING), None)


def has(settings: object, name: str) -> bool:
    """Return whether this dotted attribute is there, whatever it holds: a stack's version is told by what it has."""
    return _resolve(settings, name) is not MISSING


def _declared(settings: object, source: FieldSource) -> Any:
    value = get(settings, *source.names)
    if value is not None:
        return source.convert(value)
    there = any(_resolve(settings, name) is not MISSING for name in source.names)
    return source.off if there else None


def read_fields(settings: object, sources: Iterable[FieldSource]) -> dict[str, Any]:
    """Return what the settings declare, by field; what is not declared is left out."""
    found = {source.field: _declared(settings, source) for source in sources}
    return {field: value for field, value in found.items() if value is not None}


def is_on(value: object) -> bool:
    """Return whether a setting that may hold a value of its own is on: a ramp-up schedule, a number format."""
    return bool(value)


def positive_or_none(value: int) -> int | None:
    """Return a size, or ``None`` where 0 and below say "not set"."""
    return value if value > 0 else None


def names_of(value: object) -> tuple[str, ...]:
    """Return the names in a setting that holds one or several strings or enum members."""
    members = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return tuple(str(getattr(member, "name", member)) for member in members if member is not None)
