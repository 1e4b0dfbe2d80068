"""The server half of the protocol for one stream: messages and made steps in, effects out.

No socket, clock or thread is here: ``server`` owns them and calls in. The transitions are a table, ``TRANSITIONS``:
(phase of the stream's attempt, event) → (handler, phases that it may enter). ``Attempt.enter`` refuses all others.

    FORMING   ── HELLO, time passed ─────────────▶ RESTORING, WELCOMING, FAILED
              ── stream failed ──────────────────▶ FAILED
    RESTORING ── HELLO ──────────────────────────▶ FORMING, WELCOMING, FAILED
              ── restored ───────────────────────▶ WELCOMING
              ── not restored ───────────────────▶ FORMING
              ── not made, stream failed ────────▶ FAILED
    WELCOMING ── HELLO ──────────────────────────▶ FORMING, RESTORING, FAILED
              ── ACK ────────────────────────────▶ RUNNING, ENDED
              ── made, not made, stream failed ──▶ FAILED
    RUNNING   ── HELLO ──────────────────────────▶ FORMING, RESTORING, WELCOMING, ENDED, FAILED
              ── ACK, BYE ───────────────────────▶ ENDED
              ── made ───────────────────────────▶ ENDED, FAILED
              ── not made, stream failed ────────▶ FAILED
              ── time passed ────────────────────▶ FORMING, RESTORING, WELCOMING, FAILED
    ENDED     ── HELLO, time passed ─────────────▶ FORMING, RESTORING, WELCOMING, FAILED
              ── not made, stream failed ────────▶ FAILED

What may lead to another phase need not. An END that only ends a pass is a step of the stream like any other, with
the snapshot behind it. A running attempt is untouched until a new one has formed (``rendezvous``): whoever says
HELLO meanwhile waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

from packhorse.protocol.transition_table import Table, Transition
from packhorse.rules import Violation
from packhorse.wire.hello import ForeignHello
from packhorse.wire.messages import Ack, Bye, ErrorCode, Frames, Hello, Message, Snapshot
from packhorse_service.framing import FramedStep
from packhorse_service.protocol.attempt import Attempt, Failing, Phase
from packhorse_service.protocol.attempt_starter import AttemptStarter
from packhorse_service.protocol.counters import StreamCounters
from packhorse_service.protocol.delivery import Delivery
from packhorse_service.protocol.diagnosis import StreamView
from packhorse_service.protocol.effects import (
    ConnectionLost,
    Effect,
    Made,
    NotMade,
    NotRestored,
    Restored,
    StreamFailed,
    TimePassed,
)
from packhorse_service.protocol.hello_handler import HelloHandler
from packhorse_service.protocol.rejection import Rejections
from packhorse_service.protocol.rendezvous import Rendezvous
from packhorse_service.protocol.step_buffer import StepBuffer
from packhorse_service.protocol.stream_spec import StreamSpec
from packhorse_service.protocol.wait_messages import KeepAlive

__all__ = ["TRANSITIONS", "StreamSession"]


@dataclass(slots=True)
class StreamSession:
    """Session of one stream with its readers. Methods return the effects to carry out, in order."""

    spec: StreamSpec
    attempt: Attempt = field(init=False)
    rendezvous: Rendezvous = field(init=False)
    buffer: StepBuffer = field(init=False)
    counters: StreamCounters = field(default_factory=StreamCounters)
    failing: Failing = field(init=False)
    delivery: Delivery = field(init=False)
    starter: AttemptStarter = field(init=False)
    hellos: HelloHandler = field(init=False)
    keep_alive: KeepAlive = field(init=False)
    heard_s: float = 0.0  # when a message came last

    def __post_init__(self) -> None:
        attempt = self.attempt = Attempt(self.spec)
        rendezvous = self.rendezvous = Rendezvous(self.spec.readers)
        buffer = self.buffer = StepBuffer(self.spec.steps_ahead)
        rejections = Rejections(self.spec.layout)
        self.failing = Failing(attempt, rendezvous)
        self.delivery = Delivery(attempt, rendezvous, buffer, self.counters, self.failing)
        self.starter = AttemptStarter(attempt, rendezvous, rejections, buffer, self.delivery)
        self.hellos = HelloHandler(attempt, rendezvous, rejections, self.counters, self.delivery, self.starter)
        self.keep_alive = KeepAlive(attempt, rendezvous, buffer, rejections, self.hellos)

    @property
    def phase(self) -> Phase:
        """Phase that the stream's attempt is in."""
        return self.attempt.phase

    @property
    def failure(self) -> str | None:
        """Reason for which the stream cannot go on, if it cannot."""
        return self.attempt.failure

    @property
    def done(self) -> bool:
        """True once every reader has said BYE, and none waits for the next attempt."""
        return self.attempt.readers.all_said_bye and not self.rendezvous.pending()

    def view(self) -> StreamView:
        """Return what is to be seen of the stream now, for a diagnosis."""
        return self.keep_alive.view()

    def warm_up(self) -> list[Effect]:
        """Make the first step before anybody has come."""
        return self.delivery.ask_for_step()

    def receive(self, peer: bytes, message: Message | ForeignHello, extra: Frames, now: float) -> list[Effect]:
        """Take one message from a reader."""
        self.heard_s = now
        transition = TRANSITIONS.get((self.attempt.phase, type(message)))
        if transition is None:
            text = f"{type(message).__name__} has no place here; say HELLO"
            return [self.attempt.error(peer, ErrorCode.HELLO, text)]
        self.attempt.allow(transition.to)
        effects: list[Effect] = transition.handler(self, peer, message, extra, now)
        return effects

    def _happened(self, event: type, *arguments: object) -> list[Effect]:
        transition = TRANSITIONS[self.attempt.phase, event]
        self.attempt.allow(transition.to)
        effects: list[Effect] = transition.handler(self, *arguments)
        return effects

    def made(self, generation: int, step: FramedStep | None, now: float, snapshot_after: bytes = b"") -> list[Effect]:
        """Take a step that ``Make`` asked for, or an end (``None``), with the snapshot behind the end of a pass."""
        return self._happened(Made, generation, step, now, snapshot_after)

    def restored(self, generation: int, now: float) -> list[Effect]:
        """Go on: the stream stands where ``Restore`` asked."""
        return self._happened(Restored, generation, now)

    def not_restored(self, generation: int, message: str, now: float) -> list[Effect]:
        """Refuse the attempt: the snapshot is not one of this stream."""
        return self._happened(NotRestored, generation, message, now)

    def not_made(self, generation: int, message: str, now: float) -> list[Effect]:
        """Take it that the data of what was asked for cannot be used: whoever needs it is told why."""
        return self._happened(NotMade, generation, message, now)

    def fail(self, message: str, now: float) -> list[Effect]:
        """End the stream, which cannot go on for this reason: tell everybody, now and whenever they ask again."""
        return self._happened(StreamFailed, message, now)

    def lost(self, peer: bytes) -> None:
        """Forget a connection that is gone; its reader says HELLO when it is back."""
        self._happened(ConnectionLost, peer)

    def tick(self, now: float) -> list[Effect]:
        """Say what is due as time passes: WAIT, and to whom it is no use to wait longer, why."""
        return self._happened(TimePassed, now)

    def reject(self, peer: bytes, violations: tuple[Violation, ...]) -> Effect:
        """Reject a process for these reasons, found by the server itself."""
        return self.hellos.reject(peer, violations)


