"""The server half of the protocol for one stream: messages and made steps in, effects out.

No socket, clock or thread is here: ``server`` owns them and calls in. The transitions are a table,
``TRANSITIONS``, over the phase of the stream's attempt:

    FORMING ── all HELLOs ──▶ RESTORING ── made again ──▶ WELCOMING ── all ACKs ──▶ RUNNING ── all took END ──▶ ENDED
       ▲ no attempt yet            snapshot asked for          WELCOME sent

A running attempt is untouched until a new one has formed (``meeting``): whoever says HELLO meanwhile waits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from packhorse.microbatch import Position
from packhorse.session import digest_of
from packhorse.wire import (
    ATTEMPT_BYTES,
    NO_ATTEMPT,
    Ack,
    Batch,
    Bye,
    End,
    ErrorCode,
    Frames,
    Give,
    Hello,
    Message,
    Reject,
    ServerError,
    Snapshot,
    Welcome,
)
from packhorse_service.attempt import Phase, Reader, Roster
from packhorse_service.dismissal import Dismissal, rank_name
from packhorse_service.effects import Effect, Make, Restore, Send
from packhorse_service.framing import FramedStep
from packhorse_service.meeting import Formation, Meeting
from packhorse_service.notices import silent_readers, waits
from packhorse_service.offer import Offer, dismissals
from packhorse_service.supply import Supply

__all__ = ["Effect", "Make", "Phase", "Restore", "Send", "StreamSession"]


@dataclass(slots=True)
class StreamSession:
    """One stream and its readers. Methods return the effects to carry out, in order."""

    offer: Offer
    phase: Phase = Phase.FORMING
    attempt: bytes = NO_ATTEMPT
    attempt_number: int = 0
    failure: str | None = None  # why the stream cannot go on
    roster: Roster = field(init=False)
    meeting: Meeting = field(init=False)
    supply: Supply = field(init=False)
    _dismissal: Dismissal = field(init=False)
    phase_since_s: float = 0.0
    _round: int = 0  # counts restores: a step made for an earlier round is not this stream's any more
    _asked: tuple[bytes, int, bytes] | None = None  # (peer, step, digest) of the snapshot asked for
    _told: set[bytes] = field(default_factory=set)  # connections that must still hear of the failure
    _said_s: float = 0.0  # when the last round of WAIT was sent
    _rejoin_s: float = 0.0

    def __post_init__(self) -> None:
        self.roster = Roster({}, self.offer)
        self.meeting = Meeting(self.offer.readers)
        self.supply = Supply(self.offer.steps_ahead)
        self._dismissal = Dismissal(self.offer.layout)

    # The server's calls ------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Every reader has said BYE, and none waits for the next attempt."""
        return self.roster.all_left and not self.meeting.present()

    @property
    def failure_heard(self) -> bool:
        """Everybody who was told of the failure has left."""
        return self.failure is not None and not self._told

    def warm_up(self) -> list[Effect]:
        """Make the first step before anybody has come."""
        return self._ask_for_step()

    def receive(self, peer: bytes, message: Message, extra: Frames, now: float) -> list[Effect]:
        """One message from a reader."""
        if self.failure is not None:
            return self._say_failure(peer, message)
        transition = TRANSITIONS.get((self.phase, type(message)))
        if transition is None:
            return [self._error(peer, ErrorCode.HELLO, f"{type(message).__name__} has no place here; say HELLO")]
        return transition(self, peer, message, extra, now)

    def made(self, round_: int, step: FramedStep | None, now: float) -> list[Effect]:
        """A step that ``Make`` asked for; ``None`` where the stream ended before it."""
        if round_ != self._round:
            return []
        self.supply.made(step)
        return self._diverged() or self._pump(now)

    def _diverged(self) -> list[Effect]:
        """Compare every step that is held with what readers say they were handed."""
        found = (self.roster.diverged(step, self._num_microbatches) for step in self.supply.steps.values())
        diverged = next(filter(None, found), None)
        return self.fail(diverged, ErrorCode.DIVERGED) if diverged else []

    def restored(self, round_: int, now: float) -> list[Effect]:
        """The stream stands where ``Restore`` asked."""
        return self._welcome_all(now) if round_ == self._round else []

    def not_restored(self, round_: int, message: str, now: float) -> list[Effect]:
        """The snapshot is not one of this stream: its readers are refused, the server waits for others."""
        if round_ != self._round:
            return []
        told: list[Effect] = [self._error(r.peer, ErrorCode.FAILED, message, fatal=True) for r in self.roster]
        self.roster, self.attempt = Roster({}, self.offer), NO_ATTEMPT
        self.meeting.clear()
        self.supply.lose()
        self._enter(Phase.FORMING, now)
        return told

    def fail(self, message: str, code: ErrorCode = ErrorCode.FAILED) -> list[Effect]:
        """The stream cannot go on: tell everybody, now and whenever they ask again."""
        self.failure = message
        present = {reader.peer for reader in self.roster} | {g.peer for g in self.meeting.waiting()}
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
        self.roster.lose(peer)
        self.meeting.forget(peer)

    def tick(self, now: float) -> list[Effect]:
        """Time passed: every keep-alive interval, tell whom something is owed what is waited for."""
        if self.failure is None and self.meeting.overdue(now):
            return self._dismiss()
        if now - self._said_s < self.offer.keep_alive_s or self.failure is not None:
            return []
        self._said_s = now
        return [*(Send(peer, wait) for peer, wait in waits(self, now)), *self._rejoins(now)]

    def _dismiss(self) -> list[Effect]:
        """The deadline of those that wait: refuse them all, in the same words."""
        violations = self._dismissal.violations(self.meeting.missing(), self.meeting.disagreement())
        reject = Reject(stream=self.offer.stream, violations=violations)
        told: list[Effect] = [Send(greeting.peer, reject) for greeting in self.meeting.waiting()]
        self.meeting.clear()
        self._dismissal.clear()
        return told

    # HELLO -------------------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: Hello, _extra: Frames, now: float) -> list[Effect]:
        violations = self.offer.refusals(hello)
        if violations:
            named = self._dismissal.refuse(hello, violations)
            return [Send(peer, Reject(stream=self.offer.stream, violations=named))]
        self._dismissal.accept(hello.reader)
        known = self.roster.by_coordinates.get(hello.reader)
        returns = known is not None and known.client == hello.client and hello.attempt == self.attempt
        if known is not None and returns and self.phase in (Phase.WELCOMING, Phase.RUNNING, Phase.ENDED):
            return self._move(known, peer, hello, now)
        replaced = self.meeting.note(peer, hello, now)
        effects: list[Effect] = []
        if replaced is not None and replaced.peer != peer:
            self._dismissal.claim_twice(hello.reader)
            name = rank_name(self.offer.layout, hello.reader)
            text = f"another process has claimed {name}; each reader connects once: check the ranks"
            effects.append(self._error(replaced.peer, ErrorCode.FAILED, text, fatal=True))
        formation = self.meeting.formed()
        refused = [Send(peer, reject) for peer, reject in dismissals(self.offer, self.meeting, formation)]
        return effects + (refused or (self._form(formation, now) if formation else []))

    def _move(self, reader: Reader, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        """A reader of this attempt is back on a new connection and continues at its position."""
        if not reader.acked <= hello.position <= reader.sent:
            text = f"{hello.reader} stands at {tuple(hello.position)}, outside what attempt {self.attempt_number} sent"
            return [self._error(peer, ErrorCode.POSITION, text, fatal=True)]
        self.roster.move(reader, peer)
        self.roster.acknowledge(reader, hello.position)
        reader.sent, reader.heard_s, reader.left = hello.position, now, False
        return [self._welcome(reader), *self._end_again(reader), *self._pump(now)]

    # Forming -----------------------------------------------------------------------------------------

    def _form(self, formation: Formation, now: float) -> list[Effect]:
        self.attempt = formation.attempt or secrets.token_bytes(ATTEMPT_BYTES)
        self.attempt_number += 1
        self.roster = Roster(formation.greetings, self.offer, now)
        self._enter(Phase.RESTORING, now)
        lowest = formation.lowest
        # A new attempt that begins elsewhere may have other data in mind: its snapshot tells.
        if self.supply.holds(lowest.step) and (formation.attempt or lowest.step == 0):
            return self._diverged() or self._welcome_all(now)
        return self._restore(0, None) if formation.compared_from == 0 else self._ask_for_snapshot(formation)

    def _restore(self, step: int, snapshot: bytes | None) -> list[Effect]:
        self._round += 1
        self.supply.reset(step)
        return [Restore(self._round, snapshot)]

    def _ask_for_snapshot(self, formation: Formation) -> list[Effect]:
        held = formation.snapshots()
        if not held:
            return self.fail(
                f"no reader holds a snapshot at or below {tuple(formation.lowest)}: nothing to resume from"
            )
        step = max((step for step in held if step <= formation.compared_from), default=max(held))
        if len(held[step]) > 1:
            return self.fail(f"readers hold different snapshots before step {step}: their checkpoints differ")
        ((digest, greeting),) = held[step].items()
        self._asked = (greeting.peer, step, digest)
        return [Send(greeting.peer, Give(stream=self.offer.stream, step=step, digest=digest))]

    def _snapshot(self, peer: bytes, message: Snapshot, extra: Frames, _now: float) -> list[Effect]:
        snapshot = bytes(extra[0])
        if self._asked != (peer, message.step, digest_of(snapshot)):
            return [self._error(peer, ErrorCode.HELLO, "this is not the snapshot that was asked for")]
        self._asked = None
        return self._restore(message.step, snapshot)

    def _welcome_all(self, now: float) -> list[Effect]:
        self._enter(Phase.WELCOMING, now)
        return [*(self._welcome(reader) for reader in self.roster), *self._ask_for_step()]

    def _welcome(self, reader: Reader) -> Send:
        offer = self.offer
        return Send(
            reader.peer,
            Welcome(
                server=offer.server,
                stream=offer.stream,
                attempt=self.attempt,
                attempt_number=self.attempt_number,
                fingerprint=offer.fingerprint,
                position=reader.acked,
                contract=offer.contract,
                steps_ahead=offer.steps_ahead,
                keep_alive_s=offer.keep_alive_s,
                warnings=reader.warnings,
            ),
        )

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self.phase_since_s = phase, now

    # ACK, BYE ----------------------------------------------------------------------------------------

    def _heard(self, peer: bytes, message: Ack, now: float) -> Reader | None:
        """The reader that acknowledges this attempt over its own connection; others say nothing to it."""
        reader = self.roster.of(peer)
        if reader is None or message.attempt != self.attempt:
            return None
        reader.heard_s, reader.idle_s = now, message.idle_s
        return reader

    def _answer(self, peer: bytes, message: Ack, _extra: Frames, now: float) -> list[Effect]:
        reader = self._heard(peer, message, now)
        if reader is None:
            return self._unknown(peer)
        if not self.roster.answer(reader):
            return []
        self._enter(Phase.RUNNING, now)
        self.meeting.clear()
        self._dismissal.clear()
        return self._pump(now)

    def _ack(self, peer: bytes, message: Ack, _extra: Frames, now: float) -> list[Effect]:
        reader = self._heard(peer, message, now)
        if reader is None:
            return self._unknown(peer)
        if not reader.acked <= message.position <= reader.sent:
            return [self._error(peer, ErrorCode.POSITION, f"{tuple(message.position)} was not sent; say HELLO")]
        if self.roster.acknowledge(reader, message.position):
            return self._pump(now)
        return list(self._send_to(reader, now))

    def _unknown(self, peer: bytes) -> list[Effect]:
        if any(greeting.peer == peer for greeting in self.meeting.waiting()):
            return []  # it has said HELLO since, and waits
        return [self._error(peer, ErrorCode.HELLO, "this connection has said no HELLO")]

    def _bye(self, peer: bytes, _message: Bye, _extra: Frames, now: float) -> list[Effect]:
        self.meeting.forget(peer)
        reader = self.roster.of(peer)
        if reader is not None:
            reader.left = True
        return self._end_if_all_have_ended(now)

    # Delivering --------------------------------------------------------------------------------------

    @property
    def _num_microbatches(self) -> int:
        return self.offer.contract.num_microbatches(self.offer.layout)

    def _ask_for_step(self) -> list[Effect]:
        step = self.supply.ask(self.roster.floor.step)
        return [] if step is None else [Make(self._round, step)]

    def _pump(self, now: float) -> list[Effect]:
        """The floor moved or a step was made: send to everybody what the windows allow."""
        if self.phase is not Phase.RUNNING:
            return self._ask_for_step()
        floor = self.roster.floor
        self.supply.release(floor.step)
        effects: list[Effect] = [effect for reader in self.roster for effect in self._send_to(reader, now)]
        return effects + self._end_if_all_have_ended(now) + self._ask_for_step()

    def _end_if_all_have_ended(self, now: float) -> list[Effect]:
        """Where everybody has taken END or left, those that stay for the others' sake hear that they may leave."""
        end = self.supply.end
        if self.phase is not Phase.RUNNING or end is None:
            return []
        if not all(reader.left or reader.acked.step > end for reader in self.roster):
            return []
        self._enter(Phase.ENDED, now)
        return [again for reader in self.roster if reader.peer and not reader.left for again in self._end_again(reader)]

    def _end_again(self, reader: Reader) -> list[Effect]:
        end = self.supply.end if self.phase is Phase.ENDED else None
        again = End(stream=self.offer.stream, attempt=self.attempt, position=Position(end or 0, 0))
        return [] if end is None else [Send(reader.peer, again)]

    def _send_to(self, reader: Reader, now: float) -> Iterator[Effect]:
        while reader.peer and self._in_flight(reader) < reader.window:
            message, extra = self._next_for(reader)
            if message is None:
                break
            yield Send(reader.peer, message, extra)
        owed = reader.sent == reader.acked and self.supply.end != reader.sent.step - 1
        reader.owed_since_s = (reader.owed_since_s or now) if owed else None

    def _in_flight(self, reader: Reader) -> int:
        steps = reader.sent.step - reader.acked.step
        return steps * self._num_microbatches + reader.sent.index - reader.acked.index

    def _next_for(self, reader: Reader) -> tuple[Message | None, Frames]:
        """The reader's next message, moving ``sent`` behind it."""
        at = reader.sent
        if at.step == self.supply.end:
            reader.sent = Position(at.step + 1, 0)
            return End(stream=self.offer.stream, attempt=self.attempt, position=at), ()
        step = self.supply.steps.get(at.step)
        if step is None:
            return None, ()
        view = step.of(reader.view)[at.index]
        reader.sent = at.after(self._num_microbatches)
        batch = Batch(stream=self.offer.stream, attempt=self.attempt, floor=self.roster.floor, body=view.body)
        last = at.index == self._num_microbatches - 1
        return batch, (view.payload, step.snapshot) if last else (view.payload,)

    # Silence ----------------------------------------------------------------------------------------

    def _rejoins(self, now: float) -> list[Effect]:
        """Where a reader is silent for long, the others look for it where the endpoint's name points now."""
        silent = silent_readers(self, now)
        if not silent or now - self._rejoin_s < self.offer.rejoin_after_s:
            return []
        self._rejoin_s = now
        names, after = ", ".join(str(reader.at) for reader in silent), self.offer.rejoin_after_s
        text = f"nothing heard from {names} for {after:.0f} s"
        return [self._error(r.peer, ErrorCode.REJOIN, text) for r in self.roster if r.peer and r not in silent]

    def _error(self, peer: bytes, code: ErrorCode, message: str, *, fatal: bool = False) -> Send:
        return Send(peer, ServerError(stream=self.offer.stream, code=code, message=message, fatal=fatal))


Transition = Callable[[StreamSession, bytes, Any, Frames, float], list[Effect]]

TRANSITIONS: dict[tuple[Phase, type], Transition] = {
    **{(phase, Hello): StreamSession._hello for phase in Phase},
    **{(phase, Bye): StreamSession._bye for phase in Phase},
    (Phase.FORMING, Ack): lambda session, peer, _message, _extra, _now: session._unknown(peer),
    (Phase.RESTORING, Ack): lambda session, peer, _message, _extra, _now: session._unknown(peer),
    (Phase.RESTORING, Snapshot): StreamSession._snapshot,
    (Phase.WELCOMING, Ack): StreamSession._answer,
    (Phase.RUNNING, Ack): StreamSession._ack,
    (Phase.ENDED, Ack): lambda session, peer, message, _extra, now: [],
}
