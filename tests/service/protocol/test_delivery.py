"""Who gets what next: in turn, up to the windows, and without a look at readers that can get nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.contract.position import Position
from packhorse.wire.messages import Batch, End, Hello
from packhorse_service.protocol.delivery import Delivery
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.readers import Reader, Roster
from packhorse_service.protocol.rendezvous import Greeting
from packhorse_service.protocol.step_buffer import Supply
from tests.client.messages import EXAMPLES
from tests.protocol.network import LAYOUT, Stream, stream_spec

READERS = sorted(stream_spec().readers)
MICRO_BATCHES = 2
WINDOW = 3


def delivery() -> Delivery:
    """Of an attempt in which everybody stands at the beginning, and nothing is made."""
    hello = EXAMPLES["HELLO"]
    assert isinstance(hello, Hello)
    origin = Position(0, 0)
    begins = replace(hello, layout=LAYOUT, start=origin, position=origin, window=WINDOW, snapshots=(), last_digest=b"")
    greetings = {at: Greeting(bytes([number]), replace(begins, reader=at)) for number, at in enumerate(READERS)}
    return Delivery("train", bytes(8), MICRO_BATCHES, Roster(greetings, stream_spec()), Supply(steps_ahead=4))


def make(to: Delivery, stream: Stream, steps: int = 1) -> None:
    for _ in range(steps):
        to.supply.made(stream.next_step())


def peers(sent: list[Effect]) -> list[bytes]:
    return [effect.peer for effect in sent if isinstance(effect, Send)]


def test_every_reader_has_its_next_micro_batch_before_any_has_the_one_behind_it() -> None:
    to = delivery()
    make(to, Stream(), 2)
    sent = to.to(to.roster, 0.0)
    everybody = [reader.peer for reader in to.roster]
    assert peers(sent) == everybody * WINDOW
    batches = [effect.message for effect in sent if isinstance(effect, Send)]
    positions = [batch.position for batch in batches if isinstance(batch, Batch)]
    assert len(positions) == len(sent)
    assert positions == sorted(positions)


def test_a_step_that_is_made_is_looked_at_by_those_that_wait_for_it_alone() -> None:
    to, stream = delivery(), Stream()
    make(to, stream)
    to.to(to.roster, 0.0)
    full, *hungry = to.roster
    full.window = MICRO_BATCHES
    to.to(to.roster.take_hungry(), 0.0)
    assert [reader.at for reader in to.roster.take_hungry()] == [reader.at for reader in hungry]
    make(to, stream)
    assert peers(to.to(hungry, 0.0)) == [reader.peer for reader in hungry]
    assert not to.roster.take_hungry(), "their windows are full"


def test_an_end_is_sent_in_its_place_and_waits_for_nothing() -> None:
    to = delivery()
    to.supply.made(None)
    sent = to.to(to.roster, 0.0)
    assert [type(effect.message) for effect in sent if isinstance(effect, Send)] == [End] * len(READERS)
    assert not any(reader.owed_since_s is not None for reader in to.roster)


def test_nothing_is_sent_to_a_reader_without_a_connection() -> None:
    to = delivery()
    make(to, Stream())
    gone = next(iter(to.roster))
    to.roster.lose(gone.peer)
    assert gone.known_by not in peers(to.to(to.roster, 0.0))
    assert gone.sent == Position(0, 0)


@given(st.lists(st.tuples(st.integers(0, len(READERS) - 1), st.integers(0, 3)), max_size=60))
def test_the_floor_is_the_lowest_of_all_acknowledged_positions(moves: list[tuple[int, int]]) -> None:
    """And a move tells whether it moved the floor."""
    roster = delivery().roster
    readers: list[Reader] = list(roster)
    for number, distance in moves:
        before = roster.floor
        step = readers[number].acked
        for _ in range(distance):
            step = step.after(MICRO_BATCHES)
        moved = roster.acknowledge(readers[number], step)
        assert roster.floor == min(reader.acked for reader in readers)
        assert moved == (roster.floor != before)


@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_is_known_by_its_last_connection_alone(times: int) -> None:
    roster = delivery().roster
    reader = next(iter(roster))
    seen = [reader.peer]
    for number in range(times):
        roster.lose(reader.peer)
        assert roster.of(seen[-1]) is reader, "what it said there may still wait to be read"
        seen.append(b"again" + bytes([number]))
        roster.move(reader, seen[-1])
    assert [roster.of(peer) is reader for peer in seen] == [False] * times + [True]
