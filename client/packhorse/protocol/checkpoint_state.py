"""Where a reader stands, as a trainer's checkpoint holds it.

A plain dictionary of strings, integers and lists of them, so that ``json`` and ``torch.load(weights_only=True)``
read it back. The same on every rank at a step boundary: one copy in a checkpoint serves all of them.

    {"version": 3, "stream": "train", "position": [step, index], "fingerprint": hex, "snapshot": base64,
     "further": [["validation", [step, index], hex, base64], …], "digest": hex}

The digest is of all the rest: a state that was damaged, or put together of two, is refused and never trained on.

It has the same keys whatever streams it holds, and lists where it could have dictionaries: a distributed
checkpoint loads the keys that the state to be replaced has, and no others.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import ContractError
from packhorse.wire.limits import DIGEST_BYTES, SNAPSHOT_LIMIT_BYTES

__all__ = ["FeedState", "read_states", "seal_state", "write_states"]

VERSION = 3
PLACE = ("stream", "position", "fingerprint", "snapshot")
CONTENT = ("version", *PLACE, "further")
FIELDS = (*CONTENT, "digest")
FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class FeedState:
    """The next micro-batch of one stream, and the snapshot of the stream before its step."""

    stream: str
    position: Position = ORIGIN
    fingerprint: bytes = b""  # of the stream it was taken from; empty at the very start
    snapshot: bytes = b""  # before ``position.step``; empty before step 0, which needs none

    def entries(self) -> list[object]:
        """Return the parts of the state in the order of ``PLACE``."""
        snapshot = base64.b64encode(self.snapshot).decode("ascii")
        return [self.stream, list(self.position), self.fingerprint.hex(), snapshot]

    def at_boundary(self) -> FeedState:
        """Return the state before the first micro-batch of its step, for which its snapshot serves too."""
        return replace(self, position=Position(self.position.step, 0))

    @classmethod
    def from_entries(cls, stream: object, position: object, fingerprint: object, snapshot: object) -> FeedState:
        """Read what ``entries`` made. Raises ``ContractError`` that names what is wrong."""
        if not isinstance(stream, str):
            raise ContractError(f"the state stream={stream!r} must be a name")
        at, made_from, before = _position(position), _from_hex(fingerprint), _from_base64(snapshot)
        of = f"of stream {stream!r}: "
        _require(
            len(made_from) == FINGERPRINT_BYTES or (not made_from and at == ORIGIN),
            f"{of}fingerprint must have {FINGERPRINT_BYTES} bytes, has {len(made_from)}",
        )
        _require(
            (0 < len(before) <= SNAPSHOT_LIMIT_BYTES) if at.step else not before,
            f"{of}snapshot of {len(before)} bytes does not fit step {at.step}: step 0 needs none, "
            f"a later one 1 … {SNAPSHOT_LIMIT_BYTES}",
        )
        return cls(stream, at, made_from, before)


def write_states(own: FeedState, further: Iterable[FeedState]) -> dict[str, object]:
    """Return the state of a feed of ``own`` stream that uses ``further`` ones too.

    One that is at its start is left out: whether it was opened already may differ from rank to rank.
    """
    begun = (state for state in further if state.position != ORIGIN)
    others = sorted(begun, key=lambda state: state.stream)
    content: dict[str, object] = {
        "version": VERSION,
        **dict(zip(PLACE, own.entries(), strict=True)),
        "further": [state.entries() for state in others],
    }
    return seal_state(content)


def seal_state(content: Mapping[str, object]) -> dict[str, object]:
    """Return the content of a state with its digest, in place of any that it has."""
    return {**content, "digest": _digest(content)}


def read_states(state: Mapping[str, object], stream: str) -> dict[str, FeedState]:
    """Read what ``write_states`` made, for a feed of ``stream``: each stream's by its name.

    Raises ``ContractError`` that names what is wrong: a damaged state is never a fresh start.
    """
    _require(isinstance(state, Mapping), f"must be a mapping, got {type(state).__name__}")
    _require(bool(state), "is empty; leave load_state_dict out to begin from the start")
    version = state.get("version")
    _require(version == VERSION, f"version={version!r} is not known here, must be {VERSION}")
    differing = ", ".join(sorted(map(str, state.keys() ^ set(FIELDS))))
    _require(not differing, f"must hold exactly {', '.join(FIELDS)}; missing or unknown: {differing}")
    _require(
        state["digest"] == _digest(state),
        "is damaged: its digest is not that of its content. It is loaded as state_dict returned it, or not at all; "
        "load another checkpoint",
    )
    theirs = state["stream"]
    _require(theirs == stream, f"is of stream {theirs!r}, this Feed reads {stream!r}")
    own = FeedState.from_entries(*(state[name] for name in PLACE))
    read = [own, *_further(state["further"])]
    states = {of_stream.stream: of_stream for of_stream in read}
    _require(len(states) == len(read), f"names a stream twice: {', '.join(sorted(s.stream for s in read))}")
    return states


def _digest(state: Mapping[str, object]) -> str:
    """Return the digest of all but itself, in hexadecimal."""
    try:
        content = json.dumps([state[name] for name in CONTENT], separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ContractError(f"the state holds what no state has: {error}") from error
    return blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _further(value: object) -> list[FeedState]:
    if not isinstance(value, (list, tuple)):
        raise ContractError(f"the state further={value!r} must be a list")
    for entries in value:
        if not isinstance(entries, (list, tuple)) or len(entries) != len(PLACE):
            raise ContractError(f"the state further={entries!r} must be lists of {', '.join(PLACE)}")
    return [FeedState.from_entries(*entries) for entries in value]


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
