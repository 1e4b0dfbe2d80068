"""What a value on the wire may be, and the checks that every message makes of itself."""

from __future__ import annotations

from packhorse.contract.position import Position
from packhorse.errors import ProtocolError

__all__ = [
    "ATTEMPT_BYTES",
    "DIGEST_BYTES",
    "KEEP_ALIVE_RANGE_S",
    "NAME_LIMIT",
    "NO_ATTEMPT",
    "SNAPSHOT_LIMIT_BYTES",
    "WINDOW_LIMIT",
    "require",
    "require_attempt",
    "require_position",
]

DIGEST_BYTES = 16
ATTEMPT_BYTES = 8
NO_ATTEMPT = b""
SNAPSHOT_LIMIT_BYTES = 64 << 10
NAME_LIMIT = 64  # characters of a stream's name, or of a fact's
WINDOW_LIMIT = 1 << 16
KEEP_ALIVE_RANGE_S = (0.01, 3600.0)


def require(holds: bool, rule: str) -> None:
    """Raise ``ProtocolError`` with the rule where it does not hold."""
    if not holds:
        raise ProtocolError(rule)


def require_position(position: Position) -> None:
    """Raise ``ProtocolError`` where a step or an index is negative."""
    if min(position) < 0:
        raise ProtocolError("a position is never negative")


def require_attempt(attempt: bytes) -> None:
    """Raise ``ProtocolError`` where these bytes cannot name an attempt."""
    if len(attempt) != ATTEMPT_BYTES:
        raise ProtocolError(f"an attempt is named by {ATTEMPT_BYTES} bytes")
