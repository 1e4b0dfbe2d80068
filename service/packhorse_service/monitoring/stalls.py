"""Why a reader waits, and what keeps a stream from going on: one word and a sentence.

Three things tell causes apart. Each reader says every keep-alive interval how long its loop has not asked: silence
is a process that is stopped or cut off, a growing age is a loop that does something else. The server knows what it
has sent and what was taken. And the producer knows whether it waits for a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse_service.monitoring.status import Cause, ReaderState, Stall
from packhorse_service.protocol.readers import Phase, Reader
from packhorse_service.protocol.rejection import rank_name
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.wait_messages import describe
from packhorse_service.text.formatting import names

__all__ = ["SILENT_S", "WORTH_NAMING_S", "Finding", "Producing", "findings", "in_flight", "stall"]

SILENT_S = 3.0  # three keep-alive intervals
FRESH_S = 1.5  # what a reader said last still holds: it says it every second
WORTH_NAMING_S = 2.0  # shorter waits, and shorter absences of a loop, are how training goes


@dataclass(frozen=True, slots=True)
class Producing:
    """What a stream's producer is at."""

    busy: bool  # with a step
    block: str = ""  # that it waits for

    @property
    def cause(self) -> Cause:
        return Cause.LOADING if self.block else Cause.PACKING

    @property
    def why(self) -> str:
        return f"the next step waits for {self.block}" if self.block else "the next step is being packed"


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one reader at one moment."""

    state: ReaderState
    cause: Cause | None = None
    why: str = ""
    waits_s: float = 0.0


def in_flight(session: StreamSession, reader: Reader) -> int:
    """Micro-batches that were sent and that its loop has not taken."""
    each = session.spec.contract.num_microbatches(session.spec.layout)
    return session.buffer.count_between(reader.acked, reader.sent, each)


def loop_age(reader: Reader, now: float) -> float:
    """Seconds since its loop last asked; 0 while it is asking."""
    return reader.loop_idle_s + now - reader.heard_s if reader.loop_idle_s else 0.0


def findings(
    session: StreamSession, producing: Producing, moved_s: Mapping[Coordinates, float], now: float
) -> dict[Coordinates, Finding]:
    """Of every reader of the stream. ``moved_s``: when each was first seen where it stands."""
    if session.phase in (Phase.RUNNING, Phase.ENDED):
        view = _Running(session, producing, moved_s, now)
        return {reader.at: view.find(reader) for reader in session.readers}
    here = {pending.hello.reader for pending in session.rendezvous.pending()}
    here |= {reader.at for reader in session.readers if reader.peer}
    why = _starting(session)
    forming = Finding(ReaderState.FORMING, Cause.STARTUP, why, now - session.phase_since_s)
    absent = Finding(ReaderState.ABSENT, Cause.STARTUP, "has not said HELLO")
    return {at: forming if at in here else absent for at in sorted(session.spec.readers)}


def _starting(session: StreamSession) -> str:
    """What keeps the attempt from running."""
    if session.phase is Phase.RESTORING:
        asked = session.asked
        return "waits for a reader's snapshot" if asked else "the stream is made again where the readers stand"
    if session.phase is Phase.WELCOMING:
        silent = _named(session, (reader.at for reader in session.readers if not reader.answered))
        return f"waits for {silent} to acknowledge that the attempt begins"
    return describe(session)


@dataclass(frozen=True, slots=True)
class _Running:
    """An attempt that runs, looked at ``now``."""

    session: StreamSession
    producing: Producing
    moved_s: Mapping[Coordinates, float]
    now: float

    def find(self, reader: Reader) -> Finding:
        lost = self._lost(reader)
        if lost or reader.said_bye:
            return lost or Finding(ReaderState.LEFT)
        age = loop_age(reader, self.now)
        if age > WORTH_NAMING_S:
            ready = in_flight(self.session, reader)
            why = f"its training loop last asked {age:.0f} s ago; {ready} micro-batches are ready for it"
            return Finding(ReaderState.TRAINING, Cause.TRAINER, why)
        if age:
            return Finding(ReaderState.RECEIVING)
        return self._asking(reader)

    def _lost(self, reader: Reader) -> Finding | None:
        silence = self.now - reader.heard_s
        if reader.said_bye or self.session.phase is Phase.ENDED:
            return None
        if not reader.peer:
            why = f"its connection is gone, and nothing was heard from it for {silence:.0f} s"
        elif silence > SILENT_S:
            why = (
                f"nothing was heard from it for {silence:.0f} s: its process is stopped or gone, or the network is cut"
            )
        else:
            return None
        new = any(pending.hello.reader == reader.at for pending in self.session.rendezvous.pending())
        if new:
            why += "; a new process for it waits, and can only begin again together with all others"
        return Finding(ReaderState.LOST, Cause.NETWORK, why, silence)

    def _asking(self, reader: Reader) -> Finding:
        """Its loop asks at this moment."""
        ready = in_flight(self.session, reader)
        still_s = self.now - self.moved_s.get(reader.at, self.now)
        if ready:
            if still_s <= WORTH_NAMING_S or self.now - reader.heard_s > FRESH_S:
                return Finding(ReaderState.RECEIVING)  # or it is silent, as will show
            why = f"asks, and of {ready} micro-batches that were sent none has arrived for {still_s:.0f} s"
            return Finding(ReaderState.WAITING, Cause.NETWORK, why, still_s)
        if reader.starved_since_s is None:
            return Finding(ReaderState.RECEIVING)  # it has taken all there is
        waits_s = self.now - reader.starved_since_s
        if reader.sent.step < self.session.readers.low_watermark.step + self.session.spec.steps_ahead:
            return Finding(ReaderState.WAITING, self.producing.cause, self.producing.why, waits_s)
        slow = [at for at in _slowest(self.session) if at != reader.at]
        why = f"waits for {_named(self.session, slow)} to take step {self.session.readers.low_watermark.step}"
        return Finding(ReaderState.WAITING, Cause.SLOW_PEER, why, waits_s)


def _slowest(session: StreamSession) -> Iterator[Coordinates]:
    """Whoever stands in the step that keeps the next from being made."""
    low_watermark: Position = session.readers.low_watermark
    return (reader.at for reader in session.readers if reader.acked.step == low_watermark.step and not reader.said_bye)


def stall(session: StreamSession, found: Mapping[Coordinates, Finding]) -> Stall | None:
    """What keeps the stream from going on, if somebody has waited for longer than is usual."""
    if session.failure is not None:
        return None
    waiting = {at: finding for at, finding in found.items() if finding.state.waits}
    long = {at: finding for at, finding in waiting.items() if finding.waits_s > WORTH_NAMING_S}
    if not long:
        return None
    cause, why = _root(session, found, long)
    return Stall(cause=cause, why=why, waiting=len(waiting))


Found = Mapping[Coordinates, Finding]
ALL_THE_SAME = (Cause.STARTUP, Cause.LOADING, Cause.PACKING)  # whoever waits for it


def _root(session: StreamSession, found: Found, waiting: Found) -> tuple[Cause, str]:
    """What explains others comes first."""
    for cause in ALL_THE_SAME:
        for finding in waiting.values():
            if finding.cause is cause:
                return cause, finding.why
    slow = {at: found[at] for at in _slowest(session)}
    return (
        _because_of(session, Cause.NETWORK, waiting)
        or _because_of(session, Cause.NETWORK, slow)
        or _because_of(session, Cause.TRAINER, slow)
        or (Cause.SLOW_PEER, f"{_named(session, slow)} takes longer over a step than the others")
    )


def _because_of(session: StreamSession, cause: Cause, readers: Found) -> tuple[Cause, str] | None:
    """Those of the readers that do not go on for this cause."""
    because = {at: finding for at, finding in readers.items() if finding.cause is cause}
    return (cause, f"{_named(session, because)}: {next(iter(because.values())).why}") if because else None


def _named(session: StreamSession, readers: Iterable[Coordinates]) -> str:
    """The first of them for people, and how many more there are."""
    return names(readers, say=lambda at: rank_name(session.spec.layout, at)) or "nobody"
