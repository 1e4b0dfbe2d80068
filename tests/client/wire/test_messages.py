"""The bytes of every message, and that nothing but them is read."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.batch_contract import ResolvedContract
from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import ProtocolError
from packhorse.rows.payload import ArrayEntry
from packhorse.rules import Severity, Violation
from packhorse.schema import HEADER_LIMIT_BYTES, unpack
from packhorse.wire.hello import BEGINNING, ON_THE_WIRE
from packhorse.wire.limits import KEEP_ALIVE_RANGE_S
from packhorse.wire.messages import (
    DECODERS,
    FREQUENT,
    PROTOCOL_VERSION,
    Ack,
    Batch,
    BatchBody,
    Bye,
    End,
    ErrorCode,
    GetSnapshot,
    Hello,
    Message,
    Reject,
    ServerError,
    Snapshot,
    SnapshotRef,
    Wait,
    WaitReason,
    Welcome,
    decode,
    encode,
)
from tests.client.messages import EXAMPLES, EXTRA, altered
from tests.strategies import declared_contracts, layouts, resolved_contracts

# The protocol's bytes, version 2. A change here is a new version of the protocol.
GOLDEN: dict[str, str] = {
    "HELLO": (
        "92a548454c4c4f8fab6d696e5f76657273696f6e02ab6d61785f76657273696f6e02a673747265616da5747261696ea67265"
        "616465729401000000a6636c69656e74c410000102030405060708090a0b0c0d0e0fa66c61796f757487a46461746102a763"
        "6f6e7465787402a674656e736f7201a8706970656c696e6501b173657175656e63655f706172616c6c656cc2a56f72646572"
        "ab74702d63702d64702d7070aa6d74705f73746167657390a8636f6e7472616374de0018aa7365715f6c656e67746810b06d"
        "6963726f5f62617463685f73697a65c0b1676c6f62616c5f62617463685f73697a65c0a77061636b696e67c0b169736f6c61"
        "74655f646f63756d656e7473c0a9706172746974696f6ea67a69677a6167a772656164657273c0b26576616c756174696f6e"
        "5f636f6e74657874c0b07365676d656e745f6d756c7469706c65c0ad7061636b5f6d756c7469706c65c0ad7374617469635f"
        "736861706573c0b17061645f746f5f6d61785f6c656e677468c0ae7061645f63755f7365716c656e73c0ac6d61785f736567"
        "6d656e7473c0ac7461696c5f70616464696e67c0a96f626a656374697665c0ae6c6f73735f726564756374696f6ec0a97265"
        "6d61696e646572c0b1617474656e74696f6e5f6f666673657473c0ac70616464696e675f6d61736bc0aa766f6361625f7369"
        "7a65c0a67061645f6964c0ac69676e6f72655f696e646578c0a7747261696e657283a5737461636bab6d65676174726f6e5f"
        "6c6daa776f726c645f73697a6504b568696572617263686963616c5f63705f73697a6573920201af636f6e74726163745f64"
        "6967657374c41022222222222222222222222222222222a7617474656d7074c408617474656d707421a57374617274920200"
        "a8706f736974696f6e920301a9736e617073686f7473919203c41033333333333333333333333333333333ab6c6173745f64"
        "6967657374c41044444444444444444444444444444444a677696e646f7704af73746172745f74696d656f75745f73cb4080"
        "e00000000000"
    ),
    "WELCOME": (
        "92a757454c434f4d4587a673747265616da5747261696ea7617474656d7074c408617474656d707421ab66696e6765727072"
        "696e74c41055555555555555555555555555555555a8706f736974696f6e920301a8636f6e7472616374de0017aa7365715f"
        "6c656e67746810b06d6963726f5f62617463685f73697a6501b1676c6f62616c5f62617463685f73697a6508a77061636b69"
        "6e67a66f6e6c696e65b169736f6c6174655f646f63756d656e7473c3a9706172746974696f6ea67a69677a6167a772656164"
        "657273a3616c6cb26576616c756174696f6e5f636f6e7465787402b07365676d656e745f6d756c7469706c6504ad7061636b"
        "5f6d756c7469706c6501ad7374617469635f736861706573c2b17061645f746f5f6d61785f6c656e677468c3ae7061645f63"
        "755f7365716c656e73c2ac6d61785f7365676d656e7473c0ac7461696c5f70616464696e67ab6f776e5f7365676d656e74a9"
        "6f626a656374697665a3736674ae6c6f73735f726564756374696f6eab737465705f746f6b656e73a972656d61696e646572"
        "a3706164b1617474656e74696f6e5f6f666673657473a8706879736963616cac70616464696e675f6d61736bc2aa766f6361"
        "625f73697a65cd03e8a67061645f696400ac69676e6f72655f696e646578d09cac6b6565705f616c6976655f73cb3ff00000"
        "00000000a87761726e696e67739186a472756c65ae5045525f544f4b454e5f4c4f5353a87365766572697479a47761726ea5"
        "6669656c64ae6c6f73735f726564756374696f6ea477616e74a97065725f746f6b656ea3676f74a46d65616ea672656d6564"
        "79ad736574207065725f746f6b656e"
    ),
    "REJECT": (
        "92a652454a45435482a673747265616da5747261696eaa76696f6c6174696f6e739186a472756c65a657494e444f57a87365"
        "766572697479a56572726f72a56669656c64a677696e646f77a477616e74a132a3676f74a131a672656d656479af73657420"
        "77696e646f7720746f2032"
    ),
    "GET_SNAPSHOT": (
        "92ac4745545f534e415053484f5483a673747265616da5747261696ea47374657003a6646967657374c41033333333333333"
        "333333333333333333"
    ),
    "SNAPSHOT": "92a8534e415053484f5482a673747265616da5747261696ea47374657003",
    "BATCH": (
        "92a5424154434884a673747265616da5747261696ea7617474656d7074c408617474656d707421ad6c6f775f77617465726d"
        "61726b920203a4626f64798ca47374657003a5696e64657801aa6e756d5f746f6b656e7308af6e756d5f6c6f73735f746f6b"
        "656e7307b16c6f63616c5f6c6f73735f746f6b656e7303ab737465705f746f6b656e7350b0737465705f6c6f73735f746f6b"
        "656e7346aa6d61785f7365716c656e08a5736c6f747308a666696c6c6572c2aa726f775f646967657374c410666666666666"
        "66666666666666666666a66172726179739284a46e616d65aa63755f7365716c656e73a56474797065a33c6934a66c656e67"
        "746804a66f66667365740084a46e616d65a6746f6b656e73a56474797065a33c7532a66c656e67746808a66f666673657440"
    ),
    "ACK": (
        "92a341434b84a673747265616da5747261696ea7617474656d7074c408617474656d707421a8706f736974696f6e920302ab"
        "6c6f6f705f69646c655f73cb3fe0000000000000"
    ),
    "WAIT": (
        "92a45741495484a673747265616da5747261696ea6726561736f6ea772656164657273a572616e6b7391bb72616e6b203120"
        "28647031c2b7637030c2b7747030c2b770703029a87761697465645f73cb4004000000000000"
    ),
    "END": "92a3454e4483a673747265616da5747261696ea7617474656d7074c408617474656d707421a8706f736974696f6e920600",
    "ERROR": (
        "92a54552524f5284a673747265616da5747261696ea4636f6465a672656a6f696ea76d657373616765aa6c6f6f6b20616761"
        "696ea5666174616cc2"
    ),
    "BYE": "92a342594581a673747265616da5747261696e",
}


@pytest.mark.parametrize("tag", EXAMPLES)
def test_the_bytes_of_a_message_do_not_change(tag: str) -> None:
    assert encode(EXAMPLES[tag]).hex() == GOLDEN[tag]
    assert decode([bytes.fromhex(GOLDEN[tag]), *EXTRA.get(tag, ())]) == (EXAMPLES[tag], list(EXTRA.get(tag, ())))


def travels(value: object, name: str) -> bool:
    """Whether a field is on the wire by its name: all are, but for facts that were not declared, or are not known."""
    if isinstance(value, TrainerFacts):
        return getattr(value, name) is not None
    return not isinstance(value, Hello) or name in ON_THE_WIRE


@pytest.mark.parametrize("tag", EXAMPLES)
def test_a_header_has_the_fields_of_its_class_in_their_order(tag: str) -> None:
    def check(value: Any, packed: Any) -> None:
        if isinstance(packed, dict):
            assert list(packed) == [name for name in get_type_hints(type(value)) if travels(value, name)]
            for name, part in packed.items():
                check(getattr(value, name), part)
        elif isinstance(packed, list):
            for one, part in zip(value, packed, strict=True):
                check(one, part)
        else:
            assert packed == value

    found_tag, packed = header_of(tag)
    assert found_tag == tag
    check(EXAMPLES[tag], packed)


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES.values()} == set(get_args(Message))


@pytest.mark.parametrize("tag", EXAMPLES)
def test_frames_may_be_bytes_or_views_of_them(tag: str) -> None:
    extra = EXTRA.get(tag, ())
    for kind in (bytes, bytearray, memoryview):
        frames: list[Any] = [kind(encode(EXAMPLES[tag])), *map(kind, extra)]
        message, found = decode(frames)
        assert message == EXAMPLES[tag]
        assert [bytes(frame) for frame in found] == list(extra)


# Round trip -----------------------------------------------------------------------------------------

COUNTS = st.integers(0, (1 << 62) - 1)
POSITIONS = st.builds(Position, COUNTS, COUNTS)
DIGESTS = st.binary(min_size=16, max_size=16)
ATTEMPTS = st.binary(min_size=8, max_size=8)
STREAMS = st.text(max_size=64)
TEXTS = st.text(max_size=40)
SECONDS = st.floats(0, 1e9)
COORDINATES = st.builds(Coordinates, *[st.integers(0, 1 << 20)] * 4)
CONTRACTS: st.SearchStrategy[ResolvedContract] = layouts().flatmap(resolved_contracts)
STARTS = st.tuples(POSITIONS, POSITIONS).map(sorted)
BODIES = st.builds(
    BatchBody,
    step=COUNTS,
    index=COUNTS,
    num_tokens=COUNTS,
    num_loss_tokens=COUNTS,
    local_loss_tokens=COUNTS,
    step_tokens=COUNTS,
    step_loss_tokens=COUNTS,
    max_seqlen=COUNTS,
    slots=COUNTS,
    filler=st.booleans(),
    row_digest=DIGESTS,
    arrays=st.lists(st.builds(ArrayEntry, TEXTS, st.sampled_from(("<u2", "|u1")), COUNTS, COUNTS), max_size=4).map(
        tuple
    ),
)
VIOLATIONS = st.builds(
    Violation, rule=TEXTS, severity=st.sampled_from(Severity), field=TEXTS, want=TEXTS, got=TEXTS, remedy=TEXTS
)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    start, position = draw(STARTS)
    refs = st.builds(SnapshotRef, COUNTS, DIGESTS)
    return Hello(
        min_version=draw(st.integers(-(1 << 62) + 1, PROTOCOL_VERSION)),
        max_version=draw(st.integers(PROTOCOL_VERSION, (1 << 62) - 1)),
        stream=draw(STREAMS),
        reader=draw(COORDINATES),
        client=draw(DIGESTS),
        layout=draw(layouts(max_degree=1 << 20)),
        contract=draw(declared_contracts()),
        contract_digest=draw(DIGESTS),
        attempt=draw(st.just(b"") | ATTEMPTS),
        start=start,
        position=position,
        snapshots=tuple(draw(st.lists(refs, max_size=4))),
        last_digest=draw(st.just(b"") | DIGESTS),
        window=draw(st.integers(0, 1 << 16)),
        start_timeout_s=draw(SECONDS),
    )


MESSAGES: dict[str, st.SearchStrategy[Message]] = {
    "HELLO": hellos(),
    "WELCOME": st.builds(
        Welcome,
        stream=STREAMS,
        attempt=ATTEMPTS,
        fingerprint=DIGESTS,
        position=POSITIONS,
        contract=CONTRACTS,
        keep_alive_s=st.floats(*KEEP_ALIVE_RANGE_S),
        warnings=st.lists(VIOLATIONS, max_size=3).map(tuple),
    ),
    "REJECT": st.builds(Reject, stream=STREAMS, violations=st.lists(VIOLATIONS, max_size=3).map(tuple)),
    "GET_SNAPSHOT": st.builds(GetSnapshot, stream=STREAMS, step=COUNTS, digest=DIGESTS),
    "SNAPSHOT": st.builds(Snapshot, stream=STREAMS, step=COUNTS),
    "BATCH": st.builds(Batch, stream=STREAMS, attempt=ATTEMPTS, low_watermark=POSITIONS, body=BODIES),
    "ACK": st.builds(Ack, stream=STREAMS, attempt=ATTEMPTS, position=POSITIONS, loop_idle_s=SECONDS),
    "WAIT": st.builds(
        Wait,
        stream=STREAMS,
        reason=st.sampled_from(WaitReason),
        ranks=st.lists(TEXTS, max_size=4).map(tuple),
        waited_s=SECONDS,
    ),
    "END": st.builds(End, stream=STREAMS, attempt=ATTEMPTS, position=POSITIONS),
    "ERROR": st.builds(
        ServerError, stream=STREAMS, code=st.sampled_from(ErrorCode), message=TEXTS, fatal=st.booleans()
    ),
    "BYE": st.builds(Bye, stream=STREAMS),
}


def test_every_message_is_made_at_random() -> None:
    assert MESSAGES.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("tag", MESSAGES)
@given(data=st.data())
def test_a_message_comes_back_as_it_was(tag: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[tag])
    header = encode(message)
    assert len(header) <= HEADER_LIMIT_BYTES
    found, extra = decode([header, *EXTRA.get(tag, ())])
    assert found == message
    assert list(extra) == list(EXTRA.get(tag, ()))
    assert encode(found) == header, "one message has one encoding"


# Strictness -----------------------------------------------------------------------------------------


def header_of(tag: str) -> list[Any]:
    """The example's header as plain values: [tag, fields]."""
    return msgpack.unpackb(encode(EXAMPLES[tag]))  # type: ignore[no-any-return]


