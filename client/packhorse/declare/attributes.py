"""Reading a stack's settings by attribute: tables of what is read, so that they document themselves.

A setting that is missing is not declared; nor is ``None``, but where a stack means "off" by it. No stack is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Setting", "look_up", "names_of", "positive", "read", "switch"]


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared field and where it comes from: dotted attribute names, the newest first.

    ``off``: what is declared where a stack has the attribute and spells "off" as ``None``.
    """

    field: str
    names: tuple[str, ...]
    convert: Callable[[Any], Any] = _as_it_is
    off: object = None


MISSING = object()


def _resolve(source: object, name: str) -> Any:
    value: Any = source
    for part in name.split("."):
        value = value.get(part, MISSING) if isinstance(value, dict) else getattr(value, part, MISSING)
    return value


def look_up(source: object, *names: str) -> Any:
    """The first of these dotted attributes that is there and not ``None``; mappings count as objects."""
    found = (_resolve(source, name) for name in names)
    return next((value for value in found if value is not None and value is not MISSING), None)


def _declared(source: object, setting: Setting) -> Any:
    value = look_up(source, *setting.names)
    if value is not None:
        return setting.convert(value)
    there = any(_resolve(source, name) is not MISSING for name in setting.names)
    return setting.off if there else None


def read(source: object, settings: Iterable[Setting]) -> dict[str, Any]:
    """What the settings declare, by field; what is not declared is left out."""
    found = {setting.field: _declared(source, setting) for setting in settings}
    return {field: value for field, value in found.items() if value is not None}


def switch(value: object) -> bool:
    """Whether a setting that may hold a value of its own is on: a ramp-up schedule, a number format."""
    return bool(value)


def positive(value: int) -> int | None:
    """A size, where 0 and below say "not set"."""
    return value if value > 0 else None


def names_of(value: object) -> tuple[str, ...]:
    """The names in a setting that holds one or several strings or enum members."""
    members = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return tuple(str(getattr(member, "name", member)) for member in members if member is not None)
