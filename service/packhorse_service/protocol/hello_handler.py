"""HELLO: what becomes of a process that says who it is, where it stands and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from packhorse.rules import Violation
from packhorse.wire.hello import ForeignHello
from packhorse.wire.messages import ErrorCode, Frames, Hello, Reject
from packhorse_service.protocol.attempt import Attempt, Phase
from packhorse_service.protocol.attempt_starter import AttemptStarter
from packhorse_service.protocol.counters import StreamCounters
from packhorse_service.protocol.delivery import Delivery
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.readers import Reader
from packhorse_service.protocol.rejection import Rejections
from packhorse_service.protocol.rendezvous import Rendezvous, reject_disagreeing
from packhorse_service.protocol.stream_spec import version_violation

__all__ = ["HelloHandler", "HelloOutcome"]


class HelloOutcome(Enum):
    """Outcomes of a HELLO that breaks no rule, in the order in which it is found out."""

    RETURNS = auto()  # a reader of this attempt, back on a new connection
    OUTRUN = auto()  # the same, but beyond what was sent here: another server has served the attempt since
    REPEATED = auto()  # said just so by a reader of this attempt, whose answer is on its way
    OVER = auto()  # of an attempt that ran here before a later one
    WAITS = auto()  # for all others to come


@dataclass(slots=True)
class HelloHandler:
    """Takes HELLOs, and those back that came to nothing. Methods return the effects to carry out, in order."""

    attempt: Attempt
    rendezvous: Rendezvous
    rejections: Rejections
    counters: StreamCounters
    delivery: Delivery
    starter: AttemptStarter

    def hello(self, peer: bytes, hello: Hello, _extra: Frames, now: float) -> list[Effect]:
        """Reject it where it breaks a rule, serve its reader here, or let it wait for the others."""
        violations = self.attempt.spec.violations_of(hello)
        if violations:
            return [self.reject(peer, self.rejections.reject(hello, violations))]
        self.rejections.accept(hello.reader)
        return OUTCOMES[self.outcome(peer, hello)](self, peer, hello, now)

    def foreign_hello(self, peer: bytes, hello: ForeignHello, _extra: Frames, _now: float) -> list[Effect]:
        """Reject it: whatever else there is to say, it may not understand."""
        return [self.reject(peer, self.rejections.reject(hello, [version_violation(hello)]))]

    def outcome(self, peer: bytes, hello: Hello) -> HelloOutcome:
        """Return what this HELLO comes to."""
        reader = self._same_process(hello)
        if reader is not None and self.attempt.phase in (Phase.RUNNING, Phase.ENDED):
            return HelloOutcome.RETURNS if hello.position <= reader.sent else HelloOutcome.OUTRUN
        if self.attempt.readers.by_peer(peer) is not None and self.rendezvous.already_said(peer, hello):
            return HelloOutcome.REPEATED
        return HelloOutcome.OVER if self.rendezvous.candidates.is_over(hello) else HelloOutcome.WAITS

    def _same_process(self, hello: Hello) -> Reader | None:
        """Return the reader of this attempt that the process is which says this."""
        known = self.attempt.readers.by_coordinates.get(hello.reader)
        same = known is not None and known.client == hello.client and hello.attempt == self.attempt.name
        return known if same else None

    def _return(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        """Serve a reader of this attempt on its new connection, from its position on."""
        reader = self.attempt.readers.by_coordinates[hello.reader]
        if hello.position < reader.acked or not self.delivery.sender.can_stand_at(hello.position):
            text = f"{hello.reader} stands at {tuple(hello.position)}, before what it has acknowledged, or nowhere"
            return [self.attempt.error(peer, ErrorCode.POSITION, text, fatal=True)]
        again = self.delivery.buffer.count_between(hello.position, reader.sent, self.delivery.sender.num_microbatches)
        self.counters.add_reconnect(again)
        self.attempt.readers.move(reader, peer)
        self.attempt.readers.acknowledge(reader, hello.position)
        reader.sent, reader.heard_s, reader.said_bye = hello.position, now, False
        welcome = self.starter.welcome(reader)
        return [welcome, *self.delivery.end_again(reader), *self.delivery.pump([reader], now)]

    def _outrun(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        """Let all meet again: what was sent here is behind what another server has sent since."""
        others = [reader.peer for reader in self.attempt.readers if reader.peer not in (b"", peer)]
        self.attempt.dissolve()
        self.attempt.enter(Phase.FORMING, now)
        text = "another server has served this attempt since"
        told: list[Effect] = [self.attempt.error(other, ErrorCode.HELLO, text) for other in others]
        return told + self._wait(peer, hello, now)

    def _ignore(self, _peer: bytes, _hello: Hello, _now: float) -> list[Effect]:
        return []

    def _is_over(self, peer: bytes, hello: Hello, _now: float) -> list[Effect]:
        """Tell a process that its job has been begun again without it."""
        text = f"attempt {hello.attempt.hex()[:8]} is over: a later one runs; start again from a checkpoint"
        return [self.attempt.error(peer, ErrorCode.FAILED, text, fatal=True)]

    def _wait(self, peer: bytes, hello: Hello, now: float) -> list[Effect]:
        """Let a process wait for the others; start the attempt if it was the last."""
        if self.rendezvous.add(peer, hello, now) is not None:
            self.rejections.claim_twice(hello.reader)
        quorum = self.rendezvous.candidates.quorum()
        rejected: list[Effect] = [
            self.reject(other, broken) for other, broken in reject_disagreeing(self.rendezvous, quorum)
        ]
        return rejected or (self.starter.begin(quorum, now) if quorum else [])

    def reject(self, peer: bytes, violations: tuple[Violation, ...]) -> Send:
        """Reject a process, for these reasons."""
        self.counters.add_reject(violations)
        return Send(peer, Reject(stream=self.attempt.spec.stream, violations=violations))

    def reject_all(self, violations: tuple[Violation, ...]) -> list[Effect]:
        """Reject all that wait, in the same words: the first of them would give up about now."""
        peers = [pending.peer for pending in self.rendezvous.pending()]
        self.rendezvous.reset()
        self.rejections.clear()
        return [self.reject(peer, violations) for peer in peers]


OUTCOMES: dict[HelloOutcome, Callable[[HelloHandler, bytes, Hello, float], list[Effect]]] = {
    HelloOutcome.RETURNS: HelloHandler._return,
    HelloOutcome.OUTRUN: HelloHandler._outrun,
    HelloOutcome.REPEATED: HelloHandler._ignore,
    HelloOutcome.OVER: HelloHandler._is_over,
    HelloOutcome.WAITS: HelloHandler._wait,
}