def refused(frames: list[bytes]) -> str:
    """What a peer is told of frames that must not be read."""
    with pytest.raises(ProtocolError) as error:
        decode(frames)
    return str(error.value)


def changed(tag: str, change: Callable[[Any], None]) -> list[bytes]:
    header = copy.deepcopy(header_of(tag))
    change(header[1])
    return [msgpack.packb(header), *EXTRA.get(tag, ())]


def setting(path: str, value: object) -> Callable[[Any], None]:
    """Set the value at a dotted path; numbers are places in an array."""

    def change(header: Any) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            header = header[part]
        header[last] = value

    return change


@pytest.mark.parametrize("tag", EXAMPLES)
def test_a_missing_key_is_refused_by_name(tag: str) -> None:
    for name in header_of(tag)[1]:
        told = refused(changed(tag, lambda values, name=name: values.pop(name)))  # type: ignore[misc]
        in_every_version = tag == "HELLO" and name in BEGINNING
        assert told.startswith(f"{tag} must be a map " + ("that has" if in_every_version else "of exactly"))
        assert (name if in_every_version else repr(name)) in told.replace('"', "")


@pytest.mark.parametrize("tag", EXAMPLES)
def test_an_unknown_key_is_refused_by_name(tag: str) -> None:
    told = refused(changed(tag, setting("surprise", 1)))
    assert told.startswith(f"{tag} must be a map of exactly")
    assert "surprise" in told


