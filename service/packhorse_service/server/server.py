"""The server's loop: its clock, and the thread that owns its socket (``router``).

What arrives and is admitted (``inbound``) it gives to the session of the stream that it names (``served_stream``),
which carries out the effects. Each stream has a thread of its own that runs its pipeline (``producer``).

The first stream is what the server is there for: it ends with its readers (``lifetime``). Those of a further stream
come and go, or never come; what fails there ends only that stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from packhorse.rules.runtime_rules import STREAM
from packhorse.wire.hello import ForeignHello
from packhorse.wire.messages import Bye, Hello, Message, Reject, ServerError
from packhorse_service.loading.engine import Engine
from packhorse_service.pipeline.plan import StreamPlan
from packhorse_service.protocol.admission import Limits
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of
from packhorse_service.server.authentication import Curve
from packhorse_service.server.inbound import InboundFilter, InboundMessage
from packhorse_service.server.lifetime import END_GRACE_S, FAILURE_GRACE_S, Ending, Lifetime
from packhorse_service.server.producer import Producer
from packhorse_service.server.rank_claims import RankClaims
from packhorse_service.server.router import Router
from packhorse_service.server.served_stream import ServedStream

__all__ = ["LoopHook", "Server"]

log = logging.getLogger("packhorse.server")

REJECTIONS = (ServerError, Reject)
PRODUCER_JOIN_S = 1.0  # they may be waiting for a read that never returns


class LoopHook(Protocol):
    """Watcher of a server's loop, called by the loop's own thread: what it takes, the data waits for."""

    def started(self) -> None:
        """Take note that the server listens, and the loop begins."""

    def on_turn(self, now: float, connections: int) -> None:
        """Take note that the loop has turned, at ``now`` seconds of the server's clock, with so many connections."""

    def stopping(self) -> None:
        """Take note that the loop has ended."""


class _Unwatched:
    def started(self) -> None: ...

    def on_turn(self, now: float, connections: int) -> None: ...

    def stopping(self) -> None: ...


