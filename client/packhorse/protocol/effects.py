"""Effects of the client's session: what whoever owns the socket and the loop carries out, in order."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from packhorse.errors import PackhorseError
from packhorse.wire.messages import BatchBody, Frames, Message

__all__ = ["Deliver", "Effect", "Fail", "Finish", "Forget", "Reconnect", "Send"]


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message on the socket, with its further frames."""

    message: Message
    extra: Frames = ()


class Deliver(Struct, frozen=True):
    """Rebuild a micro-batch and keep it ready for the loop."""

    body: BatchBody
    payload: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop everything that is ready and was not handed out."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Note END behind what is ready: the loop ends there, or its pass does."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Close the socket, resolve the endpoint again, connect."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise an error in the loop, behind what is ready."""

    error: PackhorseError


Effect = Send | Deliver | Forget | Finish | Reconnect | Fail
