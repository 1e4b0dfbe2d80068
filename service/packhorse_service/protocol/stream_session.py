"""The server half of the protocol for one stream: messages and made steps in, effects out.

No socket, clock or thread is here: ``server`` owns them and calls in. The transitions are a table,
``TRANSITIONS``, over the phase of the stream's attempt:

    FORMING ── all HELLOs ──▶ RESTORING ── made again ──▶ WELCOMING ── all ACKs ──▶ RUNNING ── all took END ──▶ ENDED
       ▲ no attempt yet            snapshot asked for          WELCOME sent

An END that only ends a pass is a step of the stream like any other, with the snapshot behind it.
A running attempt is untouched until a new one has formed (``meeting``): whoever says HELLO meanwhile waits.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from packhorse.contract.position import Position
from packhorse.errors import ContractError
from packhorse.rules import Violation
from packhorse.wire.digest import digest_of
from packhorse.wire.hello import ForeignHello
from packhorse.wire.limits import ATTEMPT_BYTES, NO_ATTEMPT
from packhorse.wire.messages import (
    Ack,
    Bye,
    End,
    ErrorCode,
    Frames,
    GetSnapshot,
    Hello,
    Message,
    Reject,
    ServerError,
    Snapshot,
)
from packhorse_service.framing import FramedStep
from packhorse_service.protocol.counters import StreamCounters
from packhorse_service.protocol.delivery import Sender
from packhorse_service.protocol.effects import Effect, Make, Restore, Send
from packhorse_service.protocol.readers import Phase, Reader, ReaderTable
from packhorse_service.protocol.rejection import Rejections, rank_name
from packhorse_service.protocol.rendezvous import PendingHello, Quorum, Rendezvous, reject_disagreeing
from packhorse_service.protocol.step_buffer import StepBuffer
from packhorse_service.protocol.stream_spec import StreamSpec, version_violation
from packhorse_service.protocol.wait_messages import obstacles, rejoining, waits

__all__ = ["Effect", "Make", "Phase", "Restore", "Send", "StreamSession"]

log = logging.getLogger("packhorse.server")


@dataclass(slots=True)
class StreamSession:
    """One stream and its readers. Methods return the effects to carry out, in order."""

    spec: StreamSpec
    phase: Phase = Phase.FORMING
    attempt: bytes = NO_ATTEMPT
    attempt_number: int = 0
    failure: str | None = None  # why the stream cannot go on
    readers: ReaderTable = field(init=False)
    rendezvous: Rendezvous = field(init=False)
    buffer: StepBuffer = field(init=False)
    rejections: Rejections = field(init=False)
    counters: StreamCounters = field(default_factory=StreamCounters)
    phase_since_s: float = 0.0
    heard_s: float = 0.0  # when a message came last
    asked: tuple[int, bytes, bytes] | None = None  # (step, digest, peer) of the snapshot asked for
    _num_microbatches: int = field(init=False)
    _supplied: bytes = NO_ATTEMPT  # whose steps the supply holds: another attempt may have packed otherwise
    _told: set[bytes] = field(default_factory=set)  # connections that must still hear of the failure
    _said_s: float = 0.0  # when the last round of WAIT was sent
    _rejoin_s: float = 0.0

    def __post_init__(self) -> None:
        self._num_microbatches = self.spec.contract.num_microbatches(self.spec.layout)
        self.readers = ReaderTable({}, self.spec)
        self.rendezvous = Rendezvous(self.spec.readers)
        self.buffer = StepBuffer(self.spec.steps_ahead)
        self.rejections = Rejections(self.spec.layout)

    # The server's calls ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Every reader has said BYE, and none waits for the next attempt."""
        return self.readers.all_said_bye and not self.rendezvous.pending()

    @property
    def failure_heard(self) -> bool:
        """Everybody who was told of the failure has left."""
        return self.failure is not None and not self._told

    def warm_up(self) -> list[Effect]:
        """Make the first step before anybody has come."""
        return self._ask_for_step()

    def receive(self, peer: bytes, message: Message | ForeignHello, extra: Frames, now: float) -> list[Effect]:
        """Take one message from a reader; return the effects."""
        self.heard_s = now
        if isinstance(message, ForeignHello):  # whatever else there is to say, it may not understand
            return [self.reject(peer, self.rejections.reject(message, [version_violation(message)]))]
        if self.failure is not None:
            return self._say_failure(peer, message)
        transition = TRANSITIONS.get((self.phase, type(message)))
        if transition is None:
            return [self._error(peer, ErrorCode.HELLO, f"{type(message).__name__} has no place here; say HELLO")]
        return transition(self, peer, message, extra, now)

    def made(self, generation: int, step: FramedStep | None, now: float, snapshot_after: bytes = b"") -> list[Effect]:
        """Take a step that ``Make`` asked for, or an end (``None``), with the snapshot behind the end of a pass."""
        if generation != self.buffer.generation:
            return []
        self.buffer.add(step, snapshot_after)
        if step is not None:
            self.counters.add_step(step.totals)
        if self.phase is Phase.RESTORING:
            return []  # the stream will be made again from elsewhere
        return self._diverged([step] if step else []) or self._pump(self.readers.take_waiting(), now)

    def _diverged(self, steps: Iterable[FramedStep]) -> list[Effect]:
        """Compare these steps with what readers say they were handed."""
        found = (self.readers.diverged(step, self._num_microbatches) for step in steps)
        diverged = next(filter(None, found), None)
        return self.fail(diverged, ErrorCode.DIVERGED) if diverged else []

    def restored(self, generation: int, now: float) -> list[Effect]:
        """The stream stands where ``Restore`` asked."""
        return self._welcome_all(now) if generation == self.buffer.generation else []

    def not_restored(self, generation: int, message: str, now: float) -> list[Effect]:
        """The snapshot is not one of this stream."""
        return self._refuse_attempt(message, now) if generation == self.buffer.generation else []

    def _refuse_attempt(self, message: str, now: float) -> list[Effect]:
        """Nothing can be made for these readers: they are refused, the server waits for others."""
        told: list[Effect] = [self._error(r.peer, ErrorCode.FAILED, message, fatal=True) for r in self.readers]
        self.readers, self.attempt = ReaderTable({}, self.spec), NO_ATTEMPT
        self.rendezvous.reset()
        self.buffer.invalidate()
        self._enter(Phase.FORMING, now)
        return told

    def fail(self, message: str, code: ErrorCode = ErrorCode.FAILED) -> list[Effect]:
        """The stream cannot go on: tell everybody, now and whenever they ask again."""
        self.failure = message
        present = {reader.peer for reader in self.readers} | {pending.peer for pending in self.rendezvous.pending()}
        self._told = present - {b""}
        return [self._error(peer, code, message, fatal=True) for peer in sorted(self._told)]

    def _say_failure(self, peer: bytes, message: Message) -> list[Effect]:
        if isinstance(message, Bye):
            self._told.discard(peer)
            return []
        return [self._error(peer, ErrorCode.FAILED, str(self.failure), fatal=True)]

    def lost(self, peer: bytes) -> None:
        """This connection is gone; its reader says HELLO when it is back."""
        self._told.discard(peer)
        self.readers.disconnect(peer)
        self.rendezvous.forget(peer)

    def tick(self, now: float) -> list[Effect]:
        """Time passed: every keep-alive interval, tell whom something is owed what is waited for."""
        met = self.phase in (Phase.RESTORING, Phase.WELCOMING)
        if self.failure is None and not met and self.rendezvous.overdue(now):
            return self._reject_waiting()
        if now - self._said_s < self.spec.keep_alive_s or self.failure is not None:
            return []
        self._said_s = now
        back = [self._error(g.peer, ErrorCode.HELLO, "say HELLO again") for g in self.rendezvous.restored()]
        return [*back, *(Send(peer, wait) for peer, wait in waits(self, now)), *self._rejoins(now)]

    def _reject_waiting(self) -> list[Effect]:
        """The deadline of those that wait: refuse them all, in the same words."""
        violations = self.rejections.violations(*obstacles(self))
        peers = [pending.peer for pending in self.rendezvous.pending()]
        self.rendezvous.reset()
        self.rejections.clear()
        return [self.reject(peer, violations) for peer in peers]

    def _rejoins(self, now: float) -> list[Effect]:
        """Where a reader is silent for long, the others look for it where the endpoint's name points now."""
        if now - self._rejoin_s < self.spec.rejoin_after_s:
            return []
        silent, told = rejoining(self, now)
        self._rejoin_s = now if told else self._rejoin_s
        text = f"nothing heard from {', '.join(map(str, silent))} for {self.spec.rejoin_after_s:.0f} s"
        if told:
            log.warning("stream %r: %s; %d readers are to look for the server again", self.spec.stream, text, len(told))
        return [self._error(peer, ErrorCode.REJOIN, text) for peer in told]

    # HELLO -------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: Hello, _extra: Frames, now: float) -> list[Effect]:
        violations = self.spec.violations_of(hello)
        if violations:
            named = self.rejections.reject(hello, violations)
            return [self.reject(peer, named)]
        self.rejections.accept(hello.reader)
        known = self.readers.by_coordinates.get(hello.reader)
        returns = known is not None and known.client == hello.client and hello.attempt == self.attempt
        effects: list[Effect] = []
        if known is not None and returns and self.phase in (Phase.RUNNING, Phase.ENDED):
            if hello.position <= known.sent:
                return self._move(known, peer, hello, now)
            effects = self._outrun(peer, now)
        elif self.readers.by_peer(peer) is not None and self.rendezvous.already_said(peer, hello):
            return []  # said twice; its answer is on the way
        elif self.rendezvous.is_over(hello):
            text = f"attempt {hello.attempt.hex()[:8]} is over: a later one runs; start again from a checkpoint"
            return [self._error(peer, ErrorCode.FAILED, text, fatal=True)]
        replaced = self.rendezvous.add(peer, hello, now)
        if replaced is not None:
            self.rejections.claim_twice(hello.reader)
        quorum = self.rendezvous.quorum()
        refused = [self.reject(peer, broken) for peer, broken in reject_disagreeing(self.rendezvous, quorum)]
        return effects + (refused or (self._form(quorum, now) if quorum else []))

    def _move(self, reader: Reader, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        """A reader of this attempt is back on a new connection and continues at its position."""
        if hello.position < reader.acked:
            text = f"{hello.reader} stands at {tuple(hello.position)}, before what it has acknowledged"
            return [self._error(peer, ErrorCode.POSITION, text, fatal=True)]
        self.counters.add_reconnect(self.buffer.count_between(hello.position, reader.sent, self._num_microbatches))
        self.readers.move(reader, peer)
        self.readers.acknowledge(reader, hello.position)
        reader.sent, reader.heard_s, reader.said_bye = hello.position, now, False
        return [self._welcome(reader), *self._end_again(reader), *self._pump([reader], now)]

    def _outrun(self, peer: bytes, now: float) -> list[Effect]:
        """A reader stands behind what was sent here: another server has served the attempt since. All meet again."""
        others = [reader.peer for reader in self.readers if reader.peer not in (b"", peer)]
        self.readers = ReaderTable({}, self.spec)
        self._enter(Phase.FORMING, now)
        return [self._error(other, ErrorCode.HELLO, "another server has served this attempt since") for other in others]

    # Forming -----------------------------------------------------------------------------------------

    def _form(self, quorum: Quorum, now: float) -> list[Effect]:
        self.attempt_number += not quorum.attempt or quorum.attempt != self.attempt
        self.attempt = quorum.attempt or secrets.token_bytes(ATTEMPT_BYTES)
        self.readers = ReaderTable(quorum.hellos, self.spec, now)
        self.asked = None
        self._enter(Phase.RESTORING, now)
        lowest = quorum.lowest
        # Elsewhere than at the beginning, another attempt may have other data in mind: its snapshot tells.
        same = quorum.attempt != NO_ATTEMPT and quorum.attempt == self._supplied
        if self.buffer.holds(lowest.step) and (same or lowest.step == 0):
            return self._diverged(self.buffer.steps.values()) or self._welcome_all(now)
        return self._restore(0, None) if quorum.compared_from == 0 else self._ask_for_snapshot(quorum, now)

    def _restore(self, step: int, snapshot: bytes | None) -> list[Effect]:
        self.buffer.reset(step)
        return [Restore(self.buffer.generation, snapshot)]

    def _ask_for_snapshot(self, quorum: Quorum, now: float) -> list[Effect]:
        try:
            step, digest, peer = self.asked = quorum.newest_snapshot()
        except ContractError as error:
            return self._refuse_attempt(str(error), now)
        self.buffer.invalidate()  # a restore that is under way is not this attempt's
        return [Send(peer, GetSnapshot(stream=self.spec.stream, step=step, digest=digest))]

    def _snapshot(self, peer: bytes, message: Snapshot, extra: Frames, _now: float) -> list[Effect]:
        snapshot = bytes(extra[0])
        if self.asked != (message.step, digest_of(snapshot), peer):
            return [self._error(peer, ErrorCode.HELLO, "this is not the snapshot that was asked for")]
        self.asked = None
        return self._restore(message.step, snapshot)

    def _welcome_all(self, now: float) -> list[Effect]:
        self._enter(Phase.WELCOMING, now)
        self._supplied = self.attempt
        for reader in self.readers:
            reader.heard_s = now
        return [*(self._welcome(reader) for reader in self.readers), *self._ask_for_step()]

    def _welcome(self, reader: Reader) -> Send:
        welcome = self.spec.welcome(self.attempt, reader.acked, reader.warnings)
        return Send(reader.peer, welcome)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self.phase_since_s = phase, now

    # ACK, BYE ----------------------------------------------------------------------------------------

    def _heard(self, peer: bytes, message: Ack, now: float) -> Reader | None:
        """The reader that acknowledges this attempt over its own connection; others say nothing to it."""
        reader = self.readers.by_peer(peer)
        if reader is None or message.attempt != self.attempt:
            return None
        reader.heard_s, reader.loop_idle_s = now, message.loop_idle_s
        return reader

    def _answer(self, peer: bytes, message: Ack, _extra: Frames, now: float) -> list[Effect]:
        reader = self._heard(peer, message, now)
        if reader is None:
            return self._unknown(peer)
        if not self.readers.mark_answered(reader):
            return []
        self._enter(Phase.RUNNING, now)
        out = [self._replaced(pending) for pending in self.rendezvous.replaced()]
        self.rendezvous.attempt_started(self.attempt, {reader.client for reader in self.readers})
        self.rejections.clear()
        return [*out, *self._pump(self.readers, now)]

    def _replaced(self, pending: PendingHello) -> Send:
        name = rank_name(self.spec.layout, pending.hello.reader)
        text = f"another process has claimed {name}; each reader connects once: check the ranks"
        return self._error(pending.peer, ErrorCode.FAILED, text, fatal=True)

    def _ack(self, peer: bytes, message: Ack, _extra: Frames, now: float) -> list[Effect]:
        reader = self._heard(peer, message, now)
        if reader is None:
            return self._unknown(peer)
        before = reader.acked
        if not before <= message.position <= reader.sent:
            return [self._error(peer, ErrorCode.POSITION, f"{tuple(message.position)} was not sent; say HELLO")]
        watermark_moved = self.readers.acknowledge(reader, message.position)
        sends = self._deliver([reader], now)
        return sends + self._go_on(now) if watermark_moved and message.position.step != before.step else sends

    def _unknown(self, peer: bytes) -> list[Effect]:
        if any(pending.peer == peer for pending in self.rendezvous.pending()):
            return []  # it has said HELLO since, and waits
        return [self._error(peer, ErrorCode.HELLO, "this connection has said no HELLO")]

    def _bye(self, peer: bytes, _message: Bye, _extra: Frames, now: float) -> list[Effect]:
        self.rendezvous.forget(peer)
        reader = self.readers.by_peer(peer)
        if reader is not None:
            reader.said_bye = True
        return self._end_if_all_have_ended(now)

    # Delivering --------------------------------------------------------------------------------------

    def _ask_for_step(self) -> list[Effect]:
        """The next step, where it may be made; what every reader has taken is dropped first."""
        self.counters.delivered_steps += self.buffer.release(self.readers.low_watermark.step)
        step = self.buffer.claim_next(self.readers.low_watermark.step)
        return [] if step is None else [Make(self.buffer.generation, step)]

    def _pump(self, readers: Iterable[Reader], now: float) -> list[Effect]:
        """These readers may get more than before: send what their windows allow, and go on."""
        return (self._deliver(readers, now) if self.phase is Phase.RUNNING else []) + self._go_on(now)

    def _deliver(self, readers: Iterable[Reader], now: float) -> list[Effect]:
        sender = Sender(self.spec.stream, self.attempt, self._num_microbatches, self.readers, self.buffer)
        return sender.send_to(readers, now)

    def _go_on(self, now: float) -> list[Effect]:
        """The floor is in another step, maybe, or a step was made."""
        return self._end_if_all_have_ended(now) + self._ask_for_step()

    def _end_if_all_have_ended(self, now: float) -> list[Effect]:
        """Where everybody has taken END or left, those that stay for the others' sake hear that they may leave."""
        last = self.buffer.final_end
        if self.phase is not Phase.RUNNING or last is None or not self.readers.all_past(last):
            return []
        self._enter(Phase.ENDED, now)
        return [again for reader in self.readers for again in self._end_again(reader)]

    def _end_again(self, reader: Reader) -> list[Effect]:
        if self.phase is not Phase.ENDED or not reader.peer or reader.said_bye:
            return []
        at = Position(self.buffer.final_end or 0, 0)
        return [Send(reader.peer, End(stream=self.spec.stream, attempt=self.attempt, position=at))]

    def reject(self, peer: bytes, violations: tuple[Violation, ...]) -> Send:
        """This process is refused, for these reasons."""
        self.counters.add_reject(violations)
        return Send(peer, Reject(stream=self.spec.stream, violations=violations))

    def _error(self, peer: bytes, code: ErrorCode, message: str, *, fatal: bool = False) -> Send:
        return Send(peer, ServerError(stream=self.spec.stream, code=code, message=message, fatal=fatal))


Transition = Callable[[StreamSession, bytes, Any, Frames, float], list[Effect]]

TRANSITIONS: dict[tuple[Phase, type], Transition] = {
    **{(phase, Hello): StreamSession._hello for phase in Phase},
    **{(phase, Bye): StreamSession._bye for phase in Phase},
    (Phase.FORMING, Ack): lambda session, peer, _message, _extra, _now: session._unknown(peer),
    (Phase.RESTORING, Ack): lambda session, peer, _message, _extra, _now: session._unknown(peer),
    (Phase.RESTORING, Snapshot): StreamSession._snapshot,
    (Phase.WELCOMING, Ack): StreamSession._answer,
    (Phase.RUNNING, Ack): StreamSession._ack,
    (Phase.ENDED, Ack): StreamSession._ack,
}
