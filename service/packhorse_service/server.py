"""The server's only socket and clock.

One thread owns the ROUTER: it decodes what arrives, gives it to the stream's session and carries out the
effects. A second thread runs the pipeline, so that the loop answers while a step is being made; the two
meet in queues. ROUTER is told to fail rather than drop (``ROUTER_MANDATORY``), and never blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import zmq

from packhorse.errors import ConfigError, ContractError, PackhorseError, ProtocolError
from packhorse.wire import ErrorCode, ServerError, decode, encode
from packhorse_service.accounting import describe_counts
from packhorse_service.attempt import Phase
from packhorse_service.framing import FramedStep
from packhorse_service.notices import describe
from packhorse_service.offer import Offer, readers_of
from packhorse_service.pipeline import Pipeline
from packhorse_service.sessions import Effect, Make, Restore, Send, StreamSession
from packhorse_service.socket_file import SocketFile

__all__ = ["Server"]

log = logging.getLogger("packhorse.server")

POLL_MS = 200
INBOUND_LIMIT_BYTES = 80 << 10  # a snapshot of 64 KiB, and headers
BACKLOG = 1024
HEARTBEAT_MS = 2_000
LINGER_MS = 1_000
END_GRACE_S = 60.0
FAREWELL_S = 5.0
PRODUCER_S = 1.0  # it may be waiting for a read that never returns
REPORT_S = 10.0


@dataclass(frozen=True, slots=True)
class Made:
    round: int
    step: FramedStep | None


@dataclass(frozen=True, slots=True)
class Restored:
    round: int


@dataclass(frozen=True, slots=True)
class NotRestored:
    round: int
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    message: str


Result = Made | Restored | NotRestored | Failed


class Producer(threading.Thread):
    """Runs the pipeline on request. Results are put in ``results``, and the bell is rung."""

    def __init__(self, pipeline: Pipeline, bell: socket.socket) -> None:
        super().__init__(name="packhorse-producer", daemon=True)
        self.requests: queue.SimpleQueue[Make | Restore | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._pipeline = pipeline
        self._bell = bell

    def run(self) -> None:
        while (request := self.requests.get()) is not None:
            result: Result
            try:
                result = self._carry_out(request)
            except PackhorseError as error:
                result = Failed(str(error))
            except Exception as error:
                log.exception("the pipeline failed")
                result = Failed(f"{type(error).__name__}: {error}")
            self.results.put(result)
            with contextlib.suppress(OSError):  # the loop has stopped listening
                self._bell.send(b"\0")

    def _carry_out(self, request: Make | Restore) -> Result:
        match request:
            case Make(round_, _):
                return Made(round_, self._pipeline.next_step())
            case Restore(round_, snapshot):
                try:
                    self._pipeline.restore(snapshot)
                except (ContractError, ProtocolError) as error:
                    return NotRestored(round_, str(error))
                return Restored(round_)


class Server:
    """Serves one pipeline's stream until every reader has left, the end was long ago, or a signal."""

    def __init__(
        self,
        pipeline: Pipeline,
        listen: str,
        *,
        steps_ahead: int = 2,
        rejoin_after_s: float = 60.0,
        end_grace_s: float = END_GRACE_S,
    ) -> None:
        plan = pipeline.plan
        self._session = StreamSession(
            Offer(
                server=secrets.token_bytes(8),
                stream=plan.name,
                layout=plan.layout,
                contract=plan.contract,
                fingerprint=plan.identity.fingerprint,
                readers=readers_of(plan.layout, plan.contract.readers),
                steps_ahead=steps_ahead,
                rejoin_after_s=rejoin_after_s,
            )
        )
        self._end_grace_s = end_grace_s
        self._bell, self._ear = socket.socketpair()
        self._pipeline = pipeline
        self._producer = Producer(pipeline, self._bell)
        self._stopping: str | None = None
        self._failed_s = 0.0
        self._context = zmq.Context()
        self._socket = self._bind(listen)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket_file = SocketFile.of(self.endpoint)

    def _bind(self, listen: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        for option, value in {
            zmq.ROUTER_MANDATORY: 1,
            zmq.ROUTER_HANDOVER: 0,
            zmq.SNDHWM: 0,  # the delivery window bounds what is in flight
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: INBOUND_LIMIT_BYTES,
            zmq.LINGER: LINGER_MS,
            zmq.BACKLOG: BACKLOG,
            zmq.IPV6: int("[" in listen),  # an IPv6 socket would announce IPv4 addresses in a mapped form
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: 3 * HEARTBEAT_MS,
        }.items():
            router.setsockopt(option, value)
        try:
            router.bind(listen)
        except zmq.ZMQError as error:
            router.close(linger=0)
            self._context.term()
            raise ConfigError(
                f"listen={listen!r}: {error}; end the process that uses it, or choose another port "
                "(tcp://127.0.0.1:* takes a free one)"
            ) from error
        return router

    def publish_endpoint(self, path: Path) -> None:
        """Write the endpoint to a file in one step: whoever reads it finds nothing or all of it."""
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(self.endpoint + "\n", encoding="utf-8")
        part.replace(path)

    def stop(self, why: str) -> None:
        """End the loop soon; safe from a signal handler."""
        self._stopping = why
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

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

    def serve(self) -> bool:
        """Run until done; whether every reader left in order.

        Raises ``PackhorseError`` where the stream failed; the readers have been told the same.
        """
        self._producer.start()
        try:
            self._carry_out(self._session.warm_up())
            return self._loop()
        finally:
            self._close()
            for line in describe_counts(self._pipeline.counts):
                log.info("%s", line)

    def _loop(self) -> bool:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._ear.fileno(), zmq.POLLIN)
        reported = 0.0
        while self._stopping is None and not self._session.done:
            events = dict(poller.poll(POLL_MS))
            now = time.monotonic()
            if self._ear.fileno() in events:
                self._ear.recv(4096)
                self._take_results(now)
            if self._socket in events:
                self._read(now)
            self._carry_out(self._session.tick(now))
            self._leave_if_failed(now)
            if self._session.phase is Phase.ENDED and now - self._session.phase_since_s > self._end_grace_s:
                log.warning("not every reader has said BYE %.0f s after the end; leaving", self._end_grace_s)
                return False
            if now - reported > REPORT_S:
                log.info("%s", describe(self._session))
                reported = now
        if self._stopping is not None:
            log.info("stopped by %s", self._stopping)
        return self._session.done

    def _leave_if_failed(self, now: float) -> None:
        """A failed stream is over once every reader has heard of it, or should have."""
        failure = self._session.failure
        if failure is None:
            return
        self._failed_s = self._failed_s or now
        if self._session.failure_heard or now - self._failed_s > FAREWELL_S:
            raise StreamFailed(failure)

    def _read(self, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    message, extra = decode(frames)
                except ProtocolError as error:
                    self._refuse(peer, str(error))
                    continue
                self._carry_out(self._session.receive(peer, message, extra, now))

    def _refuse(self, peer: bytes, message: str) -> None:
        log.warning("a message that the protocol does not allow: %s", message)
        error = ServerError(stream=self._session.offer.stream, code=ErrorCode.HELLO, message=message, fatal=True)
        self._carry_out([Send(peer, error)])

    def _take_results(self, now: float) -> None:
        while not self._producer.results.empty():
            result = self._producer.results.get()
            match result:
                case Made(round_, step):
                    self._carry_out(self._session.made(round_, step, now))
                case Restored(round_):
                    self._carry_out(self._session.restored(round_, now))
                case NotRestored(round_, message):
                    self._carry_out(self._session.not_restored(round_, message, now))
                case Failed(message):
                    self._carry_out(self._session.fail(message))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message, extra):
                    self._send(peer, [encode(message), *extra])
                case Make() | Restore():
                    self._producer.requests.put(effect)

    def _send(self, peer: bytes, frames: list[bytes | bytearray | memoryview]) -> None:
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._session.lost(peer)

    def _close(self) -> None:
        self._producer.requests.put(None)
        self._socket.close()
        self._context.term()
        if self._socket_file is not None:
            self._socket_file.remove()
        self._bell.close()
        self._producer.join(timeout=PRODUCER_S)
        self._ear.close()


class StreamFailed(ContractError):
    """The data or the settings cannot be served; the text says why."""
