"""Why a reader waits: the real session of a server, brought into each situation, is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packhorse.contract.layout import Coordinates
from packhorse.wire.messages import encode
from packhorse_service.monitoring.stalls import stall, why
from packhorse_service.monitoring.status import Stall
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.diagnosis import Cause, Diagnosis, Producing, ReaderState, diagnose
from packhorse_service.protocol.stream_session import StreamSession
from tests.protocol.network import Network

ZERO, ONE = Coordinates(0, 0, 0, 0), Coordinates(1, 0, 0, 0)
IDLE = Producing(busy=False)
STALLED_S = 8.0


class Finding(NamedTuple):
    """What the status page says of one reader."""

    state: ReaderState
    cause: Cause | None
    why: str


def diagnosis_of(network: Network, producing: Producing = IDLE, *, still_s: float = 0.0) -> Diagnosis:
    now = network.now
    return diagnose(network.server.session.view(), now, producing, dict.fromkeys(network.clients, now - still_s))


def look(network: Network, producing: Producing = IDLE, *, still_s: float = 0.0) -> dict[Coordinates, Finding]:
    diagnosis = diagnosis_of(network, producing, still_s=still_s)
    return {at: Finding(found.state, found.cause, why(diagnosis, at)) for at, found in diagnosis.readers.items()}


def stall_of(network: Network, producing: Producing = IDLE) -> Stall | None:
    return stall(diagnosis_of(network, producing))


def running() -> Network:
    """Both readers are served, and have taken nothing."""
    network = Network()
    network.now = 100.0
    for at in network.clients:
        network.connect(at)
    while network.server.session.phase is not Phase.RUNNING:
        network.turn()
    return network


def session_of(network: Network) -> StreamSession:
    return network.server.session


def says(network: Network, at: Coordinates, loop_idle_s: float) -> None:
    """Its keep-alive."""
    client = network.clients[at]
    client.to_server.append([encode(client.session.ack(loop_idle_s))])
    while network.deliver_to_server(at):
        pass


def turns(network: Network, *takers: Coordinates, count: int = 20) -> None:
    for _ in range(count):
        network.turn(*takers)


def test_who_has_not_come_is_named_and_the_others_wait_for_the_start() -> None:
    network = Network()
    network.connect(ZERO)
    network.turn()
    network.tick(STALLED_S)
    found = look(network)
    assert (found[ZERO].state, found[ONE].state) == (ReaderState.FORMING, ReaderState.ABSENT)
    told = stall_of(network)
    assert told is not None
    assert told.cause is Cause.STARTUP
    assert "rank 1" in told.why


def test_a_server_that_nobody_has_come_to_stalls_nobody() -> None:
    network = Network()
    network.tick(STALLED_S)
    assert {finding.state for finding in look(network).values()} == {ReaderState.ABSENT}
    assert stall_of(network) is None


def test_readers_that_take_what_they_get_are_no_stall() -> None:
    network = running()
    for _ in range(4):
        turns(network, ZERO, ONE, count=2)
        assert {finding.state for finding in look(network).values()} <= {ReaderState.RECEIVING, ReaderState.WAITING}
        assert stall_of(network) is None


def starved(network: Network) -> Iterator[Coordinates]:
    """Rank 0 takes all it can get; rank 1 nothing. Then time passes, in which rank 0's loop asks."""
    turns(network, ZERO)
    network.tick(STALLED_S)
    says(network, ZERO, 0.0)
    yield ONE


def test_a_reader_that_is_silent_is_why_the_others_wait() -> None:
    network = running()
    for silent in starved(network):
        found = look(network)
        assert (found[silent].state, found[silent].cause) == (ReaderState.LOST, Cause.NETWORK)
        assert (found[ZERO].state, found[ZERO].cause) == (ReaderState.WAITING, Cause.SLOW_PEER)
        assert "rank 1" in found[ZERO].why
        told = stall_of(network)
        assert told is not None
        assert (told.cause, told.waiting) == (Cause.NETWORK, 1)
        assert "rank 1" in told.why
        assert "nothing was heard from it for 8 s" in told.why


def test_a_reader_whose_connection_is_gone_is_told_from_one_that_is_silent() -> None:
    network = running()
    turns(network, ZERO)
    network.cut(ONE, noticed=True)
    network.tick(STALLED_S)
    says(network, ZERO, 0.0)
    told = stall_of(network)
    assert told is not None
    assert told.cause is Cause.NETWORK
    assert "its connection is gone" in told.why


def test_a_new_process_for_a_lost_rank_is_mentioned() -> None:
    network = running()
    turns(network, ZERO)
    network.restart_client(ONE)
    network.connect(ONE)
    network.turn()
    assert "a new process for it waits" in look(network)[ONE].why


def test_a_loop_that_does_not_ask_is_why_the_others_wait() -> None:
    network = running()
    for away in starved(network):
        says(network, away, STALLED_S)
        found = look(network)
        assert (found[away].state, found[away].cause) == (ReaderState.TRAINING, Cause.TRAINER)
        assert "last asked 8 s ago" in found[away].why
        told = stall_of(network)
        assert told is not None
        assert (told.cause, "rank 1" in told.why) == (Cause.TRAINER, True)


def test_a_reader_that_goes_on_slowly_is_a_slow_peer() -> None:
    network = running()
    for slow in starved(network):
        says(network, slow, 0.5)
        told = stall_of(network)
        assert told is not None
        assert (told.cause, "rank 1" in told.why) == (Cause.SLOW_PEER, True)


def test_a_step_that_is_not_made_waits_for_its_data_or_for_its_packing() -> None:
    network = running()
    moved = [True]
    while any(moved):  # the pipeline makes no step beyond those that it has made
        each = network.clients.items()
        moved = [network.deliver_to_server(at) or network.deliver_to_client(at) or client.take() for at, client in each]
    network.tick(STALLED_S)
    for at in network.clients:
        says(network, at, 0.0)
    reading = Producing(busy=True, block="shard 'part-000003.tar' of source 'docs', from byte 4,096")
    for producing, cause, words in ((reading, Cause.LOADING, "part-000003.tar"), (Producing(True), Cause.PACKING, "")):
        assert {finding.cause for finding in look(network, producing).values()} == {cause}
        told = stall_of(network, producing)
        assert told is not None
        assert (told.cause, told.waiting) == (cause, 2)
        assert words in told.why


def test_frames_that_do_not_arrive_are_the_networks_fault() -> None:
    network = running()
    network.server.produce(network)
    network.tick(1.0)
    for at in network.clients:
        says(network, at, 0.0)
    assert {finding.state for finding in look(network).values()} == {ReaderState.RECEIVING}
    found = look(network, still_s=STALLED_S)
    assert {(finding.state, finding.cause) for finding in found.values()} == {(ReaderState.WAITING, Cause.NETWORK)}


def test_a_reader_that_has_just_fallen_silent_is_not_blamed_on_what_was_sent_to_it() -> None:
    """It may have been asking when it was stopped: what it said then does not hold for long."""
    network = running()
    network.server.produce(network)
    for at in network.clients:
        says(network, at, 0.0)
    for seconds, state in ((1.9, ReaderState.RECEIVING), (2.0, ReaderState.LOST)):
        network.tick(seconds)
        assert {finding.state for finding in look(network, still_s=STALLED_S).values()} == {state}


def test_who_has_left_and_who_took_the_end_wait_for_nothing() -> None:
    network = Network()
    network.settle()
    network.tick(60.0)
    assert stall_of(network) is None
    assert ReaderState.WAITING not in {finding.state for finding in look(network).values()}
