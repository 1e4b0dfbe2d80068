"""The reference of the configuration file, from the models that check it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import StrEnum
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from packhorse.contract.batch_contract import SIZES, BatchContract, resolve
from packhorse.contract.documented import description_of
from packhorse.contract.layout import AXES, ParallelLayout
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse_service.config.sections import ContractSection, LayoutSection, Section
from packhorse_service.config.serve_config import (
    CurveConfig,
    LoadingConfig,
    MixingConfig,
    PackingConfig,
    ResumeConfig,
    ServeConfig,
    SourceConfig,
    StreamConfig,
    TokenizerConfig,
)
from packhorse_service.config.yaml_check import section_in
from packhorse_service.text.formatting import human_bytes
from tools.docs.markdown import code, either, table

__all__ = ["settings", "trainer_facts"]

HEAD = ("field", "type", "default", "meaning")
REQUIRED = "required"
AT_LEAST_ONE = " (≥ 1)"


class Described(NamedTuple):
    """A section and its place in the page; without a ``text`` of its own it has the model's."""

    heading: str
    model: type[Section]
    text: str = ""


SECTIONS = (
    Described("The top level", ServeConfig, "It describes the stream `train`."),
    Described("tokenizer", TokenizerConfig),
    Described("layout", LayoutSection, "The degrees of parallelism of the job; their product is its world size."),
    Described("contract", ContractSection, "What both sides must agree on. Lengths and multiples count slots."),
    Described("sources", SourceConfig),
    Described("mixing", MixingConfig),
    Described("loading", LoadingConfig),
    Described("packing", PackingConfig),
    Described("streams", StreamConfig),
    Described("curve", CurveConfig),
    Described("resume", ResumeConfig),
)
BY_NAME = {SourceConfig, StreamConfig}  # sections of which the file has several
# What a contract that leaves a field out gets, where it depends on more than that field.
DERIVED = {
    "seq_length": REQUIRED,
    "global_batch_size": REQUIRED,
    "vocab_size": "the tokenizer's, else required",
    "evaluation_context": "`layout.context`",
    "segment_multiple": "lcm(2·CP, CP·TP under sequence parallelism); CP for `contiguous`",
    "pack_multiple": "CP·TP under sequence parallelism, else 1",
    "pad_to_max_length": "true, but in `in_batch`",
    "pad_cu_seqlens": "`static_shapes`",
    "trainer": "nothing",
}
LENGTHS = {"seq_length": 512, "global_batch_size": 1, "vocab_size": 2}
RESOLVED = resolve(BatchContract(), ParallelLayout(), **LENGTHS)


def settings() -> str:
    """All sections."""
    return "\n".join(map(_section, SECTIONS))


def trainer_facts() -> str:
    """Return the fields of ``TrainerFacts``; each may be left out."""
    hints = get_type_hints(TrainerFacts)
    rows = ([code(f.name), _kind(hints[f.name]), description_of(f)] for f in fields(TrainerFacts))
    return table(("field", "type", "meaning"), rows)


def _section(described: Described) -> str:
    text = described.text or (inspect.getdoc(described.model) or "").replace("``", "`")
    by_name = " Each has a name of your choice." if described.model in BY_NAME else ""
    rows = (_row(described.model, name, info) for name, info in described.model.model_fields.items())
    return f"### {described.heading}\n\n{text}{by_name}\n\n{table(HEAD, rows)}"


def _row(model: type[Section], name: str, info: FieldInfo) -> list[str]:
    return [code(info.alias or name), _type(model, name, info), _default(model, name, info), info.description or ""]


def _type(model: type[Section], name: str, info: FieldInfo) -> str:
    inner = section_in(info.annotation)
    if inner is not None:
        heading = next(described.heading for described in SECTIONS if described.model is inner)
        return f"[{heading}](#{heading})" + (", by name" if inner in BY_NAME else "")
    if name == "trainer":
        return "[trainer](#trainer)"
    return _kind(info.annotation) + (_limits(info) or AT_LEAST_ONE * (name in CHECKED_BY_THEMSELVES.get(model, ())))


CHECKED_BY_THEMSELVES: dict[type[Section], tuple[str, ...]] = {ContractSection: SIZES, LayoutSection: AXES}

PLAIN: dict[object, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    ByteSize: "bytes, or as in `8GiB`",
}


def _kind(annotation: Any) -> str:
    """Tell a type in words; what may be left out is told by the default."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    if get_origin(annotation) in (Union, UnionType):
        return either([_kind(kind) for kind in get_args(annotation) if kind is not NoneType])
    if get_origin(annotation) is Literal:
        return either(list(map(code, get_args(annotation))))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return either(list(map(code, annotation)))
    return _kind(get_args(annotation)[0])  # Annotated


LIMITS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (Ge, lambda limit: f"≥ {limit.ge:,}"),
    (Gt, lambda limit: f"> {limit.gt:,}"),
    (Le, lambda limit: f"≤ {limit.le:,}"),
    (MinLen, lambda limit: f"at least {limit.min_length}"),
)


def _limits(info: FieldInfo) -> str:
    found = chain.from_iterable(_said(limit) for limit in info.metadata)
    text = ", ".join(found)
    return f" ({text})" if text else ""


def _said(limit: object) -> Iterator[str]:
    return (say(limit) for kind, say in LIMITS if isinstance(limit, kind))


def _default(model: type[Section], name: str, info: FieldInfo) -> str:
    if model is ContractSection:
        return DERIVED.get(name) or _value(getattr(RESOLVED, name))
    if info.is_required():
        return REQUIRED
    value = info.get_default(call_default_factory=True)
    if info.annotation is int and name.endswith("_bytes"):
        return human_bytes(value)
    return "" if isinstance(value, BaseModel) else _value(value)


def _value(value: object) -> str:
    """As it would stand in the file."""
    if value is None or value in ({}, ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return code(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
