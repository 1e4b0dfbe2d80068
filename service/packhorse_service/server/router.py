"""The server's only socket: a ROUTER that fails rather than drops (``ROUTER_MANDATORY``) and never blocks.

One thread owns it. Any other, and a signal handler, may call ``wake``. With keys (``curve``), another thread
answers ZeroMQ's question of who may connect, and each message comes with the key of its connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from packhorse.errors import ConfigError, TransportError
from packhorse.transport.polling import HEARTBEATS, PollResult, SocketPoller, Waker, has_message, set_options
from packhorse.wire.messages import Frames
from packhorse_service.server.authentication import ClientAuthenticator, Curve
from packhorse_service.server.bind_policy import require_private, require_private_folder
from packhorse_service.server.socket_file import SocketFile
from packhorse_service.server.zmq_connections import Connections

__all__ = ["Arrival", "Router"]

INBOUND_LIMIT_BYTES = 80 << 10  # a snapshot of 64 KiB, and headers
BACKLOG = 1024
HANDSHAKE_MS = 5_000  # how long a connection may stay that proves nothing
LINGER_MS = 1_000
THE_LAST = int(zmq.NOBLOCK)  # flags of a message's frames, as integers: to combine enums takes as long as to send
NOT_THE_LAST = int(zmq.NOBLOCK | zmq.SNDMORE)
ZERO_COPY_BYTES = 64 << 10  # below, a copy costs less than to hear that a buffer is free again
ZAP_DOMAIN = "packhorse"
USER = "User-Id"  # what ``zmq.auth`` calls the public key of a connection
NO_KEY = b""
RECEIVED_AHEAD = 16  # messages of one connection that wait to be read; the rest waits with who sent it
RECEIVE_BUFFER_BYTES = 256 << 10
MESSAGES_A_TURN = 256
FRAMES_LIMIT = 3  # one more than any message has: what is beyond is read, and dropped


class Arrival(NamedTuple):
    """Message as it arrived: who sent it, number and public key, if any, of its connection, its frames."""

    peer: bytes
    connection: int
    key: bytes
    frames: Frames


class Router:
    """ROUTER socket bound to ``listen``, in fact to ``endpoint``. With ``curve`` only its clients can connect.

    Raises ``ConfigError`` where it cannot be bound, or would be open to others and is not meant to be (``insecure``).
    """

    def __init__(self, listen: str, *, curve: Curve | None = None, insecure: bool = False) -> None:
        require_private(listen, curve=curve is not None, insecure=insecure)
        require_private_folder(listen)
        self._waker = Waker()
        self._context = zmq.Context()
        self._curve = curve
        self._zap_thread = None if curve is None else self._start_zap_thread(curve)
        self._socket = self._context.socket(zmq.ROUTER)
        self.connections = Connections(self._context, self._socket)
        self._bind(listen)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket_file = SocketFile.at(self.endpoint)
        if self._socket_file is not None:
            self._socket_file.keep_private()
        self._poller = SocketPoller(self._socket, self.connections.monitor, self._waker)

    def _start_zap_thread(self, curve: Curve) -> ThreadAuthenticator:
        """Start the thread that checks keys, before anything is bound: at no moment can anybody else connect."""
        zap_thread = ThreadAuthenticator(self._context)
        zap_thread.configure_curve_callback(ZAP_DOMAIN, ClientAuthenticator(curve.clients))
        zap_thread.start()
        return zap_thread

    def _bind(self, listen: str) -> None:
        router = self._socket
        options = {
            zmq.ROUTER_MANDATORY: 1,
            zmq.ROUTER_HANDOVER: 0,
            zmq.SNDHWM: 0,  # the delivery window bounds what is in flight
            zmq.RCVHWM: RECEIVED_AHEAD,
            zmq.RCVBUF: RECEIVE_BUFFER_BYTES,
            zmq.MAXMSGSIZE: INBOUND_LIMIT_BYTES,
            zmq.LINGER: LINGER_MS,
            zmq.BACKLOG: BACKLOG,
            zmq.IPV6: int("[" in listen),  # an IPv6 socket would announce IPv4 addresses in a mapped form
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            **HEARTBEATS,
        }
        set_options(router, options)
        if self._curve is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._curve.secret)
            router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuse all where nobody answers
        try:
            router.bind(listen)
        except zmq.ZMQError as error:
            self.connections.close()
            router.close(linger=0)
            self._end_context()
            raise ConfigError(
                f"listen={listen!r}: {error}; end the process that uses it, or choose another port "
                "(tcp://127.0.0.1:* takes a free one)"
            ) from error

    def wait(self, timeout_ms: int) -> PollResult:
        """Wait until something happens, ``timeout_ms`` milliseconds at most.

        Raises ``TransportError`` where the thread that lets clients in is gone: they would wait and never hear why.
        """
        if self._zap_thread is not None and not self._zap_thread.is_alive():
            raise TransportError("the thread that checks the keys of clients has ended; start the server again")
        return self._poller.wait(timeout_ms)

    def messages(self) -> Iterator[Arrival]:
        """Yield some of what has arrived, a message from each connection in turn."""
        for _ in repeat(None, MESSAGES_A_TURN):
            if not has_message(self._socket):
                return
            peer = self._socket.recv(copy=False)
            frames, connection = self._frames(), _connection_number(peer)
            if connection is not None:
                yield Arrival(peer.bytes, connection, self._key_of(peer), frames)

    def _key_of(self, frame: zmq.Frame) -> bytes:
        return NO_KEY if self._curve is None else str(frame.get(USER)).encode("ascii")

    def _frames(self) -> list[bytes]:
        """Read the frames of one message. Their number has no limit in ZeroMQ, so it has one here."""
        frames, more = list[bytes](), True
        while more:
            frame = self._socket.recv(copy=False)
            more = frame.more
            if len(frames) < FRAMES_LIMIT:
                frames.append(frame.bytes)
        return frames

    def send(self, peer: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Send a message; return whether there still is such a connection.

        Large buffers are not copied, and must never change.
        """
        try:
            self._socket.send(peer, NOT_THE_LAST)
            for frame in frames[:-1]:
                self._socket.send(frame, NOT_THE_LAST, copy=len(frame) < ZERO_COPY_BYTES)
            self._socket.send(frames[-1], THE_LAST, copy=len(frames[-1]) < ZERO_COPY_BYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def wake(self) -> None:
        """Wake the thread that waits; safe from any other, and from a signal handler."""
        self._waker.wake()

    def close(self) -> None:
        """Close the socket, after what was sent has left, or a moment. ``wake`` may still be called, in vain."""
        self.connections.close()
        self._socket.close()
        self._end_context()
        if self._socket_file is not None:
            self._socket_file.remove()
        self._waker.close()

    def _end_context(self) -> None:
        if self._zap_thread is not None:
            self._zap_thread.stop()
        self._context.term()


def _connection_number(peer: zmq.Frame) -> int | None:
    """Return the number of a peer's connection; ``None`` for ZeroMQ before 3.0, which has no handshake."""
    try:
        return int(peer.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None