# The table ------------------------------------------------------------------------------------------

Handler = Callable[..., list[Effect]]
Row = Transition[Phase]


def _by_hellos(handler: Handler) -> Handler:
    return wraps(handler)(lambda session, *arguments: handler(session.hellos, *arguments))


def _by_starter(handler: Handler) -> Handler:
    return wraps(handler)(lambda session, *arguments: handler(session.starter, *arguments))


def _by_delivery(handler: Handler) -> Handler:
    return wraps(handler)(lambda session, *arguments: handler(session.delivery, *arguments))


def _by_keep_alive(handler: Handler) -> Handler:
    return wraps(handler)(lambda session, *arguments: handler(session.keep_alive, *arguments))


def _by_failing(handler: Handler) -> Handler:
    return wraps(handler)(lambda session, *arguments: handler(session.failing, *arguments))


def _bye(session: StreamSession, peer: bytes, _message: Bye, _extra: Frames, now: float) -> list[Effect]:
    """Take its leave; end, if it was the last that had not taken END."""
    session.rendezvous.forget(peer)
    reader = session.attempt.readers.by_peer(peer)
    if reader is not None:
        reader.said_bye = True
    return session.delivery.end_if_all_have_ended(now)


def _bye_to_failed(session: StreamSession, peer: bytes, *_: object) -> list[Effect]:
    """Wait for this reader no longer."""
    session.failing.forget(peer)
    return []


