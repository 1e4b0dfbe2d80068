"""A stable name in front of a server: a TCP relay that reads along, and can hold, cut, block or slow a connection.

One relay stands before each rank, so a connection's rank is known. It forwards whole ZMTP messages, which makes
moments exact: ``Wire.hold`` stops everything just before a certain message, and tells who was sent what by then.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from packhorse.contract.position import ORIGIN, Position
from packhorse.wire.messages import Ack, Batch, End, Hello, Message, Welcome, decode

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
DEADLINE_S = 300.0
BUFFER_BYTES = 1 << 16  # a relay holds little itself: where one end does not read, the other notices soon


class Way(Enum):
    """Who speaks."""

    READER = auto()
    SERVER = auto()


class Seen(NamedTuple):
    """A message about to be forwarded."""

    rank: int
    way: Way
    message: Message


class Unit(NamedTuple):
    """Bytes to forward together, and the message they hold, if any."""

    raw: bytes
    message: Message | None


class Zmtp:
    """Cuts a ZMTP 3 byte stream into greeting, commands and messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting = GREETING_BYTES
        self._frames: list[bytes] = []
        self._begin = 0  # of the message that ``_frames`` belong to
        self._at = 0

    def feed(self, data: bytes) -> Iterator[Unit]:
        greeting, data = data[: self._greeting], data[self._greeting :]
        self._greeting -= len(greeting)
        if greeting:
            yield Unit(greeting, None)
        self._buffer += data
        while (frame := self._frame()) is not None:
            flags, body = frame
            if not flags & COMMAND:
                self._frames.append(body)
            if flags & MORE:
                continue
            message = None if flags & COMMAND else decode(self._frames)[0]
            raw, self._frames = bytes(self._buffer[: self._at]), []
            del self._buffer[: self._at]
            self._at = 0
            yield Unit(raw, message)

    def _frame(self) -> tuple[int, bytes] | None:
        rest = memoryview(self._buffer)[self._at :].tobytes()
        if not rest:
            return None
        head = 9 if rest[0] & LONG else 2
        if len(rest) < head:
            return None
        size = int.from_bytes(rest[1:head], "big")
        if len(rest) < head + size:
            return None
        self._at += head + size
        return rest[0], rest[head : head + size]


