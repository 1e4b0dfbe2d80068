"""Read a stream as one of its ranks and say what arrived: one JSON object a line, for people and scripts.

Everything but ``row_digest`` is computed from what was delivered, so that whoever doubts the server, the wire
or the client can compare two runs, or ranks, or a run and the shards, from outside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packhorse import ConfigError, Feed, MicroBatch
from packhorse_service.row_digests import local_digest, verify_row_digest

__all__ = ["TapSettings", "load_state", "tap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TapSettings:
    """Settings of a tap: what to print, where to keep the state, when to stop."""

    steps: int | None = None  # whole steps to take; None = to the end
    delay_s: float = 0.0  # behind each micro-batch, as a training step would take
    state_out: Path | None = None
    keys: bool = False
    pairs: bool = False
    verify: bool = True


def tap(feed: Feed, settings: TapSettings, write: Callable[[str], None]) -> None:
    """Take micro-batches to the end, or so many steps; ``write`` gets a line for each, then the state is saved.

    A line is written before the state that counts it: whoever is killed between the two repeats lines in the
    next attempt, and never misses one.

    Raises ``ProtocolError`` where a whole row does not have its digest, and what the feed raises.
    """
    taken = 0
    while taken != settings.steps and (micro_batch := next(feed, None)) is not None:
        if settings.verify:
            verify_row_digest(micro_batch)
        write(json.dumps(dict(_line(feed, micro_batch, settings))))
        if micro_batch.index == micro_batch.num_microbatches - 1:
            taken += 1
            _save(feed, settings.state_out)
        if settings.delay_s:
            time.sleep(settings.delay_s)
    _save(feed, settings.state_out)


def _line(feed: Feed, mb: MicroBatch, settings: TapSettings) -> Iterator[tuple[str, Any]]:
    yield from (("attempt", feed.attempt), ("step", mb.step), ("index", mb.index))
    yield from (("num_microbatches", mb.num_microbatches), ("filler", mb.filler))
    yield from (("tokens", mb.num_tokens), ("loss_tokens", mb.num_loss_tokens))
    yield from (("local_loss_tokens", mb.local_loss_tokens), ("step_tokens", mb.step_tokens))
    yield ("step_loss_tokens", mb.step_loss_tokens)
    yield ("row_digest", mb.row_digest.hex())
    yield ("local_digest", local_digest(mb).hex())
    if settings.keys:
        yield ("keys", [list(key) for key in mb.keys])
    if settings.pairs:
        yield ("pairs", _pairs(mb))


def _pairs(micro_batch: MicroBatch) -> list[list[int]]:
    """(input, target) of each slot that has a target; none on a stage that gets only one of the two."""
    if micro_batch.tokens is None or micro_batch.labels is None:
        return []
    real = micro_batch.labels != micro_batch.ignore_index
    pairs: list[list[int]] = np.stack([micro_batch.tokens[real], micro_batch.labels[real]], axis=-1).tolist()
    return pairs


# Files and arguments ---------------------------------------------------------------------------------


def _save(feed: Feed, path: Path | None) -> None:
    """Save the state in one step: whoever reads the file finds the state before or the one after, whole."""
    if path is not None:
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(feed.state_dict()) + "\n", encoding="utf-8")
        part.replace(path)


def load_state(path: Path) -> dict[str, object]:
    """Load a state that ``tap`` or a trainer saved as JSON. Raises ``ConfigError``."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume={str(path)!r} cannot be read: {error}; name a file of --state-out") from error
    if not isinstance(state, dict):
        raise ConfigError(f"--resume={str(path)!r} holds {type(state).__name__}, must be a state of --state-out")
    return state
