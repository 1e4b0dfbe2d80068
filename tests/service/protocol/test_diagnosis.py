"""WAIT and the status page are made from one diagnosis: whatever happens to a stream, they cannot differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from packhorse.contract.layout import Coordinates
from packhorse.wire.messages import Wait, WaitReason
from packhorse_service.monitoring.stalls import stall, why
from packhorse_service.protocol.diagnosis import Cause, Producing, ReaderState, diagnose
from packhorse_service.protocol.effects import Effect, Send
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.wait_messages import wait_messages
from tests.protocol.rare_schedules import RARE
from tests.protocol.simulated_cluster import Seen
from tests.service.monitoring.test_stalls import ONE, ZERO, running, says, turns

CAUSES = {
    WaitReason.READERS: {Cause.STARTUP},
    WaitReason.ANSWERS: {Cause.STARTUP},
    WaitReason.SNAPSHOT: {Cause.STARTUP},
    WaitReason.LOADING: {Cause.LOADING, Cause.PACKING},
    WaitReason.SLOW_READERS: {Cause.SLOW_PEER},
}


def compare(session: StreamSession, waits: dict[bytes, Wait], now: float) -> int:
    """Compare what readers were just told with what the page says of them; return how many waits were compared."""
    diagnosis = diagnose(session.view(), now)
    said = dict(wait_messages(diagnosis))
    assert waits == said
    at_peer = {reader.peer: at for at, reader in diagnosis.view.readers.items() if reader.peer}
    compared = 0
    for peer, wait in waits.items():
        found = diagnosis.readers.get(at_peer.get(peer, Coordinates(-1, -1, -1, -1)))
        if found is None or not found.state.waits or found.blocked is None:
            continue  # a process that is in no attempt, or a loop that asks for nothing
        assert found.cause in CAUSES[wait.reason]
        assert max(found.since_s, 0.0) == wait.waited_s
        sentence = why(diagnosis, at_peer[peer])
        assert all(rank.partition(":")[0] in sentence for rank in wait.ranks if wait.reason is not WaitReason.SNAPSHOT)
        compared += 1
    return compared


@pytest.mark.parametrize("schedule", RARE, ids=lambda schedule: schedule.__name__)
def test_what_readers_are_told_is_what_the_page_says(
    schedule: Callable[[Seen], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every tick of the schedules that reach every row of the table."""
    tick = StreamSession.tick

    def compared_tick(session: StreamSession, now: float) -> list[Effect]:
        effects = tick(session, now)
        sends = [effect for effect in effects if isinstance(effect, Send)]
        waits = {send.peer: send.message for send in sends if isinstance(send.message, Wait)}
        if waits:
            compare(session, waits, now)
        return effects

    monkeypatch.setattr(StreamSession, "tick", compared_tick)
    schedule(Seen())


def test_a_reader_that_waits_for_a_slow_one_is_told_whom_and_so_is_the_page() -> None:
    network = running()
    turns(network, ZERO)
    network.now += 8.0
    says(network, ZERO, 0.0)
    effects = network.server.session.tick(network.now)
    waits = {effect.peer: effect.message for effect in effects if isinstance(effect, Send)}
    only_waits = {peer: wait for peer, wait in waits.items() if isinstance(wait, Wait)}
    assert only_waits == waits
    assert compare(network.server.session, only_waits, network.now) == 1


def test_who_has_left_too_early_is_named_to_those_that_wait_and_on_the_page() -> None:
    network = running()
    turns(network, ZERO)
    session = network.server.session
    session.receive(network.clients[ONE].peer, network.clients[ONE].session.bye(), (), network.now)
    network.now += 8.0
    says(network, ZERO, 0.0)
    diagnosis = diagnose(session.view(), network.now)
    assert diagnosis.readers[ONE].state is ReaderState.LEFT
    ((_, wait),) = wait_messages(diagnosis)
    assert wait.ranks == ("rank 1 (dp1·cp0·tp0·pp0): has left",)
    told = stall(diagnosis)
    assert told is not None
    assert told.why == "rank 1 (dp1·cp0·tp0·pp0) has left before the end"


def test_a_stream_is_diagnosed_the_same_without_what_only_the_server_knows() -> None:
    """The producer tells loading from packing, and nothing else."""
    network = running()
    for producing in (None, Producing(busy=True), Producing(busy=True, block="a shard")):
        diagnosis = diagnose(network.server.session.view(), network.now, producing)
        assert {found.state for found in diagnosis.readers.values()} == {ReaderState.RECEIVING}
        assert list(wait_messages(diagnosis)) == list(
            wait_messages(diagnose(network.server.session.view(), network.now))
        )
