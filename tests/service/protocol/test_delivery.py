"""Who gets what next: in turn, up to the windows, and without a look at readers that can get nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.position import Position
from packhorse.wire.messages import Batch, End, Hello
from packhorse_service.protocol.attempt import Attempt
from packhorse_service.protocol.delivery import Sender
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.readers import Reader, ReaderTable
from packhorse_service.protocol.rendezvous import PendingHello
from packhorse_service.protocol.step_buffer import StepBuffer
from tests.client.messages import EXAMPLES
from tests.protocol.network import LAYOUT, Stream, stream_spec

READERS = sorted(stream_spec().readers)
MICRO_BATCHES = 2
WINDOW = 3


def new_sender() -> Sender:
    """Return the sender of an attempt in which everybody stands at the beginning, and nothing is made."""
    hello = EXAMPLES["HELLO"]
    assert isinstance(hello, Hello)
    origin = Position(0, 0)
    begins = replace(hello, layout=LAYOUT, start=origin, position=origin, window=WINDOW, snapshots=(), last_digest=b"")
    hellos = {at: PendingHello(bytes([number]), replace(begins, reader=at)) for number, at in enumerate(READERS)}
    attempt = Attempt(stream_spec(), name=bytes(8))
    attempt.readers = ReaderTable(hellos, attempt.spec)
    return Sender(attempt, StepBuffer(steps_ahead=4))


def make(sender: Sender, stream: Stream, steps: int = 1) -> None:
    for _ in range(steps):
        sender.buffer.add(stream.next_step())


def peers(sent: list[Effect]) -> list[bytes]:
    return [effect.peer for effect in sent if isinstance(effect, Send)]


def test_every_reader_has_its_next_micro_batch_before_any_has_the_one_behind_it() -> None:
    sender = new_sender()
    make(sender, Stream(), 2)
    sent = sender.send_to(sender.attempt.readers, 0.0)
    everybody = [reader.peer for reader in sender.attempt.readers]
    assert peers(sent) == everybody * WINDOW
    batches = [effect.message for effect in sent if isinstance(effect, Send)]
    positions = [batch.position for batch in batches if isinstance(batch, Batch)]
    assert len(positions) == len(sent)
    assert positions == sorted(positions)


def test_a_step_that_is_made_is_looked_at_by_those_that_wait_for_it_alone() -> None:
    sender, stream = new_sender(), Stream()
    make(sender, stream)
    sender.send_to(sender.attempt.readers, 0.0)
    full, *waiting = sender.attempt.readers
    full.window = MICRO_BATCHES
    sender.send_to(sender.attempt.readers.take_waiting(), 0.0)
    assert [reader.at for reader in sender.attempt.readers.take_waiting()] == [reader.at for reader in waiting]
    make(sender, stream)
    assert peers(sender.send_to(waiting, 0.0)) == [reader.peer for reader in waiting]
    assert not sender.attempt.readers.take_waiting(), "their windows are full"


def test_an_end_is_sent_in_its_place_and_waits_for_nothing() -> None:
    sender = new_sender()
    sender.buffer.add(None)
    sent = sender.send_to(sender.attempt.readers, 0.0)
    assert [type(effect.message) for effect in sent if isinstance(effect, Send)] == [End] * len(READERS)
    assert not any(reader.starved_since_s is not None for reader in sender.attempt.readers)


def test_nothing_is_sent_to_a_reader_without_a_connection() -> None:
    sender = new_sender()
    make(sender, Stream())
    gone = next(iter(sender.attempt.readers))
    sender.attempt.readers.disconnect(gone.peer)
    assert gone.last_peer not in peers(sender.send_to(sender.attempt.readers, 0.0))
    assert gone.sent == Position(0, 0)


@given(st.lists(st.tuples(st.integers(0, len(READERS) - 1), st.integers(0, 3)), max_size=60))
def test_the_floor_is_the_lowest_of_all_acknowledged_positions(moves: list[tuple[int, int]]) -> None:
    """And a move tells whether it moved the floor."""
    table = new_sender().attempt.readers
    readers: list[Reader] = list(table)
    for number, distance in moves:
        before = table.low_watermark
        step = readers[number].acked
        for _ in range(distance):
            step = step.after(MICRO_BATCHES)
        moved = table.acknowledge(readers[number], step)
        assert table.low_watermark == min(reader.acked for reader in readers)
        assert moved == (table.low_watermark != before)


@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_is_known_by_its_last_connection_alone(times: int) -> None:
    readers = new_sender().attempt.readers
    reader = next(iter(readers))
    seen = [reader.peer]
    for number in range(times):
        readers.disconnect(reader.peer)
        assert readers.by_peer(seen[-1]) is reader, "what it said there may still wait to be read"
        seen.append(b"again" + bytes([number]))
        readers.move(reader, seen[-1])
    assert [readers.by_peer(peer) is reader for peer in seen] == [False] * times + [True]
