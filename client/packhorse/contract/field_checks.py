"""Checks of the values that a declaration is made of; an error names field, value and rule."""

from __future__ import annotations

from enum import StrEnum

from packhorse.errors import ConfigError

__all__ = ["as_member", "require_type", "require_types"]

WORDS: dict[type, str] = {int: "an integer", bool: "true or false", str: "text"}


def as_member(enum: type[StrEnum], field: str, value: object) -> StrEnum:
    """Return the member of an enum that a value names; raise ``ConfigError`` where it names none."""
    if not isinstance(value, str) or value not in list(enum):
        raise ConfigError(f"{field}={value!r} must be one of {', '.join(enum)}")
    return enum(value)


def require_type(kind: type, field: str, value: object) -> None:
    """Raise ``ConfigError`` for a value of another type than this very one: true is no integer."""
    if type(value) is not kind:
        raise ConfigError(f"{field}={value!r} must be {WORDS[kind]}")


def require_types(kind: type, field: str, value: object) -> None:
    """Raise ``ConfigError`` for what is no tuple of values of this type."""
    if type(value) is not tuple or any(type(item) is not kind for item in value):
        raise ConfigError(f"{field}={value!r} must be a tuple, of which each is {WORDS[kind]}")
