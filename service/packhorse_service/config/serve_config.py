"""The configuration file: one YAML file, checked as a whole, with errors that name the field.

Paths in it are relative to the file. Every field that has a default can be left out. The top level describes
the stream ``train``; ``streams`` adds further ones by name, for evaluations.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    field_validator,
)

from packhorse.contract.batch_contract import BatchContract, Remainder
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError
from packhorse.wire.limits import NAME_LIMIT
from packhorse_service.config.addresses import AUTO, address_of
from packhorse_service.config.sections import ContractSection, LayoutSection, Section
from packhorse_service.config.yaml_check import checked, load_mapping
from packhorse_service.loading.decode import BLOCK_BYTES
from packhorse_service.mixing.order import MixBy, OnEnd
from packhorse_service.mixing.over_length import OverLength
from packhorse_service.mixing.unsupervised import Unsupervised
from packhorse_service.packing.packing_plan import PackingAlgorithm
from packhorse_service.snapshot.fingerprint import RESUMABLE_CHANGES
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
    "load_config",
]

ENDLESS = "endless"
TRAIN = "train"  # the stream that the top level describes


def _epochs(value: object) -> int | str:
    if value == ENDLESS:
        return ENDLESS
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be an integer of at least 1, or {ENDLESS!r}")


def _date(value: object) -> object:
    """Return a date as text: YAML reads an unquoted one as a date."""
    return value.isoformat() if isinstance(value, datetime.date) else value


def _change(value: str) -> str:
    part, _, digest = value.partition("@")
    if part not in RESUMABLE_CHANGES or not re.fullmatch("[0-9a-f]{16}", digest):
        raise ValueError(
            f"must be PART@DIGEST as a refusal names it, PART one of {', '.join(sorted(RESUMABLE_CHANGES))}"
        )
    return value


def _extension(value: str) -> str:
    extension = value.removeprefix(".").lower()
    if not extension or "/" in extension:
        raise ValueError("must be what follows the first dot of a file's name, as in jpg or mask.npy")
    return extension


class TokenizerConfig(Section):
    """A ``tokenizers`` JSON file and its special tokens."""

    file: str = Field(description="A tokenizer.json, or a model's folder: special tokens and template too.")
    eos_token: str | None = Field(default=None, description="Appended to each text document.")
    bos_token: str | None = Field(default=None, description="For chat templates that name it.")
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="Of the model, where it is larger than the tokenizer's largest id + 1; ids must be below.",
    )


class SourceConfig(Section):
    """Source of samples of a stream."""

    shards: Annotated[tuple[str, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)] = Field(
        description="A pattern or a list of them: braces, globs, any URL that fsspec reads."
    )
    weight: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Share of the mixture, relative to the others'."
    )
    epochs: Annotated[int | Literal["endless"], PlainValidator(_epochs)] = Field(
        default=1, description="Passes over the data."
    )
    format: SampleFormat = Field(
        default=SampleFormat.AUTO, description="What a sample holds; `auto` goes by its extension."
    )
    chat_template: str | None = Field(
        default=None,
        description="A jinja file; left out: the folder's, else ChatML. `{% generation %}` marks what is trained on.",
    )
    ignore_fields: tuple[str, ...] = Field(
        default=(),
        description="Fields of conversations, messages and calls to leave out; others that are not read are errors.",
    )
    ignore_members: tuple[Annotated[str, AfterValidator(_extension)], ...] = Field(
        default=(),
        description="Extensions of files in a shard to leave out (`jpg`); others that are not read are errors.",
    )
    over_length: OverLength = Field(default=OverLength.ERROR, description="What becomes of samples over seq_length.")
    unsupervised: Unsupervised = Field(
        default=Unsupervised.KEEP, description="What becomes of samples, cut or not, whose loss mask is all 0."
    )
    shuffle: bool = Field(default=True, description="Shards, and samples within them, in a seeded order.")
    open_shards: int = Field(default=4, ge=1, le=1024, description="Shards read in turn, a sample of each.")
    skip_budget: int = Field(
        default=0, ge=0, description="How many samples may have content that is unusable; one more is an error."
    )


class MixingConfig(Section):
    """Mixing of the sources by their weights."""

    by: MixBy = Field(default=MixBy.TOKENS, description="What weights are shares of: ids, or samples.")
    on_end: OnEnd = Field(
        default=OnEnd.GO_ON,
        description="When a source has given all its epochs: go on with the rest, or end the stream.",
    )


class LoadingConfig(Section):
    """Reading and tokenising of shards."""

    workers: int = Field(
        default=2,
        ge=0,
        le=256,
        description="Loader processes of each stream; 0 loads in the server itself, the cheapest for ids.",
    )
    block_bytes: int = Field(default=BLOCK_BYTES, ge=1, description="How much of a shard is read at a time.")


class PackingConfig(Section):
    """Filling of packs with samples."""

    algorithm: PackingAlgorithm = Field(
        default=PackingAlgorithm.FIFO_EXACT_TAIL, description="How packs are made of a lookahead (`online`)."
    )
    lookahead: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Packs' worth of samples to choose from; left out: min(64, packs of a step).",
    )
    tail_slots: int = Field(default=0, ge=0, description="Slots kept free behind the last sample of each row.")
    window: int = Field(
        default=1, ge=1, le=64, description="Steps whose packs are assigned to them together, to even their cost."
    )
    hidden_size: int = Field(default=4096, ge=1, description="Of the model: what long segments cost beside short ones.")


class CurveConfig(Section):
    """Keys (``packhorse keygen``): everything is encrypted, and only who is on the list can connect."""

    key_file: str = Field(description="The server's key; its owner alone may read it.")
    clients: str = Field(description="The clients file: who may connect, as which ranks. It holds no secret.")


class ResumeConfig(Section):
    """Going on from a checkpoint."""

    allow_changes: tuple[Annotated[str, AfterValidator(_change)], ...] = Field(
        default=(), description="Changes of data or rendering to go on with, each as the refusal names it: PART@DIGEST."
    )


class StreamConfig(Section):
    """A further stream: read in passes, each over all of its data.

    What ``contract``, ``layout`` and ``packing`` leave out is that of the top level.
    """

    layout_section: LayoutSection = Field(
        default_factory=LayoutSection, alias="layout", description="The parallel layout of the job."
    )
    contract_section: ContractSection = Field(
        default_factory=ContractSection, alias="contract", description="What both sides must agree on."
    )
    sources: dict[str, SourceConfig] = Field(min_length=1, description="The sources, by names of your choice.")
    mixing: MixingConfig = Field(default=MixingConfig(), description="How sources are mixed by their weights.")
    packing: PackingConfig = Field(default=PackingConfig(), description="How packs are filled.")

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
    def _in_full(cls, contract: ContractSection) -> ContractSection:
        if contract.contract().remainder is Remainder.DROP:
            raise ConfigError("contract.remainder='drop' must be 'pad': a pass is over all the data")
        return contract


class ServeConfig(Section):
    """Configuration of a server: the whole file."""

    listen: str = Field(
        default="tcp://127.0.0.1:5555",
        description="Where readers connect: tcp://ADDRESS:PORT or ipc://PATH. Elsewhere than on loopback or ipc only "
        "with curve, or `serve --insecure`.",
    )
    curve: CurveConfig | None = Field(
        default=None, description="Keys: everything is encrypted, and only listed clients connect."
    )
    monitor: str | None = Field(
        default=AUTO,
        description="HOST:PORT of the status page, the metrics and the probes; `auto`: on loopback, at the port of "
        "listen + 4000; null: nowhere.",
    )
    seed: int = Field(default=0, ge=0, description="Of the order of shards and samples.")
    date: Annotated[str | None, BeforeValidator(_date)] = Field(
        default=None, pattern=r"^\d{4}-\d{2}-\d{2}$", description="What chat templates get for today, as YYYY-MM-DD."
    )
    tokenizer: Annotated[
        TokenizerConfig | None, BeforeValidator(lambda v: {"file": v} if isinstance(v, str) else v)
    ] = Field(default=None, description="For text and chats; its file alone will do.")
    layout_section: LayoutSection = Field(
        default_factory=LayoutSection, alias="layout", description="The parallel layout of the job."
    )
    contract_section: ContractSection = Field(
        default_factory=ContractSection, alias="contract", description="What both sides must agree on."
    )
    sources: dict[str, SourceConfig] = Field(min_length=1, description="The sources, by names of your choice.")
    mixing: MixingConfig = Field(default=MixingConfig(), description="How sources are mixed by their weights.")
    loading: LoadingConfig = Field(default=LoadingConfig(), description="Who reads and tokenises.")
    packing: PackingConfig = Field(default=PackingConfig(), description="How packs are filled.")
    streams: dict[str, StreamConfig] = Field(
        default={}, description="Further streams, for evaluations, by names of your choice."
    )
    resume: ResumeConfig = Field(default=ResumeConfig(), description="How to go on from a checkpoint.")
    steps_ahead: int = Field(
        default=2, ge=2, le=64, description="Whole steps made before the slowest reader needs them."
    )
    memory_limit: ByteSize | None = Field(
        default=None, gt=0, description="`check` and `serve` refuse a configuration that may come to hold more."
    )
    rejoin_after_s: float = Field(
        default=60.0,
        ge=2,
        allow_inf_nan=False,
        description="After so many seconds of silence of a reader, the others look for the server anew, where the "
        "endpoint's name points by then.",
    )
    keys: bool = Field(default=False, description="Send (source, shard, key) of each segment, as `MicroBatch.keys`.")

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
        return self.layout_section.layout()

    @property
    def contract(self) -> BatchContract:
        return self.contract_section.contract()

    def of_stream(self, name: str) -> ServeConfig:
        """Return the configuration of one stream, as if it was the only one."""
        if name == TRAIN:
            return self
        own = self.streams[name]
        inherited = ("layout_section", "contract_section", "packing")
        merged = {section: _over(getattr(self, section), getattr(own, section)) for section in inherited}
        # What is left over at the end of a pass is never dropped, whatever training does.
        merged["contract_section"] = merged["contract_section"].model_copy(update={"remainder": None})
        return self.model_copy(update={**merged, "sources": own.sources, "mixing": own.mixing, "streams": {}})


def _over(top: Section, own: Section) -> Section:
    """Return what is set in ``own``, and of the top level where it is not."""
    return top.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def load_config(path: Path) -> ServeConfig:
    """Read and check a configuration file.

    Raises ``ConfigError`` that lists everything wrong with it.
    """
    return checked(ServeConfig, load_mapping(path, "configuration", "must be a mapping with at least 'sources'"), path)
