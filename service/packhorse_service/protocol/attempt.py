"""The attempt of a stream: its phase, its name and its readers, and the end of a stream that cannot go on.

A phase is entered through ``Attempt.enter`` alone, which refuses what the row of the transition table that is being
carried out (``stream_session.TRANSITIONS``) does not allow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from packhorse.contract.layout import Coordinates
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import Ack, ErrorCode, Frames, Hello, Message, ServerError
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.readers import Reader, ReaderTable
from packhorse_service.protocol.rendezvous import Rendezvous
from packhorse_service.protocol.stream_spec import StreamSpec

__all__ = ["Attempt", "Failing", "Phase", "PhaseRefused", "SnapshotRequest"]


class Phase(Enum):
    """Phases of a stream's attempt, in the order in which an undisturbed one enters them."""

    FORMING = auto()  # no attempt yet
    RESTORING = auto()  # all readers are here; the stream is brought to where they stand
    WELCOMING = auto()  # WELCOME is sent, not yet acknowledged by all
    RUNNING = auto()
    ENDED = auto()  # every reader has taken END
    FAILED = auto()  # the stream cannot go on; whoever asks is told why


class PhaseRefused(RuntimeError):
    """A handler entered a phase that its row of the transition table does not name: a fault of this program."""


class SnapshotRequest(NamedTuple):
    """The snapshot that one reader was asked for: before which step, with which digest, over which connection."""

    step: int
    digest: bytes
    peer: bytes


@dataclass(slots=True)
class Attempt:
    """The attempt that forms, runs or has ended. Times are seconds of the server's clock."""

    spec: StreamSpec
    phase: Phase = Phase.FORMING
    phase_since_s: float = 0.0
    name: bytes = NO_ATTEMPT
    number: int = 0  # of those of this server, the first being 1
    failure: str | None = None  # why the stream cannot go on
    held_failure: str | None = None  # why no step was made before anybody came; who resumes elsewhere may not need it
    readers: ReaderTable = field(init=False)
    snapshot_request: SnapshotRequest | None = None
    _allowed: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        self.dissolve()

    def allow(self, phases: tuple[Phase, ...]) -> None:
        """Say which phases may be entered from now on, until the next event."""
        self._allowed = phases

    def enter(self, phase: Phase, now: float) -> None:
        """Enter a phase. Raises ``PhaseRefused`` where the row that is being carried out does not allow it."""
        if phase not in self._allowed:
            allowed = ", ".join(other.name for other in self._allowed) or "none"
            raise PhaseRefused(f"from {self.phase.name} this event may lead to {allowed}, not to {phase.name}")
        self.phase, self.phase_since_s = phase, now

    def dissolve(self) -> None:
        """Forget the readers: whoever is to be one says HELLO again."""
        self.readers = ReaderTable({}, self.spec)

    def heard(self, peer: bytes, ack: Ack, now: float) -> Reader | None:
        """Return the reader that acknowledges this attempt over its own connection; no other is heard by this."""
        reader = self.readers.by_peer(peer)
        if reader is None or ack.attempt != self.name:
            return None
        reader.heard_s, reader.loop_idle_s = now, ack.loop_idle_s
        return reader

    def error(self, peer: bytes, code: ErrorCode, message: str, *, fatal: bool = False) -> Send:
        """Return an ERROR to this connection; a fatal one ends its reader."""
        return Send(peer, ServerError(stream=self.spec.stream, code=code, message=message, fatal=fatal))


@dataclass(slots=True)
class Failing:
    """The end of a stream that cannot go on: everybody is told, now and whenever they ask again."""

    attempt: Attempt
    rendezvous: Rendezvous
    _unheard: set[bytes] = field(default_factory=set)  # connections that have not said BYE to it yet
    _told: set[Coordinates] = field(default_factory=set)  # readers that some process was told for

    @property
    def heard(self) -> bool:
        """Everybody who was told of the failure has left."""
        return self.attempt.failure is not None and not self._unheard

    @property
    def held(self) -> bool:
        """True while a first step could not be made, and nobody is here to need it, or another one."""
        return self.attempt.held_failure is not None and not self.rendezvous.pending()

    @property
    def told_all(self) -> bool:
        """Every reader of the stream has been told of the failure."""
        return self._told >= self.attempt.spec.readers

    def fail(self, message: str, now: float, code: ErrorCode = ErrorCode.FAILED) -> list[Effect]:
        """End the stream for this reason."""
        self.attempt.failure = message
        self.attempt.enter(Phase.FAILED, now)
        served = {reader.peer for reader in self.attempt.readers}
        pending = self.rendezvous.pending()
        self._unheard = (served | {waiting.peer for waiting in pending}) - {b""}
        self._told = {reader.at for reader in self.attempt.readers if reader.peer}
        self._told |= {waiting.hello.reader for waiting in pending}
        return [self.attempt.error(peer, code, message, fatal=True) for peer in sorted(self._unheard)]

    def repeat(self, peer: bytes, message: Message, _extra: Frames, _now: float) -> list[Effect]:
        """Tell why the stream has failed."""
        if isinstance(message, Hello):
            self._told.add(message.reader)
            self._unheard.add(peer)
        return [self.attempt.error(peer, ErrorCode.FAILED, str(self.attempt.failure), fatal=True)]

    def forget(self, peer: bytes) -> None:
        """Wait for this connection no longer: it has said BYE, or is gone."""
        self._unheard.discard(peer)
