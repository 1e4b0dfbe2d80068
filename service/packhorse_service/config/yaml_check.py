"""YAML files checked against models, with errors that name the field, its value and the nearest name there is."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from packhorse.errors import ConfigError
from packhorse_service.config.strict_yaml import read_yaml

__all__ = ["checked", "load_mapping", "section_in"]

Checked = TypeVar("Checked", bound=BaseModel)


def load_mapping(path: Path, what: str, rule: str = "must be a mapping of fields") -> dict[str, Any]:
    """Return the mapping that a YAML file holds, unchecked; ``what`` the file is. Raises ``ConfigError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error
    try:
        raw = read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that no calendar has is a ValueError
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: {rule}")
    if unending := [f"  {where}={value}: must be a finite number" for where, value in _not_finite(raw, "")]:
        raise ConfigError("\n".join([f"{path}:", *unending]))
    return raw


def _not_finite(value: object, where: str) -> Iterator[tuple[str, float]]:
    """Yield the place and the value of each number that is none, or is infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield where, value
    parts = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for name, part in parts:
        yield from _not_finite(part, f"{where}.{name}".removeprefix("."))


def checked(model: type[Checked], raw: Mapping[str, Any], origin: object) -> Checked:
    """Return ``raw`` as a ``model``. Raises ``ConfigError`` that says of ``origin`` everything that is wrong."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = "\n".join(f"  {_explain(details, model)}" for details in error.errors())
        raise ConfigError(f"{origin}:\n{lines}") from error


def _explain(details: ErrorDetails, model: type[BaseModel]) -> str:
    path = [str(part) for part in details["loc"] if not str(part).startswith("function-")]
    where = ".".join(path)
    if details["type"] == "extra_forbidden":
        known = _known_fields(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{where}: unknown field; {hint}"
    if details["type"] == "missing":
        return f"{where}: is required"
    reason = details.get("ctx", {}).get("error")
    if isinstance(reason, ConfigError):
        return ".".join([*path[:-1], str(reason)])  # it begins with the section that it was raised for
    return f"{where}={details['input']!r}: {details['msg'][0].lower()}{details['msg'][1:]}"


def _known_fields(model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the names of the fields of the section that ``path`` leads to."""
    parts = iter(path)
    for part in parts:
        annotation = {(f.alias or name): f.annotation for name, f in model.model_fields.items()}.get(part)
        model = section_in(annotation) or model
        if get_origin(annotation) is dict:
            next(parts, None)  # a name that the file chose
    return [f.alias or name for name, f in model.model_fields.items()]


def section_in(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field holds, or may hold, or holds by names of the file's choice."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
