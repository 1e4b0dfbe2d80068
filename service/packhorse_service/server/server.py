"""The server's clock, and the thread that owns its socket (``router``).

What arrives and may be heard (``inbound``) it gives to the session of the stream that it names, and carries out
the effects.
Each stream has a thread of its own that runs its pipeline (``producer``).

The first stream is what the server is there for: it ends with its readers. Those of a further stream come and
go, or never come; what fails there ends only that stream.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType

from packhorse.errors import ConfigError, ContractError
from packhorse.rules import Violation
from packhorse.rules.runtime_rules import STREAM
from packhorse.wire.hello import ForeignHello
from packhorse.wire.messages import Bye, Hello, Message, Reject, ServerError, encode
from packhorse_service.config.addresses import Address
from packhorse_service.loading.engine import Engine
from packhorse_service.mixing.source_counts import describe_counts
from packhorse_service.monitoring.collect import StatusCollector
from packhorse_service.monitoring.loop_hook import LoopMonitor
from packhorse_service.monitoring.recent_events import RecentEvents
from packhorse_service.monitoring.status_http import StatusServer
from packhorse_service.pipeline.run import StreamPlan
from packhorse_service.protocol.admission import Limits
from packhorse_service.protocol.readers import Phase
from packhorse_service.protocol.stream_session import Effect, Make, Restore, Send, StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of
from packhorse_service.server.authentication import Curve
from packhorse_service.server.inbound import InboundFilter, InboundMessage
from packhorse_service.server.producer import Failed, Made, NotRestored, Producer, Restored
from packhorse_service.server.router import Router
from packhorse_service.server.systemd import SystemdNotifier

__all__ = ["Ending", "Server", "publish"]

log = logging.getLogger("packhorse.server")

END_GRACE_S = 60.0
FAILURE_GRACE_S = 5.0
REJECTIONS = (ServerError, Reject)
PRODUCER_JOIN_S = 1.0  # they may be waiting for a read that never returns


class Ending(Enum):
    """How a server that did not fail came to its end."""

    ALL_LEFT = auto()  # every reader said BYE
    STOPPED = auto()  # it was asked to
    SILENT = auto()  # all was delivered, and not every reader said BYE within the grace


@dataclass(frozen=True, slots=True)
class ServedStream:
    """One stream: its half of the protocol, and the thread that makes its steps."""

    name: str
    session: StreamSession
    producer: Producer


class Server:
    """Serves streams until every reader of the first has left, its end was long ago, or a signal."""

    def __init__(
        self,
        streams: Sequence[tuple[StreamPlan, Engine]],
        listen: str,
        *,
        steps_ahead: int = 2,
        rejoin_after_s: float = 60.0,
        end_grace_s: float = END_GRACE_S,
        curve: Curve | None = None,
        insecure: bool = False,
        monitor: Address | None = None,
    ) -> None:
        self._end_grace_s = end_grace_s
        self._clients = None if curve is None else curve.clients
        if self._clients is not None:
            for plan, _ in streams:
                self._clients.require_readers(plan.layout, plan.contract.readers, plan.name)
        self._router = Router(listen, curve=curve, insecure=insecure)
        self.endpoint = self._router.endpoint
        self._streams = {
            plan.name: ServedStream(
                plan.name,
                StreamSession(
                    StreamSpec(
                        stream=plan.name,
                        layout=plan.layout,
                        contract=plan.contract,
                        fingerprint=plan.fingerprint.digest,
                        readers=readers_of(plan.layout, plan.contract.readers),
                        steps_ahead=steps_ahead,
                        rejoin_after_s=rejoin_after_s,
                    )
                ),
                Producer(plan, engine, self._router.wake),
            )
            for plan, engine in streams
        }
        self._first, *self._further = self._streams.values()
        readers = sum(len(stream.session.spec.readers) for stream in self._streams.values())
        self._inbound = InboundFilter(self._router, Limits.for_readers(readers), self._first.name)
        self._wrong_claims: set[Violation] = set()  # that were logged
        self._stopping: str | None = None
        self._failed_s = 0.0
        self._notifier = SystemdNotifier()
        self._recent = RecentEvents(time.monotonic)
        watched = [(stream.session, stream.producer) for stream in self._streams.values()]
        collector = StatusCollector(self.endpoint, watched, time.monotonic())
        self._monitoring = LoopMonitor(collector, self._recent, self._notifier, time.monotonic)
        try:
            self._monitor = None if monitor is None else StatusServer(monitor, self._monitoring.latest)
        except ConfigError:
            self._router.close()
            raise

    @property
    def monitor_url(self) -> str | None:
        """Where the status page is."""
        return None if self._monitor is None else self._monitor.url

    def stop(self, why: str) -> None:
        """End the loop soon; safe from a signal handler."""
        self._stopping = why
        self._router.wake()

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the loop while inside."""

        def on_signal(number: int, _frame: FrameType | None) -> None:
            self.stop(signal.Signals(number).name)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # The loop ----------------------------------------------------------------------------------------

    def serve(self) -> Ending:
        """Run until done.

        Raises ``PackhorseError`` where a stream failed; its readers have been told the same.
        """
        with self._recent.attached():
            try:
                self._start()
                ending = self._loop()
            finally:
                self._close()
        for stream in self._further:
            if stream.session.failure is not None:
                raise StreamFailed(f"{self._label(stream)}{stream.session.failure}")
        return ending

    def _start(self) -> None:
        for stream in self._streams.values():
            stream.producer.start()
        if self._monitor is not None:
            self._monitor.start()
        self._notifier.ready(f"listening on {self.endpoint}")
        self._carry_out(self._first, self._first.session.warm_up())

    def _label(self, stream: ServedStream) -> str:
        """Whose line it is, where there are several streams."""
        return f"stream {stream.name!r}: " if self._further else ""

    def _loop(self) -> Ending:
        looked = 0.0
        first = self._first.session
        while self._stopping is None and not first.done:
            polled = self._router.wait(int(1000 * self._inbound.audit_interval_s))
            now = time.monotonic()
            if polled.woken:
                self._take_results(now)
            if polled.connections:
                self._inbound.track_connections(now)
            if polled.messages:
                self._receive(now)
            if now - looked < self._inbound.audit_interval_s:
                continue
            looked = now
            self._housekeeping(now)
            self._leave_if_failed(now)
            if first.phase is Phase.ENDED and now - self._last_needed_s > self._end_grace_s:
                log.warning("not every reader has said BYE %.0f s after the end; leaving", self._end_grace_s)
                return Ending.SILENT
        if self._stopping is None:
            return Ending.ALL_LEFT
        log.info("stopped by %s; readers wait for a server, and go on where they stand", self._stopping)
        return Ending.STOPPED

    def _housekeeping(self, now: float) -> None:
        """What need not be done with every message."""
        self._inbound.audit(now)
        gone = self._inbound.closed_peers()
        for stream in self._streams.values():
            for peer in gone:
                stream.session.lost(peer)
            self._carry_out(stream, stream.session.tick(now))
        self._monitoring.on_turn(now, self._inbound.connections)

    @property
    def _last_needed_s(self) -> float:
        """When the first stream ended, or a reader of another, which may evaluate behind that end, was heard last."""
        heard = [stream.session.heard_s for stream in self._further]
        return max([self._first.session.phase_since_s, *heard])

    def _leave_if_failed(self, now: float) -> None:
        """Where the first stream failed, the server is over once every reader has heard of it, or should have."""
        failure = self._first.session.failure
        if failure is None:
            return
        if not self._failed_s:
            self._failed_s = now
            for stream in self._further:
                if stream.session.failure is None:
                    text = f"stream {self._first.name!r} has failed, and the server ends: {failure}"
                    self._carry_out(stream, stream.session.fail(text))
        heard = all(stream.session.failure_heard for stream in self._streams.values())
        if heard or now - self._failed_s > FAILURE_GRACE_S:
            raise StreamFailed(failure)

    def _receive(self, now: float) -> None:
        for heard in self._inbound.receive(now):
            stream = self._streams.get(heard.message.stream)
            if stream is not None:
                self._dispatch(stream, heard, now)
            elif not isinstance(heard.message, Bye) and self._inbound.allow_error(heard.connection, now):
                self._reject_unknown_stream(heard.peer, heard.message)

    def _dispatch(self, stream: ServedStream, heard: InboundMessage, now: float) -> None:
        """One message to a stream. One that is answered with an error counts against its connection."""
        message = heard.message
        effects = self._reject_claim(stream, heard) or stream.session.receive(heard.peer, message, heard.extra, now)
        if _is_rejected(heard.peer, effects):
            self._inbound.allow_error(heard.connection, now)
        elif isinstance(message, Hello):
            self._inbound.hello_accepted(heard.connection)
        self._carry_out(stream, effects)

    def _reject_claim(self, stream: ServedStream, heard: InboundMessage) -> list[Effect]:
        """Where this key may not be this reader. That comes before everything else: others learn no contract.

        Only HELLO claims a rank. All that follows is bound to the connection that said it, and so to its key.
        """
        session, hello = stream.session, heard.message
        if (
            self._clients is None
            or not isinstance(hello, Hello | ForeignHello)
            or hello.reader not in session.spec.readers
        ):
            return []
        violation = self._clients.claim_violation(heard.key, session.spec.layout.rank(hello.reader))
        if violation is None:
            return []
        named = session.rejections.reject(hello, [violation])
        if named[0] not in self._wrong_claims:
            self._wrong_claims.add(named[0])
            log.warning("%s%s", self._label(stream), named[0])
        return [session.reject(heard.peer, named)]

    def _reject_unknown_stream(self, peer: bytes, message: Message | ForeignHello) -> None:
        """There is no such stream here; say which there are."""
        want, remedy = f"one of {', '.join(self._streams)}", "correct the name, or configure it under streams"
        violations = (STREAM.violation("stream", want=want, got=message.stream, remedy=remedy),)
        self._first.session.counters.add_reject(violations)
        self._carry_out(self._first, [Send(peer, Reject(stream=message.stream, violations=violations))])

    def _take_results(self, now: float) -> None:
        for stream in self._streams.values():
            while not stream.producer.results.empty():
                self._take_result(stream, now)

    def _take_result(self, stream: ServedStream, now: float) -> None:
        session = stream.session
        match stream.producer.results.get():
            case Made(generation, step, snapshot_after):
                self._carry_out(stream, session.made(generation, step, now, snapshot_after))
            case Restored(generation):
                self._carry_out(stream, session.restored(generation, now))
            case NotRestored(generation, message):
                self._carry_out(stream, session.not_restored(generation, message, now))
            case Failed(message):
                log.error("%s%s", self._label(stream), message)
                self._carry_out(stream, session.fail(message))

    def _carry_out(self, stream: ServedStream, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message, extra):
                    if not self._inbound.send(peer, [encode(message), *extra]):
                        stream.session.lost(peer)
                case Make() | Restore():
                    stream.producer.requests.put(effect)

    def _close(self) -> None:
        """Within a few seconds: what was sent has a moment to leave, a read that never returns is not waited for."""
        self._notifier.stopping()
        for stream in self._streams.values():
            stream.producer.requests.put(None)
        self._router.close()
        deadline = time.monotonic() + PRODUCER_JOIN_S
        for stream in self._streams.values():
            stream.producer.join(timeout=max(0.0, deadline - time.monotonic()))
            for line in describe_counts(stream.producer.counts):
                log.info("%s%s", self._label(stream), line)
        if self._monitor is not None:
            self._monitor.close()


def _is_rejected(peer: bytes, effects: list[Effect]) -> bool:
    """Whether this peer is told that it may not have said what it said."""
    return any(
        isinstance(effect, Send) and isinstance(effect.message, REJECTIONS) and effect.peer == peer
        for effect in effects
    )


class StreamFailed(ContractError):
    """The data or the settings cannot be served; the text says why."""


def publish(text: str, path: Path) -> None:
    """Write a line to a file in one step: whoever reads it finds nothing or all of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)
