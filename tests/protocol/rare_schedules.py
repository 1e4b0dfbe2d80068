"""Schedules that reach, together, every (state, event) pair of both tables: random ones may miss some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.position import Position
from packhorse.protocol.client_session import UNANSWERED_LIMIT, State
from packhorse.protocol.reader_state import FeedState
from packhorse_service.protocol.readers import Phase
from tests.protocol.world import FINGERPRINT, REJOIN_AFTER_S, SEQ_LENGTH, STEPS, Process, Seen, Server, Shape, World

__all__ = ["RARE"]

ONE = Shape(ParallelLayout())
TWO = Shape(ParallelLayout(data=2))
PATIENCE_S = 40.0
OTHER_FINGERPRINT = b"\x11" * 16


def begin(seen: Seen, shape: Shape = TWO) -> tuple[World, Server, list[Process]]:
    world = World(shape, seen, start_timeout_s=PATIENCE_S)
    return world, world.alive[0], list(world.processes.values())


def make(world: World, server: Server) -> None:
    while world.produce(server):
        pass


def meet(world: World, server: Server) -> None:
    """An attempt runs; nothing is made or taken."""
    for process in world.processes.values():
        world.connect(process)
    for _ in range(3):
        for process in world.processes.values():
            world.pass_on(process)
        if server.session.phase is Phase.RESTORING:
            make(world, server)
    assert server.session.phase is Phase.RUNNING


def phase_of(server: Server) -> Phase:
    return server.session.phase


def run(world: World, until: Position) -> None:
    """Every loop takes what is before ``until``."""
    processes = list(world.processes.values())
    while any(process.cursor < until for process in processes):
        for server in world.alive:
            make(world, server)
        for process in processes:
            world.connect(process)
            world.pass_on(process)
            if process.cursor < until:
                world.take(process)


def state_at(seen: Seen, position: Position) -> FeedState:
    world, _, (first, _) = begin(seen)
    run(world, position)
    return first.session.saved()


def an_ordinary_run(seen: Seen) -> None:
    """A slow reader is waited for; one leaves too early, and says so in every phase."""
    world, server, (first, second) = begin(seen)
    world.connect(first)
    world.pass_on(first)
    world.tick()
    world.pass_on(first)
    assert first.session.waiting is not None
    meet(world, server)
    for _ in range(10):
        make(world, server)
        world.pass_on(first, take=True)
    world.tick(2.0)
    world.pass_on(first)
    assert first.session.waiting is not None
    run(world, Position(STEPS, 0))
    for process in (first, second):
        world.pass_on(process, take=True)
    world.pass_on(first)
    assert server.session.phase is Phase.ENDED
    new = world.replace(first.at)
    world.connect(new)
    world.pass_on(new)
    world.tick()
    world.say_bye(second)
    while any(world.deliver_up(connection) for connection in world.abandoned):
        pass


def readers_leave_early(seen: Seen) -> None:
    for phase in (Phase.FORMING, Phase.WELCOMING, Phase.RUNNING, Phase.RESTORING):
        world, server, (first, second) = begin(seen)
        state = state_at(seen, Position(1, 0)) if phase is Phase.RESTORING else None
        for process in (first, second):
            if state is not None:
                world.load(process, state)
            if process is first or phase is not Phase.FORMING:
                world.connect(process)
                world.deliver_up(process.connection)
        if phase is Phase.RUNNING:
            meet(world, server)
        assert server.session.phase is phase
        world.say_bye(first)
        while any(world.deliver_up(connection) for connection in world.abandoned):
            pass


def a_server_dies_between_two_ends(seen: Seen) -> None:
    """Who has ended comes again, is asked for its snapshot, and waits for the others until it is refused."""
    world, server, (first, second) = begin(seen)
    run(world, Position(STEPS, 0))
    make(world, server)
    world.pass_on(first, take=True)
    assert first.session.state is State.ENDED
    world.kill_server(0)
    server = world.start_server(0)
    world.connect(first)
    world.pass_on(first)
    world.tick(REJOIN_AFTER_S + 1)
    world.pass_on(first)
    world.connect(first)
    world.pass_on(first)
    world.tick(PATIENCE_S)
    world.pass_on(first)
    for process in (first, second):
        world.disconnect(process)
        world.connect(process)
        world.deliver_up(process.connection)
    assert server.session.phase is Phase.RESTORING
    world.tick()
    for _ in range(3):
        for process in (first, second):
            world.pass_on(process)
        make(world, server)
    world.pass_on(second, take=True)
    assert second.session.state is State.ENDED


def the_last_is_sent_twice(seen: Seen) -> None:
    """A stalled server reads two HELLOs of one reader, and serves it twice from the same position."""
    world, server, (reader,) = begin(seen, ONE)
    run(world, Position(STEPS - 1, 1))
    make(world, server)
    world.disconnect(reader)
    world.connect(reader)
    for _ in range(UNANSWERED_LIMIT):
        world.tick(0.1)
    while world.deliver_up(reader.connection):
        pass
    while reader.session.state is not State.ENDED:
        assert world.take(reader) or world.deliver_down(reader)
    world.pass_on(reader)


def an_older_hello_is_read_behind_the_newer(seen: Seen) -> None:
    """The server answers to a connection that is gone, until the reader acknowledges on the one it has."""
    world, _, (first, second) = begin(seen)
    run(world, Position(1, 1))
    for _ in range(2):
        world.disconnect(first)
        world.connect(first)
    world.deliver_up(first.connection)
    for connection in world.abandoned:
        world.deliver_up(connection)
    while first.session.state is not State.STREAMING:
        assert world.deliver_down(first)
    world.tick()
    world.tick()
    for _ in range(2):
        while world.deliver_up(first.connection):
            pass
        while world.deliver_down(first):
            pass
    run(world, Position(STEPS, 0))
    assert first.error is None
    assert second.error is None


def a_state_is_loaded_while_the_first_frames_arrive(seen: Seen) -> None:
    """What was on its way when the reader said HELLO again is ignored: micro-batches, or the end of an empty stream."""
    for made in (0, STEPS):
        state = state_at(seen, Position(1, 0))
        world, server, (first, _) = begin(seen)
        server.step = made
        meet(world, server)
        make(world, server)
        world.load(first, state)
        world.pass_on(first)


def a_state_from_another_stream(seen: Seen, position: Position, fingerprint: bytes) -> tuple[World, list[Process]]:
    """The first reader has failed of it, and is still connected."""
    state = replace(state_at(seen, position), fingerprint=fingerprint)
    world, server, (first, second) = begin(seen)
    world.load(first, state)
    world.load(second, replace(state, fingerprint=FINGERPRINT))
    for process in (first, second):
        world.connect(process)
        world.deliver_up(process.connection)
    while first.error is None:
        assert world.produce(server) or world.deliver_down(first) or world.deliver_up(first.connection)
    return world, [first, second]


def a_reader_fails_inside_a_step(seen: Seen) -> None:
    """It stays connected while the others try on: they reconnect, another process comes, time passes."""
    for position in (Position(0, 1), Position(1, 1)):
        world, (first, second) = a_state_from_another_stream(seen, position, OTHER_FINGERPRINT)
        world.disconnect(second)
        world.connect(second)
        world.deliver_up(second.connection)
        world.pass_on(first)
        world.tick()
        world.tick(REJOIN_AFTER_S + 1)
        world.pass_on(first)
    other = world.replace(second.at, second.session.saved())
    differing = replace(other.session.identity, contract=BatchContract(seq_length=SEQ_LENGTH))
    other.session = replace(other.session, identity=differing)
    world.connect(other)
    world.deliver_up(other.connection)
    world.pass_on(first)


def a_reader_is_refused_while_it_is_served(seen: Seen) -> None:
    """It has loaded a state alone, in an attempt that runs: what is made afterwards still goes to it."""
    for made in (0, STEPS):
        state = state_at(seen, Position(1, 0))
        world, server, (first, _) = begin(seen)
        server.step = made
        meet(world, server)
        world.load(first, state)
        world.deliver_up(first.connection)
        world.tick(PATIENCE_S)
        assert first.connection is not None
        while first.error is None:
            assert world.deliver_down(first)
        make(world, server)
        world.pass_on(first)


def a_zombie_is_welcomed_too_late(seen: Seen) -> None:
    """A reader returns to a new server; before it answers, another process begins in its place."""
    world, _, (zombie,) = begin(seen, ONE)
    run(world, Position(1, 1))
    world.kill_server(0)
    server = world.start_server(0)
    world.connect(zombie)
    while phase_of(server) is not Phase.WELCOMING:
        assert world.deliver_up(zombie.connection) or world.deliver_down(zombie) or world.produce(server)
    reader = world.replace(zombie.at, zombie=True)
    world.connect(reader)
    while phase_of(server) is not Phase.RUNNING:
        assert world.deliver_up(reader.connection) or world.deliver_down(reader) or world.produce(server)
    world.pass_on(zombie)
    world.tick()
    world.pass_on(zombie)
    world.tick(PATIENCE_S)
    world.pass_on(zombie)
    assert zombie.error is not None


def a_snapshot_is_asked_of_a_reader_that_was_welcomed(seen: Seen) -> None:
    """One of two that begin from a checkpoint connects anew before all have answered."""
    state = state_at(seen, Position(2, 0))
    world, server, (first, second) = begin(seen)
    for process in (first, second):
        world.load(process, state)
        world.connect(process)
    while first.session.state is not State.STREAMING:
        moved = [world.deliver_up(first.connection), world.deliver_up(second.connection), world.produce(server)]
        assert world.deliver_down(first) or any(moved)
    world.disconnect(second)
    world.connect(second)
    world.deliver_up(second.connection)
    world.pass_on(first)


RARE: list[Callable[[Seen], None]] = [
    an_ordinary_run,
    readers_leave_early,
    a_server_dies_between_two_ends,
    the_last_is_sent_twice,
    an_older_hello_is_read_behind_the_newer,
    a_state_is_loaded_while_the_first_frames_arrive,
    a_reader_fails_inside_a_step,
    a_reader_is_refused_while_it_is_served,
    a_zombie_is_welcomed_too_late,
    a_snapshot_is_asked_of_a_reader_that_was_welcomed,
]
