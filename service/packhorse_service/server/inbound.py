"""What arrives at the server's socket, decoded, as far as ``protocol.admission`` lets it through.

Connections that go beyond their limits are closed here. What their messages mean is for the sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from packhorse.errors import ProtocolError
from packhorse.wire.hello import ForeignHello, OtherVersion
from packhorse.wire.messages import ErrorCode, Frames, Hello, Message, ServerError, decode, encode
from packhorse_service.protocol.admission import Admission, Decision, Limits
from packhorse_service.server.router import Arrival, Router
from packhorse_service.server.zmq_connections import ConnectionChange

__all__ = ["InboundFilter", "InboundMessage"]

log = logging.getLogger("packhorse.server")


class InboundMessage(NamedTuple):
    """A message, who said it, the number of its connection, and its public key, if any."""

    peer: bytes
    connection: int
    key: bytes
    message: Message | ForeignHello
    extra: Frames


class InboundFilter:
    """Filter between one router and the sessions; counts what it sends, as credit for answers.

    ``stream`` is named to those who say what names none.
    """

    def __init__(self, router: Router, limits: Limits, stream: str) -> None:
        self._router = router
        self._admission = Admission(limits)
        self._stream = stream
        self._closed_peers: list[bytes] = []

    @property
    def audit_interval_s(self) -> float:
        """Seconds until connections are to be audited again."""
        return self._admission.audits.interval_s

    @property
    def connections(self) -> int:
        """Number of connections that are open."""
        return len(self._admission)

    def closed_peers(self) -> list[bytes]:
        """Return whose connections have ended since the last call. A message of theirs may still wait to be read."""
        closed, self._closed_peers = self._closed_peers, []
        return closed

    def track_connections(self, now: float) -> None:
        """Take note of connections that were opened and closed, and close those beyond the limits."""
        for change, connection in self._router.connections.changes():
            if change is ConnectionChange.CLOSED:
                self._closed_peers += filter(None, [self._admission.closed(connection)])
            else:
                self._apply(connection, self._admission.opened(connection, now))

    def audit(self, now: float) -> None:
        """Close connections that say nothing, and those that send what becomes no message."""
        for connection in self._admission.overdue(now):
            self._router.connections.disconnect(connection)
        for connection in self._admission.to_audit(now):
            received = self._router.connections.bytes_received(connection)
            if received is not None:
                self._apply(connection, self._admission.received(connection, received))
        closed = self._admission.closures.report(now)
        if closed is not None:
            log.warning("%s", closed)

    def receive(self, now: float) -> Iterator[InboundMessage]:
        """Yield some of the messages that have arrived and are admitted."""
        for arrival in self._router.messages():
            if arrival.connection not in self._admission:
                self.track_connections(now)  # that it was opened is told before it can speak
            size = sum(map(len, arrival.frames))
            if self._apply(arrival.connection, self._admission.admit(arrival.connection, arrival.peer, size, now)):
                inbound = self._decode(arrival, now)
                if inbound is not None:
                    yield inbound

    def _decode(self, arrival: Arrival, now: float) -> InboundMessage | None:
        message: Message | ForeignHello
        try:
            message, extra = decode(arrival.frames)
        except OtherVersion as error:
            message, extra = error.hello, ()
        except ProtocolError as error:
            if self.allow_error(arrival.connection, now):
                self._answer_error(arrival.peer, str(error), now)
            return None
        if isinstance(message, Hello | ForeignHello) and not self._apply(
            arrival.connection, self._admission.admit_hello(arrival.connection, now)
        ):
            return None
        return InboundMessage(arrival.peer, arrival.connection, arrival.key, message, extra)

    def _answer_error(self, peer: bytes, message: str, now: float) -> None:
        if self._admission.allow_log_line(now):
            log.warning("a message that the protocol does not allow: %s", message)
        error = ServerError(stream=self._stream, code=ErrorCode.HELLO, message=message, fatal=True)
        self.send(peer, [encode(error)])

    def hello_accepted(self, connection: int) -> None:
        """Note that the HELLO on this connection was valid."""
        self._admission.hello_accepted(connection)

    def allow_error(self, connection: int, now: float) -> bool:
        """Count a message that the protocol does not allow; return whether its connection stays, and is answered."""
        return self._apply(connection, self._admission.allow_error(connection, now))

    def send(self, peer: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Send a message; return whether there still is such a connection."""
        self._admission.credit(peer)
        return self._router.send(peer, frames)

    def _apply(self, connection: int, decision: Decision) -> bool:
        """Close the connection where that was decided; return whether it is admitted."""
        if decision is Decision.CLOSE:
            self._router.connections.disconnect(connection)
        return decision is Decision.ADMIT
