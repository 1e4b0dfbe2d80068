"""How much of a server its connections may take: connections, HELLOs and messages, each at a limited rate.

libzmq answers whoever connects, and a connection is one file descriptor and one queue of the server's. So
what a client without authentication, or a reader gone wrong, can take is bounded here:

* connections        at most so many, and opened at most so fast: what is more is closed as it comes;
* handshake timeout  a connection that has said no valid HELLO in time is closed;
* HELLO              is costly to check, and honest readers say it a few times a minute;
* messages           a reader says about one message for each that it is sent, and keep-alives;
* protocol errors    messages that are answered with an error;
* unparsed bytes     bytes that become no message: ZeroMQ keeps the parts of one until the last has come, and has no
                     limit for their number. So what has arrived is compared with what was read.

A connection that goes beyond its rate is closed. An honest reader that this befalls connects again, says
HELLO and goes on where it stood. Nothing here is a socket or a clock: a connection is a number that is its own
while it is open, ``now`` is in seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

__all__ = ["ACCEPTED_AHEAD", "Admission", "AuditSchedule", "ClosureLog", "Decision", "Limits", "Rate", "TokenBucket"]

# Accepted before they are closed again. Where the limit of open files is reached, ZeroMQ tries in vain to accept
# the next connection, at full speed and for ever.
ACCEPTED_AHEAD = 4096
CONNECTIONS_A_READER = 2  # its old connection may not have been noticed to be gone when the new one comes
CONNECTIONS_BESIDE = 64  # whoever asks for a stream that is not here, tools, and jobs that wait to be next
STORM_S = 5.0  # in which every connection may be replaced
REPORT_S = 10.0
AUDIT_S = 0.01  # between audits of unauthenticated connections: in that time, tens of thousands of parts arrive
READERS_AUDIT_S = 0.1
AUDITED_AT_ONCE = 64


class Decision(Enum):
    """Fate of a connection, or of a message on it."""

    ADMIT = auto()
    IGNORE = auto()  # it was closed for what it said before
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class Rate:
    """Limit of a token bucket: ``burst`` at once, and ``per_s`` more each second."""

    burst: float
    per_s: float


@dataclass(slots=True)
class TokenBucket:
    """Tokens that are left of a ``Rate``."""

    rate: Rate
    _at: float = 0.0  # when it was counted last
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.rate.burst

    def take(self, now: float) -> bool:
        """Spend one token; return whether there was one."""
        self._left = min(self.rate.burst, self._left + max(0.0, now - self._at) * self.rate.per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def add(self, amount: float) -> None:
        """Earn some tokens; what is beyond the burst is cut when the next is spent."""
        self._left += amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server, as a function of how many readers it has."""

    connections: int
    new_connections: Rate  # of all together
    handshake_timeout_s: float = 10.0  # from connecting to the first valid HELLO
    hellos: Rate = Rate(8, 0.5)
    messages: Rate = Rate(256, 8.0)
    messages_per_sent: float = 2.0
    protocol_errors: Rate = Rate(64, 1.0)
    unparsed_bytes: int = 256 << 10  # between two audits; four times the longest message there is
    log_lines: Rate = Rate(16, 0.2)  # about protocol errors of all connections

    @classmethod
    def for_readers(cls, readers: int) -> Limits:
        """Return the limits of a server with ``readers`` readers, of all streams together."""
        connections = CONNECTIONS_A_READER * readers + CONNECTIONS_BESIDE
        return cls(connections=connections, new_connections=Rate(connections, connections / STORM_S))


@dataclass(slots=True)
class _OpenConnection:
    """Tokens and byte counts of one connection."""

    since_s: float
    hellos: TokenBucket
    messages: TokenBucket
    protocol_errors: TokenBucket
    peer: bytes = b""  # its name for the socket, once it has said something
    received: int = 0  # bytes, at the last audit
    read: int = 0  # bytes of messages since then

    @classmethod
    def opened(cls, limits: Limits, now: float) -> _OpenConnection:
        def bucket(rate: Rate) -> TokenBucket:
            return TokenBucket(rate, now)

        return cls(now, bucket(limits.hellos), bucket(limits.messages), bucket(limits.protocol_errors))


