"""Schedules that reach, together, every (state, event) pair of both tables: random ones may miss some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.position import Position
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import UNANSWERED_LIMIT, State
from packhorse_service.protocol.attempt import Phase
from tests.protocol.simulated_cluster import (
    FINGERPRINT,
    REJOIN_AFTER_S,
    SEQ_LENGTH,
    STEPS,
    Process,
    Seen,
    Server,
    Shape,
    SimulatedCluster,
)

__all__ = ["RARE"]

ONE = Shape(ParallelLayout())
TWO = Shape(ParallelLayout(data=2))
PATIENCE_S = 40.0
OTHER_FINGERPRINT = b"\x11" * 16


def begin(seen: Seen, shape: Shape = TWO) -> tuple[SimulatedCluster, Server, list[Process]]:
    cluster = SimulatedCluster(shape, seen, start_timeout_s=PATIENCE_S)
    return cluster, cluster.alive[0], list(cluster.processes.values())


def make(cluster: SimulatedCluster, server: Server) -> None:
    while cluster.produce(server):
        pass


def meet(cluster: SimulatedCluster, server: Server) -> None:
    """An attempt runs; nothing is made or taken."""
    for process in cluster.processes.values():
        cluster.connect(process)
    for _ in range(3):
        for process in cluster.processes.values():
            cluster.pass_on(process)
        if server.session.phase is Phase.RESTORING:
            make(cluster, server)
    assert server.session.phase is Phase.RUNNING


def phase_of(server: Server) -> Phase:
    return server.session.phase


def run(cluster: SimulatedCluster, until: Position) -> None:
    """Every loop takes what is before ``until``."""
    processes = list(cluster.processes.values())
    while any(process.cursor < until for process in processes):
        for server in cluster.alive:
            make(cluster, server)
        for process in processes:
            cluster.connect(process)
            cluster.pass_on(process)
            if process.cursor < until:
                cluster.take(process)


def state_at(seen: Seen, position: Position) -> FeedState:
    cluster, _, (first, _) = begin(seen)
    run(cluster, position)
    return first.session.saved()


def an_ordinary_run(seen: Seen) -> None:
    """A slow reader is waited for; one leaves too early, and says so in every phase."""
    cluster, server, (first, second) = begin(seen)
    cluster.connect(first)
    cluster.pass_on(first)
    cluster.tick()
    cluster.pass_on(first)
    assert first.session.waiting is not None
    meet(cluster, server)
    for _ in range(10):
        make(cluster, server)
        cluster.pass_on(first, take=True)
    cluster.tick(2.0)
    cluster.pass_on(first)
    assert first.session.waiting is not None
    run(cluster, Position(STEPS, 0))
    for process in (first, second):
        cluster.pass_on(process, take=True)
    cluster.pass_on(first)
    assert server.session.phase is Phase.ENDED
    new = cluster.replace(first.at)
    cluster.connect(new)
    cluster.pass_on(new)
    cluster.tick()
    cluster.say_bye(second)
    while any(cluster.deliver_up(connection) for connection in cluster.abandoned):
        pass


def readers_leave_early(seen: Seen) -> None:
    for phase in (Phase.FORMING, Phase.WELCOMING, Phase.RUNNING, Phase.RESTORING):
        cluster, server, (first, second) = begin(seen)
        state = state_at(seen, Position(1, 0)) if phase is Phase.RESTORING else None
        for process in (first, second):
            if state is not None:
                cluster.load(process, state)
            if process is first or phase is not Phase.FORMING:
                cluster.connect(process)
                cluster.deliver_up(process.connection)
        if phase is Phase.RUNNING:
            meet(cluster, server)
        assert server.session.phase is phase
        cluster.say_bye(first)
        while any(cluster.deliver_up(connection) for connection in cluster.abandoned):
            pass


def a_server_dies_between_two_ends(seen: Seen) -> None:
    """Who has ended comes again, is asked for its snapshot, and waits for the others until it is refused."""
    cluster, server, (first, second) = begin(seen)
    run(cluster, Position(STEPS, 0))
    make(cluster, server)
    cluster.pass_on(first, take=True)
    assert first.session.state is State.ENDED
    cluster.kill_server(0)
    server = cluster.start_server(0)
    cluster.connect(first)
    cluster.pass_on(first)
    cluster.tick(REJOIN_AFTER_S + 1)
    cluster.pass_on(first)
    cluster.connect(first)
    cluster.pass_on(first)
    cluster.tick(PATIENCE_S)
    cluster.pass_on(first)
    for process in (first, second):
        cluster.disconnect(process)
        cluster.connect(process)
        cluster.deliver_up(process.connection)
    assert server.session.phase is Phase.RESTORING
    cluster.tick()
    for _ in range(3):
        for process in (first, second):
            cluster.pass_on(process)
        make(cluster, server)
    cluster.pass_on(second, take=True)
    assert second.session.state is State.ENDED


def the_last_is_sent_twice(seen: Seen) -> None:
    """A stalled server reads two HELLOs of one reader, and serves it twice from the same position."""
    cluster, server, (reader,) = begin(seen, ONE)
    run(cluster, Position(STEPS - 1, 1))
    make(cluster, server)
    cluster.disconnect(reader)
    cluster.connect(reader)
    for _ in range(UNANSWERED_LIMIT):
        cluster.tick(0.1)
    while cluster.deliver_up(reader.connection):
        pass
    while reader.session.state is not State.ENDED:
        assert cluster.take(reader) or cluster.deliver_down(reader)
    cluster.pass_on(reader)


def an_older_hello_is_read_behind_the_newer(seen: Seen) -> None:
    """The server answers to a connection that is gone, until the reader acknowledges on the one it has."""
    cluster, _, (first, second) = begin(seen)
    run(cluster, Position(1, 1))
    for _ in range(2):
        cluster.disconnect(first)
        cluster.connect(first)
    cluster.deliver_up(first.connection)
    for connection in cluster.abandoned:
        cluster.deliver_up(connection)
    while first.session.state is not State.STREAMING:
        assert cluster.deliver_down(first)
    cluster.tick()
    cluster.tick()
    for _ in range(2):
        while cluster.deliver_up(first.connection):
            pass
        while cluster.deliver_down(first):
            pass
    run(cluster, Position(STEPS, 0))
    assert first.error is None
    assert second.error is None


def a_state_is_loaded_while_the_first_frames_arrive(seen: Seen) -> None:
    """What was on its way when the reader said HELLO again is ignored: micro-batches, or the end of an empty stream."""
    for made in (0, STEPS):
        state = state_at(seen, Position(1, 0))
        cluster, server, (first, _) = begin(seen)
        server.step = made
        meet(cluster, server)
        make(cluster, server)
        cluster.load(first, state)
        cluster.pass_on(first)


def a_state_from_another_stream(
    seen: Seen, position: Position, fingerprint: bytes
) -> tuple[SimulatedCluster, list[Process]]:
    """The first reader has failed of it, and is still connected."""
    state = replace(state_at(seen, position), fingerprint=fingerprint)
    cluster, server, (first, second) = begin(seen)
    cluster.load(first, state)
    cluster.load(second, replace(state, fingerprint=FINGERPRINT))
    for process in (first, second):
        cluster.connect(process)
        cluster.deliver_up(process.connection)
    while first.error is None:
        assert cluster.produce(server) or cluster.deliver_down(first) or cluster.deliver_up(first.connection)
    return cluster, [first, second]


def a_reader_fails_inside_a_step(seen: Seen) -> None:
    """It stays connected while the others try on: they reconnect, another process comes, time passes."""
    for position in (Position(0, 1), Position(1, 1)):
        cluster, (first, second) = a_state_from_another_stream(seen, position, OTHER_FINGERPRINT)
        cluster.disconnect(second)
        cluster.connect(second)
        cluster.deliver_up(second.connection)
        cluster.pass_on(first)
        cluster.tick()
        cluster.tick(REJOIN_AFTER_S + 1)
        cluster.pass_on(first)
    other = cluster.replace(second.at, second.session.saved())
    differing = replace(other.session.progress.identity, contract=BatchContract(seq_length=SEQ_LENGTH))
    other.session.progress.identity = differing
    cluster.connect(other)
    cluster.deliver_up(other.connection)
    cluster.pass_on(first)


def a_reader_is_refused_while_it_is_served(seen: Seen) -> None:
    """It has loaded a state alone, in an attempt that runs: what is made afterwards still goes to it."""
    for made in (0, STEPS):
        state = state_at(seen, Position(1, 0))
        cluster, server, (first, _) = begin(seen)
        server.step = made
        meet(cluster, server)
        cluster.load(first, state)
        cluster.deliver_up(first.connection)
        cluster.tick(PATIENCE_S)
        assert first.connection is not None
        while first.error is None:
            assert cluster.deliver_down(first)
        make(cluster, server)
        cluster.pass_on(first)


def a_zombie_is_welcomed_too_late(seen: Seen) -> None:
    """A reader returns to a new server; before it answers, another process begins in its place."""
    cluster, _, (zombie,) = begin(seen, ONE)
    run(cluster, Position(1, 1))
    cluster.kill_server(0)
    server = cluster.start_server(0)
    cluster.connect(zombie)
    while phase_of(server) is not Phase.WELCOMING:
        assert cluster.deliver_up(zombie.connection) or cluster.deliver_down(zombie) or cluster.produce(server)
    reader = cluster.replace(zombie.at, zombie=True)
    cluster.connect(reader)
    while phase_of(server) is not Phase.RUNNING:
        assert cluster.deliver_up(reader.connection) or cluster.deliver_down(reader) or cluster.produce(server)
    cluster.pass_on(zombie)
    cluster.tick()
    cluster.pass_on(zombie)
    cluster.tick(PATIENCE_S)
    cluster.pass_on(zombie)
    assert zombie.error is not None


def a_snapshot_is_asked_of_a_reader_that_was_welcomed(seen: Seen) -> None:
    """One of two that begin from a checkpoint connects anew before all have answered."""
    state = state_at(seen, Position(2, 0))
    cluster, server, (first, second) = begin(seen)
    for process in (first, second):
        cluster.load(process, state)
        cluster.connect(process)
    while first.session.state is not State.STREAMING:
        moved = [cluster.deliver_up(first.connection), cluster.deliver_up(second.connection), cluster.produce(server)]
        assert cluster.deliver_down(first) or any(moved)
    cluster.disconnect(second)
    cluster.connect(second)
    cluster.deliver_up(second.connection)
    cluster.pass_on(first)


def a_stream_fails(seen: Seen) -> None:
    """Its data cannot be read while it is restored, or served; whoever says something is told, until it leaves."""
    for begins_at in (0, 1):
        cluster, server, (first, second) = begin(seen)
        if begins_at:
            state = state_at(seen, Position(begins_at, 0))
            for process in (first, second):
                cluster.load(process, state)
        for process in (first, second):
            cluster.connect(process)
            cluster.deliver_up(process.connection)
        if not begins_at:
            meet(cluster, server)
        while cluster.deliver_down(first):
            pass
        cluster.acknowledge(first)
        cluster.server_effects(server, server.session.fail("the disk is full", cluster.now))
        cluster.client_effects(second, second.session.connected())
        for process in (first, second):
            cluster.pass_on(process)
            assert "the disk is full" in str(process.error)
            cluster.say_bye(process)
        while any(cluster.deliver_up(connection) for connection in cluster.abandoned):
            pass
        assert server.session.failing.heard


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
    a_stream_fails,
]