@pytest.mark.parametrize(
    ("tag", "path"),
    [
        ("HELLO", "layout"),
        ("HELLO", "contract"),
        ("WELCOME", "contract"),
        ("BATCH", "body"),
        ("REJECT", "violations.0"),
        ("WELCOME", "warnings.0"),
    ],
)
def test_maps_inside_a_message_are_exact_too(tag: str, path: str) -> None:
    where = ".".join([tag, *(part for part in path.split(".") if not part.isdigit())])
    assert refused(changed(tag, setting(f"{path}.surprise", 1))).startswith(f"{where} must be a map of exactly")
    assert refused(changed(tag, setting(path, 5))).startswith(f"{where} must be a map of exactly")


def with_a_key_twice(tag: str, path: tuple[str, ...]) -> bytes:
    """The header with the first key of the map at ``path`` written twice."""

    def write(value: Any, rest: tuple[str, ...] | None) -> bytes:
        packer = msgpack.Packer(autoreset=False)
        if rest is None or not isinstance(value, dict):
            return msgpack.packb(value)  # type: ignore[no-any-return]
        items = list(value.items())
        if not rest:
            items.append(items[0])
        packer.pack_map_header(len(items))
        inner = {key: write(item, rest[1:] if rest and key == rest[0] else None) for key, item in items}
        return packer.bytes() + b"".join(msgpack.packb(key) + inner[key] for key, _ in items)  # type: ignore[no-any-return]

    tag_bytes: bytes = msgpack.packb(tag)
    return b"\x92" + tag_bytes + write(header_of(tag)[1], path)


