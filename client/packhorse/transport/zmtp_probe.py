"""Which security mechanism a peer announces: the first 64 bytes of ZMTP, ZeroMQ's wire protocol.

A server that does not take a handshake closes the connection, and ZeroMQ tells no reason. Its greeting, which it
sends as soon as it knows the version of ours and before it judges, tells apart what else looks the same: no key
where one is needed, a key where none is, and a port where another program listens.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["mechanism_of"]

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
VERSION = b"\x03"
GREETING_BYTES = 64
MECHANISM = slice(12, 32)  # in a greeting, padded with zeros
ANSWER_S = 1.0


def mechanism_of(endpoint: str, timeout_s: float = ANSWER_S) -> str | None:
    """``NULL`` or ``CURVE``, say; ``None`` where nobody listens, or something that does not speak ZMTP 3."""
    with contextlib.suppress(OSError, UnicodeError), _connect(endpoint, timeout_s) as peer:
        peer.sendall(SIGNATURE + VERSION)
        greeting = b"".join(_read(peer))
        if len(greeting) == GREETING_BYTES and (greeting[0], greeting[9]) == (SIGNATURE[0], SIGNATURE[9]):
            return greeting[MECHANISM].rstrip(b"\0").decode("ascii", "replace")
    return None


def _read(peer: socket.socket) -> Iterator[bytes]:
    missing = GREETING_BYTES
    while missing and (part := peer.recv(missing)):
        missing -= len(part)
        yield part


def _connect(endpoint: str, timeout_s: float) -> socket.socket:
    transport, _, address = endpoint.partition("://")
    if transport == "tcp":
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(timeout_s)
    try:
        peer.connect("\0" + address[1:] if address.startswith("@") else address)
    except OSError:
        peer.close()
        raise
    return peer
