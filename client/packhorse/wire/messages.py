"""The messages of the protocol and their frames.

A message is one msgpack header, ``[tag, fields]``, with an exact schema (``schema``). Three messages carry
more frames: BATCH a payload with the arrays and, on the last micro-batch of a step, the snapshot of the
stream after it; END the snapshot after it, where another pass follows; SNAPSHOT the snapshot. Nothing
executable crosses the wire.

An illegal message cannot be constructed: they check their ranges. What comes for every micro-batch is a ``Struct``,
which is written and read in a quarter of the time of a dataclass; none refers to itself, so ``gc`` need not look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.position import Position
from packhorse.errors import ProtocolError
from packhorse.rows.payload import ArrayEntry
from packhorse.rules import Violation
from packhorse.schema import HEADER_LIMIT_BYTES, Whole, decoder_for, exact_reader, pack, unpack
from packhorse.wire.hello import PROTOCOL_VERSION, Hello, SnapshotRef, hello_fields, read_hello
from packhorse.wire.limits import (
    DIGEST_BYTES,
    KEEP_ALIVE_RANGE_S,
    require,
    require_attempt,
    require_position,
)

__all__ = [
    "DEFAULT_KEEP_ALIVE_S",
    "DEFAULT_WINDOW",
    "PROTOCOL_VERSION",
    "Ack",
    "Batch",
    "BatchBody",
    "Bye",
    "End",
    "ErrorCode",
    "Frames",
    "GetSnapshot",
    "Hello",
    "Message",
    "Reject",
    "ServerError",
    "Snapshot",
    "SnapshotRef",
    "Wait",
    "WaitReason",
    "Welcome",
    "decode",
    "encode",
]

# Micro-batches. What is sent, read and acknowledged half a window at once costs less the larger it is.
DEFAULT_WINDOW = 16
# How often a reader says that it lives, and a server what is waited for: until WELCOME says otherwise.
DEFAULT_KEEP_ALIVE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Server → client: the attempt has formed, this is its stream."""

    stream: str
    attempt: bytes
    fingerprint: bytes  # 16: equal only where every position has the same bytes
    position: Position  # where this reader stands
    contract: ResolvedContract  # what micro-batches are rebuilt by
    keep_alive_s: float  # 0.01 … 3600: how often each side tells the other that it lives; 1 before WELCOME
    warnings: tuple[Violation, ...] = ()  # rules that are broken, and served nevertheless

    def __post_init__(self) -> None:
        require_attempt(self.attempt)
        require_position(self.position)
        least, most = KEEP_ALIVE_RANGE_S
        require(least <= self.keep_alive_s <= most, f"keep_alive_s must be in {least:g} … {most:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Server → client: every rule this reader breaks."""

    stream: str
    violations: tuple[Violation, ...]  # all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSnapshot:
    """Server → client: send me the snapshot before ``step``."""

    stream: str
    step: int
    digest: bytes

    def __post_init__(self) -> None:
        SnapshotRef(self.step, self.digest).check()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Client → server: the snapshot asked for, as a second frame."""

    stream: str
    step: int

    def __post_init__(self) -> None:
        require(self.step >= 0, "a step is never negative")


class BatchBody(Struct, frozen=True, kw_only=True, gc=False):
    """Part of a BATCH that is the same for every reader of one view of a micro-batch."""

    step: Whole
    index: Whole
    num_tokens: Whole  # real slots of the whole row
    num_loss_tokens: Whole  # supervised slots of the whole row
    local_loss_tokens: Whole  # of this rank's slice
    step_tokens: Whole  # of the whole step, over all ranks
    step_loss_tokens: Whole  # the denominator of a loss per token
    max_seqlen: Whole  # the longest physical segment; a constant with fixed shapes
    slots: Whole  # of the slice, all rows together
    filler: bool  # a row again, with nothing to train on
    row_digest: bytes  # 16, of the whole row: equal for every view of it (`row_digest`)
    arrays: tuple[ArrayEntry, ...]  # what is in the payload

    def __post_init__(self) -> None:
        counts = (self.num_tokens, self.num_loss_tokens, self.local_loss_tokens, self.step_tokens)
        if min(self.step, self.index, self.slots, self.step_loss_tokens, self.max_seqlen, *counts) < 0:
            raise ProtocolError("BATCH: a position, width or count is never negative")
        if len(self.row_digest) != DIGEST_BYTES:
            raise ProtocolError("a digest has 16 bytes")


class Batch(Struct, frozen=True, kw_only=True, gc=False):
    """Server → client: one micro-batch; its arrays, and on the last one of a step the snapshot, are further frames."""

    stream: str
    attempt: bytes
    low_watermark: Position  # the lowest acknowledged position of all readers
    body: BatchBody  # the same for all readers of this view

    def __post_init__(self) -> None:
        require_attempt(self.attempt)
        require_position(self.low_watermark)

    @property
    def position(self) -> Position:
        """Position of the micro-batch in its stream."""
        return Position(self.body.step, self.body.index)


class Ack(Struct, frozen=True, kw_only=True, gc=False):
    """Client → server: everything before ``position`` was handed out. Absolute."""

    stream: str
    attempt: bytes
    position: Position
    loop_idle_s: float  # seconds since the training loop last asked; 0 while it asks

    def __post_init__(self) -> None:
        if not math.isfinite(self.loop_idle_s):
            raise ProtocolError("loop_idle_s is finite")
        require_attempt(self.attempt)
        require_position(self.position)


class WaitReason(StrEnum):
    """Reason for which a reader has to wait."""

    READERS = "readers"  # not every declared reader has said HELLO
    ANSWERS = "answers"  # not every reader has acknowledged its WELCOME
    SNAPSHOT = "snapshot"  # a reader was asked for its snapshot, or the stream is made again from it
    SLOW_READERS = "slow readers"  # the next step is made when these have taken theirs
    LOADING = "loading"  # the next step is being made


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Server → client: what I wait for, which ranks, and for how long."""

    stream: str
    reason: WaitReason
    ranks: tuple[str, ...]  # for people
    waited_s: float  # for how long, until now


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Server → client: the stream ends here, or a pass over it. It has a position and is acknowledged like a BATCH.

    It counts as a step of one. The snapshot behind it comes with it where the next pass follows.
    """

    stream: str
    attempt: bytes
    position: Position

    def __post_init__(self) -> None:
        require_attempt(self.attempt)
        require_position(self.position)


class ErrorCode(StrEnum):
    """Kind of an error, which tells a client what to do about it."""

    HELLO = "hello"  # say HELLO first
    REJOIN = "rejoin"  # close, resolve the name again, say HELLO
    FAILED = "failed"  # the server cannot go on, and the message says why
    DIVERGED = "replay_diverged"  # the stream made again differs from what was delivered
    POSITION = "position"  # a position the server cannot serve


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerError:
    """Server → client: something is wrong; fatal ones end the client."""

    stream: str
    code: ErrorCode
    message: str
    fatal: bool  # the client ends with it, and says BYE


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """Client → server: an orderly leave."""

    stream: str


Message = Hello | Welcome | Reject | GetSnapshot | Snapshot | Batch | Ack | Wait | End | ServerError | Bye
Frames = Sequence[bytes | bytearray | memoryview]

TAGS: dict[str, type] = {
    "HELLO": Hello,
    "WELCOME": Welcome,
    "REJECT": Reject,
    "GET_SNAPSHOT": GetSnapshot,
    "SNAPSHOT": Snapshot,
    "BATCH": Batch,
    "ACK": Ack,
    "WAIT": Wait,
    "END": End,
    "ERROR": ServerError,
    "BYE": Bye,
}
NAMES = {kind: tag for tag, kind in TAGS.items()}
DECODERS = {tag: decoder_for(kind) for tag, kind in TAGS.items() if kind is not Hello} | {"HELLO": read_hello}
# What comes for every micro-batch, by the bytes that its header begins with.
FREQUENT: dict[bytes, Callable[[bytes], Batch | Ack | None]] = {
    b"\x92" + pack(NAMES[Batch]): exact_reader(NAMES[Batch], Batch),
    b"\x92" + pack(NAMES[Ack]): exact_reader(NAMES[Ack], Ack),
}
EXTRA_FRAMES: dict[type, tuple[int, ...]] = {Batch: (1, 2), End: (0, 1), Snapshot: (1,)}


def encode(message: Message) -> bytes:
    """Return the header frame of a message; its further frames, if any, are sent behind it."""
    return pack((NAMES[type(message)], hello_fields(message) if type(message) is Hello else message))


def decode(frames: Frames) -> tuple[Message, Frames]:
    """Return a message and its further frames.

    Raise ``ProtocolError`` where they are no legal message, ``OtherVersion`` where they are a HELLO of another version.
    """
    if not frames:
        raise ProtocolError("a message without frames")
    message = _decode_header(frames[0])
    extra = frames[1:]
    allowed = EXTRA_FRAMES.get(type(message), (0,))
    if len(extra) not in allowed:
        tag, want = NAMES[type(message)], " or ".join(map(str, allowed))
        raise ProtocolError(f"{tag} came with {len(extra)} further frames, must be {want}")
    return message, extra


def _decode_header(frame: bytes | bytearray | memoryview) -> Message:
    if len(frame) <= HEADER_LIMIT_BYTES:
        header = bytes(frame)
        for opening, read in FREQUENT.items():
            if header.startswith(opening) and (frequent := read(header)) is not None:
                return frequent
    match unpack(memoryview(frame)):
        case [str(tag), fields] if tag in DECODERS:
            message: Message = DECODERS[tag](fields, tag)
            return message
        case _:
            raise ProtocolError("a header must be [tag, fields] with a known tag")