class Server:
    """Serves streams until every reader of the first has left, its end was long ago, or it is stopped.

    ``clock`` gives seconds that never go back. Raises ``ConfigError`` where it cannot listen, or no key may claim
    the rank of some reader.
    """

    def __init__(
        self,
        streams: Sequence[tuple[StreamPlan, Engine]],
        listen: str,
        *,
        steps_ahead: int = 2,
        rejoin_after_s: float = 60.0,
        end_grace_s: float = END_GRACE_S,
        failure_grace_s: float = FAILURE_GRACE_S,
        curve: Curve | None = None,
        insecure: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if curve is not None:
            for plan, _ in streams:
                curve.clients.require_readers(plan.layout, plan.contract.readers, plan.name)
        self.clock = clock
        self._router = Router(listen, curve=curve, insecure=insecure)
        specs = [_spec(plan, steps_ahead, rejoin_after_s) for plan, _ in streams]
        limits = Limits.for_readers(sum(len(spec.readers) for spec in specs))
        self._inbound = InboundFilter(self._router, limits, specs[0].stream)
        self.streams = tuple(
            ServedStream(
                spec,
                Producer(plan, engine, self._router.wake),
                self._inbound.send,
                f"stream {plan.name!r}: " if streams[1:] else "",
            )
            for spec, (plan, engine) in zip(specs, streams, strict=True)
        )
        self._by_name = {stream.name: stream for stream in self.streams}
        self._claims = RankClaims(None if curve is None else curve.clients)
        self._lifetime = Lifetime(self.streams[0], self.streams[1:], end_grace_s, failure_grace_s)
        self._stopping: str | None = None
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Endpoint at which the server listens in fact."""
        return self._router.endpoint

    def stop(self, why: str) -> None:
        """End the loop soon; safe from a signal handler."""
        self._stopping = why
        self._router.wake()

    def serve(self, hook: LoopHook | None = None) -> Ending:
        """Run until done, and close. ``hook`` is told of every turn of the loop.

        Raises the error of a stream that failed; its readers have been told the same.
        """
        watcher = _Unwatched() if hook is None else hook
        first = self.streams[0]
        try:
            for stream in self.streams:
                stream.producer.start()
            watcher.started()
            first.carry_out(first.session.warm_up())
            ending = self._loop(watcher)
        finally:
            watcher.stopping()
            self.close()
        self._lifetime.raise_further()
        return ending

    def close(self) -> None:
        """Close the socket and end the producers, within a few seconds; again, or unserved, it does no harm.

        What was sent has a moment to leave; a read that never returns is not waited for.
        """
        if self._closed:
            return
        self._closed = True
        for stream in self.streams:
            stream.stop()
        self._router.close()
        deadline = self.clock() + PRODUCER_JOIN_S
        for stream in self.streams:
            stream.join(max(0.0, deadline - self.clock()))

    # The loop ----------------------------------------------------------------------------------------

    def _loop(self, watcher: LoopHook) -> Ending:
        audited = 0.0
        while self._stopping is None and not self._lifetime.all_left:
            polled = self._router.wait(int(1000 * self._inbound.audit_interval_s))
            now = self.clock()
            if polled.woken:
                for stream in self.streams:
                    stream.take_results(now)
            if polled.connections:
                self._inbound.track_connections(now)
            if polled.messages:
                self._receive(now)
            if now - audited < self._inbound.audit_interval_s:
                continue
            audited = now
            self._tick(now, watcher)
            ending = self._lifetime.ending(now)
            if ending is not None:
                return ending
        if self._stopping is None:
            return Ending.ALL_LEFT
        self._lifetime.raise_failure()
        log.info("stopped by %s; readers wait for a server, and go on where they stand", self._stopping)
        return Ending.STOPPED

    def _tick(self, now: float, watcher: LoopHook) -> None:
        """Do what need not be done with every message."""
        self._inbound.audit(now)
        closed = self._inbound.closed_peers()
        for stream in self.streams:
            stream.tick(now, closed)
        watcher.on_turn(now, self._inbound.connections)

    def _receive(self, now: float) -> None:
        for inbound in self._inbound.receive(now):
            stream = self._by_name.get(inbound.message.stream)
            if stream is not None:
                self._dispatch(stream, inbound, now)
            elif not isinstance(inbound.message, Bye) and self._inbound.allow_error(inbound.connection, now):
                self._reject_unknown_stream(inbound.peer, inbound.message)

    def _dispatch(self, stream: ServedStream, inbound: InboundMessage, now: float) -> None:
        """Give a message to its stream. One that is answered with an error counts against its connection."""
        peer, message = inbound.peer, inbound.message
        effects = self._claims.reject(stream, inbound) or stream.session.receive(peer, message, inbound.extra, now)
        if _is_rejected(peer, effects):
            self._inbound.allow_error(inbound.connection, now)
        elif isinstance(message, Hello):
            self._inbound.hello_accepted(inbound.connection)
        stream.carry_out(effects)

    def _reject_unknown_stream(self, peer: bytes, message: Message | ForeignHello) -> None:
        """Tell ``peer``, which named a stream that is not here, which there are."""
        want, remedy = f"one of {', '.join(self._by_name)}", "correct the name, or configure it under streams"
        violations = (STREAM.violation("stream", want=want, got=message.stream, remedy=remedy),)
        first = self.streams[0]
        first.session.counters.add_reject(violations)
        first.carry_out([Send(peer, Reject(stream=message.stream, violations=violations))])


def _spec(plan: StreamPlan, steps_ahead: int, rejoin_after_s: float) -> StreamSpec:
    return StreamSpec(
        stream=plan.name,
        layout=plan.layout,
        contract=plan.contract,
        fingerprint=plan.fingerprint.digest,
        readers=readers_of(plan.layout, plan.contract.readers),
        steps_ahead=steps_ahead,
        rejoin_after_s=rejoin_after_s,
    )


def _is_rejected(peer: bytes, effects: list[Effect]) -> bool:
    """Return whether these effects tell ``peer`` that it may not have said what it said."""
    return any(
        isinstance(effect, Send) and isinstance(effect.message, REJECTIONS) and effect.peer == peer
        for effect in effects
    )