@dataclass(slots=True)
class AuditSchedule:
    """Order in which connections are audited: unauthenticated ones often, readers in turn."""

    unauthenticated: dict[int, None] = field(default_factory=dict)  # open, without a valid HELLO, oldest audit first
    _round: Iterator[int] = field(default_factory=lambda: iter(()))  # of all that are open
    _readers_audited_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds until connections are to be audited again."""
        return AUDIT_S if self.unauthenticated else READERS_AUDIT_S

    def due(self, now: float, connections: Iterable[int], still_open: Container[int]) -> list[int]:
        """Return the next connections to audit, of all the open ``connections``."""
        unauthenticated = list(islice(self.unauthenticated, AUDITED_AT_ONCE))
        for connection in unauthenticated:  # they take turns
            self.unauthenticated[connection] = self.unauthenticated.pop(connection)
        if now - self._readers_audited_s < READERS_AUDIT_S:
            return unauthenticated
        self._readers_audited_s = now
        readers = list(islice(self._round, AUDITED_AT_ONCE))
        if len(readers) < AUDITED_AT_ONCE:
            self._round = iter(list(connections))
        return [
            *unauthenticated,
            *(number for number in readers if number in still_open and number not in self.unauthenticated),
        ]


@dataclass(slots=True)
class ClosureLog:
    """Count of the connections that the server closed, and a line about them now and then."""

    closed: int = 0
    _reason: str = ""  # of the last
    _reported: int = 0
    _reported_s: float = -REPORT_S

    def add(self, reason: str) -> None:
        """Count one connection that was closed because ``reason``."""
        self.closed += 1
        self._reason = reason

    def report(self, now: float) -> str | None:
        """Return a line for the log, now and then, where connections were closed since the last."""
        new = self.closed - self._reported
        if not new or now - self._reported_s < REPORT_S:
            return None
        self._reported, self._reported_s = self.closed, now
        return f"{new} connections were closed; the last because {self._reason}"


@dataclass(slots=True)
class Admission:
    """Decisions about every connection of a server, and each message on one, by its ``Limits``."""

    limits: Limits
    closures: ClosureLog = field(default_factory=ClosureLog)
    audits: AuditSchedule = field(default_factory=AuditSchedule)
    _open: dict[int, _OpenConnection] = field(default_factory=dict)
    _by_peer: dict[bytes, _OpenConnection] = field(default_factory=dict)
    _closed_here: set[int] = field(default_factory=set)  # numbers that had connections closed here, and no other since
    _new_connections: TokenBucket = field(init=False)
    _log_lines: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self._new_connections = TokenBucket(self.limits.new_connections)
        self._log_lines = TokenBucket(self.limits.log_lines)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: int) -> bool:
        return connection in self._open

    # Connections -------------------------------------------------------------------------------------

    def opened(self, connection: int, now: float) -> Decision:
        """Decide whether a connection that was just opened may stay."""
        self.closed(connection)  # its number was another's, whose end was not reported
        self._closed_here.discard(connection)
        if len(self._open) >= self.limits.connections:
            return self._close(connection, f"{self.limits.connections} connections are open already")
        if not self._new_connections.take(now):
            return self._close(connection, "connections come faster than readers can")
        self._open[connection] = _OpenConnection.opened(self.limits, now)
        self.audits.unauthenticated[connection] = None
        return Decision.ADMIT

    def closed(self, connection: int) -> bytes:
        """Forget a connection, whose number may be another's soon.

        Returns its name for the socket, empty if it never said anything.
        """
        known = self._open.pop(connection, None)
        if known is None:
            return b""
        self._by_peer.pop(known.peer, None)
        self.audits.unauthenticated.pop(connection, None)
        return known.peer

    def overdue(self, now: float) -> list[int]:
        """Return the connections to close because no valid HELLO came within the handshake timeout."""
        since = now - self.limits.handshake_timeout_s
        late = [number for number in self.audits.unauthenticated if self._open[number].since_s < since]
        for connection in late:
            self._close(connection, f"no valid HELLO came within {self.limits.handshake_timeout_s:g} s")
        return late

    def to_audit(self, now: float) -> list[int]:
        """Return connections of which to see how many bytes have arrived; asked every ``audits.interval_s``."""
        return self.audits.due(now, self._open, self._open)

    def received(self, connection: int, total_bytes: int) -> Decision:
        """Decide about a connection on which ``total_bytes`` have ever arrived, read or not."""
        known = self._open[connection]
        unparsed = total_bytes - known.received - known.read
        known.received, known.read = total_bytes, 0
        if unparsed <= self.limits.unparsed_bytes:
            return Decision.ADMIT
        return self._close(connection, "it sends what becomes no message")

    # Messages ----------------------------------------------------------------------------------------

    def admit(self, connection: int, peer: bytes, size: int, now: float) -> Decision:
        """Decide whether a message of ``size`` bytes on this connection, which ``peer`` names, is dealt with.

        What a connection that was closed from here had said before is not. One that has left by itself is heard to
        the end: BYE is the last that a reader says.
        """
        known = self._open.get(connection)
        if known is None:
            return Decision.IGNORE if connection in self._closed_here else Decision.ADMIT
        known.read += size
        if known.peer != peer:
            known.peer = peer
            self._by_peer[peer] = known
        if known.messages.take(now):
            return Decision.ADMIT
        return self._close(connection, "it says far more than it is sent")

    def admit_hello(self, connection: int, now: float) -> Decision:
        """Decide whether a HELLO on this connection is checked."""
        known = self._open.get(connection)
        if known is None or known.hellos.take(now):
            return Decision.ADMIT
        return self._close(connection, "it says HELLO again and again")

    def hello_accepted(self, connection: int) -> None:
        """Note that the HELLO on this connection was valid."""
        self.audits.unauthenticated.pop(connection, None)

    def credit(self, peer: bytes) -> None:
        """Grant ``peer``, which was sent a message, the messages by which it may answer."""
        known = self._by_peer.get(peer)
        if known is not None:
            known.messages.add(self.limits.messages_per_sent)

    def allow_error(self, connection: int, now: float) -> Decision:
        """Decide whether a message on this connection that the protocol does not allow is answered."""
        known = self._open.get(connection)
        if known is None or known.protocol_errors.take(now):
            return Decision.ADMIT
        return self._close(connection, "it goes on saying what it may not")

    def allow_log_line(self, now: float) -> bool:
        """Return whether one more protocol error is written to the log."""
        return self._log_lines.take(now)

    def _close(self, connection: int, reason: str) -> Decision:
        self.closures.add(reason)
        self.closed(connection)
        self._closed_here.add(connection)
        return Decision.CLOSE
