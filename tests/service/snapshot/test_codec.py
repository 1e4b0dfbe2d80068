"""A snapshot is small, comes back as it was, and is refused where it is not of this stream."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import ContractError, ProtocolError
from packhorse.wire.limits import SNAPSHOT_LIMIT_BYTES
from packhorse_service.loading.block import TokenBlock
from packhorse_service.mixing.order import Mixing, OrderCursor, SourceOrderPlan
from packhorse_service.mixing.over_length import CUT_LENGTHS_LIMIT, UNLIMITED, CutLength
from packhorse_service.mixing.replay_log import PIECES_LIMIT, StreamCursor
from packhorse_service.mixing.sample_stream import SampleStream
from packhorse_service.packing.consumed_unit import ConsumedUnit
from packhorse_service.packing.fifo_exact_tail import FifoExactTailPacker
from packhorse_service.packing.packing_plan import PackingPlan
from packhorse_service.planning.window_position import WindowPosition
from packhorse_service.snapshot.codec import (
    DIGEST_BYTES,
    PackShape,
    StreamSnapshot,
    decode_snapshot,
    encode_snapshot,
    seal_snapshot,
)
from packhorse_service.snapshot.fingerprint import StreamFingerprint
from tests.service.corpus import MemoryCorpus, mutated

PARTS: dict[str, object] = {"manifest": ["a.tar", 10], "tokenizer": "t", "rendering": None, "mixture": {"seed": 0}}
FINGERPRINT = StreamFingerprint.of(PARTS, {"packing": 1})


def plans(count: int = 2, *, shards: int = 9, open_shards: int = 3, epochs: int | None = 5) -> list[SourceOrderPlan]:
    return [
        SourceOrderPlan(
            name=f"source {i}",
            shards=shards,
            weight=i + 1,
            epochs=epochs,
            open_shards=open_shards,
            shuffle=True,
            seed=0,
        )
        for i in range(count)
    ]


def first_order(of: list[SourceOrderPlan]) -> OrderCursor:
    return OrderCursor.at_start(of, Mixing())


def place_with(
    bits: list[int], of: list[SourceOrderPlan], cut_lengths: Sequence[CutLength] | None = None
) -> StreamCursor:
    order = first_order(of)
    for number, source in enumerate(order.sources):
        source.drawn, source.faults = 1000 + number, number
        source.open[0].offset, source.open[0].first_sample, source.open[0].index = 512 * 77, 40, 3
    return StreamCursor(order, cut_lengths or [CutLength(len(bits), 64)], np.array(bits, np.uint8))


WINDOW = WindowPosition(0, 0, 1, 8, b"settings")
SHAPE = PackShape(seq_length=64, segment_multiple=2)


def encoded(
    cursor: StreamCursor,
    *,
    step: int = 3,
    consumed_unit: ConsumedUnit = ConsumedUnit.LOOKAHEAD,
    consumed: int = 0,
    window: WindowPosition = WINDOW,
) -> bytes:
    return encode_snapshot(StreamSnapshot(step, cursor, consumed_unit, consumed, SHAPE, window), FINGERPRINT)


def same(read: StreamSnapshot, cursor: StreamCursor) -> bool:
    return (
        read.cursor.order.encode() == cursor.order.encode()
        and read.cursor.packed.tolist() == cursor.packed.tolist()
        and read.cursor.cut_lengths == cursor.cut_lengths
    )


@settings(max_examples=100)
@given(
    bits=st.lists(st.integers(0, 1), max_size=200),
    step=st.integers(0, (1 << 62) - 1),
    cut_lengths=st.lists(
        st.builds(CutLength, st.integers(0, 9_999), st.integers(1, (1 << 32) - 1) | st.just(UNLIMITED)),
        min_size=1,
        max_size=CUT_LENGTHS_LIMIT,
    ),
    unit=st.sampled_from(ConsumedUnit),
    consumed=st.integers(0, (1 << 64) - 1),
    count=st.integers(1, 4),
)
def test_a_snapshot_comes_back_as_it_was(
    bits: list[int], step: int, cut_lengths: list[CutLength], unit: ConsumedUnit, consumed: int, count: int
) -> None:
    of = plans(count)
    cursor = place_with(bits, of, cut_lengths)
    read = decode_snapshot(
        encoded(cursor, step=step, consumed_unit=unit, consumed=consumed), FINGERPRINT, first_order(of)
    )
    assert (read.step, read.consumed_unit, read.consumed, read.shape, read.window) == (
        step,
        unit,
        consumed,
        SHAPE,
        WINDOW,
    )
    assert read.changed == []
    assert same(read, cursor)


@given(
    offset=st.integers(1, 63), rest=st.integers(1, 9), shorter=st.integers(0, 9), packs=st.integers(1, (1 << 32) - 1)
)
def test_a_place_inside_a_window_comes_back_with_the_stream_at_its_beginning(
    offset: int, rest: int, shorter: int, packs: int
) -> None:
    of = plans()
    cursor = place_with([0, 1], of)
    beginning = encoded(cursor, step=7, consumed=5)
    window = WindowPosition(offset, offset + rest, offset + rest + shorter, packs, b"settings")
    data = beginning, encoded(cursor, step=7, consumed=5, window=window)
    outside, inside = (decode_snapshot(each, FINGERPRINT, first_order(of)) for each in data)
    assert (outside.window, inside.window) == (WINDOW, window)
    assert inside._replace(window=WINDOW, cursor=cursor) == outside._replace(cursor=cursor)
    assert same(inside, cursor)


def test_the_bytes_of_a_snapshot_never_change() -> None:
    """One source, so that the layout of the docstring can be read off; integers are little-endian."""
    of = plans(1, shards=4, open_shards=1)
    of[0] = SourceOrderPlan(name="docs", shards=4, weight=1, epochs=None, open_shards=1, shuffle=False, seed=0)
    cut_lengths = [CutLength(5, 64), CutLength(2, UNLIMITED)]
    cursor = StreamCursor(first_order(of), cut_lengths, np.array([0, 1, 1, 0, 0, 0, 0, 0, 1], np.uint8), 99)
    content = (
        b"PHSNAP\x04\x00"
        + struct.pack("<QBBHIQ", 3, 1, 2, 1, 9, 6)
        + struct.pack("<III", 64, 2, 99)
        + struct.pack("<HHHI8s", 0, 0, 1, 8, b"settings")
        + struct.pack("<IIII", 5, 64, 2, 0)
        + b"".join(FINGERPRINT.sample_parts[name] for name in ("manifest", "mixture", "rendering", "tokenizer"))
        + struct.pack("<IIHHQQ", 0, 1, 0, 1, 0, 0)
        + struct.pack("<IQQII", 0, 0, 0, 0, 0)
        + bytes([0b00000110, 0b1])
    )
    digest = blake2b(content, digest_size=8).digest()
    assert encoded(cursor, consumed_unit=ConsumedUnit.SLOTS, consumed=6) == content + digest


# Size ------------------------------------------------------------------------------------------------


def realistic_stream(seed: int, samples: int) -> SampleStream:
    """Three endless sources of log-normal lengths, mean 500, in blocks of 200 samples; ids are all 0."""
    corpus, lengths = MemoryCorpus(), np.random.default_rng(seed)
    for number, weight in enumerate((5, 3, 2)):
        shards = []
        for _ in range(8):
            blocks = []
            for first in range(0, samples, 200):
                ids = np.clip(lengths.lognormal(np.log(500) - 0.72, 1.2, 200).astype(int), 2, 8193)
                offsets = np.concatenate([[0], np.cumsum(ids)]).astype(np.int64)
                keys = tuple(str(first + i) for i in range(200))
                blocks.append(TokenBlock(np.zeros(offsets[-1], np.uint32), offsets, None, None, keys, None))
            shards.append(blocks)
        corpus.add(shards, name=f"source {number}", weight=weight, epochs=None, open_shards=4)
    return corpus.stream(seq_length=8192)


@pytest.mark.parametrize(("lookahead", "packs"), [(64, 300), (16, 200)])
def test_a_snapshot_is_one_bit_a_sample_drawn_since_and_32_bytes_an_open_shard_and_1_kib(
    lookahead: int, packs: int
) -> None:
    stream = realistic_stream(0, 600)
    packer = FifoExactTailPacker(PackingPlan(capacity=8192, lookahead=lookahead * 8192))
    drawn, sizes = 0, []
    for _ in range(packs):
        while packer.wants_more:
            for piece in stream.draw() or []:
                packer.add(piece.number, piece.slots)
                drawn = piece.number + 1
        stream.mark_packed(packer.next_pack())
        cursor = stream.cursor()
        oldest = min((number for number, _ in packer.pending()), default=drawn)
        size = len(encoded(cursor))
        open_shards = sum(len(source.open) for source in cursor.order.sources)
        assert size <= (drawn - oldest) / 8 + 1 + 32 * open_shards + 1024
        sizes.append(size)
    assert max(sizes) < 2048 < SNAPSHOT_LIMIT_BYTES == 64 << 10


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_snapshot_of_another_stream_is_refused_with_the_part_that_differs(part: str) -> None:
    of = plans()
    data = encoded(place_with([0, 1], of))
    other = StreamFingerprint.of(PARTS | {part: "another"}, {"packing": 1})
    with pytest.raises(ContractError) as error:
        decode_snapshot(data, other, first_order(of))
    assert f"these differ: {part};" in str(error.value)


def test_all_parts_that_differ_are_named() -> None:
    of = plans()
    data = encoded(place_with([0, 1], of))
    other = StreamFingerprint.of(PARTS | {"manifest": 1, "mixture": 2}, {})
    with pytest.raises(ContractError, match="these differ: manifest, mixture;"):
        decode_snapshot(data, other, first_order(of))


def test_rows_of_another_shape_do_not_refuse_a_snapshot() -> None:
    """An elastic restart may change layout and packing."""
    of = plans()
    cursor = place_with([0, 1], of)
    data = encoded(cursor)
    other = StreamFingerprint.of(PARTS, {"packing": 2, "layout": "another"})
    assert same(decode_snapshot(data, other, first_order(of)), cursor)


def test_another_number_of_sources_is_refused() -> None:
    data = encoded(place_with([0, 1], plans(2)))
    with pytest.raises(ProtocolError, match="of 2 sources, here are 3"):
        decode_snapshot(data, FINGERPRINT, first_order(plans(3)))


@pytest.mark.parametrize("data", [b"", b"PHSNAP", b"x" * 200, b"PHSNAP\x02\x00" + bytes(200), bytes(1 << 20)])
def test_bytes_that_are_no_snapshot_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="snapshot"):
        decode_snapshot(data, FINGERPRINT, first_order(plans()))


def test_a_snapshot_cut_short_or_drawn_out_is_refused() -> None:
    of = plans()
    data = encoded(place_with([0, 1] * 30, of))
    for length in range(len(data)):
        with pytest.raises((ProtocolError, ContractError)):
            decode_snapshot(data[:length], FINGERPRINT, first_order(of))
        with pytest.raises((ProtocolError, ContractError)):
            decode_snapshot(seal_snapshot(data[: max(length - DIGEST_BYTES, 0)]), FINGERPRINT, first_order(of))
    for longer in (data + b"\0", seal_snapshot(data[:-DIGEST_BYTES] + b"\0")):
        with pytest.raises(ProtocolError):
            decode_snapshot(longer, FINGERPRINT, first_order(of))


def test_a_snapshot_that_promises_more_pieces_than_it_has_bits_for_is_refused() -> None:
    of = plans()
    data = bytearray(encoded(place_with([0, 1] * 30, of)))
    data[20:24] = b"\xff\xff\xff\xff"
    with pytest.raises(ProtocolError, match="4294967295 pieces"):
        decode_snapshot(seal_snapshot(bytes(data)[:-DIGEST_BYTES]), FINGERPRINT, first_order(of))


def test_a_step_that_no_position_can_hold_is_refused() -> None:
    """The wire holds steps below 2^62."""
    of = plans()
    data = bytearray(encoded(place_with([0], of)))
    data[8:16] = b"\xff" * 8
    with pytest.raises(ProtocolError):
        decode_snapshot(seal_snapshot(bytes(data)[:-DIGEST_BYTES]), FINGERPRINT, first_order(of))


@pytest.mark.parametrize(
    ("cut_lengths", "said"),
    [
        ([], "0 cut lengths, must be 1 … 16"),
        ([CutLength(1, 64)] * (CUT_LENGTHS_LIMIT + 1), "17 cut lengths"),
        ([CutLength(PIECES_LIMIT, 64), CutLength(1, 32)], "262145 samples drawn since its order, at most 262144"),
    ],
    ids=["none", "too many", "too long"],
)
def test_impossible_cut_lengths_are_refused(cut_lengths: list[CutLength], said: str) -> None:
    of = plans()
    cursor = StreamCursor(first_order(of), cut_lengths, np.zeros(3, np.uint8))
    with pytest.raises(ProtocolError, match=said):
        decode_snapshot(encoded(cursor), FINGERPRINT, first_order(of))


@pytest.mark.parametrize("inside", [False, True], ids=["beginning", "inside a window"])
def test_a_snapshot_with_any_bit_flipped_is_refused(inside: bool) -> None:
    of = plans(3)
    window = WindowPosition(2, 5, 8, 4, b"settings") if inside else WINDOW
    honest, first = encoded(place_with([0, 1, 1] * 20, of), window=window), first_order(of)
    assert decode_snapshot(honest, FINGERPRINT, first).stands_before == 3 + 2 * inside
    for bit in range(8 * len(honest)):
        broken = bytearray(honest)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_snapshot(bytes(broken), FINGERPRINT, first)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_snapshots_raise_no_other_error(seed: int) -> None:
    of, mutate = plans(3), random.Random(seed)
    honest = encoded(place_with([0, 1, 1] * 20, of))
    first, read = first_order(of), 0
    for _ in range(6_000):
        data = seal_snapshot(mutated(honest[:-DIGEST_BYTES], mutate))
        try:
            snapshot = decode_snapshot(data, FINGERPRINT, first)
        except (ProtocolError, ContractError):
            continue
        read += 1
        assert len(snapshot.cursor.packed) <= 8 * len(data)
        for source in snapshot.cursor.order.sources:
            assert len(source.open) <= source.plan.open_shards
            assert all(shard.shard < source.plan.shards for shard in source.open)
    assert 0 < read < 6_000  # some mutations change only offsets, counts or bits
