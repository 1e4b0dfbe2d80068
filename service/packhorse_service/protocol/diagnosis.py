"""Diagnosis of a stream: what each reader does, and what it waits for, whom, and how long.

WAIT messages, the status page, logs and the metrics of stalls are all made from this one value. Three things tell
causes apart. Each reader says every keep-alive interval how long its loop has not asked: silence is a process that is
stopped or cut off, a growing age is a loop that does something else. The server knows what it has sent and what was
taken. And the producer knows whether it waits for a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.wire.messages import WaitReason
from packhorse_service.protocol.attempt import Attempt, Phase
from packhorse_service.protocol.readers import Reader
from packhorse_service.protocol.rejection import Rejections, rank_name
from packhorse_service.protocol.rendezvous import PendingHello, Rendezvous
from packhorse_service.protocol.step_buffer import StepBuffer
from packhorse_service.protocol.stream_spec import StreamSpec
from packhorse_service.text.formatting import names

__all__ = [
    "SILENT_S",
    "WORTH_NAMING_S",
    "Blocked",
    "Cause",
    "Diagnosis",
    "PendingView",
    "Producing",
    "ReaderDiagnosis",
    "ReaderState",
    "ReaderView",
    "StreamView",
    "diagnose",
    "view_stream",
]

SILENT_S = 3.0  # three keep-alive intervals
FRESH_S = 1.5  # what a reader said last still holds: it says it every second
WORTH_NAMING_S = 2.0  # shorter waits, and shorter absences of a loop, are how training goes


class Cause(StrEnum):
    """Causes for which a reader waits, or is not heard."""

    STARTUP = "startup"  # not all readers are here, or the stream is being brought to where they stand
    LOADING = "loading"  # the next step waits for data to be read
    PACKING = "packing"  # the next step is being packed and built
    NETWORK = "network"  # a reader is not connected, not heard, or has not got what was sent
    SLOW_PEER = "slow_peer"  # the stream waits for other readers
    TRAINER = "trainer"  # its own training loop is not asking


class ReaderState(StrEnum):
    """States of a reader, by what it does."""

    ABSENT = "absent"  # has not come
    FORMING = "forming"  # is here, and waits for the attempt to begin
    RECEIVING = "receiving"  # gets what it asks for
    TRAINING = "training"  # its loop is at work on what it took
    WAITING = "waiting"  # asks, and has not got its next micro-batch
    LOST = "lost"  # not connected, or not heard
    LEFT = "left"  # said BYE

    @property
    def waits(self) -> bool:
        """True where it waits: for its next micro-batch, or for the attempt to begin."""
        return self in (ReaderState.WAITING, ReaderState.FORMING)

    @property
    def away(self) -> bool:
        """True where nothing is heard from it."""
        return self in (ReaderState.LOST, ReaderState.ABSENT, ReaderState.LEFT)


# The view -------------------------------------------------------------------------------------------


class ReaderView(NamedTuple):
    """A reader of the attempt at one moment. Times are those of the server's clock, in seconds."""

    at: Coordinates
    peer: bytes  # empty while its connection is down
    client: bytes
    acked: Position
    sent: Position
    in_flight: int  # micro-batches that were sent and that its loop has not taken
    heard_s: float
    loop_idle_s: float
    starved_since_s: float | None
    answered: bool
    said_bye: bool

    def loop_age_s(self, now: float) -> float:
        """Return for how long its loop has not asked; 0 while it is asking."""
        return self.loop_idle_s + now - self.heard_s if self.loop_idle_s else 0.0


class PendingView(NamedTuple):
    """A process that has said HELLO and waits for an attempt, at one moment."""

    at: Coordinates
    peer: bytes
    client: bytes
    position: Position
    of_attempt: bool  # whether it names one to resume
    since_s: float
    in_attempt: bool  # whether the attempt that begins is its own
    lacks: tuple[Coordinates, ...]  # readers that it waits for


@dataclass(frozen=True, slots=True)
class StreamView:
    """A stream and its readers at one moment."""

    spec: StreamSpec
    phase: Phase
    phase_since_s: float
    attempt_number: int
    low_watermark: Position
    readers: Mapping[Coordinates, ReaderView]
    pending: tuple[PendingView, ...]  # once for each connection, those of the fullest list first
    waiting_at: Mapping[Coordinates, PendingView]  # the last of those that wait for each reader
    missing: tuple[Coordinates, ...]  # readers that no process has said HELLO for
    disagreement: tuple[str, ...]  # who stands where, where all are here and yet no attempt forms
    sought: tuple[Coordinates, ...]  # readers that the fullest list lacks, and that were not rejected
    snapshot_of: Coordinates | None  # the reader whose snapshot was asked for

    @property
    def has_run(self) -> bool:
        """True where its readers have all been welcomed: also those of an attempt that has failed since."""
        return len(self.readers) > 0 and all(reader.answered for reader in self.readers.values())

    def waited_s(self, now: float) -> float:
        """Return how long the first of those that wait has waited."""
        return now - min((pending.since_s for pending in self.pending), default=now)

    def name(self, at: Coordinates) -> str:
        """Return a reader's name for people: its rank and its coordinates."""
        return rank_name(self.spec.layout, at)

    def named(self, readers: Iterable[Coordinates]) -> str:
        """Return the names of readers for people, of many the first."""
        return names(readers, say=self.name) or "nobody"