@pytest.mark.parametrize(
    ("tag", "path"),
    [*((tag, ()) for tag in EXAMPLES), ("HELLO", ("contract",)), ("HELLO", ("layout",)), ("BATCH", ("body",))],
)
def test_a_key_given_twice_is_refused(tag: str, path: tuple[str, ...]) -> None:
    assert "a key is given twice" in refused([with_a_key_twice(tag, path), *EXTRA.get(tag, ())])


@pytest.mark.parametrize(
    ("tag", "path", "value"),
    [
        ("HELLO", "window", True),
        ("HELLO", "window", 4.0),
        ("HELLO", "window", "4"),
        ("HELLO", "window", None),
        ("HELLO", "window", 1 << 62),
        ("HELLO", "window", -(1 << 62)),
        ("HELLO", "stream", b"train"),
        ("HELLO", "stream", 1),
        ("HELLO", "client", "text"),
        ("HELLO", "reader", [0, 0, 0]),
        ("HELLO", "reader", [0, 0, 0, 0, 0]),
        ("HELLO", "reader", {"data": 0, "context": 0, "tensor": 0, "pipeline": 0}),
        ("HELLO", "reader.2", False),
        ("HELLO", "start", 5),
        ("HELLO", "start.0", 0.0),
        ("HELLO", "snapshots", None),
        ("HELLO", "snapshots", {}),
        ("HELLO", "snapshots.0", [3]),
        ("HELLO", "snapshots.0.1", 5),
        ("HELLO", "start_timeout_s", 540),
        ("HELLO", "start_timeout_s", float("nan")),
        ("HELLO", "start_timeout_s", float("inf")),
        ("HELLO", "layout.data", 2.0),
        ("HELLO", "layout.data", 0),
        ("HELLO", "layout.sequence_parallel", 0),
        ("HELLO", "layout.order", "tp-tp-tp-tp"),
        ("HELLO", "contract.seq_length", True),
        ("HELLO", "contract.seq_length", 0),
        ("HELLO", "contract.packing", "offline"),
        ("HELLO", "contract.packing", 0),
        ("HELLO", "contract.pad_to_max_length", 1),
        ("HELLO", "contract.readers", "some"),
        ("HELLO", "contract.evaluation_context", 0),
        ("HELLO", "contract.padding_mask", 0),
        ("HELLO", "contract.trainer.world_size", "4"),
        ("HELLO", "contract.trainer.hierarchical_cp_sizes.0", 2.0),
        ("WELCOME", "contract.seq_length", None),
        ("WELCOME", "contract.isolate_documents", None),
        ("WELCOME", "contract.max_segments", 2.0),
        ("WELCOME", "contract.partition", "Zigzag"),
        ("WELCOME", "keep_alive_s", 1),
        ("WELCOME", "keep_alive_s", True),
        ("WELCOME", "keep_alive_s", float("nan")),
        ("WELCOME", "keep_alive_s", float("inf")),
        ("WELCOME", "attempt", None),
        ("WELCOME", "warnings", None),
        ("WELCOME", "warnings.0.severity", "note"),
        ("REJECT", "violations.0.severity", "fatal"),
        ("GET_SNAPSHOT", "step", None),
        ("SNAPSHOT", "step", "3"),
        ("BATCH", "body.filler", 0),
        ("BATCH", "body.slots", 8.0),
        ("BATCH", "body.local_loss_tokens", None),
        ("BATCH", "body.arrays", None),
        ("BATCH", "body.arrays.0.dtype", 4),
        ("BATCH", "body.arrays.1.length", True),
        ("BATCH", "low_watermark", [1]),
        ("ACK", "loop_idle_s", 0),
        ("ACK", "loop_idle_s", float("nan")),
        ("ACK", "position", [3, 2, 1]),
        ("WAIT", "reason", "coffee"),
        ("WAIT", "ranks", "rank 1"),
        ("WAIT", "ranks.0", 1),
        ("WAIT", "waited_s", float("-inf")),
        ("END", "position", None),
        ("ERROR", "code", "other"),
        ("ERROR", "fatal", 1),
        *((tag, "stream", msgpack.ExtType(5, b"x")) for tag in EXAMPLES),
        *((tag, "stream", msgpack.Timestamp(1)) for tag in EXAMPLES),
    ],
)
def test_a_value_of_another_type_is_refused_by_field(tag: str, path: str, value: object) -> None:
    told = refused(changed(tag, setting(path, value)))
    if isinstance(value, msgpack.ExtType):
        assert "extension type 5 is not allowed" in told
    else:
        # Records name themselves: their parts have no keys.
        named = [part for part in path.split(".") if not part.isdigit()]
        assert told.startswith(tag)
        assert named[0] in told
        assert named[-1] in told


