"""HELLO: what becomes of a process that says who it is, where it stands and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from packhorse.rules import Violation
from packhorse.rules.runtime_rules import RANKS_AGREE
from packhorse.wire.hello import ForeignHello
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import ErrorCode, Frames, Hello, Reject
from packhorse_service.protocol.attempt import Attempt, Phase
from packhorse_service.protocol.attempt_starter import AttemptStarter
from packhorse_service.protocol.counters import StreamCounters
from packhorse_service.protocol.delivery import Delivery
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.readers import Reader
from packhorse_service.protocol.rejection import Rejections, rank_name
from packhorse_service.protocol.rendezvous import Quorum, Rendezvous, reject_disagreeing
from packhorse_service.protocol.stream_spec import version_violation

__all__ = ["HelloHandler", "HelloOutcome"]

SILENT_INTERVALS = 5  # of keep-alive, behind which a reader may be gone
CONTEST_S = 10.0  # for which a process waits for the one that it would replace: it may be about to end


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
    _contender: bytes = b""  # connection of a process that waits for the only reader to end

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
        if self._is_contested(quorum, now):
            self._contender = peer
            return []
        rejected: list[Effect] = [
            self.reject(other, broken) for other, broken in reject_disagreeing(self.rendezvous, quorum)
        ]
        return rejected or (self.starter.begin(quorum, now) if quorum else [])

    def _is_contested(self, quorum: Quorum | None, now: float) -> bool:
        """Return whether a single process would end, by a new start, the job of another that lives.

        Of several readers, all would have to have been started anew: that is a job that begins again.
        """
        if quorum is None or quorum.attempt != NO_ATTEMPT or len(quorum.hellos) > 1:
            return False
        if self.attempt.phase is not Phase.RUNNING:
            return False
        (reader,) = self.attempt.readers
        lives = (
            bool(reader.peer)
            and not reader.said_bye
            and now - reader.heard_s < SILENT_INTERVALS * self.attempt.spec.keep_alive_s
        )
        return lives and all(pending.hello.client != reader.client for pending in quorum.hellos.values())

    def settle_contest(self, now: float) -> list[Effect]:
        """Begin with a process that waited for the only reader to end, once it has; reject it where that lives on."""
        quorum = self.rendezvous.candidates.quorum() if self._contender else None
        if quorum is None or not self.rendezvous.is_waiting(self._contender):
            self._contender = b""
            return []
        if not self._is_contested(quorum, now):
            self._contender = b""
            return self.starter.begin(quorum, now)
        ((at, pending),) = quorum.hellos.items()
        if now - pending.since_s < CONTEST_S:
            return []
        self.rendezvous.forget(pending.peer)
        got = f"{rank_name(self.attempt.spec.layout, at)} is read by a process that lives"
        remedy = "end that process or close its Feed first, or start a server for this one"
        violation = RANKS_AGREE.violation("readers", want="each coordinate once", got=got, remedy=remedy)
        return [self.reject(pending.peer, (violation,))]

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
