"""A message that the tables have no row for leaves the server as it is; the client's half is in ``test_session``."""

from __future__ import annotations

import copy
from typing import get_args

import pytest

from packhorse.contract.position import Position
from packhorse.wire.messages import ErrorCode, Hello, Message, ServerError
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.effects import Send
from packhorse_service.protocol.stream_session import TRANSITIONS
from tests.client.messages import EXAMPLES, EXTRA
from tests.protocol.rare_schedules import begin, make, meet, phase_of, run, state_at
from tests.protocol.simulated_cluster import STEPS, Process, Seen, Server, SimulatedCluster

FROM_READERS = ("Hello", "Snapshot", "Ack", "Bye")
ILLEGAL = [
    (phase, name) for phase in Phase for name, message in EXAMPLES.items() if (phase, type(message)) not in TRANSITIONS
]


def server_in(phase: Phase) -> tuple[Server, list[Process]]:
    """A server that came to ``phase`` by what happens."""
    seen = Seen()
    cluster, server, readers = begin(seen)
    ways = {
        Phase.FORMING: lambda: come(cluster, readers[:1]),
        Phase.RESTORING: lambda: come(cluster, readers, state_at_step=1),
        Phase.WELCOMING: lambda: come(cluster, readers),
        Phase.RUNNING: lambda: meet(cluster, server),
        Phase.ENDED: lambda: end(cluster, server),
        Phase.FAILED: lambda: fail(cluster, server),
    }
    ways[phase]()
    assert phase_of(server) is phase
    return server, readers


def come(cluster: SimulatedCluster, readers: list[Process], state_at_step: int = 0) -> None:
    """These readers say HELLO, from a checkpoint or from the start."""
    for reader in readers:
        if state_at_step:
            cluster.load(reader, state_at(Seen(), Position(state_at_step, 0)))
        cluster.connect(reader)
        cluster.deliver_up(reader.connection)


def end(cluster: SimulatedCluster, server: Server) -> None:
    run(cluster, Position(STEPS, 0))
    make(cluster, server)
    for reader in cluster.processes.values():
        cluster.pass_on(reader, take=True)


def fail(cluster: SimulatedCluster, server: Server) -> None:
    meet(cluster, server)
    cluster.server_effects(server, server.session.fail("the disk is full", cluster.now))


@pytest.mark.parametrize(("phase", "name"), ILLEGAL)
@pytest.mark.parametrize("known", [True, False], ids=["reader", "stranger"])
def test_a_message_without_a_row_leaves_the_server_as_it_is_and_asks_for_hello(
    phase: Phase, name: str, known: bool
) -> None:
    server, readers = server_in(phase)
    connection = readers[0].connection
    assert connection is not None
    peer = connection.peer if known else b"?"
    before = copy.deepcopy(server.session)
    before.heard_s = 1e4  # a clock: that something came is all that may change
    (effect,) = server.session.receive(peer, EXAMPLES[name], EXTRA.get(name, ()), before.heard_s)
    assert isinstance(effect, Send)
    assert effect.peer == peer
    assert isinstance(effect.message, ServerError)
    assert (effect.message.code, effect.message.fatal) == (ErrorCode.HELLO, False)
    assert name_of(EXAMPLES[name]) in effect.message.message
    assert comparable(server.session) == comparable(before)


def name_of(message: Message) -> str:
    return type(message).__name__


def comparable(value: object) -> object:
    """Everything that an object is made of, so that copies compare equal."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [comparable(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", {})]
    if callable(value) or not names:
        return value if not callable(value) else None
    return type(value), {name: comparable(getattr(value, name)) for name in names}


def test_what_only_a_server_says_has_no_row_in_any_phase() -> None:
    only_servers = {kind for kind in get_args(Message) if kind.__name__ not in FROM_READERS}
    assert {kind for _, kind in TRANSITIONS}.isdisjoint(only_servers)
    assert {(phase, type(EXAMPLES[name])) for phase, name in ILLEGAL} == {
        (phase, kind) for phase in Phase for kind in get_args(Message) if (phase, kind) not in TRANSITIONS
    }


@pytest.mark.parametrize("phase", Phase)
def test_a_copy_that_was_changed_does_not_compare_equal(phase: Phase) -> None:
    """The comparison above looks at everything."""
    server, _ = server_in(phase)
    changed = copy.deepcopy(server.session)
    changed.rendezvous.add(b"?", hello(), 1.0)
    assert comparable(changed) != comparable(server.session)
    for part, name in (("attempt", "number"), ("attempt", "phase_since_s"), ("keep_alive", "_waits_sent_s")):
        changed = copy.deepcopy(server.session)
        setattr(getattr(changed, part), name, 99)
        assert comparable(changed) != comparable(server.session)


def hello() -> Hello:
    """Of a process that is not known."""
    example = EXAMPLES["HELLO"]
    assert isinstance(example, Hello)
    return example
