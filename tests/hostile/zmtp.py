"""Just enough of ZMTP 3.1 to break it: what an attacker writes to a socket by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Sequence

from packhorse.wire.messages import Message, encode

__all__ = ["GREETING", "READY", "Stranger", "dial", "frame", "message"]

GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _command(name: bytes, body: bytes) -> bytes:
    whole = bytes([len(name)]) + name + body
    return bytes([COMMAND, len(whole)]) + whole


READY = _command(b"READY", _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))


def frame(body: bytes, *, more: bool = False) -> bytes:
    if len(body) < 256:
        return bytes([MORE * more, len(body)]) + body
    return bytes([MORE * more | LONG]) + struct.pack(">Q", len(body)) + body


def message(*frames: bytes) -> bytes:
    return b"".join(frame(body, more=number < len(frames) - 1) for number, body in enumerate(frames))


def dial(endpoint: str, *, blocking: bool = True) -> socket.socket:
    """A TCP connection to ``tcp://host:port``, and nothing said."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    dialled = socket.socket()
    dialled.settimeout(5.0 if blocking else 0.0)
    dialled.connect_ex((host, int(port)))
    return dialled


class Stranger:
    """A connection that has shaken hands as a DEALER does, without libzmq: it says what it likes."""

    def __init__(self, endpoint: str) -> None:
        self.socket = dial(endpoint)
        self.write(GREETING + READY)
        with contextlib.suppress(AssertionError, OSError):  # it may be closed at once
            self.hears(b"READY")  # what is said before is taken for a command

    def say(self, *frames: bytes) -> bool:
        """One message; whether the server still takes it."""
        return self.write(message(*frames))

    def send(self, said: Message, extra: Sequence[bytes] = ()) -> bool:
        return self.say(encode(said), *extra)

    def write(self, raw: bytes) -> bool:
        try:
            self.socket.sendall(raw)
        except OSError:  # closed by the server, which is its answer
            return False
        return True

    def hears(self, *words: bytes, within_s: float = 5.0) -> bytes:
        """Read until one of these words has come; all that came until then."""
        self.socket.settimeout(within_s)
        heard = b""
        while not any(word in heard for word in words):
            more = self.socket.recv(1 << 16)
            assert more, f"closed after {heard!r}"
            heard += more
        return heard

    def closed_within(self, seconds: float) -> bool:
        """Whether the server ends this connection. What it says is read and dropped."""
        self.socket.settimeout(seconds)
        with contextlib.suppress(ConnectionError):
            try:
                while self.socket.recv(1 << 16):
                    pass
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        self.socket.close()


def close_all(opened: Iterable[socket.socket | Stranger]) -> None:
    for each in opened:
        each.close()
