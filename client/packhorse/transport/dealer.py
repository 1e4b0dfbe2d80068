"""The client's only socket: a DEALER, the monitor that tells of its connections, and a waker.

One thread at a time owns it. Any other may call ``waker.wake``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto

import zmq
from zmq.utils.monitor import recv_monitor_message

from packhorse.errors import ConfigError
from packhorse.transport.handshakes import Handshakes
from packhorse.transport.key_files import ClientKey
from packhorse.transport.polling import HEARTBEATS, PollResult, SocketPoller, Waker, set_options
from packhorse.wire.messages import Frames

__all__ = ["ConnectionEvent", "Dealer"]

RECONNECT_MS = (100, 5_000)
HANDSHAKE_MS = 4_000  # less than a server waits: what it closes, it closes for a reason
SEND_MS = 1_000  # how long a connection that is being made may take to accept a message
NOBLOCK = int(zmq.NOBLOCK)  # to combine or pass enums takes long
LEAVE_MS = 500  # how long the last message may take to leave


class ConnectionEvent(Enum):
    UP = auto()
    DOWN = auto()


EVENTS: dict[int, ConnectionEvent] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionEvent.UP,
    zmq.EVENT_DISCONNECTED: ConnectionEvent.DOWN,
}
# What follows when ZeroMQ goes on trying; it gives up, and tells nobody, where a peer breaks its protocol.
TRYING = {zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CONNECTED}


class Dealer:
    """Connects, and connects again with backoff; what is on a connection that breaks is lost.

    With a ``key`` everything is encrypted, and only the server that the key names is talked to. ``context``: one
    that many dealers of a thread share, and that whoever made it ends; left out, each has its own.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        key: ClientKey | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.handshakes = Handshakes(endpoint, key)
        self.given_up = False  # ZeroMQ has: ``reconnect`` begins anew
        self.waker = Waker()
        self._shares_context = context is not None
        self._context = context or zmq.Context()
        self._open()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        options = {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.IPV6: 1,
            zmq.RCVHWM: 0,  # the delivery window bounds what is in flight
            zmq.SNDTIMEO: SEND_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS[1],
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            **HEARTBEATS,
        }
        set_options(self._socket, options)
        if self.handshakes.key is not None:
            self._encrypt(self.handshakes.key)
        self.given_up = False
        self._monitor = self._socket.get_monitor_socket()
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"endpoint={self.endpoint!r} cannot be used ({error}); give tcp://host:port or ipc://path"
            ) from error
        self._poller = SocketPoller(self._socket, self._monitor, self.waker)

    def _encrypt(self, key: ClientKey) -> None:
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, key.server)

    def reconnect(self) -> None:
        """Start over: the endpoint's name is resolved again."""
        self._close_socket()
        self._open()

    def filenos(self) -> tuple[int, int]:
        """Return file descriptors that become readable where ``messages`` or ``events`` may have something.

        They are for a loop over many dealers, and others after ``reconnect``. As ZeroMQ has it, they may also become
        readable in vain, and what arrives while this dealer sends need not show: look for messages behind every
        ``send``.
        """
        return int(self._socket.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))

    def wait(self, timeout_s: float) -> PollResult:
        """Wait until something happens, ``timeout_s`` seconds at most."""
        return self._poller.wait(int(timeout_s * 1000))

    def events(self) -> Iterator[ConnectionEvent]:
        """Iterate what happened to the connection. Raises what ``Handshakes.observe`` does."""
        while self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            kind = int(message["event"])
            self.given_up = kind not in TRYING and (self.given_up or kind == zmq.EVENT_DISCONNECTED)
            self.handshakes.observe(kind, int(message["value"]))
            if kind in EVENTS:
                yield EVENTS[kind]

    def messages(self) -> Iterator[Frames]:
        """Iterate messages that have arrived, without copying it but for the header."""
        while (frame := self._next_frame()) is not None:
            frames: list[bytes | memoryview] = [frame.bytes]
            while frame.more:
                frame = self._socket.recv(NOBLOCK, copy=False)  # a message is there as a whole, or not at all
                frames.append(frame.buffer)
            yield frames

    def _next_frame(self) -> zmq.Frame | None:
        """Return the first frame of the next message; to try in vain once costs less than to ask before each."""
        try:
            return self._socket.recv(NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def send(self, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Send one message; return whether there was a connection to send it on."""
        try:
            self._socket.send_multipart(frames)
        except zmq.Again:
            return False
        return True

    def linger(self) -> None:
        """Let what was sent leave before the socket closes."""
        self._socket.setsockopt(zmq.LINGER, LEAVE_MS)

    def _close_socket(self) -> None:
        if not self._socket.closed:  # an interrupt may have come between this and what opens it again
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()

    def close(self) -> None:
        self._close_socket()
        if not self._shares_context:
            self._context.term()
        self.waker.close()
