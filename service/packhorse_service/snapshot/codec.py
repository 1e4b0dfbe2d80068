"""The resumable state of a stream before a step, in a fixed binary layout.

    magic "PHSNAP", version u16 | step u64 | kind of ``used`` u8 | cut lengths u8 | sources u16 | pieces u32 | used u64
    | seq_length u32 | segment_multiple u32 | checksum of the blocks drawn from u32
    | inside a window: steps to pass over u16, its steps u16, packing.window u16, packs a step u32
    | digest of the packing settings 8 bytes | each cut length: draws u32, slots u32 | fingerprint: 8 bytes a part
    | each source's place (``mixing``) | one bit a piece: packed | digest of all that 8 bytes

It refers to data and holds none. A snapshot that comes back from a reader is input from a stranger: every
length is checked against what this stream allows before anything is allocated. One that was damaged where it lay is
refused by its digest: a bit of it is a sample.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from packhorse.errors import ContractError, ProtocolError
from packhorse.rows.payload import bits, from_bits
from packhorse.wire.limits import SNAPSHOT_LIMIT_BYTES
from packhorse_service.mixing.order import SHARD_FORMAT, SOURCE_FORMAT, OrderCursor, SourceCursor
from packhorse_service.mixing.over_length import CUT_LENGTHS_LIMIT, UNLIMITED, CutLength
from packhorse_service.mixing.replay_log import PIECES_LIMIT, StreamCursor
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.planning.window_position import WindowPosition
from packhorse_service.snapshot.fingerprint import RESETS_SOURCES, StreamFingerprint

__all__ = [
    "PackShape",
    "StreamSnapshot",
    "decode_snapshot",
    "encode_snapshot",
    "seal_snapshot",
    "snapshot_bound",
]

MAGIC = b"PHSNAP"
VERSION = 4
STEP_LIMIT = 1 << 62  # as on the wire
FINGERPRINT_BYTES = 64
DIGEST_BYTES = 8
HEAD = struct.Struct("<6sHQBBHIQIII")
WINDOW = struct.Struct("<HHHI8s")
CUT_LENGTH = struct.Struct("<II")


class PackShape(NamedTuple):
    """Shape of packs by which a changed packing setting is noticed."""

    seq_length: int
    segment_multiple: int


class StreamSnapshot(NamedTuple):
    """The stream before ``step``, and before the ``window.offset`` steps behind it that were delivered already."""

    step: int
    cursor: StreamCursor
    consumed_unit: ConsumedUnit
    consumed: int
    shape: PackShape
    window: WindowPosition
    changed: Collection[str] = ()  # parts of the fingerprint that are not those of our stream, and were asked for

    @property
    def stands_before(self) -> int:
        """Step that is the next to deliver."""
        return self.step + self.window.offset


def snapshot_bound(sources: int, open_shards: int) -> int:
    """Bytes that a snapshot may need: of the order, and of the bits of all that can be drawn ahead."""
    head = HEAD.size + WINDOW.size + FINGERPRINT_BYTES + CUT_LENGTHS_LIMIT * CUT_LENGTH.size + DIGEST_BYTES
    return head + sources * SOURCE_FORMAT.size + open_shards * SHARD_FORMAT.size + PIECES_LIMIT // 8


def encode_snapshot(snapshot: StreamSnapshot, fingerprint: StreamFingerprint) -> bytes:
    """Encode a snapshot, a few hundred bytes: the order, and one bit for each piece drawn since."""
    step, (order, cut_lengths, packed, checksum), consumed_unit, consumed, shape, window, _ = snapshot
    head = HEAD.pack(
        MAGIC,
        VERSION,
        step,
        consumed_unit,
        len(cut_lengths),
        len(order.sources),
        len(packed),
        consumed,
        *shape,
        checksum,
    )
    cuts = b"".join(CUT_LENGTH.pack(draws, 0 if slots == UNLIMITED else slots) for draws, slots in cut_lengths)
    content = b"".join(
        (head, WINDOW.pack(*window), cuts, fingerprint.encoded_parts(), order.encode(), bits(packed).tobytes())
    )
    data = seal_snapshot(content)
    if len(data) > SNAPSHOT_LIMIT_BYTES:
        raise ContractError(
            f"snapshot: {len(packed)} pieces were drawn since its order, which needs {len(data)} bytes of "
            f"at most {SNAPSHOT_LIMIT_BYTES}: a sample is cut into very many; raise seq_length, or split it"
        )
    return data


def seal_snapshot(content: bytes) -> bytes:
    """Return the content of a snapshot with its digest behind it."""
    return content + _digest(content)


def decode_snapshot(
    data: bytes, fingerprint: StreamFingerprint, first: OrderCursor, allowed: Collection[str] = ()
) -> StreamSnapshot:
    """Read a snapshot of this very stream, or of one that differs as ``allowed`` says; ``first`` gives its sources.

    Raises ``ProtocolError`` for bytes that are no snapshot, ``ContractError`` for one of other data.
    """
    least = HEAD.size + WINDOW.size + DIGEST_BYTES
    if not least <= len(data) <= SNAPSHOT_LIMIT_BYTES:
        raise ProtocolError(f"snapshot: {len(data)} bytes, must be {least} … {SNAPSHOT_LIMIT_BYTES}")
    magic, version, step, consumed_unit, cut_lengths, sources, pieces, consumed, *shape, checksum = HEAD.unpack_from(
        data
    )
    if magic != MAGIC or version != VERSION or step >= STEP_LIMIT or consumed_unit not in set(ConsumedUnit):
        raise ProtocolError(f"snapshot: not one of version {VERSION}, or of an impossible step")
    content, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if digest != _digest(content):
        raise ProtocolError("snapshot: its digest is not that of its content: it is damaged; load another checkpoint")
    window = WindowPosition(*WINDOW.unpack_from(data, HEAD.size))
    if not window.possible:
        raise ProtocolError(f"snapshot: {window.offset} steps into a window of {window.steps} of {window.window} steps")
    cuts, rest = _cut_lengths(memoryview(content)[HEAD.size + WINDOW.size :], cut_lengths)
    parts, rest = rest[: len(fingerprint.encoded_parts())], rest[len(fingerprint.encoded_parts()) :]
    changed = fingerprint.changed(bytes(parts), allowed)
    if RESETS_SOURCES.intersection(changed):
        begun = StreamCursor(first, cuts, np.empty(0, np.uint8))
        return StreamSnapshot(step, begun, ConsumedUnit(consumed_unit), consumed, PackShape(*shape), window, changed)
    if sources != len(first.sources):
        raise ProtocolError(f"snapshot: of {sources} sources, here are {len(first.sources)}")
    cursors = []
    for source in first.sources:
        cursor, rest = SourceCursor.decode(source.plan, rest, epochs_changed="mixture" in changed)
        cursors.append(cursor)
    if len(rest) != math.ceil(pieces / 8):
        raise ProtocolError(f"snapshot: {len(rest)} bytes of bits for {pieces} pieces")
    packed = from_bits(np.frombuffer(rest, np.uint8), pieces)
    here = StreamCursor(OrderCursor(cursors, first.mixing), cuts, packed, checksum)
    return StreamSnapshot(step, here, ConsumedUnit(consumed_unit), consumed, PackShape(*shape), window, changed)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _cut_lengths(data: memoryview, count: int) -> tuple[list[CutLength], memoryview]:
    size = count * CUT_LENGTH.size
    if not 1 <= count <= CUT_LENGTHS_LIMIT or len(data) < size:
        raise ProtocolError(f"snapshot: {count} cut lengths, must be 1 … {CUT_LENGTHS_LIMIT}")
    cut_lengths = [CutLength(draws, slots or UNLIMITED) for draws, slots in CUT_LENGTH.iter_unpack(data[:size])]
    draws = sum(cut.draws for cut in cut_lengths)
    if draws > PIECES_LIMIT:
        raise ProtocolError(f"snapshot: {draws} samples drawn since its order, at most {PIECES_LIMIT}")
    return cut_lengths, data[size:]
