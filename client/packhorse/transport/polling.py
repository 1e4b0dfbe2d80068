"""Waiting for a ZeroMQ socket, for events of its connections and for other threads; of the client and of the server.

``SocketPoller.wait`` returns when a message waits, a connection came or went, or another thread called
``Waker.wake``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from typing import NamedTuple

import zmq

__all__ = ["HEARTBEATS", "PollResult", "SocketPoller", "Waker", "has_message", "set_options"]

HEARTBEAT_MS = 2_000
# ZMTP pings of both ends: a peer that answers none for this long has gone, whatever TCP believes.
HEARTBEATS: Mapping[int, int] = {zmq.HEARTBEAT_IVL: HEARTBEAT_MS, zmq.HEARTBEAT_TIMEOUT: 3 * HEARTBEAT_MS}

READABLE = int(zmq.POLLIN)  # as an integer: to combine or pass enums takes long
DRAINED_BYTES = 4096


class Waker:
    """Wakes the thread that waits in a ``SocketPoller``, by a byte on a pair of connected sockets."""

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)

    def wake(self) -> None:
        """Wake the thread that waits, or that waits next; safe from any other, and from a signal handler."""
        # Enough bytes are waiting to be read, or the waker is closed and nobody waits any more.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable by ``wake``."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Read what ``wake`` has written, once ``fileno`` is readable."""
        self._reader.recv(DRAINED_BYTES)

    def close(self) -> None:
        """Close both ends; ``wake`` may still be called, in vain."""
        self._writer.close()
        self._reader.close()


class PollResult(NamedTuple):
    """Reasons why a wait ended; all ``False`` where its time has passed."""

    woken: bool  # another thread called ``Waker.wake``
    messages: bool  # there may be messages to read
    connections: bool  # the monitor of the socket has events of connections


class SocketPoller:
    """Polls one socket, the monitor of its connections, and a waker."""

    def __init__(self, messages: zmq.Socket[bytes], connections: zmq.Socket[bytes], waker: Waker) -> None:
        self._messages, self._connections, self._waker = messages, connections, waker
        self._waker_fileno = waker.fileno()
        self._poller = zmq.Poller()
        for source in (messages, connections, self._waker_fileno):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> PollResult:
        """Wait until something happens, ``timeout_ms`` milliseconds at most."""
        found = dict(self._poller.poll(timeout_ms))
        woken = self._waker_fileno in found
        if woken:
            self._waker.drain()
        return PollResult(woken, self._messages in found, self._connections in found)


def has_message(source: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits on a socket: cheaper than to poll, or to receive in vain."""
    return bool(int(source.getsockopt(zmq.EVENTS)) & READABLE)


def set_options(target: zmq.Socket[bytes], options: Mapping[int, int]) -> None:
    """Set socket options by their ZeroMQ numbers, before the socket connects or binds."""
    for option, value in options.items():
        target.setsockopt(option, value)