@pytest.mark.parametrize("tag", EXAMPLES)
def test_fields_that_are_no_map_are_refused(tag: str) -> None:
    for fields_ in (None, [], 5, "text", list(header_of(tag)[1].values())):
        assert refused([msgpack.packb([tag, fields_]), *EXTRA.get(tag, ())]).startswith(f"{tag} must be a map")


@pytest.mark.parametrize(
    "header", [None, 5, "BYE", b"BYE", [], ["BYE"], {"BYE": {}}, ["bye", {}], ["NOPE", {}], [1, {}], [["BYE"], {}]]
)
def test_a_header_that_is_not_a_known_tag_with_fields_is_refused(header: object) -> None:
    assert "known tag" in refused([msgpack.packb(header)])


def test_a_header_of_three_is_refused() -> None:
    assert "known tag" in refused([msgpack.packb([*header_of("BYE"), 1])])


@pytest.mark.parametrize("tag", EXAMPLES)
def test_bytes_behind_a_header_are_refused(tag: str) -> None:
    assert "msgpack" in refused([encode(EXAMPLES[tag]) + b"\xc0", *EXTRA.get(tag, ())])


@pytest.mark.parametrize("tag", EXAMPLES)
def test_a_header_cut_short_is_refused(tag: str) -> None:
    header = encode(EXAMPLES[tag])
    for length in range(len(header)):
        assert refused([header[:length], *EXTRA.get(tag, ())])


