"""The server's only socket: a ROUTER that fails rather than drops (``ROUTER_MANDATORY``) and never blocks.

One thread owns it. Any other, and a signal handler, may ring the bell.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import zmq

from packhorse.errors import ConfigError
from packhorse.wire import Frames
from packhorse_service.socket_file import SocketFile

__all__ = ["Router"]

INBOUND_LIMIT_BYTES = 80 << 10  # a snapshot of 64 KiB, and headers
BACKLOG = 1024
HEARTBEAT_MS = 2_000
LINGER_MS = 1_000
ZERO_COPY_BYTES = 64 << 10  # below, a copy costs less than to hear that a buffer is free again


class Router:
    """Bound to ``listen``; ``endpoint`` is where that is in fact. Raises ``ConfigError`` where it cannot be."""

    def __init__(self, listen: str) -> None:
        self._bell, self._ear = socket.socketpair()
        self._context = zmq.Context()
        self._socket = self._bind(listen)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket_file = SocketFile.of(self.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._ear.fileno(), zmq.POLLIN)

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

    def wait(self, timeout_ms: int) -> bool:
        """Until something happens; whether the bell was rung."""
        rung = self._ear.fileno() in dict(self._poller.poll(timeout_ms))
        if rung:
            self._ear.recv(4096)
        return rung

    def messages(self) -> Iterator[tuple[bytes, Frames]]:
        """What has arrived: the connection it came on, and its frames."""
        with contextlib.suppress(zmq.Again):
            while True:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                yield peer, frames

    def send(self, peer: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Whether there still is such a connection. Large buffers are not copied, and must never change."""
        more = zmq.NOBLOCK | zmq.SNDMORE
        try:
            self._socket.send(peer, more)
            for frame in frames[:-1]:
                self._socket.send(frame, more, copy=len(frame) < ZERO_COPY_BYTES)
            self._socket.send(frames[-1], zmq.NOBLOCK, copy=len(frames[-1]) < ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def ring(self) -> None:
        """Wake the thread that waits; safe from any other, and from a signal handler."""
        with contextlib.suppress(OSError):  # the loop has stopped listening
            self._bell.send(b"\0")

    def close(self) -> None:
        """Close the socket, after what was sent has left, or a moment. The bell can be rung still, in vain."""
        self._socket.close()
        self._context.term()
        if self._socket_file is not None:
            self._socket_file.remove()
        self._bell.close()
        self._ear.close()
