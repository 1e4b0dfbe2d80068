"""The connections below the server's socket: who came and went, and the way to close one.

A ROUTER cannot drop a peer, and ``unbind`` closes every connection. But the socket's monitor and each message
tell the file descriptor of a connection: shut down from here, it ends for libzmq as if the peer had left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from enum import Enum, auto
from itertools import repeat

import zmq

from packhorse.transport.polling import has_message

__all__ = ["ConnectionChange", "Connections"]

COUNTED = (socket.AF_INET, socket.AF_INET6)
EVENT = struct.Struct("=Hi")  # what it is, and of which connection
RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received of Linux's struct tcp_info
CHANGES_AT_ONCE = 8192


class ConnectionChange(Enum):
    """Kind of change that a socket's monitor reports."""

    OPENED = auto()
    CLOSED = auto()


EVENTS: dict[int, ConnectionChange] = {
    zmq.EVENT_ACCEPTED: ConnectionChange.OPENED,
    zmq.EVENT_DISCONNECTED: ConnectionChange.CLOSED,
}


class Connections:
    """Connections of one socket, which must not listen yet. Numbers are file descriptors of this process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes]) -> None:
        self._listener = listener
        self._listens_at: object = None
        address = f"inproc://connections-{id(listener)}"
        listener.monitor(address, sum(EVENTS))
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would hold up the thread that carries all data
        self.monitor.setsockopt(zmq.LINGER, 0)
        self.monitor.connect(address)

    def changes(self) -> Iterator[tuple[ConnectionChange, int]]:
        """Yield some of what has happened since: whoever connects very fast does not keep the thread here."""
        for _ in repeat(None, CHANGES_AT_ONCE):
            if not has_message(self.monitor):
                return
            event, _address = self.monitor.recv_multipart()
            kind, connection = EVENT.unpack(event)
            yield EVENTS[kind], connection

    def disconnect(self, connection: int) -> None:
        """End a connection. One that has ended meanwhile is left alone, whatever has its number now."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as held:
            if _local_end(held) == self._own_end():
                held.shutdown(socket.SHUT_RDWR)

    def bytes_received(self, connection: int) -> int | None:
        """Return how many bytes have ever arrived on a connection.

        ``None`` where nobody counts them, or where it has ended.
        """
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as held:
            if _local_end(held) == self._own_end() and held.family in COUNTED:
                info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
                return int(RECEIVED.unpack(info)[0]) if len(info) == RECEIVED.size else None
        return None

    def _own_end(self) -> object:
        if self._listens_at is None:
            endpoint = self._listener.getsockopt_string(zmq.LAST_ENDPOINT)
            scheme, _, rest = endpoint.partition("://")
            self._listens_at = int(rest.rpartition(":")[2]) if scheme == "tcp" else rest
        return self._listens_at

    def close(self) -> None:
        """Stop the monitor, before the socket itself closes."""
        self._listener.disable_monitor()
        self.monitor.close(linger=0)


def _local_end(connected: socket.socket) -> object:
    """Return the end of a connection on this side: its port, or the name of its socket."""
    name = connected.getsockname()
    if isinstance(name, tuple):
        return name[1]
    return name.replace(b"\0", b"@").decode() if isinstance(name, bytes) else name  # an abstract one is bytes
