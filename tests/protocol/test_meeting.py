"""Whoever meets, or cannot: data that fails before anybody needs it, starts that differ, a second single reader."""

from __future__ import annotations

import struct
from collections import deque

import pytest

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.position import Position
from packhorse.errors import HandshakeRefused, ServerFailed
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Effect as ClientEffect
from packhorse.protocol.effects import Fail, Send
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.wire.messages import decode, encode
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.effects import Effect
from packhorse_service.protocol.effects import Send as ServerSend
from packhorse_service.protocol.hello_handler import CONTEST_S, SILENT_INTERVALS
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, readers_of
from packhorse_service.protocol.wait_messages import SETTLED_S
from tests.protocol.network import CONTRACT, Network, undisturbed

# Data that fails before anybody needs it -----------------------------------------------------------------


def state_before(step: int) -> FeedState:
    return FeedState("train", Position(step, 0), bytes(16), struct.pack("<Q", step))


def load(network: Network, at: Coordinates, state: FeedState) -> None:
    client = network.clients[at]
    network.client_effects(client, client.session.resume(state))


def test_a_job_that_resumes_does_not_need_the_data_before_its_checkpoint() -> None:
    network = Network(broken=frozenset({0, 1}))
    network.server.produce(network)
    assert (network.server.session.phase, network.server.session.failure) == (Phase.FORMING, None)
    assert network.server.session.failing.held
    for at in network.clients:
        load(network, at, state_before(3))
    network.settle()
    assert not network.server.session.failing.held
    for at, client in network.clients.items():
        assert client.error is None
        taken = [(mb.position, mb.row_digest) for mb in client.taken]
        assert taken == [entry for entry in undisturbed(at) if entry[0].step >= 3]


@pytest.mark.parametrize("failed_first", [True, False], ids=["before they came", "after they came"])
def test_a_job_that_begins_where_the_data_fails_is_told_so_and_ends(failed_first: bool) -> None:
    network = Network(broken=frozenset({0}))
    if failed_first:
        network.server.produce(network)
    network.settle()
    for client in network.clients.values():
        assert isinstance(client.error, ServerFailed)
        assert "step 0 is broken" in str(client.error)
        assert client.taken == []
    assert network.server.session.phase is Phase.FAILED
    assert network.server.session.failing.told_all


def test_a_failure_waits_for_those_that_come_and_not_for_those_that_were_told() -> None:
    network = Network(broken=frozenset({0}))
    network.server.produce(network)
    first, second = network.clients
    assert network.server.session.failing.held
    network.connect(first)
    network.deliver_to_server(first)
    assert not network.server.session.failing.held  # it may need another step
    network.server_effects(network.server.session.fail("nothing can be read", network.now))
    assert not network.server.session.failing.told_all
    network.connect(second)
    network.settle()
    assert network.server.session.failing.told_all
    assert "nothing can be read" in str(network.clients[second].error)


# Starts that differ --------------------------------------------------------------------------------------


def came_apart(network: Network) -> None:
    for at, step in zip(network.clients, (3, 4), strict=True):
        load(network, at, state_before(step))
        network.connect(at)
        network.deliver_to_server(at)


def refusals(network: Network) -> list[str]:
    for at in network.clients:
        while network.deliver_to_client(at):
            pass
    return [str(client.error) for client in network.clients.values() if isinstance(client.error, HandshakeRefused)]


def test_ranks_that_are_all_there_and_disagree_are_told_within_seconds() -> None:
    network = Network()
    came_apart(network)
    network.tick(SETTLED_S - 1)
    assert refusals(network) == []
    network.tick(1)
    one, two = refusals(network)
    assert one == two
    assert "dp0·cp0·tp0·pp0 at (3, 0)" in one
    assert "resume all ranks from one checkpoint" in one


