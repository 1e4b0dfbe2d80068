"""Effects that a session asks its server for, and events that the server tells it of: it has no pipeline of its own."""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.wire.messages import Frames, Message
from packhorse_service.framing import FramedStep

__all__ = [
    "ConnectionLost",
    "Effect",
    "Made",
    "Make",
    "NotMade",
    "NotRestored",
    "Restore",
    "Restored",
    "Send",
    "StreamFailed",
    "TimePassed",
]


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on one connection, with its further frames."""

    peer: bytes
    message: Message
    extra: Frames = ()


@dataclass(frozen=True, slots=True)
class Make:
    """Make this step; the answer is ``Made`` or ``NotMade``, of the same generation."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Stand at this snapshot, or at the beginning; the answer is ``Restored``, ``NotRestored`` or ``NotMade``."""

    generation: int
    snapshot: bytes | None
    step: int  # before which the snapshot shall be


Effect = Send | Make | Restore


@dataclass(frozen=True, slots=True)
class Made:
    """Answer to ``Make``: a step, or an end (``None``) with the snapshot behind it where another pass follows."""

    generation: int
    step: FramedStep | None
    snapshot_after: bytes = b""


@dataclass(frozen=True, slots=True)
class Restored:
    """Answer to ``Restore``: the stream stands there."""

    generation: int


@dataclass(frozen=True, slots=True)
class NotRestored:
    """Answer to ``Restore``: the snapshot is not one of this stream, for this reason."""

    generation: int
    message: str


@dataclass(frozen=True, slots=True)
class NotMade:
    """Answer to ``Make`` or ``Restore``: the data cannot be used, for this reason."""

    generation: int
    message: str


class StreamFailed:
    """Event: the stream cannot go on, for a reason that its readers are told."""


class TimePassed:
    """Event: some time has passed, a tenth of a second or so."""


class ConnectionLost:
    """Event: the connection of a peer is gone."""
