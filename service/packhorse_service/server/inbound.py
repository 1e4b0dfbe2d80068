"""Who is heard: what arrives at the server's socket, decoded, within the allowances of ``admission``.

Connections that take more than theirs are closed here. What their messages mean is for the sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from packhorse.errors import ProtocolError
from packhorse.wire.messages import ErrorCode, Frames, Hello, Message, ServerError, decode, encode
from packhorse_service.protocol.admission import Admission, Limits, Verdict
from packhorse_service.server.router import Arrival, Router
from packhorse_service.server.zmq_connections import Change

__all__ = ["Door", "Heard"]

log = logging.getLogger("packhorse.server")


class Heard(NamedTuple):
    """A message, who said it, the number of its connection, and its public key, if any."""

    peer: bytes
    connection: int
    key: bytes
    message: Message
    extra: Frames


class Door:
    """Of one router. ``stream`` is named to those who say what names none."""

    def __init__(self, router: Router, limits: Limits, stream: str) -> None:
        self._router = router
        self._admission = Admission(limits)
        self._stream = stream
        self._gone: list[bytes] = []

    @property
    def look_s(self) -> float:
        """How soon connections are to be looked at again."""
        return self._admission.look_s

    @property
    def connections(self) -> int:
        """That are open."""
        return len(self._admission)

    def gone(self) -> list[bytes]:
        """Whose connections have ended since this was last asked. Something that they said may still be to be heard."""
        gone, self._gone = self._gone, []
        return gone

    def follow(self, now: float) -> None:
        """Follow who connects and leaves."""
        for change, connection in self._router.connections.changes():
            if change is Change.CLOSED:
                self._gone += filter(None, [self._admission.closed(connection)])
            else:
                self._abides(connection, self._admission.opened(connection, now))

    def look(self, now: float) -> None:
        """Close connections that say nothing, and those that send what becomes no message; every ``look_s``."""
        for connection in self._admission.silent(now):
            self._router.connections.shut(connection)
        for connection in self._admission.to_look_at(now):
            arrived = self._router.connections.arrived(connection)
            if arrived is not None:
                self._abides(connection, self._admission.arrived(connection, arrived))
        closed = self._admission.report(now)
        if closed is not None:
            log.warning("%s", closed)

    def heard(self, now: float) -> Iterator[Heard]:
        """Some of what has arrived and may be looked at."""
        for arrival in self._router.messages():
            if arrival.connection not in self._admission:
                self.follow(now)  # that it has come was told before it could speak
            size = sum(map(len, arrival.frames))
            if self._abides(arrival.connection, self._admission.hears(arrival.connection, arrival.peer, size, now)):
                heard = self._decoded(arrival, now)
                if heard is not None:
                    yield heard

    def _decoded(self, arrival: Arrival, now: float) -> Heard | None:
        try:
            message, extra = decode(arrival.frames)
        except ProtocolError as error:
            if self.bears(arrival.connection, now):
                self._refuse(arrival.peer, str(error), now)
            return None
        if isinstance(message, Hello) and not self._abides(
            arrival.connection, self._admission.greets(arrival.connection, now)
        ):
            return None
        return Heard(arrival.peer, arrival.connection, arrival.key, message, extra)

    def _refuse(self, peer: bytes, message: str, now: float) -> None:
        if self._admission.logs(now):
            log.warning("a message that the protocol does not allow: %s", message)
        error = ServerError(stream=self._stream, code=ErrorCode.HELLO, message=message, fatal=True)
        self.send(peer, [encode(error)])

    def greeted(self, connection: int) -> None:
        """Its HELLO was valid."""
        self._admission.greeted(connection)

    def bears(self, connection: int, now: float) -> bool:
        """It said what it may not: whether it may stay, and be answered."""
        return self._abides(connection, self._admission.offended(connection, now))

    def send(self, peer: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Whether there still is such a connection."""
        self._admission.told(peer)
        return self._router.send(peer, frames)

    def _abides(self, connection: int, verdict: Verdict) -> bool:
        """Whether it is heard; it may be closed instead."""
        if verdict is Verdict.CLOSE:
            self._router.connections.shut(connection)
        return verdict is Verdict.HEAR
