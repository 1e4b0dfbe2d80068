"""Extremes of every field that a reader can send, in every phase: no turn of the server's loop is long, and no other
reader is served otherwise.

What the schema refuses never reaches a session; the rest is given to one that is in the midst of its work.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from packhorse.errors import ProtocolError
from packhorse.wire.hello import Hello
from packhorse.wire.messages import Ack, Frames, Message, Snapshot, decode, encode
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.effects import Effect
from packhorse_service.protocol.stream_session import StreamSession
from tests.client.messages import EXTRA
from tests.fuzz.mutation import leaves, replaced
from tests.protocol.simulated_cluster import Process
from tests.protocol.test_illegal_messages import server_in

LONGEST_TURN_S = 1.0  # of processor time
MOST_EFFECTS = 1000
EDGES = [0, 1, 2, 3, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
EXTREMES: list[Any] = [
    *(EDGES + [-edge for edge in EDGES if edge <= 1 << 63]),
    *(0.0, -0.0, -1.0, 5e-324, 1e-9, 1e9, 1e308, float("inf"), float("-inf"), float("nan")),
    *(b"", b"\0", bytes(8), bytes(16), b"\xff" * 16, bytes(64), bytes(1024)),
    *("", "\0", "train", "é" * 64, "x" * 64, "x" * 65, "x" * 4096),
    *(None, True, False, [], {}, [0], [[]], [0] * 500),
]


def messages_of(reader: Process, attempt: bytes) -> list[tuple[Message, Frames]]:
    """One of each kind that this reader can send, as it stands."""
    session = reader.session
    (hello,) = [effect.message for effect in copy.deepcopy(session).connected() if hasattr(effect, "message")]
    ack = Ack(stream="train", attempt=attempt, position=session.position, loop_idle_s=0.0)
    snapshot = Snapshot(stream="train", step=max(1, session.position.step))
    return [(hello, ()), (ack, ()), (session.bye(), ()), (snapshot, EXTRA["SNAPSHOT"])]


def variants(message: Message, extra: Frames) -> Iterator[Message]:
    """Every message that the schema takes and that has an extreme in the place of one value of this one."""
    header = msgpack.unpackb(encode(message))
    for way in leaves(header):
        for extreme in EXTREMES:
            frame = msgpack.packb(replaced(header, way, extreme))
            try:
                decoded, _ = decode([frame, *extra])
            except ProtocolError:
                continue
            if not isinstance(decoded, type(message)):
                continue
            yield decoded


def turn(session: StreamSession, peer: bytes, message: Message, extra: Frames, now: float) -> list[Effect]:
    """One turn of the server's loop, and the tick behind it: neither long, nor with more effects than readers need."""
    began = time.thread_time()
    effects = [*session.receive(peer, message, extra, now), *session.tick(now + 0.1)]
    assert time.thread_time() - began < LONGEST_TURN_S, message
    assert len(effects) < MOST_EFFECTS, message
    return effects


def served(session: StreamSession) -> list[object]:
    """What the readers of the attempt are served, and where."""
    of_readers = [(reader.at, reader.peer, reader.acked, reader.sent) for reader in session.attempt.readers]
    return [session.attempt.name, *of_readers]


@pytest.mark.parametrize("phase", Phase)
def test_no_field_of_a_reader_makes_a_turn_of_the_loop_long(phase: Phase) -> None:
    server, readers = server_in(phase)
    connection = readers[0].connection
    assert connection is not None
    taken = 0
    for message, extra in messages_of(readers[0], server.session.attempt.name or b"attempt!"):
        for variant in variants(message, extra):
            taken += 1
            turn(copy.deepcopy(server.session), connection.peer, variant, extra, 2000.0)
    assert taken > 200


@pytest.mark.parametrize("phase", Phase)
def test_no_field_of_a_stranger_changes_what_others_are_served(phase: Phase) -> None:
    server, readers = server_in(phase)
    before, taken = served(server.session), 0
    for message, extra in messages_of(readers[0], server.session.attempt.name or b"attempt!"):
        of_another = replace(message, client=b"another process!") if isinstance(message, Hello) else message
        for variant in variants(of_another, extra):
            session = copy.deepcopy(server.session)
            taken += 1
            turn(session, b"?", variant, extra, 2000.0)
            if phase in (Phase.RUNNING, Phase.ENDED, Phase.FAILED):
                assert served(session) == before, variant
    assert taken > 200


def test_an_extreme_that_is_taken_is_noticed() -> None:
    """The control: what is compared above does change where a message is the reader's own."""
    server, readers = server_in(Phase.RUNNING)
    connection = readers[0].connection
    assert connection is not None
    server.session.lost(connection.peer)
    before = served(server.session)
    (hello, extra), *_ = messages_of(readers[0], server.session.attempt.name or b"attempt!")
    turn(server.session, b"?", hello, extra, 2000.0)
    assert served(server.session) != before