def view_stream(attempt: Attempt, rendezvous: Rendezvous, buffer: StepBuffer, rejections: Rejections) -> StreamView:
    """Return what is to be seen of a stream now."""
    spec, readers, request = attempt.spec, attempt.readers, attempt.snapshot_request
    each = spec.contract.num_microbatches(spec.layout)
    asked = readers.by_peer(request.peer) if request else None
    lacks, rejected = rendezvous.absent_from(rendezvous.candidates.by_size()[0]), rejections.rejected
    pending = tuple(_pending(attempt, rendezvous))
    return StreamView(
        spec=spec,
        phase=attempt.phase,
        phase_since_s=attempt.phase_since_s,
        attempt_number=attempt.number,
        low_watermark=readers.low_watermark,
        readers={reader.at: _reader(reader, buffer, each) for reader in readers},
        pending=pending,
        waiting_at={waiting.at: waiting for waiting in pending},
        missing=tuple(rendezvous.missing()),
        disagreement=tuple(rendezvous.disagreement()),
        sought=tuple(at for at in lacks if at not in rejected),
        snapshot_of=asked.at if asked else None,
    )


def _reader(reader: Reader, buffer: StepBuffer, each: int) -> ReaderView:
    return ReaderView(
        at=reader.at,
        peer=reader.peer,
        client=reader.client,
        acked=reader.acked,
        sent=reader.sent,
        in_flight=buffer.count_between(reader.acked, reader.sent, each),
        heard_s=reader.heard_s,
        loop_idle_s=reader.loop_idle_s,
        starved_since_s=reader.starved_since_s,
        answered=reader.answered,
        said_bye=reader.said_bye,
    )


def _pending(attempt: Attempt, rendezvous: Rendezvous) -> Iterator[PendingView]:
    """Yield every process that waits, with those that its fullest list lacks; one that was replaced waits for that."""
    seen = set[bytes]()
    for known in rendezvous.candidates.by_size():
        lacks = tuple(rendezvous.absent_from(known))
        for pending in known.values():
            if pending.peer not in seen:
                seen.add(pending.peer)
                yield _waiting(attempt, pending, lacks)
    for pending in rendezvous.replaced():
        if pending.peer not in seen:
            yield _waiting(attempt, pending, (pending.hello.reader,))


def _waiting(attempt: Attempt, pending: PendingHello, lacks: tuple[Coordinates, ...]) -> PendingView:
    return PendingView(
        at=pending.hello.reader,
        peer=pending.peer,
        client=pending.hello.client,
        position=pending.hello.position,
        of_attempt=bool(pending.hello.attempt),
        since_s=pending.since_s,
        in_attempt=attempt.readers.by_peer(pending.peer) is not None,
        lacks=lacks,
    )


# The diagnosis --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Producing:
    """Work of a stream's producer, as far as it is known."""

    busy: bool = False  # with a step
    block: str = ""  # that it waits for

    @property
    def cause(self) -> Cause:
        """Loading where it waits for a block, else packing."""
        return Cause.LOADING if self.block else Cause.PACKING


@dataclass(frozen=True, slots=True)
class Blocked:
    """Obstacle without which a reader would go on: the reason, whom it waits for, and for how long."""

    reason: WaitReason
    whom: tuple[Coordinates, ...]
    waited_s: float


