"""Where a reader stands, as a trainer's checkpoint holds it.

A plain dictionary of strings and integers, so that ``json`` and ``torch.load(weights_only=True)`` read it
back. The same on every rank at a step boundary: one copy in a checkpoint serves all of them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from packhorse.errors import ContractError
from packhorse.microbatch import ORIGIN, Position

__all__ = ["FeedState"]

VERSION = 1
FIELDS = ("version", "stream", "position", "fingerprint", "snapshot")
FINGERPRINT_BYTES = 16
SNAPSHOT_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class FeedState:
    """The next micro-batch of a stream, and the snapshot of the stream before its step."""

    stream: str
    position: Position
    fingerprint: bytes  # of the stream it was taken from; empty where no server has been met
    snapshot: bytes  # before ``position.step``; empty before step 0, which needs none

    def to_dict(self) -> dict[str, object]:
        """Strings, integers and lists of them."""
        return {
            "version": VERSION,
            "stream": self.stream,
            "position": list(self.position),
            "fingerprint": self.fingerprint.hex(),
            "snapshot": base64.b64encode(self.snapshot).decode("ascii"),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, object], stream: str) -> FeedState:
        """Read what ``to_dict`` made, for a reader of ``stream``.

        Raises ``ContractError`` that names what is wrong: a damaged state is never a fresh start.
        """
        _require(isinstance(state, Mapping), f"must be a mapping, got {type(state).__name__}")
        _require(bool(state), "is empty; leave load_state_dict out to begin from the start")
        version = state.get("version")
        _require(version == VERSION, f"version={version!r} is not known here, must be {VERSION}")
        differing = ", ".join(sorted(map(str, state.keys() ^ set(FIELDS))))
        _require(not differing, f"must hold exactly {', '.join(FIELDS)}; missing or unknown: {differing}")
        theirs = state["stream"]
        _require(theirs == stream, f"is of stream {theirs!r}, this Feed reads {stream!r}")
        position = _position(state["position"])
        fingerprint, snapshot = _from_hex(state["fingerprint"]), _from_base64(state["snapshot"])
        _require(
            len(fingerprint) == FINGERPRINT_BYTES or (not fingerprint and position == ORIGIN),
            f"fingerprint must have {FINGERPRINT_BYTES} bytes, has {len(fingerprint)}",
        )
        _require(
            (0 < len(snapshot) <= SNAPSHOT_LIMIT_BYTES) if position.step else not snapshot,
            f"snapshot of {len(snapshot)} bytes does not fit step {position.step}: step 0 needs none, "
            f"a later one 1 … {SNAPSHOT_LIMIT_BYTES}",
        )
        return cls(stream, position, fingerprint, snapshot)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ContractError(f"the state {rule}")


def _position(value: object) -> Position:
    match value:
        case [int(step), int(index)] if step >= 0 and index >= 0:
            return Position(step, index)
    raise ContractError(f"the state position={value!r} must be [step, index], neither negative")


def _from_hex(value: object) -> bytes:
    try:
        return bytes.fromhex(value if isinstance(value, str) else "not hex")
    except ValueError as error:
        raise ContractError(f"the state fingerprint={value!r} must be hexadecimal digits") from error


def _from_base64(value: object) -> bytes:
    try:
        return base64.b64decode(value if isinstance(value, str) else "not base64", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContractError("the state's snapshot must be base64 text; the checkpoint is damaged") from error