def test_a_process_that_comes_in_place_of_one_that_stands_elsewhere_is_waited_for() -> None:
    network = Network()
    came_apart(network)
    network.tick(SETTLED_S - 1)
    (_, second) = network.clients
    network.restart_client(second)
    load(network, second, state_before(3))
    network.settle()
    network.tick(SETTLED_S)
    assert refusals(network) == []
    for at, client in network.clients.items():
        assert [mb.position for mb in client.taken] == [place for place, _ in undisturbed(at) if place.step >= 3]


# A second process for the only reader --------------------------------------------------------------------

ALONE = ParallelLayout()


class Duel:
    """A session with one reader, and processes that each say that they are it."""

    def __init__(self) -> None:
        spec = StreamSpec(
            stream="train", layout=ALONE, contract=CONTRACT, fingerprint=bytes(16), readers=readers_of(ALONE)
        )
        self.session = StreamSession(spec)
        self.clients: dict[bytes, ClientSession] = {}
        self.errors: dict[bytes, str] = {}
        self.now = 0.0

    def arrive(self, name: bytes) -> bytes:
        at = Coordinates(0, 0, 0, 0)
        identity = Identity(
            stream="train", reader=at, client=name * 16, layout=ALONE, contract=BatchContract(), window=2
        )
        client = self.clients[name] = ClientSession(ReaderProgress(identity))
        self._pass_on(name, client.connected())
        return name

    def keeps_alive(self, name: bytes) -> None:
        self._pass_on(name, [Send(self.clients[name].ack(0.0))])

    def pass_time(self, seconds: float, alive: tuple[bytes, ...] = ()) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for name in alive:
                self.keeps_alive(name)
            self._carry_out(self.session.tick(self.now))

    def serves(self, name: bytes) -> bool:
        return self.clients[name].state is State.STREAMING and [r.peer for r in self.session.attempt.readers] == [name]

    def _pass_on(self, name: bytes, effects: list[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message, extra):
                    decoded, _ = decode([encode(message)])
                    self._carry_out(self.session.receive(name, decoded, extra, self.now))
                case Fail(error):
                    self.errors[name] = str(error)

    def _carry_out(self, effects: list[Effect]) -> None:
        waiting = deque(effect for effect in effects if isinstance(effect, ServerSend))
        for effect in waiting:
            if effect.peer in self.clients:
                message, _ = decode([encode(effect.message)])
                self._pass_on(effect.peer, self.clients[effect.peer].receive(message, effect.extra))


def test_a_second_process_does_not_end_the_job_of_the_only_reader() -> None:
    duel = Duel()
    trainer, tap = duel.arrive(b"t"), duel.arrive(b"p")
    assert duel.serves(trainer)
    duel.pass_time(CONTEST_S - 1, alive=(trainer,))
    assert duel.errors == {}
    duel.pass_time(2, alive=(trainer,))
    assert duel.errors.keys() == {tap}
    assert "rank 0 (dp0·cp0·tp0·pp0) is read by a process that lives" in duel.errors[tap]
    assert duel.serves(trainer)


def test_a_restarted_trainer_begins_as_soon_as_the_connection_of_its_predecessor_is_gone() -> None:
    duel = Duel()
    trainer, restarted = duel.arrive(b"t"), duel.arrive(b"r")
    duel.session.lost(trainer)
    duel.pass_time(1)
    assert duel.serves(restarted)


def test_a_restarted_trainer_begins_once_its_predecessor_is_silent() -> None:
    duel = Duel()
    duel.arrive(b"t")
    restarted = duel.arrive(b"r")
    duel.pass_time(SILENT_INTERVALS - 1)
    assert not duel.serves(restarted)
    duel.pass_time(2)
    assert duel.serves(restarted)


def test_a_process_that_comes_when_the_only_reader_has_left_begins_at_once() -> None:
    duel = Duel()
    trainer = duel.arrive(b"t")
    duel._pass_on(trainer, [Send(duel.clients[trainer].bye())])
    assert duel.serves(duel.arrive(b"n"))