@dataclass(frozen=True, slots=True)
class ReaderDiagnosis:
    """State of one reader, the cause of it, and how long it has lasted.

    ``blocked`` is what the stream owes it, whether or not its loop asks for that now.
    """

    state: ReaderState
    cause: Cause | None = None
    since_s: float = 0.0
    blocked: Blocked | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Diagnosis of a stream at one moment: of each reader, and of each process that waits for an attempt."""

    view: StreamView
    now: float
    producing: Producing
    readers: Mapping[Coordinates, ReaderDiagnosis]
    pending: Mapping[bytes, Blocked]  # by connection

    @property
    def slowest(self) -> tuple[Coordinates, ...]:
        """Readers in the step that keeps the next from being made."""
        return _slowest(self.view)


def diagnose(
    view: StreamView,
    now: float,
    producing: Producing | None = None,
    moved_s: Mapping[Coordinates, float] | None = None,
) -> Diagnosis:
    """Return the diagnosis of a stream.

    ``producing`` tells loading from packing, ``moved_s`` (when each reader was first seen where it stands) finds
    readers that do not get what was sent to them. Without them nothing else is diagnosed otherwise.
    """
    producing = producing or Producing()
    pending = {waiting.peer: blocked for waiting in view.pending if (blocked := _blocked_outside(view, waiting, now))}
    if view.phase in (Phase.RUNNING, Phase.ENDED) or (view.phase is Phase.FAILED and view.has_run):
        running = _Running(view, now, producing, moved_s or {}, _slowest(view))
        readers = {at: running.diagnose(reader) for at, reader in view.readers.items()}
    else:
        of_all = STARTING[view.phase](view, now) if view.phase in STARTING else None
        readers = {at: _starting(view, at, pending, of_all) for at in sorted(view.spec.readers)}
    return Diagnosis(view, now, producing, readers, pending)


def _slowest(view: StreamView) -> tuple[Coordinates, ...]:
    step = view.low_watermark.step
    return tuple(at for at, reader in view.readers.items() if reader.acked.step == step)


def _blocked_outside(view: StreamView, pending: PendingView, now: float) -> Blocked | None:
    """Return what a process waits for that has said HELLO; one that has its WELCOME waits for nothing here."""
    if pending.in_attempt and view.phase is Phase.RESTORING:
        return Blocked(WaitReason.SNAPSHOT, _asked(view), now - view.phase_since_s)
    if pending.in_attempt and view.phase is Phase.WELCOMING:
        return None
    return Blocked(WaitReason.READERS, pending.lacks, view.waited_s(now))


def _asked(view: StreamView) -> tuple[Coordinates, ...]:
    return () if view.snapshot_of is None else (view.snapshot_of,)


def _starting(
    view: StreamView, at: Coordinates, pending: Mapping[bytes, Blocked], of_all: Blocked | None
) -> ReaderDiagnosis:
    """Return the diagnosis of a reader while no attempt runs; ``of_all`` is what all wait for, if that is the same."""
    outside, reader = view.waiting_at.get(at), view.readers.get(at)
    if outside is None and (reader is None or not reader.peer):
        return ReaderDiagnosis(ReaderState.ABSENT, Cause.STARTUP)
    blocked = of_all or (pending.get(outside.peer) if outside else None)
    return ReaderDiagnosis(ReaderState.FORMING, Cause.STARTUP, blocked.waited_s if blocked else 0.0, blocked)


# What every reader waits for in a phase that no reader alone can end; in the others each by its own list.
STARTING: dict[Phase, Callable[[StreamView, float], Blocked]] = {
    Phase.RESTORING: lambda view, now: Blocked(WaitReason.SNAPSHOT, _asked(view), now - view.phase_since_s),
    Phase.WELCOMING: lambda view, now: Blocked(
        WaitReason.ANSWERS,
        tuple(at for at, reader in view.readers.items() if not reader.answered),
        now - view.phase_since_s,
    ),
}


@dataclass(frozen=True, slots=True)
class _Running:
    """An attempt that runs, looked at ``now``."""

    view: StreamView
    now: float
    producing: Producing
    moved_s: Mapping[Coordinates, float]
    slowest: tuple[Coordinates, ...]

    def diagnose(self, reader: ReaderView) -> ReaderDiagnosis:
        """Return the diagnosis of one of its readers."""
        blocked = self._blocked(reader)
        if reader.said_bye:
            return ReaderDiagnosis(ReaderState.LEFT, blocked=blocked)
        silence_s = self.now - reader.heard_s
        if (not reader.peer or silence_s > SILENT_S) and self.view.phase is not Phase.ENDED:
            return ReaderDiagnosis(ReaderState.LOST, Cause.NETWORK, silence_s, blocked)
        age = reader.loop_age_s(self.now)
        if age > WORTH_NAMING_S:
            return ReaderDiagnosis(ReaderState.TRAINING, Cause.TRAINER, blocked=blocked)
        return ReaderDiagnosis(ReaderState.RECEIVING, blocked=blocked) if age else self._asking(reader, blocked)

    def _blocked(self, reader: ReaderView) -> Blocked | None:
        """Return what it waits for beyond all that it was sent, if it has taken that and more is to come."""
        if reader.starved_since_s is None:
            return None
        waited_s = self.now - reader.starved_since_s
        if reader.sent.step < self.view.low_watermark.step + self.view.spec.steps_ahead:
            return Blocked(WaitReason.LOADING, (), waited_s)
        return Blocked(WaitReason.SLOW_READERS, self.slowest, waited_s)

    def _asking(self, reader: ReaderView, blocked: Blocked | None) -> ReaderDiagnosis:
        """Return the diagnosis of a reader whose loop asks at this moment."""
        still_s = self.now - self.moved_s.get(reader.at, self.now)
        if reader.in_flight:
            if still_s <= WORTH_NAMING_S or self.now - reader.heard_s > FRESH_S:
                return ReaderDiagnosis(ReaderState.RECEIVING)  # or it is silent, as will show
            return ReaderDiagnosis(ReaderState.WAITING, Cause.NETWORK, still_s)
        if blocked is None:
            return ReaderDiagnosis(ReaderState.RECEIVING)  # it has taken all there is
        cause = self.producing.cause if blocked.reason is WaitReason.LOADING else Cause.SLOW_PEER
        return ReaderDiagnosis(ReaderState.WAITING, cause, blocked.waited_s, blocked)
