"""What the handshakes of one connection come to: an error where the keys do not fit, and never an eternal retry.

ZeroMQ tells by an event that the server refused the client's key. Of all else that keys can be wrong by it mostly
tells nothing: the server closes the connection, as one that restarts does. So the peer is asked what it announces
(``zmtp_probe``): that a mechanism differs is certain then, and where it is the right one and handshakes are closed
time after time, the server cannot read what was said to the holder of another key.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from packhorse.errors import AuthenticationFailed, TransportError
from packhorse.transport.key_files import KEY_FILE, ClientKey
from packhorse.transport.zmtp_probe import mechanism_of

__all__ = ["Handshakes"]

# Handshakes closed in a row, each by a peer that greets the next moment. A server that ends closes one and is gone;
# one that is flooded closes what comes too fast, and would have to hit the one and miss the other every time.
CLOSED_LIMIT = 8


@dataclass(slots=True)
class Handshakes:
    """Judges the events of a socket's monitor. ``trouble`` says what is wrong, where a retry may help."""

    endpoint: str
    key: ClientKey | None = None
    ask: Callable[[str], str | None] = mechanism_of
    trouble: str = "the connection was closed"
    _closed: int = 0  # in a row, by a server that encrypts
    _plain: bool = False  # the server has announced that it needs no key, and was not reached since

    def observe(self, event: int, value: int) -> None:
        """Judge one event of the monitor.

        Raises ``AuthenticationFailed`` where keys are wrong, ``TransportError`` where a retry is vain.
        """
        judge = EVENTS.get(event)
        if judge is not None:
            judge(self, value)

    def _succeeded(self, _value: int) -> None:
        self._closed, self._plain, self.trouble = 0, False, "the connection was closed"

    def _refused(self, _value: int) -> None:
        if self.key is not None:
            raise AuthenticationFailed(
                f"{self.endpoint}: the server does not know the key of {str(self.key.path)!r} "
                f"(public {self.key.public.decode()}): unknown key; add it to the clients file of the server and start "
                "that again, or use a key that is on it"
            )
        raise self._mismatch()

    def _broke_protocol(self, value: int) -> None:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            raise self._mismatch()
        raise TransportError(f"{self.endpoint}: what listens there breaks ZeroMQ's protocol (event {value:#x})")

    def _closed_early(self, value: int) -> None:
        if value == errno.EAGAIN:
            self.trouble = "the server accepts connections and says nothing"
        elif not self._plain:
            self._judge(self.ask(self.endpoint))

    def _judge(self, mechanism: str | None) -> None:
        """Note that a handshake was closed by a peer that announces this mechanism."""
        if mechanism is None:
            self._closed = 0
            self.trouble = "what listens there closes connections, and does not speak ZeroMQ's protocol"
        elif mechanism != ("NULL" if self.key is None else "CURVE"):
            raise self._mismatch()
        elif self.key is None:
            self._plain = True
        else:
            self._closed += 1
            if self._closed >= CLOSED_LIMIT:
                raise self._wrong_server(self.key)

    def _wrong_server(self, key: ClientKey) -> AuthenticationFailed:
        return AuthenticationFailed(
            f"{self.endpoint}: the server is not the holder of the key that {str(key.path)!r} names as its server's "
            f"(public {key.server.decode()}): wrong server key; if the server's key was made anew, put its public key "
            "there, else correct the endpoint"
        )

    def _mismatch(self) -> AuthenticationFailed:
        if self.key is None:
            return AuthenticationFailed(
                f"{self.endpoint}: the server takes clients with a key only, and this one has no key; make one "
                f"(packhorse keygen) and name its file: key_file=, --key-file, or the environment variable {KEY_FILE}"
            )
        return AuthenticationFailed(
            f"{self.endpoint}: the server has no key, and {str(self.key.path)!r} allows to talk to the holder of "
            f"{self.key.server.decode()} alone; give the server its key (curve, in its configuration), or leave out "
            f"key_file and {KEY_FILE}"
        )


EVENTS: dict[int, Callable[[Handshakes, int], None]] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Handshakes._succeeded,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Handshakes._refused,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Handshakes._broke_protocol,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: Handshakes._closed_early,
}
