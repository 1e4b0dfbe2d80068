"""Strangers on loopback against a server that ranks read from: it stays up, stays small, and no rank notices.

Each attack goes on for a few seconds, as fast as a Python thread can and yet with a processor left for the rest.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

import msgpack
import pytest

from packhorse import BatchContract, Coordinates, ParallelLayout, Position
from packhorse.schema import pack
from packhorse.wire.messages import PROTOCOL_VERSION, Ack, Bye, Hello, Message, Snapshot, SnapshotRef, encode
from tests.client.messages import altered
from tests.hostile.conftest import RANKS, Besieged
from tests.hostile.zmtp import GREETING, READY, Stranger, close_all, dial, frame, message

AGAIN_S = 0.15  # less often than connections may be opened, so that the attack is heard
LAYOUT = ParallelLayout(data=RANKS)
CONTRACT = BatchContract()
HELLO = Hello(
    min_version=PROTOCOL_VERSION,
    max_version=PROTOCOL_VERSION,
    stream="train",
    reader=Coordinates(data=0, context=0, tensor=0, pipeline=0),
    client=bytes(16),
    layout=LAYOUT,
    contract=CONTRACT,
    contract_digest=CONTRACT.digest(LAYOUT),
    attempt=b"",
    start=Position(0, 0),
    position=Position(0, 0),
    snapshots=(),
    last_digest=b"",
    window=4,
    start_timeout_s=540.0,
)
ACK = Ack(stream="train", attempt=b"attempt!", position=Position(3, 0), loop_idle_s=0.0)


def until(end: float, pause_s: float = 0.0) -> Iterator[int]:
    """Rounds of an attack."""
    pause = threading.Event()
    for number in count():
        if time.monotonic() > end:
            return
        yield number
        pause.wait(pause_s)


class Pest:
    """Says what it likes, and connects again, a few times a second, where it is closed for it."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._stranger = Stranger(endpoint)
        self.closed = 0
        self.said = 0

    def send(self, said: Message, extra: Sequence[bytes] = ()) -> None:
        self.say(encode(said), *extra)

    def say(self, *frames: bytes) -> None:
        self.said += 1
        if not self._stranger.say(*frames):
            self.close()
            self.closed += 1
            threading.Event().wait(AGAIN_S)
            self._stranger = Stranger(self._endpoint)

    def close(self) -> None:
        self._stranger.close()


def hello(number: int) -> Hello:
    """Of one more process for rank 0; never for all ranks, who could begin a job of their own."""
    return replace(HELLO, client=struct.pack("<QQ", number, 1))


# Bytes -----------------------------------------------------------------------------------------------


def raw_bytes(endpoint: str, end: float) -> None:
    source, kinds = random.Random(1), (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"")
    for number in until(end, 0.002):
        stranger = dial(endpoint)
        stranger.sendall(kinds[number % len(kinds)] + source.randbytes(4096))
        stranger.close()


def greetings_that_stop(endpoint: str, end: float) -> None:
    opened = []
    whole = GREETING + READY
    for number in until(end, 0.002):
        opened.append(dial(endpoint))
        opened[-1].sendall(whole[: number % len(whole)])
    close_all(opened)


def huge_frames(endpoint: str, end: float) -> None:
    """The size comes before the body: whoever believes it allocates it."""
    sizes = [1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 33, 1 << 31, (80 << 10) + 1]
    opened = []
    for number in until(end, AGAIN_S):
        opened.append(Stranger(endpoint))
        flags = (0x02, 0x03, 0x06)[number % 3]
        opened[-1].write(bytes([flags]) + struct.pack(">Q", sizes[number % len(sizes)]) + bytes(64))
    close_all(opened)


def many_parts(endpoint: str, end: float) -> None:
    """No option of ZeroMQ limits their number: 30 MiB of memory for 1 MB of empty ones."""
    for number in until(end, 0.5):
        stranger = Stranger(endpoint)
        stranger.write(frame(b"", more=True) * (20_000 if number else 500_000) + frame(b""))
        stranger.close()


def parts_without_end(endpoint: str, end: float) -> None:
    """The message is never whole, and ZeroMQ keeps all of it."""
    parts, closed = frame(b"", more=True) * 5_000, 0
    stranger = Stranger(endpoint)
    for _ in until(end, 0.01):
        if not stranger.write(parts):
            closed += 1
            stranger.close()
            threading.Event().wait(AGAIN_S)
            stranger = Stranger(endpoint)
    assert closed or stranger.closed_within(5.0)
    stranger.close()


def silent_connections(endpoint: str, end: float) -> None:
    opened = list[socket.socket]()
    for _ in until(end, 0.02):
        opened += [dial(endpoint, blocking=False) for _ in range(min(75, 5_000 - len(opened)))]
    opened += [dial(endpoint, blocking=False) for _ in range(5_000 - len(opened))]
    close_all(opened)


def silent_handshakes(endpoint: str, end: float) -> None:
    opened = []
    for _ in until(end, 0.002):
        opened.append(Stranger(endpoint))
    close_all(opened)


# Messages --------------------------------------------------------------------------------------------


def illegal_headers() -> list[bytes]:
    valid = encode(HELLO)
    return [
        b"",
        b"\x93",
        bytes(80 << 10),
        b"\x91" * 16_000 + b"\xc0",  # nested
        b"\xdd\xff\xff\xff\xff",  # an array of 2³² - 1
        b"\x92\xa5HELLO\x82" + b"\xa6stream\xa5train" * 2,  # a key twice
        msgpack.packb(["HELLO", {"stream": msgpack.Timestamp(1)}]),
        msgpack.packb(["HELLO", {"stream": msgpack.ExtType(7, b"x" * 4)}]),
        msgpack.packb(["HELLO", [None] * 15_000]),
        msgpack.packb(["EVAL", {}]),
        msgpack.packb(["ACK", {"stream": "train", "attempt": b"attempt!", "position": [-1, 0], "loop_idle_s": 0.0}]),
        msgpack.packb(
            ["ACK", {"stream": "train", "attempt": b"attempt!", "position": [1 << 63, 0], "loop_idle_s": 0.0}]
        ),
        valid[:-1],
        valid + b"\0",
        pack(("BATCH", {})),
    ]


