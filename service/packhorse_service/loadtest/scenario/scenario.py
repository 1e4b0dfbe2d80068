"""What a load test is: a scenario, from a YAML file, from options of the command line, or both; options win.

    layout: {data: 64, tensor: 4}
    consume_ms: 250
    slow_ranks: 10%
    seconds: 60
    require: [wait_p99_ms < 20, fairness >= 0.95]

Every field may be left out. ``feed`` and ``key_file`` are relative to the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError
from packhorse.wire.messages import DEFAULT_WINDOW
from packhorse_service.config.layout_text import layout_of
from packhorse_service.config.sections import LayoutSection, Section
from packhorse_service.config.yaml_check import checked, load_mapping
from packhorse_service.loadtest.scenario.thresholds import Threshold, parse_threshold

__all__ = ["MOST_RANKS", "Scenario", "Share", "SyntheticConfig", "Transport", "load_scenario"]

MOST_RANKS = 1024
RANKS = 8  # where nothing says how many
COMMAND_LINE = "command line"
PATHS = ("feed", "key_file")  # relative to the file that names them


class Transport(StrEnum):
    TCP = "tcp"
    IPC = "ipc"


@dataclass(frozen=True, slots=True)
class Share:
    """So many ranks, or so large a part of them."""

    count: int = 0
    part: float = 0.0

    def of(self, ranks: int) -> int:
        """Return how many of ``ranks`` the share is; a part that is not nothing is one at least."""
        return min(self.count or math.ceil(self.part * ranks), ranks)


def _share(value: object) -> Share:
    text = str(value).strip()
    number = text.removesuffix("%").strip()
    if text.endswith("%") and number.replace(".", "", 1).isdecimal() and float(number) <= 100:
        return Share(part=float(number) / 100)
    if text.isdecimal() and not isinstance(value, bool):
        return Share(count=int(text))
    raise ValueError("must be a number of ranks, or a share of them as in 10%")


def _layout(value: object) -> object:
    """``data=64,tensor=4`` means the same as a mapping."""
    if not isinstance(value, str):
        return value
    layout = layout_of(value)
    return {"data": layout.data, "context": layout.context, "tensor": layout.tensor, "pipeline": layout.pipeline}


def _thresholds(value: object) -> tuple[Threshold, ...]:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list | tuple):
        raise ValueError("must be a list of thresholds, each as in 'wait_p99_ms < 20'")
    return tuple(parse_threshold(str(line)) for line in lines)


class SyntheticConfig(Section):
    """Data made for the test, where no feed is named. Lengths count slots."""

    seq_length: int = Field(default=8192, ge=8)
    mean_length: int = Field(default=500, ge=2)  # of a sample
    vocab_size: int = Field(default=32_000, ge=2)
    micro_batches: int = Field(default=4, ge=1)  # of a rank in a step


class Scenario(Section):
    """The whole test. Field for field what the options of ``packhorse loadtest`` say."""

    feed: Path | None = None  # of the user; left out: synthetic data
    endpoint: str | None = None  # of a server that runs already; left out: one is started
    ranks: int | None = Field(default=None, ge=1, le=MOST_RANKS)  # data-parallel ones
    layout_section: Annotated[LayoutSection | None, BeforeValidator(_layout)] = Field(default=None, alias="layout")
    synthetic: SyntheticConfig | None = None
    transport: Transport = Transport.TCP
    curve: bool = False  # encrypt: a server of our own on synthetic data gets keys made for the test
    key_file: Path | None = None  # of the ranks, for a feed or a server that has keys
    consume_ms: float = Field(default=20.0, ge=0, allow_inf_nan=False)  # think time per micro-batch
    jitter: float = Field(default=0.2, ge=0, le=1)  # share of it, at most, that one is shorter or longer
    slow_ranks: Annotated[Share, BeforeValidator(_share)] = Share()
    slow_factor: float = Field(default=2.0, ge=1, allow_inf_nan=False)  # times the think time of the others
    stopped_ranks: int = Field(default=0, ge=0)  # take nothing for a while, from half-way on
    seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)  # measured, behind the start
    start_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    processes: int | None = Field(default=None, ge=1, le=256)  # left out: one a core
    window: int = Field(default=DEFAULT_WINDOW, ge=2, le=1024)  # micro-batches the server may send ahead of a rank
    verify: bool = True  # compute the digest of each whole row again
    seed: int = Field(default=0, ge=0)
    require: Annotated[tuple[Threshold, ...], BeforeValidator(_thresholds)] = ()

    @property
    def layout(self) -> ParallelLayout | None:
        """Layout as given; ``None`` where the feed decides."""
        if self.layout_section is not None:
            return self.layout_section.layout()
        if self.ranks is not None:
            return ParallelLayout(data=self.ranks)
        return None if self.feed is not None else ParallelLayout(data=RANKS)

    @model_validator(mode="after")
    def _said_once(self) -> Scenario:
        own = [name for name, given in (("ranks", self.ranks), ("layout", self.layout_section)) if given is not None]
        if len(own) > 1:
            raise ConfigError(f"ranks={self.ranks!r} and layout are given; give one of them")
        if own and self.feed is not None:
            raise ConfigError(f"{own[0]}: {str(self.feed)!r} has the layout; change it there, or leave the feed out")
        if self.synthetic is not None and (self.feed is not None or self.endpoint is not None):
            other = "feed" if self.feed is not None else "endpoint"
            raise ConfigError(f"synthetic: the data are those of {other}; give one of them")
        if self.endpoint is not None and "transport" in self.model_fields_set:
            raise ConfigError(f"transport={str(self.transport)!r}: endpoint={self.endpoint!r} says it; leave it out")
        if self.curve and (self.feed is not None or self.endpoint is not None):
            other = "feed" if self.feed is not None else "endpoint"
            raise ConfigError(f"curve=True: keys are made for synthetic data; those of {other} come with key_file")
        if self.key_file is not None and self.feed is None and self.endpoint is None:
            raise ConfigError(f"key_file={str(self.key_file)!r}: synthetic data have no keys but those of curve")
        if self.layout is not None and self.layout.world_size > MOST_RANKS:
            raise ConfigError(
                f"layout={self.layout}: has {self.layout.world_size:,} ranks, must have at most {MOST_RANKS:,}"
            )
        return self


def load_scenario(file: Path | None, options: Mapping[str, Any]) -> Scenario:
    """Load the scenario of a file, with ``options`` over it; either may be missing.

    Raises ``ConfigError`` that lists everything wrong.
    """
    raw: dict[str, Any] = {} if file is None else dict(load_mapping(file, "scenario"))
    for name in PATHS:
        if file is not None and isinstance(raw.get(name), str):
            raw[name] = str(file.parent / raw[name])
    if {"ranks", "layout"} & options.keys():  # whichever the file has, the command line says it otherwise
        raw = {name: value for name, value in raw.items() if name not in ("ranks", "layout")}
    synthetic = {**(raw.get("synthetic") or {}), **options.get("synthetic", {})}
    merged = {**raw, **options, **({"synthetic": synthetic} if synthetic else {})}
    return checked(Scenario, merged, str(file) if file is not None else COMMAND_LINE)