def test_a_header_over_the_limit_is_refused_before_it_is_decoded() -> None:
    rubbish = b"\xc1" * (HEADER_LIMIT_BYTES + 1)  # 0xc1 is no msgpack at all
    assert refused([rubbish]) == f"a header of {len(rubbish)} bytes is over the limit of {HEADER_LIMIT_BYTES}"
    assert "not valid msgpack" in refused([rubbish[:-1]])


def test_a_header_at_the_limit_is_read() -> None:
    assert HEADER_LIMIT_BYTES == 16 * 1024
    short = ServerError(stream="train", code=ErrorCode.FAILED, message="x" * 1000, fatal=True)
    room = HEADER_LIMIT_BYTES - len(encode(short))
    longest = replace(short, message=short.message + "x" * room)
    assert decode([encode(longest)])[0] == longest
    assert "over the limit" in refused([encode(replace(longest, message=longest.message + "x"))])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x92\xa3BYE\x91"])
def test_a_header_of_nested_containers_is_refused(opening: bytes) -> None:
    for depth in (500, 5000):
        inner = opening[-1:] if opening.startswith(b"\x92") else opening
        assert refused([(opening + inner * depth + b"\xc0")[:HEADER_LIMIT_BYTES]])


def test_a_container_of_a_huge_promised_size_is_refused() -> None:
    for promise in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        assert refused([promise])
        assert refused([b"\x92\xa3BYE" + promise])


