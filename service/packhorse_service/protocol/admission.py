"""How much one server hears: connections, HELLOs and words that nobody asked for, each within an allowance.

libzmq answers whoever connects, and a connection is one file descriptor and one queue of the server's. So
what a stranger, or a reader gone wrong, can take is bounded here:

* connections   at most so many, and opened at most so fast: what is more is closed as it comes;
* silence       a connection that has said no valid HELLO in time is closed;
* HELLO         is costly to check, and honest readers say it a few times a minute;
* words         a reader says about one message for each that it is sent, and keep-alives;
* offences      messages that are answered with an error;
* stuffing      bytes that become no message: ZeroMQ keeps the parts of one until the last has come, and has no
                limit for their number. So what has arrived is compared with what was read.

A connection that goes beyond its allowance is closed. An honest reader that this befalls connects again, says
HELLO and goes on where it stood. Nothing here is a socket or a clock: a connection is a number that is its own
while it is open, ``now`` is in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

__all__ = ["ACCEPTED_AHEAD", "Admission", "Allowance", "Budget", "Limits", "Verdict"]

# Accepted before they are closed again. Where the limit of open files is reached, ZeroMQ tries in vain to accept
# the next connection, at full speed and for ever.
ACCEPTED_AHEAD = 4096
CONNECTIONS_A_READER = 2  # its old connection may not have been noticed to be gone when the new one comes
CONNECTIONS_BESIDE = 64  # whoever asks for a stream that is not here, tools, and jobs that wait to be next
STORM_S = 5.0  # in which every connection may be replaced
REPORT_S = 10.0
LOOK_S = 0.01  # how often strangers are looked at: in that time, tens of thousands of parts arrive
READERS_LOOK_S = 0.1
LOOKED_AT = 64  # at a time


class Verdict(Enum):
    """What becomes of a connection, or of what it said."""

    HEAR = auto()
    IGNORE = auto()  # it was closed for what it said before
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class Allowance:
    """``burst`` at once, and ``per_s`` more each second."""

    burst: float
    per_s: float


@dataclass(slots=True)
class Budget:
    """What is left of an allowance."""

    allowance: Allowance
    _at: float = 0.0  # when it was counted last
    _left: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.allowance.burst

    def take(self, now: float) -> bool:
        """Spend one; whether it was there."""
        self._left = min(self.allowance.burst, self._left + max(0.0, now - self._at) * self.allowance.per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def add(self, amount: float) -> None:
        """Earn some; what is beyond the burst is cut when the next is spent."""
        self._left += amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server allows, as a function of how many readers it has."""

    connections: int
    arrivals: Allowance  # connections, of all together
    silence_s: float = 10.0  # from connecting to the first valid HELLO
    hellos: Allowance = Allowance(8, 0.5)
    words: Allowance = Allowance(256, 8.0)
    words_for_each_sent: float = 2.0
    offences: Allowance = Allowance(64, 1.0)
    stuffing_bytes: int = 256 << 10  # between two looks; four times the longest message there is
    lines: Allowance = Allowance(16, 0.2)  # in the log, about offences of all connections

    @classmethod
    def for_readers(cls, readers: int) -> Limits:
        """``readers`` of all streams together."""
        connections = CONNECTIONS_A_READER * readers + CONNECTIONS_BESIDE
        return cls(connections=connections, arrivals=Allowance(connections, connections / STORM_S))


@dataclass(slots=True)
class _Connection:
    """What one connection has left."""

    since_s: float
    hellos: Budget
    words: Budget
    offences: Budget
    peer: bytes = b""  # its name for the socket, once it has said something
    arrived: int = 0  # bytes, when it was looked at last
    read: int = 0  # bytes of messages since then


