"""The configuration file: one YAML file, checked as a whole, with errors that name the field.

Paths in it are relative to the file. Every field that has a default can be left out. The top level describes
the stream ``train``; ``streams`` adds further ones by name, for evaluations.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from packhorse.contract import BatchContract, Remainder
from packhorse.errors import ConfigError
from packhorse.layout import ParallelLayout
from packhorse.wire import NAME_LIMIT
from packhorse_service.cutting import OverLength
from packhorse_service.decoding import BLOCK_BYTES
from packhorse_service.identity import CHANGES
from packhorse_service.mixing import MixBy, OnEnd
from packhorse_service.monitoring.address import AUTO, address_of
from packhorse_service.packing import PackingAlgorithm
from packhorse_service.sources.formats import SampleFormat

__all__ = [
    "CurveConfig",
    "LayoutSection",
    "LoadingConfig",
    "MixingConfig",
    "PackingConfig",
    "ResumeConfig",
    "Section",
    "ServeConfig",
    "SourceConfig",
    "StreamConfig",
    "TokenizerConfig",
    "checked",
    "load_config",
    "load_mapping",
]

ENDLESS = "endless"
TRAIN = "train"  # the stream that the top level describes

Checked = TypeVar("Checked", bound=BaseModel)


def _epochs(value: object) -> int | str:
    if value == ENDLESS:
        return ENDLESS
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be an integer of at least 1, or {ENDLESS!r}")


def _date(value: object) -> object:
    """YAML reads an unquoted date as one."""
    return value.isoformat() if isinstance(value, datetime.date) else value


def _change(value: str) -> str:
    part, _, digest = value.partition("@")
    if part not in CHANGES or not re.fullmatch("[0-9a-f]{16}", digest):
        raise ValueError(f"must be PART@DIGEST as a refusal names it, PART one of {', '.join(sorted(CHANGES))}")
    return value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TokenizerConfig(Section):
    """A ``tokenizers`` JSON file and its special tokens."""

    file: str
    eos_token: str | None = None  # appended to each text document
    bos_token: str | None = None
    vocab_size: int | None = Field(default=None, ge=1)  # of the model, where it is padded


class SourceConfig(Section):
    """One source of samples."""

    shards: Annotated[tuple[str, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)  # share of the mixture, relative to the others'
    epochs: Annotated[int | str, PlainValidator(_epochs)] = 1
    format: SampleFormat = SampleFormat.AUTO
    chat_template: str | None = None  # a jinja file; left out: ChatML
    over_length: OverLength = OverLength.ERROR
    shuffle: bool = True
    open_shards: int = Field(default=4, ge=1, le=1024)  # read in turn, a sample of each
    skip_budget: int = Field(default=0, ge=0)  # samples whose content may be unusable


class MixingConfig(Section):
    """How sources are mixed by their weights."""

    by: MixBy = MixBy.TOKENS
    on_end: OnEnd = OnEnd.GO_ON  # when one of several sources has given all its epochs


class LoadingConfig(Section):
    """Who reads and tokenises."""

    workers: int = Field(default=2, ge=0, le=256)  # processes; 0 loads in the server itself
    block_bytes: int = Field(default=BLOCK_BYTES, ge=1)  # of a shard, read at a time


class PackingConfig(Section):
    """How packs are filled."""

    algorithm: PackingAlgorithm = PackingAlgorithm.FIFO_EXACT_TAIL
    lookahead: int | None = Field(default=None, ge=1, le=4096)  # packs' worth; left out: min(64, packs per step)
    tail_slots: int = Field(default=0, ge=0)  # kept free behind the last sample of each row
    window: int = Field(default=1, ge=1, le=64)  # steps whose packs are dealt together, to even their cost
    hidden_size: int = Field(default=4096, ge=1)  # of the model: weighs length against length² in balancing


class CurveConfig(Section):
    """Keys (``packhorse keygen``): everything is encrypted, and only who is on the list can connect."""

    key_file: str  # the server's; its owner alone may read it
    clients: str  # who may connect, as which ranks; no secrets


class ResumeConfig(Section):
    """How to go on from a checkpoint."""

    # Changes of data or rendering to go on with, each as the refusal names it: PART@DIGEST of what it was before.
    allow_changes: tuple[Annotated[str, AfterValidator(_change)], ...] = ()


def _section(name: str, described_by: type) -> type[Section]:
    """A section with exactly the fields of a dataclass of the client."""
    hints = get_type_hints(described_by)
    columns: dict[str, Any] = {f.name: (hints[f.name], f.default) for f in fields(described_by)}

    def build(section: Section) -> Section:
        described_by(**section.model_dump())  # it checks its values itself
        return section

    checks: dict[str, Any] = {"build": model_validator(mode="after")(build)}
    made: type[Section] = create_model(name, __base__=Section, __validators__=checks, **columns)
    return made


LayoutSection = _section("LayoutSection", ParallelLayout)
ContractSection = _section("ContractSection", BatchContract)


class StreamConfig(Section):
    """A further stream: read in passes, each over all of its data.

    What ``contract``, ``layout`` and ``packing`` leave out is that of the top level.
    """

    layout_section: LayoutSection = Field(default_factory=LayoutSection, alias="layout")  # type: ignore[valid-type]
    contract_section: ContractSection = Field(default_factory=ContractSection, alias="contract")  # type: ignore[valid-type]
    sources: dict[str, SourceConfig] = Field(min_length=1)
    mixing: MixingConfig = MixingConfig()
    packing: PackingConfig = PackingConfig()

    @field_validator("sources")
    @classmethod
    def _finite(cls, sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        for name, source in sources.items():
            if source.epochs == ENDLESS:
                raise ConfigError(f"sources.{name}.epochs={ENDLESS!r} must be a number: a pass over the data ends")
        return sources

    @field_validator("mixing")
    @classmethod
    def _to_its_end(cls, mixing: MixingConfig) -> MixingConfig:
        if mixing.on_end is not OnEnd.GO_ON:
            raise ConfigError(f"mixing.on_end={str(mixing.on_end)!r} must be 'go_on': a pass is over all the data")
        return mixing

    @field_validator("contract_section")
    @classmethod
    def _in_full(cls, contract: Section) -> Section:
        if getattr(contract, "remainder", None) is Remainder.DROP:
            raise ConfigError("contract.remainder='drop' must be 'pad': a pass is over all the data")
        return contract


class ServeConfig(Section):
    """The whole file."""

    listen: str = "tcp://127.0.0.1:5555"  # elsewhere than on loopback or ipc only with curve, or serve --insecure
    curve: CurveConfig | None = None
    # HOST:PORT of the status page, the metrics and the probes; auto: on loopback, at 9555 beside 5555; null: nowhere.
    monitor: str | None = AUTO
    seed: int = Field(default=0, ge=0)
    date: Annotated[str | None, BeforeValidator(_date)] = Field(
        default=None, pattern=r"^\d{4}-\d{2}-\d{2}$"
    )  # what chat templates get for "today"
    tokenizer: Annotated[
        TokenizerConfig | None, BeforeValidator(lambda v: {"file": v} if isinstance(v, str) else v)
    ] = None
    layout_section: LayoutSection = Field(default_factory=LayoutSection, alias="layout")  # type: ignore[valid-type]
    contract_section: ContractSection = Field(default_factory=ContractSection, alias="contract")  # type: ignore[valid-type]
    sources: dict[str, SourceConfig] = Field(min_length=1)
    mixing: MixingConfig = MixingConfig()
    loading: LoadingConfig = LoadingConfig()
    packing: PackingConfig = PackingConfig()
    streams: dict[str, StreamConfig] = {}  # further ones
    resume: ResumeConfig = ResumeConfig()
    steps_ahead: int = Field(default=2, ge=2, le=64)  # whole steps made before the slowest reader needs them
    memory_limit: ByteSize | None = Field(default=None, gt=0)  # 8GiB, 500MB, or bytes; what may be more is refused
    # A reader that nothing was heard from for so long is looked for where the endpoint's name points by then.
    rejoin_after_s: float = Field(default=60.0, ge=2, allow_inf_nan=False)
    keys: bool = False  # send each segment's (source, shard, key)

    @field_validator("monitor")
    @classmethod
    def _address(cls, monitor: str | None) -> str | None:
        address_of(monitor, "")
        return monitor

    @field_validator("streams")
    @classmethod
    def _named(cls, streams: dict[str, StreamConfig]) -> dict[str, StreamConfig]:
        for name in streams:
            if name == TRAIN:
                raise ConfigError(f"streams.{name}: the top level describes the stream {name!r}; give it another name")
            if not 0 < len(name) <= NAME_LIMIT:
                raise ConfigError(f"streams.{name}: a stream's name must have 1 … {NAME_LIMIT} characters")
        return streams

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(**self.layout_section.model_dump())  # type: ignore[attr-defined]

    @property
    def contract(self) -> BatchContract:
        return BatchContract(**self.contract_section.model_dump())  # type: ignore[attr-defined]

    def of_stream(self, name: str) -> ServeConfig:
        """The configuration of one stream, as if it was the only one."""
        if name == TRAIN:
            return self
        own = self.streams[name]
        inherited = ("layout_section", "contract_section", "packing")
        merged = {section: _over(getattr(self, section), getattr(own, section)) for section in inherited}
        # What is left over at the end of a pass is never dropped, whatever training does.
        merged["contract_section"] = merged["contract_section"].model_copy(update={"remainder": None})
        return self.model_copy(update={**merged, "sources": own.sources, "mixing": own.mixing, "streams": {}})


def _over(top: Section, own: Section) -> Section:
    """What is set in ``own``, and of the top level where it is not."""
    return top.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def load_config(path: Path) -> ServeConfig:
    """Read and check a configuration file.

    Raises ``ConfigError`` that lists everything wrong with it.
    """
    return checked(ServeConfig, load_mapping(path, "configuration", "must be a mapping with at least 'sources'"), path)


def load_mapping(path: Path, what: str, rule: str = "must be a mapping of fields") -> dict[str, Any]:
    """The mapping that a YAML file holds, unchecked; ``what`` the file is. Raises ``ConfigError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error}") from error
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that no calendar has is a ValueError
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: {rule}")
    return raw


def checked(model: type[Checked], raw: Mapping[str, Any], origin: object) -> Checked:
    """``raw`` as a ``model``. Raises ``ConfigError`` that says of ``origin`` everything that is wrong."""
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
    """Names of the fields of the section that ``path`` leads to."""
    parts = iter(path)
    for part in parts:
        found = {(f.alias or name): f.annotation for name, f in model.model_fields.items()}
        inner = NAMED.get(part) or _section_in(found.get(part)) if part in found else None
        model = inner or model
        if part in NAMED:
            next(parts, None)  # a name that the file chose
    return [f.alias or name for name, f in model.model_fields.items()]


def _section_in(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, or may hold."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


NAMED: dict[str, type[BaseModel]] = {"sources": SourceConfig, "streams": StreamConfig}  # by names of the file's choice