@pytest.mark.parametrize("tag", EXAMPLES)
def test_a_wrong_number_of_frames_is_refused(tag: str) -> None:
    header = encode(EXAMPLES[tag])
    allowed = {"BATCH": {1, 2}, "END": {0, 1}, "SNAPSHOT": {1}}.get(tag, {0})
    for count in range(4):
        frames = [header, *[b"frame"] * count]
        if count in allowed:
            message, extra = decode(frames)
            assert (message, list(extra)) == (EXAMPLES[tag], [b"frame"] * count)
        else:
            assert f"{tag} came with {count} further frames" in refused(frames)


def test_no_frames_at_all_are_refused() -> None:
    assert refused([]) == "a message without frames"
    refused([b""])


@pytest.mark.parametrize(
    ("tag", "settings"),
    [
        ("HELLO", {"client": b"short"}),
        ("HELLO", {"attempt": b"seven!!"}),
        ("HELLO", {"last_digest": b"x"}),
        ("HELLO", {"contract_digest": b"x"}),
        ("HELLO", {"stream": "x" * 65}),
        ("HELLO", {"window": -1}),
        ("HELLO", {"window": (1 << 16) + 1}),
        ("HELLO", {"start_timeout_s": -0.5}),
        ("HELLO", {"start": Position(-1, 0)}),
        ("HELLO", {"start": Position(3, 2)}),
        ("HELLO", {"position": Position(3, -1)}),
        ("HELLO", {"snapshots": (SnapshotRef(-1, bytes(16)),)}),
        ("HELLO", {"snapshots": (SnapshotRef(1, b"x"),)}),
        ("WELCOME", {"attempt": b""}),
        ("WELCOME", {"keep_alive_s": 0.0}),
        ("WELCOME", {"keep_alive_s": 1e9}),
        ("WELCOME", {"position": Position(0, -1)}),
        ("GET_SNAPSHOT", {"digest": b"x"}),
        ("GET_SNAPSHOT", {"step": -1}),
        ("SNAPSHOT", {"step": -1}),
        ("BATCH", {"attempt": b""}),
        ("BATCH", {"low_watermark": Position(-1, 0)}),
        ("ACK", {"attempt": b""}),
        ("ACK", {"position": Position(-1, 0)}),
        ("END", {"attempt": b""}),
        ("END", {"position": Position(-1, 0)}),
    ],
)
def test_an_illegal_message_cannot_be_constructed(tag: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        altered(EXAMPLES[tag], **settings)


BODY_COUNTS = (
    "step",
    "index",
    "num_tokens",
    "num_loss_tokens",
    "local_loss_tokens",
    "step_tokens",
    "step_loss_tokens",
    "max_seqlen",
    "slots",
)


@pytest.mark.parametrize("name", BODY_COUNTS)
def test_a_count_of_a_batch_is_never_negative(name: str) -> None:
    batch = EXAMPLES["BATCH"]
    assert isinstance(batch, Batch)
    counts: dict[str, Any] = {name: -1}
    with pytest.raises(ProtocolError):
        altered(batch.body, **counts)


@pytest.mark.parametrize(
    "name",
    [
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "evaluation_context",
        "segment_multiple",
        "pack_multiple",
        "max_segments",
        "vocab_size",
    ],
)
def test_a_welcome_whose_contract_has_an_impossible_size_is_refused(name: str) -> None:
    """A micro_batch_size of 0, say, would divide by zero at the first BATCH, in a thread that nobody sees."""
    for size in (0, -1):
        assert name in refused(changed("WELCOME", setting(f"contract.{name}", size)))


# Anything else --------------------------------------------------------------------------------------


def mutations(count: int, seed: int) -> list[tuple[str, bytes]]:
    """(tag, header) of examples that were damaged once to thrice."""
    source = random.Random(seed)
    headers = {tag: encode(message) for tag, message in EXAMPLES.items()}
    tags = list(headers)
    found = []
    for _ in range(count):
        tag = source.choice(tags)
        header = bytearray(headers[tag])
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(header) + 1)
            match source.randrange(5):
                case 0:
                    header[at : at + 1] = bytes([source.randrange(256)])
                case 1:
                    del header[at : at + source.randint(1, 8)]
                case 2:
                    header[at:at] = source.randbytes(source.randint(1, 4))
                case 3:
                    other = headers[source.choice(tags)]
                    header[at:] = other[source.randrange(len(other)) :]
                case _:
                    header[at : at + 1] = bytes([source.choice((0xC0, 0xC1, 0xC3, 0xCB, 0xD4, 0xDD, 0xDF, 0x80, 0x90))])
        found.append((tag, bytes(header)))
    return found


