"""The resumable state of a stream before a step, in a fixed binary layout.

    magic "PHSNAP", version u16 | step u64 | cutting length u32 | sources u16 | pieces u32 | consumed u64
    | inside a window: steps to pass over u16, its steps u16, packing.window u16, packs a step u32, digest 8 bytes
    | identity: 8 bytes a part | each source's place (``mixing``) | one bit a piece: packed

It refers to data and holds none. A snapshot that comes back from a reader is input from a stranger: every
length is checked against what this stream allows before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import numpy as np

from packhorse.errors import ContractError, ProtocolError
from packhorse.payload import bits, from_bits
from packhorse_service.identity import StreamIdentity
from packhorse_service.mixing import SHARD_FORMAT, SOURCE_FORMAT, Order, SourceOrder
from packhorse_service.stream import StreamPlace

__all__ = [
    "OUTSIDE",
    "SNAPSHOT_LIMIT_BYTES",
    "WindowMark",
    "decode_snapshot",
    "encode_snapshot",
    "inside_window",
    "snapshot_bound",
]

SNAPSHOT_LIMIT_BYTES = 64 << 10
MAGIC = b"PHSNAP"
VERSION = 2
STEP_LIMIT = 1 << 62  # as on the wire
IDENTITY_BYTES = 64
BITS_BYTES = 8 << 10  # 65,536 samples drawn since the oldest pending one
HEAD = struct.Struct("<6sHQIHIQ")
MARK = struct.Struct("<HHHI8s")
DIGEST_BYTES = 8


class WindowMark(NamedTuple):
    """Where inside a window of steps a stream stands, and how that window was dealt (``windows``)."""

    skip: int  # steps of the window that lie before; 0 outside of any
    steps: int  # that the window has: fewer than ``window`` at the end of a finite stream
    window: int  # as configured
    packs: int  # a step
    digest: bytes  # of the settings by which packs are made and dealt

    @property
    def possible(self) -> bool:
        return self == OUTSIDE or 0 < self.skip < self.steps <= self.window


OUTSIDE = WindowMark(0, 0, 0, 0, bytes(DIGEST_BYTES))


class StreamSnapshot(NamedTuple):
    """The stream before ``step``, and before the ``mark.skip`` steps behind it that were delivered already."""

    step: int
    cut_length: int  # seq_length at which over-long samples were cut; 0 where rows cut them
    place: StreamPlace
    consumed: int  # slots (ids of an endless run) of the oldest pending piece that were delivered
    mark: WindowMark = OUTSIDE


def snapshot_bound(sources: int, open_shards: int) -> int:
    """Bytes that a snapshot may need: of the order, and of the bits of a lookahead that is very large."""
    head = HEAD.size + MARK.size + IDENTITY_BYTES
    return head + sources * SOURCE_FORMAT.size + open_shards * SHARD_FORMAT.size + BITS_BYTES


def encode_snapshot(step: int, cut_length: int, identity: StreamIdentity, place: StreamPlace, consumed: int) -> bytes:
    """A few hundred bytes: one bit for each piece drawn since the oldest pending one, and the order."""
    head = HEAD.pack(MAGIC, VERSION, step, cut_length, len(place.order.sources), len(place.packed), consumed)
    data = b"".join(
        (head, MARK.pack(*OUTSIDE), identity.packed_order(), place.order.encode(), bits(place.packed).tobytes())
    )
    if len(data) > SNAPSHOT_LIMIT_BYTES:
        raise ContractError(
            f"snapshot: {len(place.packed)} samples were drawn since the oldest pending one, which needs {len(data)} "
            f"bytes of at most {SNAPSHOT_LIMIT_BYTES}; lower packing.lookahead"
        )
    return data


def inside_window(beginning: bytes, mark: WindowMark) -> bytes:
    """The snapshot of a place inside a window, from that of the window's beginning."""
    return beginning[: HEAD.size] + MARK.pack(*mark) + beginning[HEAD.size + MARK.size :]


def decode_snapshot(data: bytes, identity: StreamIdentity, first: Order) -> StreamSnapshot:
    """Read a snapshot of this very stream; ``first`` gives the plans of its sources.

    Raises ``ProtocolError`` for bytes that are no snapshot, ``ContractError`` for one of other data.
    """
    least = HEAD.size + MARK.size
    if not least <= len(data) <= SNAPSHOT_LIMIT_BYTES:
        raise ProtocolError(f"snapshot: {len(data)} bytes, must be {least} … {SNAPSHOT_LIMIT_BYTES}")
    magic, version, step, cut_length, sources, pieces, consumed = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or step >= STEP_LIMIT:
        raise ProtocolError(f"snapshot: not one of version {VERSION}, or of an impossible step")
    mark = WindowMark(*MARK.unpack_from(data, HEAD.size))
    if not mark.possible:
        raise ProtocolError(f"snapshot: {mark.skip} steps into a window of {mark.steps} of {mark.window} steps")
    rest = memoryview(data)[least:]
    parts, rest = rest[: len(identity.packed_order())], rest[len(identity.packed_order()) :]
    differing = identity.differing(bytes(parts))
    if differing or sources != len(first.sources):
        raise ContractError(
            f"snapshot: made from another stream; these differ: {', '.join(differing) or 'the number of sources'}; "
            "serve the data and settings that the checkpoint was trained on"
        )
    places = []
    for source in first.sources:
        place, rest = SourceOrder.decode(source.plan, rest)
        places.append(place)
    if len(rest) != math.ceil(pieces / 8):
        raise ProtocolError(f"snapshot: {len(rest)} bytes of bits for {pieces} pieces")
    packed = from_bits(np.frombuffer(rest, np.uint8), pieces)
    return StreamSnapshot(step, cut_length, StreamPlace(Order(places, first.mixing), packed), consumed, mark)
