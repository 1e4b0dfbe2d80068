"""What happened between two looks at a server: the lines of its log, an event each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from packhorse_service.monitoring.status import ReaderStatus, ServerStatus, StreamPhase, StreamStatus
from packhorse_service.protocol.diagnosis import ReaderState
from packhorse_service.text.formatting import names

__all__ = ["LogEvent", "log_events"]

STALL_WARNED_S = 10.0  # shorter ones are on the status page, and in the metrics


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Event as ``logging`` takes it."""

    level: int
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


def log_events(before: ServerStatus, after: ServerStatus) -> Iterator[LogEvent]:
    """Yield what happened to every stream between two statuses."""
    for was, stream in zip(before.streams, after.streams, strict=True):
        for find in KINDS:
            for event in find(was, stream):
                yield LogEvent(event.level, event.text, {"stream": stream.name, **event.fields})


def _attempts(before: StreamStatus, after: StreamStatus) -> Iterator[LogEvent]:
    if after.phase is before.phase and after.attempt == before.attempt:
        return
    fields = {"attempt": after.attempt, "step": after.step, "readers": len(after.readers)}
    if after.phase is StreamPhase.RUNNING:
        yield LogEvent(logging.INFO, "all readers have met; the attempt runs", fields)
    elif after.phase is StreamPhase.ENDED:
        yield LogEvent(logging.INFO, "every reader has taken the end of the data", fields)
    elif after.phase is StreamPhase.FORMING and before.phase is not after.phase:
        yield LogEvent(logging.INFO, "waiting for the readers to form an attempt", fields)


def _readers(before: StreamStatus, after: StreamStatus) -> Iterator[LogEvent]:
    """Yield who was lost, who is back and who has left. Many at once are one line."""
    if not before.readers or after.phase not in (StreamPhase.RUNNING, StreamPhase.ENDED):
        return
    earlier = {reader.rank: reader for reader in before.readers}
    # Whoever was absent a second ago, and is lost now, has come in between.
    lost = [r for r in after.readers if r.state is ReaderState.LOST and earlier[r.rank].state is not ReaderState.LOST]
    back = [r for r in after.readers if not r.state.away and earlier[r.rank].state is ReaderState.LOST]
    left = [r for r in after.readers if r.state is ReaderState.LEFT and earlier[r.rank].state is not ReaderState.LEFT]
    if lost:
        yield LogEvent(logging.WARNING, f"lost {_names(lost)}: {lost[0].why}", {"readers": len(lost)})
    if back:
        yield LogEvent(logging.INFO, f"{_names(back)} is back", {"readers": len(back)})
    if left:
        yield LogEvent(logging.INFO, f"{_names(left)} has left", {"readers": len(left)})


def _names(readers: Sequence[ReaderStatus]) -> str:
    return names(readers, say=lambda reader: f"rank {reader.rank} ({reader.at})")


def _stalls(before: StreamStatus, after: StreamStatus) -> Iterator[LogEvent]:
    """Yield a stall once it has lasted, and its end where it was told."""
    was, now = before.stall, after.stall
    if now is not None and now.since_s >= STALL_WARNED_S and (was is None or was.since_s < STALL_WARNED_S):
        fields = {"cause": str(now.cause), "waiting": now.waiting, "seconds": now.since_s}
        yield LogEvent(logging.WARNING, f"stalled: {now.why}", fields)
    ended = was is not None and was.since_s >= STALL_WARNED_S and (now is None or now.cause is not was.cause)
    if was is not None and ended:
        fields = {"cause": str(was.cause), "seconds": was.since_s}
        yield LogEvent(logging.INFO, "the stall is over" if now is None else "the stall has another cause", fields)


def _data(before: StreamStatus, after: StreamStatus) -> Iterator[LogEvent]:
    """Yield samples that were skipped, and epochs that began."""
    for was, now in zip(before.sources, after.sources, strict=True):
        if now.skipped > was.skipped:
            text = f"source {now.name!r}: {now.skipped - was.skipped} more samples skipped for their content"
            yield LogEvent(logging.WARNING, text, {"source": now.name, "skipped": now.skipped})
        if now.epoch > was.epoch:
            yield LogEvent(logging.INFO, f"source {now.name!r} begins epoch {now.epoch}", {"source": now.name})


Finder = Callable[[StreamStatus, StreamStatus], Iterator[LogEvent]]
KINDS: tuple[Finder, ...] = (_attempts, _readers, _stalls, _data)
