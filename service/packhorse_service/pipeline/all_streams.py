"""All streams of a configuration: ``train``, and the further ones that it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from packhorse.errors import PackhorseError
from packhorse_service.config.serve_config import TRAIN, ServeConfig
from packhorse_service.pipeline.plan import StreamPlan, plan_stream

__all__ = ["each_stream", "plan_streams"]

Found = TypeVar("Found")

FIELD = re.compile(r"(contract|layout|mixing|packing|sources)\.")


def plan_streams(config: ServeConfig, base: Path) -> list[StreamPlan]:
    """Plan every stream, ``train`` first. Raises as ``plan_stream`` does, and names the stream."""
    return list(each_stream(config, lambda name: plan_stream(config, base, name)).values())


def each_stream(config: ServeConfig, find: Callable[[str], Found]) -> dict[str, Found]:
    """Return what ``find`` gives for each stream by its name; its errors say which stream they are of."""
    return {name: _naming(name, find) for name in (TRAIN, *config.streams)}


def _naming(name: str, find: Callable[[str], Found]) -> Found:
    try:
        return find(name)
    except PackhorseError as error:
        if name == TRAIN:
            raise
        joint = "." if FIELD.match(str(error)) else ": "
        raise type(error)(f"streams.{name}{joint}{error}") from error