def test_damaged_headers_are_refused_or_read_and_nothing_else() -> None:
    outcomes = {"refused": 0, "read": 0}
    for tag, header in mutations(24_000, seed=1):
        try:
            message, _ = decode([header, *EXTRA.get(tag, ())])
        except ProtocolError:
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
            assert encode(message)
    assert min(outcomes.values()) > 400, outcomes


FLOATS = st.floats()


def read_exactly(header: bytes) -> Message | None:
    """What the short way reads, if it does."""
    reads = (read(header) for opening, read in FREQUENT.items() if header.startswith(opening))
    return next(reads, None)


def read_field_by_field(header: bytes) -> Message:
    tag, values = cast(tuple[str, object], unpack(header))
    message: Message = DECODERS[tag](values, tag)
    return message


@pytest.mark.parametrize("tag", ["BATCH", "ACK"])
@given(data=st.data())
def test_a_frequent_message_is_read_the_short_way_as_field_by_field(tag: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[tag])
    assert read_exactly(encode(message)) == read_field_by_field(encode(message)) == message


def test_a_damaged_header_is_read_the_short_way_only_where_field_by_field_reads_the_same() -> None:
    read = 0
    for _, header in mutations(24_000, seed=2):
        message = read_exactly(header)
        if message is not None:
            assert message == read_field_by_field(header)
            read += 1
    assert read > 100


@given(
    tag=st.sampled_from(["BATCH", "ACK"]), value=st.integers(-(1 << 63), (1 << 64) - 1) | st.booleans() | st.floats()
)
def test_no_other_number_is_read_the_short_way(tag: str, value: float) -> None:
    """Whatever stands in its place: a number over the range, a flag, a float that is none."""
    message = EXAMPLES[tag]
    for path in NUMBERS_OF[tag]:
        header = changed(tag, setting(path, value))[0]
        try:
            strict: Message | None = read_field_by_field(header)
        except ProtocolError:
            strict = None
        assert read_exactly(header) in (None, strict)
    assert read_exactly(encode(message)) == message


NUMBERS_OF = {
    "BATCH": [
        "low_watermark.0",
        "low_watermark.1",
        "body.slots",
        "body.step",
        "body.arrays.0.length",
        "body.arrays.1.offset",
    ],
    "ACK": ["position.0", "position.1", "loop_idle_s"],
}


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(header: bytes) -> None:
    for prefix in (b"", b"\x92\xa3ACK"):
        assert refused([prefix + header])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(tag=st.sampled_from(sorted(EXAMPLES)), value=VALUES, data=st.data())
def test_any_value_in_any_field_is_refused_or_read_and_nothing_else(tag: str, value: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(header_of(tag)[1])))
    try:
        message, _ = decode(changed(tag, setting(name, value)))
    except ProtocolError:
        return
    assert encode(message)


@given(VALUES)
def test_plain_values_are_unpacked_as_they_were(value: Any) -> None:
    assert repr(unpack(msgpack.packb(value))) == repr(value)