def _lost(session: StreamSession, peer: bytes) -> list[Effect]:
    """Forget the connection; its reader says HELLO when it is back."""
    session.failing.forget(peer)
    session.attempt.readers.disconnect(peer)
    session.rendezvous.forget(peer)
    return []


def _ignore(_session: StreamSession, *_: object) -> list[Effect]:
    """Ignore it: nothing here depends on it."""
    return []


def _rows(phases: tuple[Phase, ...], event: type, handler: Handler, *to: Phase) -> dict[tuple[Phase, type], Row]:
    """Return the rows of an event in several phases; it may always leave the attempt in the phase in which it is."""
    return {(phase, event): Transition(handler, tuple(dict.fromkeys((*to, phase)))) for phase in phases}


FORMING, RESTORING, WELCOMING, RUNNING, ENDED, FAILED = Phase
ALIVE = (FORMING, RESTORING, WELCOMING, RUNNING, ENDED)
BEGINNING = (FORMING, RESTORING, WELCOMING, FAILED)  # what the last HELLO of all may come to

TRANSITIONS: Table[Phase] = {
    **_rows((FORMING, RESTORING, WELCOMING), Hello, _by_hellos(HelloHandler.hello), *BEGINNING),
    **_rows((RUNNING,), Hello, _by_hellos(HelloHandler.hello), *BEGINNING, ENDED),
    **_rows((ENDED,), Hello, _by_hellos(HelloHandler.hello), *BEGINNING),
    **_rows((FAILED,), Hello, _by_failing(Failing.repeat)),
    **_rows(tuple(Phase), ForeignHello, _by_hellos(HelloHandler.foreign_hello)),
    **_rows((FORMING, RESTORING), Ack, _by_delivery(Delivery.ask_for_hello)),
    **_rows((WELCOMING,), Ack, _by_starter(AttemptStarter.answer), RUNNING, ENDED),
    **_rows((RUNNING,), Ack, _by_delivery(Delivery.acknowledge), ENDED),
    **_rows((ENDED,), Ack, _by_delivery(Delivery.acknowledge)),
    **_rows((FAILED,), Ack, _by_failing(Failing.repeat)),
    **_rows((RESTORING,), Snapshot, _by_starter(AttemptStarter.snapshot)),
    **_rows((FAILED,), Snapshot, _by_failing(Failing.repeat)),
    **_rows((RUNNING,), Bye, _bye, ENDED),
    **_rows((FORMING, RESTORING, WELCOMING, ENDED), Bye, _bye),
    **_rows((FAILED,), Bye, _bye_to_failed),
    **_rows((FORMING, ENDED), Made, _by_delivery(Delivery.take_step)),
    **_rows((RESTORING, FAILED), Made, _by_delivery(Delivery.keep_step)),
    **_rows((WELCOMING,), Made, _by_delivery(Delivery.take_step), FAILED),
    **_rows((RUNNING,), Made, _by_delivery(Delivery.take_step), ENDED, FAILED),
    **_rows((RESTORING,), Restored, _by_starter(AttemptStarter.restored), WELCOMING),
    **_rows((RESTORING,), NotRestored, _by_starter(AttemptStarter.not_restored), FORMING),
    # A restore that comes to nothing: another was asked for since, or nobody is here for it any more.
    **_rows((FORMING, WELCOMING, RUNNING, ENDED, FAILED), Restored, _ignore),
    **_rows((FORMING, WELCOMING, RUNNING, ENDED, FAILED), NotRestored, _ignore),
    **_rows((FORMING,), NotMade, _by_delivery(Delivery.hold_failure)),
    **_rows((RESTORING, WELCOMING, RUNNING, ENDED), NotMade, _by_delivery(Delivery.not_made), FAILED),
    **_rows((FAILED,), NotMade, _ignore),
    **_rows(ALIVE, StreamFailed, _by_failing(Failing.fail), FAILED),
    **_rows((FAILED,), StreamFailed, _ignore),
    **_rows((FORMING, RUNNING, ENDED), TimePassed, _by_keep_alive(KeepAlive.tick_or_reject), *BEGINNING),
    **_rows((RESTORING, WELCOMING), TimePassed, _by_keep_alive(KeepAlive.tick)),
    **_rows((FAILED,), TimePassed, _ignore),
    **_rows(tuple(Phase), ConnectionLost, _lost),
}
