"""What a session asks of the server: it has no socket and no pipeline of its own."""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.wire.messages import Frames, Message

__all__ = ["Effect", "Make", "Restore", "Send"]


@dataclass(frozen=True, slots=True)
class Send:
    """To one connection, with the message's further frames."""

    peer: bytes
    message: Message
    extra: Frames = ()


@dataclass(frozen=True, slots=True)
class Make:
    """Make this step; the answer is ``made`` with the same generation."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Stand at this snapshot, or at the beginning; the answer is ``restored`` with the same generation."""

    generation: int
    snapshot: bytes | None


Effect = Send | Make | Restore