def illegal_messages(endpoint: str, end: float) -> None:
    headers, pest = illegal_headers(), Pest(endpoint)
    for number in until(end, 0.0005):
        pest.say(headers[number % len(headers)], *[b"x"] * (number % 4))
    pest.close()
    assert pest.closed


def hellos_over_one_connection(endpoint: str, end: float) -> None:
    pest = Pest(endpoint)
    for number in until(end, 0.0002):
        pest.send(hello(number))
    pest.close()
    assert pest.closed


def hellos_over_many_connections(endpoint: str, end: float) -> None:
    opened = []
    for number in until(end, 0.002):
        opened.append(Stranger(endpoint))
        opened[-1].send(hello(number))
    close_all(opened)


def torrent(endpoint: str, end: float, said: Message) -> None:
    """The same message as fast as the connection takes it, and no answer is read."""
    many, closed = message(encode(said)) * 100, 0
    while time.monotonic() < end:
        stranger = Stranger(endpoint)
        while time.monotonic() < end and stranger.write(many):
            pass
        closed += 1
        stranger.close()
        threading.Event().wait(AGAIN_S)
    assert closed > 1


def torrent_of_hellos(endpoint: str, end: float) -> None:
    torrent(endpoint, end, HELLO)


def torrent_of_acknowledgements(endpoint: str, end: float) -> None:
    torrent(endpoint, end, ACK)


def hellos_that_are_refused(endpoint: str, end: float) -> None:
    """Each is another reader, of another layout."""
    pest = Pest(endpoint)
    for number in until(end, 0.0005):
        at, layout = Coordinates(data=number + 2, context=0, tensor=0, pipeline=0), ParallelLayout(data=number + 3)
        pest.send(replace(hello(number), reader=at, layout=layout, attempt=struct.pack("<Q", number)))
    pest.close()
    assert pest.closed


def foreign_acknowledgements(endpoint: str, end: float) -> None:
    """Of no attempt, of another, of what was never sent; by one who said no HELLO, and by one who did."""
    greeted, other = Pest(endpoint), Pest(endpoint)
    for number in until(end, 0.0005):
        ack = altered(ACK, attempt=os.urandom(8), position=Position(number << 20, 0))
        if number % 100 == 0:
            greeted.send(hello(number))
        greeted.send(ack)
        other.send(ack)
    greeted.close()
    other.close()
    assert other.closed


def snapshots_nobody_asked_for(endpoint: str, end: float) -> None:
    pest = Pest(endpoint)
    for number in until(end, 0.001):
        pest.send(Snapshot(stream="train", step=number), [os.urandom(64 << 10)])
    pest.close()
    assert pest.closed


def one_client_that_wants_to_rewind_or_stop(endpoint: str, end: float) -> None:
    """It claims the ranks' places in turn, with positions of its own, and says BYE for everybody."""
    at = [Coordinates(data=rank, context=0, tensor=0, pipeline=0) for rank in range(RANKS)]
    pest = Pest(endpoint)
    for number in until(end, 0.01):
        start = Position(0, 0) if number % 2 else Position(1 << 40, 1)
        claim = replace(
            hello(number),
            reader=at[number % RANKS],
            attempt=os.urandom(8) if number % 3 else b"",
            start=start,
            position=Position(start.step + number % 4, start.index),
            snapshots=(SnapshotRef(start.step, bytes(16)),),
            window=0 if number % 5 == 0 else 1 << 16,
            start_timeout_s=float(number % 3),
        )
        pest.send(claim)
        pest.send(Bye(stream="train"))
    pest.close()


def a_client_that_stops_reading(endpoint: str, end: float) -> None:
    """It is every reader of another stream, with the widest window, begins, and reads nothing any more."""
    opened = []
    for rank in range(RANKS):
        at = Coordinates(data=rank, context=0, tensor=0, pipeline=0)
        opened.append(Stranger(endpoint))
        opened[-1].send(replace(hello(rank), stream="validation", reader=at, window=1 << 16))
    for stranger in opened:
        attempt = stranger.hears(b"keep_alive_s").partition(b"\xa7attempt\xc4\x08")[2][:8]
        stranger.send(altered(ACK, stream="validation", attempt=attempt, position=Position(0, 0)))
    for _ in until(end, 0.001):
        for stranger in opened:
            stranger.send(altered(ACK, stream="validation"))
    close_all(opened)


# Those that spend what connections may be opened are last.
ATTACKS: list[Callable[[str, float], None]] = [
    huge_frames,
    parts_without_end,
    many_parts,
    torrent_of_hellos,
    torrent_of_acknowledgements,
    illegal_messages,
    hellos_over_one_connection,
    hellos_that_are_refused,
    foreign_acknowledgements,
    snapshots_nobody_asked_for,
    one_client_that_wants_to_rewind_or_stop,
    a_client_that_stops_reading,
    hellos_over_many_connections,
    raw_bytes,
    greetings_that_stop,
    silent_handshakes,
    silent_connections,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_ranks_notice_nothing_of(attack: Callable[[str, float], None], besieged: Besieged) -> None:
    besieged.withstands(attack)
