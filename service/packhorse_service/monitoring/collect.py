"""From what the server's loop holds to a ``ServerStatus``, once a second.

It reads and changes nothing, and remembers of the second before only what rates and durations need.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from packhorse import __version__
from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse_service.mixing.source_counts import PipelineProgress, SourceCounts
from packhorse_service.monitoring.pack_preview import NO_PREVIEW, StepPreview, preview_of
from packhorse_service.monitoring.stalls import stall, why
from packhorse_service.monitoring.status import (
    HistoryPoint,
    LoaderStatus,
    ReaderStatus,
    ServerStatus,
    SourceStatus,
    Stall,
    StreamPhase,
    StreamStatus,
)
from packhorse_service.protocol.derived import derived_values
from packhorse_service.protocol.diagnosis import Diagnosis, Producing, ReaderState, ReaderView, diagnose
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.server.producer import Producer

__all__ = ["INTERVAL_S", "StatusCollector"]

INTERVAL_S = 1.0
HISTORY = 600  # moments
BUSY_OVER = 30  # observations

Constants = dict[str, str | int | float | bool | None]


@dataclass(slots=True)
class _StreamHistory:
    """History of a stream: what its last observations leave behind."""

    at_s: float  # of the last one
    delivered: int = 0  # micro-batches that every reader had taken
    made: tuple[int, int] = (0, 0)  # tokens and slots
    standing: dict[Coordinates, Position] = field(default_factory=dict)
    moved_s: dict[Coordinates, float] = field(default_factory=dict)  # when each was first seen where it stands
    waited_s: defaultdict[Coordinates, float] = field(default_factory=lambda: defaultdict(float))
    stalled_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    stall: Stall | None = None
    stall_began_s: float = 0.0
    history: deque[tuple[float, HistoryPoint]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=BUSY_OVER))
    shown: StepPreview = NO_PREVIEW  # of the last step that was seen


@dataclass(slots=True)
class _WatchedStream:
    """Stream that is watched: its session, its producer, and what was seen of it before."""

    session: StreamSession
    producer: Producer
    past: _StreamHistory


class StatusCollector:
    """Collector of the status of a server that started at ``now``."""

    def __init__(self, endpoint: str, streams: Iterable[tuple[StreamSession, Producer]], now: float) -> None:
        self._endpoint = endpoint
        self._streams = [_WatchedStream(session, producer, _StreamHistory(now)) for session, producer in streams]
        self._started_s = now
        self._constant = [_constant(watched) for watched in self._streams]

    def collect(self, now: float, connections: int) -> ServerStatus:
        """Return the status of the server ``now``, with so many ``connections`` open."""
        streams = tuple(
            _stream_status(watched, constant, now)
            for watched, constant in zip(self._streams, self._constant, strict=True)
        )
        return ServerStatus(
            version=__version__,
            endpoint=self._endpoint,
            uptime_s=round(now - self._started_s, 1),
            age_s=0.0,
            connections=connections,
            ready=streams[0].steps > 0 and streams[0].failure is None,
            streams=streams,
        )


def _constant(watched: _WatchedStream) -> dict[str, Constants]:
    """Return what never changes of a stream."""
    spec = watched.session.spec
    contract = {item.name: _plain(getattr(spec.contract, item.name)) for item in fields(spec.contract)}
    derived = {name: _plain(value) for name, value in derived_values(spec.contract, spec.layout).items()}
    return {"contract": contract, "derived": {**derived, "fingerprint": spec.fingerprint.hex()}}


def _plain(value: object) -> str | int | float | bool | None:
    """Return a value as JSON has it: an enumeration as its text."""
    return value if value is None or isinstance(value, int | float) else str(value)


def _stream_status(watched: _WatchedStream, constant: dict[str, Constants], now: float) -> StreamStatus:
    session, producer, past = watched.session, watched.producer, watched.past
    passed_s = now - past.at_s
    progress = producer.progress
    producing = Producing(producer.busy, _block(progress))
    _note_moves(session, past, now)
    diagnosis = diagnose(session.view(), now, producing, past.moved_s)
    stalled = _noted_stall(past, stall(diagnosis) if session.failure is None else None, now, passed_s)
    for at, found in diagnosis.readers.items():
        if found.state is ReaderState.WAITING:
            past.waited_s[at] += passed_s
    if session.buffer.steps:
        past.shown = preview_of(session.buffer.steps[max(session.buffer.steps)], past.shown)
    waiting = sum(found.state.waits for found in diagnosis.readers.values())
    _remember(session, past, waiting, now, passed_s)
    counters = session.counters
    status = StreamStatus(
        name=session.spec.stream,
        phase=StreamPhase[session.phase.name],
        phase_s=round(now - session.attempt.phase_since_s, 1) if session.attempt.phase_since_s else 0.0,
        attempt=session.attempt.number,
        step=session.attempt.readers.low_watermark.step,
        stall=stalled,
        failure=session.failure,
        contract=constant["contract"],
        derived=constant["derived"],
        readers=tuple(_reader_statuses(diagnosis, past)),
        sources=tuple(_source_statuses(producer, progress)),
        loaders=_loader_status(producer, progress, past),
        packs=past.shown.packs,
        held=len(session.buffer.steps),
        steps_ahead=session.spec.steps_ahead,
        steps=counters.steps,
        delivered_steps=counters.delivered_steps,
        microbatches=counters.microbatches,
        tokens=counters.tokens,
        loss_tokens=counters.loss_tokens,
        slots=counters.slots,
        fill=past.shown.fill,
        useful_fill=past.shown.useful_fill,
        snapshot_bytes=past.shown.snapshot_bytes,
        replayed=counters.replayed,
        reconnects=counters.reconnects,
        rejects=dict(counters.rejects),
        stalled_s={cause: round(seconds, 1) for cause, seconds in past.stalled_s.items()},
        history=tuple(replace(moment, age_s=round(now - at_s, 1)) for at_s, moment in past.history),
    )
    past.at_s = now
    return status


def _block(progress: PipelineProgress | None) -> str:
    """Describe the block that the producer waits for; empty where it waits for none."""
    if progress is None or progress.waiting_for is None:
        return ""
    waits_for = progress.waiting_for
    return f"shard {waits_for.shard.name!r} of source {waits_for.source!r}, from byte {waits_for.offset:,}"


def _note_moves(session: StreamSession, past: _StreamHistory, now: float) -> None:
    for reader in session.attempt.readers:
        if past.standing.get(reader.at) != reader.acked:
            past.standing[reader.at] = reader.acked
            past.moved_s[reader.at] = now


def _noted_stall(past: _StreamHistory, found: Stall | None, now: float, passed_s: float) -> Stall | None:
    """Return the stall with its age: it goes on as long as its cause is the same."""
    if found is None or past.stall is None or past.stall.cause is not found.cause:
        past.stall_began_s = now - min(passed_s, INTERVAL_S)
    past.stall = found
    if found is None:
        return None
    past.stalled_s[found.cause] += passed_s
    return replace(found, since_s=round(now - past.stall_began_s, 1))


def _remember(session: StreamSession, past: _StreamHistory, waiting: int, now: float, passed_s: float) -> None:
    """Keep one more moment of the past. What was delivered counts by micro-batches, that a long step is no jump."""
    counters, layout = session.counters, session.spec.layout
    each = session.spec.contract.num_microbatches(layout)
    low_watermark = session.attempt.readers.low_watermark
    delivered = (low_watermark.step * each + low_watermark.index) * layout.data
    mean_tokens = counters.tokens / counters.microbatches if counters.microbatches else 0.0
    tokens, slots = counters.tokens - past.made[0], counters.slots - past.made[1]
    moment = HistoryPoint(
        age_s=0.0,
        tokens_per_s=round(max(0, delivered - past.delivered) * mean_tokens / passed_s) if passed_s > 0 else 0.0,
        fill=round(tokens / slots, 4) if slots else 0.0,
        waiting=waiting,
        held=len(session.buffer.steps),
    )
    past.history.append((now, moment))
    past.delivered, past.made = delivered, (counters.tokens, counters.slots)


def _reader_statuses(diagnosis: Diagnosis, past: _StreamHistory) -> Iterator[ReaderStatus]:
    """Yield the status of every reader, by rank."""
    view = diagnosis.view
    layout = view.spec.layout
    each = view.spec.contract.num_microbatches(layout)
    furthest = max((_number(reader.acked, each) for reader in view.readers.values()), default=0)
    for at in sorted(diagnosis.readers, key=layout.rank):
        found, reader = diagnosis.readers[at], view.readers.get(at)
        known = _where(reader, furthest, each, diagnosis.now) if reader is not None else {}
        yield ReaderStatus(
            rank=layout.rank(at),
            at=str(at),
            state=found.state,
            cause=found.cause,
            why=why(diagnosis, at),
            waits_s=round(found.since_s, 1),
            waited_s=round(past.waited_s[at], 1),
            **known,
        )


def _where(reader: ReaderView, furthest: int, each: int, now: float) -> dict[str, Any]:
    return {
        "taken": tuple(reader.acked),
        "sent": tuple(reader.sent),
        "ready": reader.in_flight,
        "lag": furthest - _number(reader.acked, each),
        "loop_age_s": round(reader.loop_age_s(now), 1),
        "silence_s": round(now - reader.heard_s, 1),
    }


def _number(position: Position, each: int) -> int:
    """Return the number of a micro-batch, counted from the beginning of the stream."""
    return position.step * each + position.index


def _source_statuses(producer: Producer, progress: PipelineProgress | None) -> Iterator[SourceStatus]:
    plans = [source.order for source in producer.plan.sources]
    counts = progress.counts if progress else {}
    drawn = sum(of_source.ids for of_source in counts.values()) or 1
    weights = sum(plan.weight for plan in plans)
    epochs = progress.epochs if progress else [(0, 0)] * len(plans)
    for plan, (epoch, opened) in zip(plans, epochs, strict=True):
        of_source = counts.get(plan.name, SourceCounts())
        yield SourceStatus(
            name=plan.name,
            samples=of_source.samples,
            tokens=of_source.ids,
            packed=of_source.packed,
            pending=of_source.pending,
            skipped=of_source.faults,
            lost_samples=of_source.dropped_samples,
            lost_tokens=of_source.lost_targets,
            unsupervised_tokens=of_source.unsupervised_targets,
            share=round(of_source.ids / drawn, 4),
            weight=round(plan.weight / weights, 4),
            epoch=epoch,
            epochs=plan.epochs,
            progress=round(opened / plan.shards, 4),
        )


def _loader_status(producer: Producer, progress: PipelineProgress | None, past: _StreamHistory) -> LoaderStatus:
    waits_for = _block(progress)
    if producer.workers:
        busy = min(progress.loading if progress else 0, producer.workers) / producer.workers
    else:
        busy = float(bool(waits_for))
    past.busy.append(busy)
    return LoaderStatus(
        workers=producer.workers,
        busy=round(sum(past.busy) / len(past.busy), 3),
        restarts=producer.restarts,
        waits_for=waits_for,
    )
