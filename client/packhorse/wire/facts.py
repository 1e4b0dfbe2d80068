"""Facts of a trainer on the wire: an open map, so that a server serves clients that know more facts than it does.

A fact that was not declared is left out. One that this side does not know, by name or by value, is kept as it came
and never checked: who reads it is told so (``KNOWN_FACTS``). All of it is untrusted, and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any, NamedTuple, get_args, get_type_hints

from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ProtocolError
from packhorse.schema import INTEGER_LIMIT, decoder_for
from packhorse.wire.limits import NAME_LIMIT, require

__all__ = ["DeclaredFacts", "FactValue", "UnknownFact", "declared_facts", "read_facts"]

UNKNOWN_FACTS_LIMIT = 64
TEXT_LIMIT = 256  # characters of a text, and entries of an array

Scalar = str | int | float | bool
FactValue = Scalar | tuple[Scalar, ...]


class UnknownFact(NamedTuple):
    """A fact that a trainer declares and this side has no rule for."""

    name: str
    value: FactValue


class DeclaredFacts(NamedTuple):
    """Declaration of a trainer: nothing, or values of the facts that this side knows; and those that it does not."""

    known: Mapping[str, Any] | None  # fields of ``TrainerFacts``
    unknown: tuple[UnknownFact, ...]


HINTS = get_type_hints(TrainerFacts)
DECODERS = {name: decoder_for(hint) for name, hint in HINTS.items()}
# The values that this side knows of a fact, where it is one of a few.
MEMBERS: dict[str, frozenset[str]] = {
    name: frozenset(kind)
    for name, hint in HINTS.items()
    for kind in get_args(hint)
    if isinstance(kind, type) and issubclass(kind, StrEnum)
}


def declared_facts(known: TrainerFacts | None, unknown: Iterable[UnknownFact]) -> dict[str, object] | None:
    """Return the map of what is declared, as it goes on the wire; ``None`` where there is no trainer."""
    if known is None:
        return None
    values = {f.name: getattr(known, f.name) for f in fields(known)}
    return {name: value for name, value in values.items() if value is not None} | dict(unknown)


def read_facts(value: object, where: str) -> DeclaredFacts:
    """Read a map of facts. Raise ``ProtocolError`` where one has another type than this side knows, or is too large."""
    if value is None:
        return DeclaredFacts(None, ())
    if not isinstance(value, dict):
        raise ProtocolError(f"{where} must be a map of facts, got {type(value).__name__}")
    declared = {_name(name, where): fact for name, fact in value.items() if fact is not None}
    unknown = {name: fact for name, fact in declared.items() if not _knows(name, fact)}
    require(len(unknown) <= UNKNOWN_FACTS_LIMIT, f"{where} has {len(unknown)} facts that are not known here")
    known = {name: DECODERS[name](fact, f"{where}.{name}") for name, fact in declared.items() if name not in unknown}
    kept = (UnknownFact(name, _value(fact, f"{where}.{name}")) for name, fact in sorted(unknown.items()))
    return DeclaredFacts(known, tuple(kept))


def _knows(name: str, fact: object) -> bool:
    return name in DECODERS and (name not in MEMBERS or type(fact) is not str or fact in MEMBERS[name])


def _name(name: object, where: str) -> str:
    if type(name) is not str or len(name) > NAME_LIMIT or not (name.isascii() and name.isidentifier()):
        raise ProtocolError(f"{where} has a fact whose name is none: {str(name)[:NAME_LIMIT]!r}")
    return name


def _value(value: object, where: str) -> FactValue:
    if type(value) is list and len(value) <= TEXT_LIMIT:
        return tuple(_scalar(item, where) for item in value)
    return _scalar(value, where)


def _scalar(value: object, where: str) -> Scalar:
    match value:
        case bool():
            return value
        case str() if len(value) <= TEXT_LIMIT:
            return value
        case int() if -INTEGER_LIMIT < value < INTEGER_LIMIT:
            return value
        case float() if math.isfinite(value):
            return value
    raise ProtocolError(
        f"{where} must be a text, a number, true or false, or an array of these; got {str(value)[:80]!r}"
    )