@dataclass
class Wire:
    """What the relays of one job share: where everybody stands as seen from the wire, and where it is held."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[int, Position] = field(default_factory=dict)  # rank -> behind what was forwarded to it
    acked: dict[int, Position] = field(default_factory=dict)
    held: bool = False
    messages: int = 0
    hopeless: Callable[[], str] = lambda: ""  # why what is waited for will not come
    _stop_at: Callable[[Seen], bool] | None = None

    def hold(self, stop_at: Callable[[Seen], bool]) -> None:
        """Wait until a message is to be forwarded for which ``stop_at`` holds; from then on nothing is forwarded."""
        end = time.monotonic() + DEADLINE_S
        with self.changed:
            self._stop_at = stop_at
            while not self.changed.wait_for(lambda: self.held, 0.1):
                assert not self.hopeless(), f"before the moment to hold the wire: {self.hopeless()}"
                assert time.monotonic() < end, f"the moment to hold the wire did not come within {DEADLINE_S:g} s"

    def hold_after(self, messages: int) -> None:
        """Wait for so many messages, and hold the next."""
        end = self.messages + messages
        self.hold(lambda _seen: self.messages >= end)

    def release(self) -> None:
        with self.changed:
            self.held, self._stop_at = False, None
            self.changed.notify_all()

    @property
    def in_flight(self) -> bool:
        """Whether some reader was sent what it has not acknowledged."""
        return any(self.sent[rank] > self.acked.get(rank, ORIGIN) for rank in self.sent)

    @property
    def steps(self) -> set[int]:
        """The steps that readers stand in."""
        return {position.step for position in self.acked.values()}

    def wait_to_pass(self, seen: Seen, link: Link) -> bool:
        """Whether to forward this message: waits while the wire is held or the way is blocked."""
        with self.changed:
            if self._stop_at is not None and not self.held and link.alive and self._stop_at(seen):
                self.held = True
                self.changed.notify_all()
            while link.alive and (self.held or seen.way in link.blocked):
                self.changed.wait()
            if link.alive:
                self._note(seen)
            return link.alive

    def _note(self, seen: Seen) -> None:
        self.messages += 1
        match seen.message:
            case Hello(position=position) | Ack(position=position):
                self.acked[seen.rank] = position
            case Welcome(position=position):
                self.sent[seen.rank] = position
            case Batch() as batch:
                self.sent[seen.rank] = Position(batch.body.step, batch.body.index + 1)
            case End(position=position):
                self.sent[seen.rank] = Position(position.step + 1, 0)


class Link:
    """One connection, from a reader to the server behind its relay."""

    def __init__(self, reader: socket.socket, server: socket.socket, relay: Relay) -> None:
        self.sockets = {Way.READER: reader, Way.SERVER: server}
        self.relay = relay
        self.alive = True
        self.blocked: set[Way] = set()
        for way in Way:
            threading.Thread(target=self._pump, args=(way,), daemon=True).start()

    def _pump(self, way: Way) -> None:
        source, drain = self.sockets[way], self.sockets[Way.SERVER if way is Way.READER else Way.READER]
        zmtp = Zmtp()
        with contextlib.suppress(OSError):  # cut, by either end or by the test
            while data := source.recv(1 << 16):
                for unit in zmtp.feed(data):
                    if not self._forward(unit, way, drain):
                        return
        if self.alive:
            self.cut()

    def _forward(self, unit: Unit, way: Way, drain: socket.socket) -> bool:
        wire = self.relay.wire
        if unit.message is not None and not wire.wait_to_pass(Seen(self.relay.rank, way, unit.message), self):
            return False
        with wire.changed:
            # A command, a PING say: on a way that is blocked it gets as far as any other.
            while unit.message is None and way in self.blocked and self.alive:
                wire.changed.wait()
            wire.changed.wait_for(lambda: not self.alive, self.relay.pause_s)
        if self.alive:
            drain.sendall(unit.raw)
        return self.alive

    def block(self, *ways: Way) -> None:
        """Nothing is forwarded from there any more, and neither end is told."""
        with self.relay.wire.changed:
            self.blocked |= set(ways)

    def cut(self, *ends: Way) -> None:
        """Close the connection: to both ends, or to one, so that the other still believes in it."""
        with self.relay.wire.changed:
            self.alive = False
            self.relay.wire.changed.notify_all()
        for way in ends or Way:
            with contextlib.suppress(OSError):
                self.sockets[way].shutdown(socket.SHUT_RDWR)
            self.sockets[way].close()


class Relay:
    """Listens where a rank connects, and connects on to ``target``, wherever that is at the time."""

    def __init__(self, rank: int, wire: Wire, target: str | None = None) -> None:
        self.rank, self.wire, self.target = rank, wire, target
        self.links: list[Link] = []
        self.pause_s = 0.0  # before each message
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)  # what it accepts inherits it
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                reader, _ = self._listening.accept()
                server = self._connect()
                if server is None:
                    reader.close()
                    continue
                for end in (reader, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.links.append(Link(reader, server, self))

    def _connect(self) -> socket.socket | None:
        """The server behind, or nothing where there is none."""
        if self.target is None:
            return None
        host, _, port = self.target.removeprefix("tcp://").partition(":")
        server = socket.socket()
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            server.connect((host, int(port)))
        except OSError:
            server.close()
            return None
        return server

    @property
    def link(self) -> Link:
        """The latest connection."""
        return self.links[-1]

    def cut(self) -> None:
        for link in self.links:
            if link.alive:
                link.cut()

    def close(self) -> None:
        # accept() in another thread only returns where the socket is shut down first.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for link in self.links:
            link.cut()
