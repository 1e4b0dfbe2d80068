"""Every decoder that meets bytes from outside, with valid inputs to start from.

An input is one string of bytes. Where a decoder takes several, or one of several situations, they are framed in
it: see ``framed``.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from packhorse.codec.microbatch import MicroBatch
from packhorse.codec.rebuild import KEYS_DECODER, KEYS_LIMIT_BYTES, Rebuilder
from packhorse.contract.batch_contract import Packing
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import ORIGIN, Position
from packhorse.errors import ContractError, ProtocolError, SourceError
from packhorse.protocol.checkpoint_state import FeedState, read_states, seal_state, write_states
from packhorse.schema import pack, unpack
from packhorse.wire.messages import EXTRA_FRAMES, Batch, BatchBody, decode, encode
from packhorse_service.mixing.over_length import UNLIMITED, CutLength
from packhorse_service.planning.window_position import WindowPosition
from packhorse_service.snapshot.codec import (
    DIGEST_BYTES,
    StreamSnapshot,
    decode_snapshot,
    encode_snapshot,
    seal_snapshot,
)
from packhorse_service.sources import formats
from packhorse_service.sources.messages import Conversation
from packhorse_service.sources.npy import load_array
from packhorse_service.sources.sample import BadSample
from packhorse_service.sources.tar.grouping import Sample, split_name
from packhorse_service.sources.tar.reader import READ_LIMIT_BYTES, TarMember, read_members
from tests.client.codec.test_views import case_of, sample_of
from tests.client.messages import EXAMPLES
from tests.fuzz.harness import Decoder
from tests.service.shards_on_disk import ids_member
from tests.service.snapshot.test_codec import FINGERPRINT, encoded, first_order, place_with, plans, same
from tests.strategies import ATTEMPT, RowCase, body_and_payload

__all__ = ["CASES", "DECODERS", "TREES", "VALID", "Framed", "framed", "parts_of"]

# Several in one --------------------------------------------------------------------------------------


def framed(situation: int, first: bytes, second: bytes = b"") -> bytes:
    """A situation, and two strings."""
    return bytes([situation]) + len(first).to_bytes(3, "little") + first + second


def parts_of(data: bytes) -> tuple[int, bytes, bytes]:
    """The inverse of ``framed``, for whatever bytes."""
    size = int.from_bytes(data[1:4], "little")
    return data[0] if data else 0, data[4 : 4 + size], data[4 + size :]


@dataclass(frozen=True, slots=True)
class Framed:
    """A valid input in two parts, each of which is mutated alone."""

    situation: int
    first: bytes
    second: bytes
    kept: int = 0  # bytes at the beginning of each that another decoder is tried with


# The wire --------------------------------------------------------------------------------------------


def _frames(tag: str, data: bytes) -> list[bytes]:
    """A message with as many further frames as it must have."""
    return [data, *[b"further"] * EXTRA_FRAMES.get(type(EXAMPLES[tag]), (0,))[0]]


def _message_decoder(tag: str) -> Decoder:
    def check(_data: bytes, message: Any) -> None:
        again, _ = decode(_frames(tag, encode(message)))
        assert again == message

    def of_tag(data: bytes) -> object:
        message, _ = decode(_frames(tag, data))
        return message

    return Decoder(name=tag, decode=of_tag, errors=(ProtocolError,), check=check)


# Micro-batches ---------------------------------------------------------------------------------------

SAMPLES = [sample_of(11, 12, 13, 14), sample_of(21, 22, 23, 24, 25, 26)]
EVEN = [sample_of(*range(10, 26)), sample_of(*range(30, 46))]
DENSE: dict[str, Any] = {
    "packing": Packing.NONE,
    "micro_batch_size": 2,
    "segment_multiple": 16,
    "pad_to_max_length": False,
}
CASES: list[tuple[RowCase, int]] = [
    (case_of(SAMPLES, ParallelLayout(), segment_multiple=4), 0),
    (case_of(SAMPLES, ParallelLayout(context=2), partition=Partition.ZIGZAG, segment_multiple=4), 1),
    (case_of(SAMPLES, ParallelLayout(context=2), partition=Partition.CONTIGUOUS, segment_multiple=4), 0),
    (case_of(SAMPLES, ParallelLayout(), own_labels=True, segment_multiple=4, padding_mask=True), 0),
    (case_of(SAMPLES, ParallelLayout()).as_filler(), 0),
    (case_of(EVEN, ParallelLayout(), **DENSE), 0),
    (case_of(EVEN, ParallelLayout(context=2), partition=Partition.ZIGZAG, **DENSE), 1),
]


def _view(data: bytes) -> tuple[int, BatchBody, MicroBatch]:
    situation, header, payload = parts_of(data)
    situation %= len(CASES)
    case, rank = CASES[situation]
    message, extra = decode([header, payload])
    if not isinstance(message, Batch):
        raise ProtocolError("this is no BATCH")
    rebuilt = Rebuilder(case.contract, case.layout, rank).rebuild(message.body, memoryview(extra[0]))
    return situation, message.body, rebuilt


def _check_view(_data: bytes, decoded: Any) -> None:
    situation, body, micro_batch = decoded
    contract = CASES[situation][0].contract
    rows = 1 if contract.packed else contract.micro_batch_size
    assert body.slots <= contract.max_width * rows
    for name in ("tokens", "labels", "loss_mask", "position_ids", "padding_mask"):
        array = getattr(micro_batch, name)
        assert array is None or array.size == body.slots, name
        assert array is None or contract.packed or array.shape[0] == rows, name
    logical, physical = micro_batch.host_offsets
    assert len(logical) == len(physical)
    assert micro_batch.position == Position(body.step, body.index)


def _batches() -> list[Framed]:
    batches = []
    for number, (case, rank) in enumerate(CASES):
        body, payload = body_and_payload(case, rank, with_keys=number % 2 == 0)
        header = encode(Batch(stream="train", attempt=ATTEMPT, low_watermark=ORIGIN, body=body))
        batches.append(Framed(number, header, bytes(payload)))
    return batches


def _keys(data: bytes) -> object:
    return KEYS_DECODER(unpack(data, KEYS_LIMIT_BYTES), "keys")


def _check_keys(_data: bytes, keys: Any) -> None:
    assert _keys(pack(keys)) == keys


# Snapshots and states --------------------------------------------------------------------------------

PLANS = plans(3)
FIRST = first_order(PLANS)


def _snapshot(data: bytes) -> StreamSnapshot:
    """What a digest does not keep away: whoever crafts a snapshot can make its digest too."""
    return decode_snapshot(seal_snapshot(data[:-DIGEST_BYTES]), FINGERPRINT, FIRST)


def _check_snapshot(data: bytes, read: Any) -> None:
    assert len(read.cursor.packed) <= 8 * len(data)
    for source in read.cursor.order.sources:
        assert len(source.open) <= source.plan.open_shards
        assert all(shard.shard < source.plan.shards for shard in source.open)
    again = _snapshot(encode_snapshot(read, FINGERPRINT))
    assert same(again, read.cursor)
    assert again._replace(cursor=read.cursor) == read


def _snapshots() -> list[bytes]:
    cursor = place_with([0, 1, 1] * 20, PLANS)
    beginning = encoded(cursor)
    cut_lengths = [CutLength(5, 64), CutLength(2, UNLIMITED)]
    inside = encoded(cursor, window=WindowPosition(2, 5, 8, 4, b"settings"))
    return [beginning, inside, encoded(place_with([1] * 7, PLANS, cut_lengths), step=9)]


class NotJson(ValueError):
    """What holds a state is not even JSON."""


def _state(data: bytes) -> dict[str, FeedState]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotJson from error
    try:
        value = seal_state(value)  # whoever crafts a state can make its digest too
    except (ContractError, KeyError, TypeError):
        return read_states(value, "train")
    return read_states(value, "train")


def _check_state(_data: bytes, states: Any) -> None:
    further = [state for name, state in states.items() if name != "train"]
    begun = {name: state for name, state in states.items() if name == "train" or state.position != ORIGIN}
    assert _state(json.dumps(write_states(states["train"], further)).encode()) == begun


def _states() -> list[Any]:
    print_of = bytes(range(16))
    train = FeedState("train", Position(7, 1), print_of, b"snapshot" * 30)
    others = [FeedState(name, Position(3, 0), print_of, b"other") for name in ("test", "validation")]
    return [write_states(train, others), write_states(FeedState("train"), [])]


# Shards ----------------------------------------------------------------------------------------------


def _tar(kind: int, names: Sequence[str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
        for number, name in enumerate(names):
            header = tarfile.TarInfo(name)
            header.size = 40 * number
            tar.addfile(header, io.BytesIO(b"x" * header.size))
    members = stream.getvalue().rstrip(b"\0")  # a record is 20 blocks, mostly empty
    return members + bytes(-len(members) % 512 + 1024)


def _members(data: bytes) -> list[TarMember]:
    return list(read_members(io.BytesIO(data), shard="x.tar"))


def _check_members(data: bytes, members: Any) -> None:
    if not data.startswith(b"\x1f\x8b"):
        assert sum(len(member.data) for member in members) <= len(data)
        assert all(member.next_offset <= len(data) + 512 for member in members)
    assert all(member.offset < member.next_offset for member in members)
    for member in members:
        member.name.encode()  # can be printed and sent
        split_name(member.name)


def _array(data: bytes) -> object:
    return load_array(TarMember("a.npy", data, 0, 0))


def _check_array(data: bytes, array: Any) -> None:
    assert array.ndim == 1
    assert array.nbytes <= len(data)
    assert np.array_equal(
        load_array(TarMember("a.npy", _dumped(array), 0, 0)), array, equal_nan=array.dtype.kind == "f"
    )


def _dumped(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def _masked(data: bytes) -> object:
    """Ids and their loss mask, or labels."""
    situation, ids, other = parts_of(data)
    extension = ("loss_mask.npy", "labels.npy")[situation % 2]
    members = {"npy": TarMember("a.npy", ids, 0, 0), extension: TarMember(f"a.{extension}", other, 0, 0)}
    return formats.decode(Sample("a", members, None), formats.SampleFormat.AUTO)


def _check_masked(_data: bytes, arrays: Any) -> None:
    assert isinstance(arrays, formats.TokenArrays)
    for other in (arrays.loss_mask, arrays.labels):
        assert other is None or len(other) == len(arrays.ids)


def _conversation(data: bytes) -> object:
    sample = Sample("a", {"json": TarMember("a.json", data, 0, 0)}, None)
    return formats.decode(sample, formats.SampleFormat.AUTO)


def _check_conversation(_data: bytes, read: Any) -> None:
    assert isinstance(read, Conversation)
    for message in read.messages:
        assert message["content"] is None or isinstance(message["content"], str)
    assert _conversation(json.dumps(read.as_json()).encode()) == read


def _conversations() -> list[Any]:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": [1, 2.5]}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    return [
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because — ", "weight": 1}],
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "3", "name": "f"},
            ],
            "tools": [tool],
        },
        {"messages": [{"role": "user", "content": ""}], "tools": json.dumps([tool])},
    ]


# All of them -----------------------------------------------------------------------------------------

PLAIN_TARS = [
    _tar(tarfile.USTAR_FORMAT, ["a.txt", "b/c.npy"]),
    _tar(tarfile.GNU_FORMAT, ["long" * 40 + ".txt", "d.json"]),
    _tar(tarfile.PAX_FORMAT, ["ключ" * 20 + ".txt", "__meta__/x", "e.bin"]),
]

NPY_HEADER_BYTES = 128

DECODERS: dict[str, Decoder] = {
    **{tag: _message_decoder(tag) for tag in EXAMPLES},
    **{
        decoder.name: decoder
        for decoder in (
            Decoder(
                name="view",
                decode=_view,
                errors=(ProtocolError,),
                check=_check_view,
            ),
            Decoder(name="keys", decode=_keys, errors=(ProtocolError,), check=_check_keys),
            Decoder(name="snapshot", decode=_snapshot, errors=(ProtocolError, ContractError), check=_check_snapshot),
            Decoder(name="state", decode=_state, errors=(ContractError, NotJson), check=_check_state),
            Decoder(
                name="tar",
                decode=_members,
                errors=(SourceError,),
                check=_check_members,
                fixed_bytes=READ_LIMIT_BYTES + (1 << 20),
                bytes_a_byte=1200,  # what gzip can reach
            ),
            Decoder(
                name="npy",
                decode=_array,
                errors=(BadSample,),
                check=_check_array,
            ),
            Decoder(name="masked", decode=_masked, errors=(BadSample,), check=_check_masked),
            Decoder(name="conversation", decode=_conversation, errors=(BadSample,), check=_check_conversation),
        )
    },
}

# Valid inputs, as bytes or in parts …
VALID: dict[str, Sequence[bytes | Framed]] = {
    **{tag: [encode(message)] for tag, message in EXAMPLES.items()},
    "view": _batches(),
    "keys": [pack((("books", "a.tar", "1"), ("web", "части.tar", "k" * 40)))],
    "snapshot": _snapshots(),
    "state": [json.dumps(state).encode() for state in _states()],
    "tar": [*PLAIN_TARS, gzip.compress(PLAIN_TARS[0], mtime=0)],
    "npy": [ids_member([1, 2, 3, 70_000]), ids_member([1] * 20, "|u1"), ids_member([0, 1], ">i8"), _dumped(np.ones(3))],
    "masked": [
        Framed(0, ids_member([1, 2, 3]), ids_member([0, 1, 1], "|u1"), NPY_HEADER_BYTES),
        Framed(0, ids_member([1, 2, 3]), _dumped(np.array([0.0, 1.0, 1.0], np.float32)), NPY_HEADER_BYTES),
        Framed(1, ids_member([1, 2, 3]), ids_member([2, 3, 4]), NPY_HEADER_BYTES),
    ],
    "conversation": [json.dumps(conversation).encode() for conversation in _conversations()],
}


def _as_msgpack(tree: Any) -> bytes:
    return bytes(msgpack.packb(tree))


def _as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


# … and as trees, where they are trees: how they become bytes, and the trees.
TREES: dict[str, tuple[Callable[[Any], bytes], Sequence[Any]]] = {
    **{tag: (_as_msgpack, [msgpack.unpackb(encode(message))]) for tag, message in EXAMPLES.items()},
    "keys": (_as_msgpack, [[["books", "a.tar", "1"], ["web", "части.tar", "k" * 40]]]),
    "state": (_as_json, _states()),
    "conversation": (_as_json, _conversations()),
}
