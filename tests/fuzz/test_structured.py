"""What Hypothesis makes up in the form that each decoder expects: every field free, and most of them wrong."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from packhorse.contract.position import ORIGIN
from packhorse.rows.payload import ArrayEntry, join_arrays, split_arrays
from packhorse.wire.messages import Batch, encode
from packhorse_service.mixing.order import SHARD_FORMAT, SOURCE_FORMAT
from packhorse_service.snapshot.codec import CUT_LENGTH, HEAD, WINDOW
from tests.fuzz.decoders import CASES, DECODERS, TREES, framed
from tests.fuzz.harness import EXAMPLES
from tests.fuzz.mutation import leaves, replaced
from tests.service.snapshot.test_codec import FINGERPRINT
from tests.strategies import ATTEMPT, body_and_payload

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]

many = settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))

# Trees: messages, keys, states, conversations --------------------------------------------------------

SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([None, True, False, "train", "user", "assistant", "text", [], {}]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=5), st.dictionaries(st.text(max_size=6), SCALARS, max_size=3))


def trees(name: str) -> st.SearchStrategy[bytes]:
    """A valid one with some of its values made up."""
    dump, valid = TREES[name]
    edits = [(tree, way) for tree in valid for way in leaves(tree)]

    def edited(edit: tuple[Any, Any], value: Any) -> bytes:
        tree, way = edit
        return dump(replaced(tree, way, value))

    return st.builds(edited, st.sampled_from(edits), VALUES)


# Micro-batches ---------------------------------------------------------------------------------------

SMALL = st.integers(-1, 40)
OFFSETS = st.lists(st.integers(0, 40) | st.integers(-(1 << 31), (1 << 31) - 1), max_size=6)
ORDERED = st.lists(st.sampled_from([0, 3, 4, 8, 12, 16]), min_size=2, max_size=5).map(sorted)


def _batch(situation: int, changed: dict[str, Any], slots: int | None, moved: tuple[int, int] | None) -> bytes:
    case, rank = CASES[situation]
    body, payload = body_and_payload(case, rank, with_keys=True)
    arrays = dict(split_arrays(body.arrays, memoryview(payload)))
    arrays |= {name: np.array(values, "<i4") for name, values in changed.items()}
    table, buffer = join_arrays(arrays)
    if moved is not None:
        at, by = moved
        entry = table[at % len(table)]
        entry = ArrayEntry(entry.name, entry.dtype, entry.length + by, entry.offset + by * 4)
        table = (*table[: at % len(table)], entry, *table[at % len(table) + 1 :])
    made = structs.replace(body, arrays=table, slots=body.slots if slots is None else max(slots, 0))
    return framed(
        situation, encode(Batch(stream="train", attempt=ATTEMPT, low_watermark=ORIGIN, body=made)), bytes(buffer)
    )


VIEWS = st.builds(
    _batch,
    st.integers(0, len(CASES) - 1),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), OFFSETS | ORDERED)),
    st.none() | SMALL,
    st.none() | st.tuples(st.integers(0, 7), st.integers(-16, 1 << 40)),
)

# Snapshots -------------------------------------------------------------------------------------------


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 4) | st.integers(0, (1 << bits) - 1)


SHARDS = st.builds(SHARD_FORMAT.pack, unsigned(32), unsigned(64), unsigned(64), unsigned(32), unsigned(32))
SOURCES = st.builds(
    lambda *parts: SOURCE_FORMAT.pack(*parts[:3], len(parts[5]), *parts[3:5]) + b"".join(parts[5]),
    *(unsigned(32), st.integers(0, 9), st.integers(0, 3), unsigned(64), unsigned(64)),
    st.lists(SHARDS, max_size=4),
)
PLACES = st.builds(
    lambda step, kind, used, mark, cut_lengths, sources, bits: (
        HEAD.pack(b"PHSNAP", 3, step, kind, len(cut_lengths), len(sources), 8 * len(bits), used, 64, 2, 0)
        + WINDOW.pack(*mark, b"settings")
        + b"".join(CUT_LENGTH.pack(*cut) for cut in cut_lengths)
        + FINGERPRINT.encoded_parts()
        + b"".join(sources)
        + bits
    ),
    unsigned(64),
    st.integers(0, 3),
    unsigned(64),
    st.tuples(unsigned(16), unsigned(16), unsigned(16), unsigned(32)),
    st.lists(st.tuples(unsigned(32), unsigned(32)), max_size=3),
    st.lists(SOURCES, min_size=2, max_size=4),
    st.binary(max_size=4),
)

# Shards ----------------------------------------------------------------------------------------------


def _member(name: bytes, kind: bytes, size: bytes, data: bytes) -> bytes:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    header[: len(name)], header[156:157], header[124 : 124 + len(size)] = name, kind, size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data + bytes(-len(data) % 512)


TARS = st.builds(
    lambda members, tail: b"".join(members) + tail,
    st.lists(
        st.builds(
            _member,
            st.binary(max_size=12),
            st.sampled_from([b"0", b"\0", b"5", b"x", b"g", b"L", b"K", b"S", b"1", b"7", b"?"]),
            st.sampled_from([b"%011o\0" % 5, b"%011o\0" % 600, b"7" * 12, b"\x80" + b"\0" * 10 + b"\5", b"\xff" * 12]),
            st.sampled_from([b"12345", b"13 path=a/b\n\0", b"12 size=512\n", b"9 size=x\n", b"", b"x" * 600]),
        ),
        max_size=4,
    ),
    st.sampled_from([b"", bytes(512), bytes(1024), b"x" * 512, b"x"]),
)


def _npy(version: tuple[int, int], descr: str, order: str, shape: str, data: bytes) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    size = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + header + data


NPYS = st.builds(
    _npy,
    st.sampled_from([(1, 0), (2, 0), (3, 0), (0, 0)]),
    st.sampled_from(["'<i4'", "'|u1'", "'>i8'", "'<f4'", "'|O'", "'<U3'", "[('a', '<i4')]", "'x'", "4", "'<i4"]),
    st.sampled_from(["False", "True", "None", "1", "False, 'fortran_order': True"]),
    st.one_of(
        st.integers(-2, 1 << 70).map("({},)".format),
        st.sampled_from(["(2,)", "()", "(1, 2)", "2", "[2]", "(2.0,)", "(True,)", "(2", "(" * 200, "('2',)"]),
    ),
    st.binary(max_size=16),
)
LISTS = st.lists(st.integers(0, 2), max_size=4)


def _saved(values: list[int], dtype: str) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(values, dtype), allow_pickle=False)
    return stream.getvalue()


ARRAYS = st.builds(_saved, LISTS, st.sampled_from(["<i4", "|u1", "|b1", "<f4", "<f8", ">u2"]))
MASKED = st.builds(framed, st.integers(0, 1), ARRAYS | NPYS, ARRAYS | NPYS)

MADE_UP: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
    **{name: lambda name=name: trees(name) for name in TREES},  # type: ignore[misc]
    "view": lambda: VIEWS,
    "snapshot": lambda: PLACES,
    "tar": lambda: TARS,
    "npy": lambda: NPYS,
    "masked": lambda: MASKED,
}


def test_every_decoder_is_given_something_made_up() -> None:
    assert MADE_UP.keys() == DECODERS.keys()


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_made_up_is_refused_in_words_or_read_soundly(name: str) -> None:
    decoder, seen = DECODERS[name], 0

    @many
    @given(MADE_UP[name]())
    def decode(data: bytes) -> None:
        nonlocal seen
        seen += 1
        decoder.accepts(data)

    decode()
    assert seen >= EXAMPLES