@dataclass(slots=True)
class Admission:
    """Decides who is heard. What it closes is counted, and logged now and then: see ``report``."""

    limits: Limits
    refused: int = 0  # connections that were closed
    _open: dict[int, _Connection] = field(default_factory=dict)
    _by_peer: dict[bytes, _Connection] = field(default_factory=dict)
    _shut: set[int] = field(default_factory=set)  # numbers that had connections closed from here, and no other since
    _strangers: dict[int, None] = field(default_factory=dict)  # open, and not greeted
    _round: Iterator[int] = field(default_factory=lambda: iter(()))  # of all that are open
    _looked_at_readers_s: float = 0.0
    _arrivals: Budget = field(init=False)
    _lines: Budget = field(init=False)
    _reported: int = 0
    _reported_s: float = -REPORT_S
    _reason: str = ""

    def __post_init__(self) -> None:
        self._arrivals, self._lines = Budget(self.limits.arrivals), Budget(self.limits.lines)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: int) -> bool:
        return connection in self._open

    # Connections -------------------------------------------------------------------------------------

    def opened(self, connection: int, now: float) -> Verdict:
        """Somebody has connected; whether it may stay."""
        self.closed(connection)  # its number was another's, whose end was not reported
        self._shut.discard(connection)
        if len(self._open) >= self.limits.connections:
            return self._close(connection, f"{self.limits.connections} connections are open already")
        if not self._arrivals.take(now):
            return self._close(connection, "connections come faster than readers can")
        self._open[connection] = self._new(now)
        self._strangers[connection] = None
        return Verdict.HEAR

    def closed(self, connection: int) -> bytes:
        """It is gone, and its number may be another's soon; its name for the socket, if it ever said anything."""
        known = self._open.pop(connection, None)
        if known is None:
            return b""
        self._by_peer.pop(known.peer, None)
        self._strangers.pop(connection, None)
        return known.peer

    def silent(self, now: float) -> list[int]:
        """Connections that are to be closed: they have said no valid HELLO for long."""
        since = now - self.limits.silence_s
        late = [number for number in self._strangers if self._open[number].since_s < since]
        for connection in late:
            self._close(connection, f"no valid HELLO came within {self.limits.silence_s:g} s")
        return late

    @property
    def look_s(self) -> float:
        """How soon connections are to be looked at again."""
        return LOOK_S if self._strangers else READERS_LOOK_S

    def to_look_at(self, now: float) -> list[int]:
        """Connections of which to see how much has arrived: asked every ``look_s``."""
        strangers = list(islice(self._strangers, LOOKED_AT))
        for stranger in strangers:  # they are looked at in turn
            self._strangers[stranger] = self._strangers.pop(stranger)
        if now - self._looked_at_readers_s < READERS_LOOK_S:
            return strangers
        self._looked_at_readers_s = now
        readers = list(islice(self._round, LOOKED_AT))
        if len(readers) < LOOKED_AT:
            self._round = iter(list(self._open))
        return strangers + [number for number in readers if number in self._open and number not in self._strangers]

    def arrived(self, connection: int, total_bytes: int) -> Verdict:
        """So much has arrived on a connection, ever."""
        known = self._open[connection]
        unread = total_bytes - known.arrived - known.read
        known.arrived, known.read = total_bytes, 0
        if unread <= self.limits.stuffing_bytes:
            return Verdict.HEAR
        return self._close(connection, "it sends what becomes no message")

    # Messages ----------------------------------------------------------------------------------------

    def hears(self, connection: int, peer: bytes, size: int, now: float) -> Verdict:
        """Whether a message of ``size`` bytes on this connection, which ``peer`` names, is dealt with.

        What a connection that was closed from here had said before is not. One that has left by itself is heard to
        the end: BYE is the last that a reader says.
        """
        known = self._open.get(connection)
        if known is None:
            return Verdict.IGNORE if connection in self._shut else Verdict.HEAR
        known.read += size
        if known.peer != peer:
            known.peer = peer
            self._by_peer[peer] = known
        if known.words.take(now):
            return Verdict.HEAR
        return self._close(connection, "it says far more than it is sent")

    def greets(self, connection: int, now: float) -> Verdict:
        """Whether a HELLO of this connection is looked at."""
        known = self._open.get(connection)
        if known is None or known.hellos.take(now):
            return Verdict.HEAR
        return self._close(connection, "it says HELLO again and again")

    def greeted(self, connection: int) -> None:
        """Its HELLO was valid."""
        self._strangers.pop(connection, None)

    def told(self, peer: bytes) -> None:
        """It was sent something, which it may answer."""
        known = self._by_peer.get(peer)
        if known is not None:
            known.words.add(self.limits.words_for_each_sent)

    def offended(self, connection: int, now: float) -> Verdict:
        """It said what it may not: whether that is answered."""
        known = self._open.get(connection)
        if known is None or known.offences.take(now):
            return Verdict.HEAR
        return self._close(connection, "it goes on saying what it may not")

    # What people are told ------------------------------------------------------------------------------

    def logs(self, now: float) -> bool:
        """Whether one more offence is written to the log."""
        return self._lines.take(now)

    def report(self, now: float) -> str | None:
        """A line for the log, now and then, where connections were closed since the last."""
        new = self.refused - self._reported
        if not new or now - self._reported_s < REPORT_S:
            return None
        self._reported, self._reported_s = self.refused, now
        return f"{new} connections were closed; the last because {self._reason}"

    def _new(self, now: float) -> _Connection:
        limits = self.limits
        return _Connection(now, Budget(limits.hellos, now), Budget(limits.words, now), Budget(limits.offences, now))

    def _close(self, connection: int, reason: str) -> Verdict:
        self.refused += 1
        self._reason = reason
        self.closed(connection)
        self._shut.add(connection)
        return Verdict.CLOSE
