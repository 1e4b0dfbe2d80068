"""What a status comes down to, as a headline, and which of its readers to look at first.

Said here once: the page, the terminal and programs that read ``/status.json`` all show the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from packhorse_service.monitoring.status import (
    Headline,
    HistoryPoint,
    Level,
    ReaderStatus,
    ServerStatus,
    Stall,
    StreamPhase,
    StreamStatus,
)
from packhorse_service.protocol.diagnosis import Cause, ReaderState
from packhorse_service.text.formatting import duration, percent, pluralise, si

__all__ = ["HIGHLIGHTED", "STALLED_BY", "headline", "highlighted_ranks", "mean", "tokens_per_s", "with_headline"]

HIGHLIGHTED = 16  # readers
RATE_S = 60.0  # over which throughput is averaged: steps come in gusts


def with_headline(status: ServerStatus) -> ServerStatus:
    """Return the same status, each stream with its headline and its highlighted ranks."""
    streams = (
        replace(each, headline=headline(each), notable=highlighted_ranks(each.readers)) for each in status.streams
    )
    return replace(status, streams=tuple(streams))


def headline(stream: StreamStatus) -> Headline:
    """Return whether all is well with a stream, and if not, what keeps it."""
    if stream.failure is not None:
        return _failed(stream)
    if stream.stall is not None:
        return _stalled(stream.stall)
    return PHASES[stream.phase](stream)


def _failed(stream: StreamStatus) -> Headline:
    return Headline(Level.BAD, "failed", stream.failure or "the server has not said why")


def _stalled(stall: Stall) -> Headline:
    who = f"{pluralise(stall.waiting, 'reader')} {'has' if stall.waiting == 1 else 'have'} waited"
    sentence = f"{stall.why}. {who if stall.waiting else 'It has lasted'} for {duration(stall.since_s)}"
    if stall.cause is Cause.STARTUP:
        return Headline(Level.NOTICE, "starting", sentence)
    return Headline(Level.BAD, f"stalled by {STALLED_BY[stall.cause]}", sentence)


STALLED_BY: Mapping[str, str] = {
    Cause.STARTUP: "startup",
    Cause.LOADING: "loading",
    Cause.PACKING: "packing",
    Cause.NETWORK: "the network",
    Cause.SLOW_PEER: "a slow peer",
    Cause.TRAINER: "the trainer",
}


def _forming(stream: StreamStatus) -> Headline:
    here = sum(reader.state is not ReaderState.ABSENT for reader in stream.readers)
    return Headline(
        Level.NOTICE, "waiting for readers", f"{here:,} of {pluralise(len(stream.readers), 'reader')} have come"
    )


def _restoring(stream: StreamStatus) -> Headline:
    return Headline(
        Level.NOTICE, "restoring", f"the stream is brought to step {stream.step:,}, where its readers stand"
    )


def _welcoming(stream: StreamStatus) -> Headline:
    return Headline(Level.NOTICE, "starting", f"attempt {stream.attempt:,} begins at step {stream.step:,}")


def _running(stream: StreamStatus) -> Headline:
    rate = f"{si(tokens_per_s(stream.history))} tokens/s"
    return Headline(Level.GOOD, "training", f"step {stream.step:,}, {rate}, useful fill {percent(stream.useful_fill)}")


def _ended(stream: StreamStatus) -> Headline:
    return Headline(
        Level.GOOD, "ended", f"{pluralise(len(stream.readers), 'reader')} took all {stream.delivered_steps:,} steps"
    )


PHASES: Mapping[StreamPhase, Callable[[StreamStatus], Headline]] = {
    StreamPhase.FORMING: _forming,
    StreamPhase.RESTORING: _restoring,
    StreamPhase.WELCOMING: _welcoming,
    StreamPhase.RUNNING: _running,
    StreamPhase.ENDED: _ended,
    StreamPhase.FAILED: _failed,
}


def tokens_per_s(history: Sequence[HistoryPoint]) -> float:
    """Return the mean throughput of the last minute."""
    rates = [moment.tokens_per_s for moment in history if moment.age_s <= RATE_S]
    return mean(rates)


def mean(values: Sequence[float]) -> float:
    """Return the mean of numbers of whatever size, whose sum may be beyond what a float holds; 0 of none."""
    return sum(value / len(values) for value in values)


def highlighted_ranks(readers: Iterable[ReaderStatus]) -> tuple[int, ...]:
    """Return the ranks to look at, the first first: who is lost or missing, who is behind, who waits longest."""
    return tuple(reader.rank for reader in sorted(readers, key=_interest)[:HIGHLIGHTED])


def _interest(reader: ReaderStatus) -> tuple[float, ...]:
    """Return a key that sorts first whom to look at: of those at work, the furthest behind, for whom others wait."""
    group = GROUPS.get(reader.state, AT_WORK)
    silence_s = reader.silence_s if reader.state is ReaderState.LOST else 0.0
    return group, -silence_s, -reader.lag, -reader.waits_s, -reader.loop_age_s, reader.rank


AT_WORK = 2
GROUPS: Mapping[ReaderState, int] = {ReaderState.LOST: 0, ReaderState.ABSENT: 1, ReaderState.LEFT: 3}
