"""Readers that are hard to bring together: split over servers, ended, replaced, read in the wrong order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.contract.position import Position
from packhorse.errors import HandshakeRefused, ServerFailed
from packhorse.protocol.client_session import State
from packhorse.wire.messages import WaitReason
from packhorse_service.protocol.readers import Phase
from tests.protocol.rare_schedules import PATIENCE_S, begin, make, meet, phase_of, run, state_at
from tests.protocol.world import REJOIN_AFTER_S, STEPS, Process, Seen, Server, World


def rounds(world: World, count: int = 30) -> None:
    for _ in range(count):
        world.round()


def assert_all_end(world: World) -> None:
    rounds(world)
    for reader in world.processes.values():
        assert reader.error is None
        assert reader.session.state is State.ENDED, reader


def error_of(reader: Process) -> str:
    assert isinstance(reader.error, HandshakeRefused | ServerFailed), reader
    return str(reader.error)


def reconnect(world: World, reader: Process, slot: int | None = None) -> None:
    world.disconnect(reader)
    world.connect(reader, slot)


# A server dies at the end ---------------------------------------------------------------------------


def test_who_has_ended_comes_back_so_that_the_others_can_end_at_a_new_server() -> None:
    world, server, (first, second) = begin(Seen())
    run(world, Position(STEPS, 0))
    make(world, server)
    world.pass_on(first, take=True)
    assert (first.session.state, second.session.state) == (State.ENDED, State.STREAMING)
    world.kill_server(0)
    world.start_server(0)
    assert_all_end(world)


def test_a_reader_that_left_behind_its_end_is_named_to_the_others() -> None:
    world, server, (first, second) = begin(Seen())
    run(world, Position(STEPS, 0))
    make(world, server)
    world.pass_on(first, take=True)
    world.say_bye(first)
    world.kill_server(0)
    world.start_server(0)
    rounds(world, 3)
    assert second.told is not None
    assert second.told.ranks == ("rank 0 (dp0·cp0·tp0·pp0)",)
    rounds(world, int(PATIENCE_S))
    assert "without rank 0 (dp0·cp0·tp0·pp0)" in error_of(second)


# Two servers ----------------------------------------------------------------------------------------


def test_readers_split_over_two_servers_meet_where_the_name_points() -> None:
    """Neither has ever had all of them: nobody is served, and each is told whom its server waits for."""
    world, _, (first, second) = begin(Seen())
    world.start_server(1)
    world.connect(first, 0)
    world.connect(second, 1)
    world.name = 1
    for _ in range(2):
        world.round()
    assert first.told is not None
    assert (first.told.reason, first.told.ranks) == (WaitReason.READERS, ("rank 1 (dp1·cp0·tp0·pp0)",))
    assert not first.ready
    assert_all_end(world)


def test_who_waits_at_a_server_that_serves_another_job_is_told_to_look_at_the_name_again() -> None:
    world, server, _ = begin(Seen())
    run(world, Position(1, 0))
    for number, at in enumerate(world.shape.readers):
        world.replace(at, zombie=number == 0)
    first, second = world.processes.values()
    world.start_server(1)
    world.connect(first, 0)
    world.connect(second, 1)
    world.name = 1
    world.zombies[0].stalled = False
    assert phase_of(server) is Phase.RUNNING
    assert_all_end(world)


def test_a_server_that_another_one_has_outrun_lets_all_meet_again() -> None:
    """The attempt ran here, went on elsewhere, and comes back to a server that never died."""
    world, old, readers = begin(Seen())
    run(world, Position(1, 0))
    world.start_server(1)
    world.name = 1
    for reader in readers:
        world.disconnect(reader)
    run(world, Position(3, 1))
    world.kill_server(1)
    world.name = 0
    assert phase_of(old) is Phase.RUNNING
    first, second = readers
    reconnect(world, second)
    world.pass_on(second)
    assert phase_of(old) is Phase.FORMING
    assert_all_end(world)
    assert old.session.attempt_number == 1, "the same attempt"
    assert first.session.attempt == old.session.attempt


def test_a_reader_that_answered_and_went_elsewhere_is_looked_for() -> None:
    """An attempt that has formed waits for an answer: those that gave theirs are told to look at the name again."""
    world, server, (first, second) = begin(Seen())
    world.start_server(1)
    for reader in (first, second):
        world.connect(reader, 0)
        world.deliver_up(reader.connection)
    assert phase_of(server) is Phase.WELCOMING
    reconnect(world, second, 1)
    world.name = 1
    assert_all_end(world)


# One rank, two processes ----------------------------------------------------------------------------


def test_who_claims_a_rank_later_ends_the_earlier_once_all_have_met() -> None:
    world, server, (first, _) = begin(Seen())
    world.connect(first)
    world.pass_on(first)
    world.replace(first.at, zombie=True)
    meet(world, server)
    world.pass_on(first)
    assert "another process has claimed rank 0" in error_of(first)
    assert_all_end(world)


def test_who_was_superseded_by_a_process_that_is_gone_takes_its_place_again() -> None:
    """A HELLO of a process that died is read behind that of the one that was started after it."""
    world, server, (dead, second) = begin(Seen())
    world.connect(dead)
    living = world.replace(dead.at)
    world.connect(living)
    world.deliver_up(living.connection)
    (late,) = world.abandoned
    assert world.deliver_up(late)
    assert [pending.peer for pending in server.session.rendezvous.replaced()]
    assert_all_end(world)
    assert second.session.attempt == living.session.attempt


def test_a_zombie_of_another_attempt_displaces_nobody() -> None:
    """It says HELLO last, to a server that has just started, and waits: it is told for whom, until it is refused."""
    world, _, (zombie, _) = begin(Seen())
    run(world, Position(1, 0))
    for number, at in enumerate(world.shape.readers):
        world.replace(at, zombie=number == 0)
    world.disconnect(zombie)
    run(world, Position(2, 0))
    world.kill_server(0)
    world.start_server(0)
    for reader in (*world.processes.values(), zombie):
        reconnect(world, reader)
        while world.deliver_up(reader.connection):
            pass
    assert_all_end(world)
    assert zombie.told is not None
    assert zombie.told.reason is WaitReason.READERS
    assert zombie.told.ranks
    rounds(world, int(PATIENCE_S))
    assert zombie.error is not None
    assert zombie.cursor == Position(1, 0)


def test_one_new_process_is_refused_with_the_reason_while_the_others_wait_for_it() -> None:
    world, _, (_, second) = begin(Seen())
    run(world, Position(1, 0))
    alone = world.replace(second.at)
    rounds(world, 5)
    told = world.processes[world.shape.readers[0]].told
    assert told is not None
    assert any("rank 1" in name and "a new process" in name for name in told.ranks)
    rounds(world, int(PATIENCE_S))
    assert "rank 1 (dp1·cp0·tp0·pp0)" in error_of(alone)
    assert "one rank cannot be replaced while the others train on" in error_of(alone)
    assert "resume all ranks from one checkpoint" in error_of(alone)


# Frames in the wrong order --------------------------------------------------------------------------


def test_an_older_hello_behind_the_newer_only_costs_a_few_seconds() -> None:
    """The server knows of a connection that is gone, and the reader greets on one that it does not know of."""
    world, server, (first, second) = begin(Seen())
    world.connect(first)
    reconnect(world, first)
    world.deliver_up(first.connection)
    (late,) = world.abandoned
    assert world.deliver_up(late)
    meet_without_connecting(world, server, second)
    assert first.session.state is State.HELLO_SENT
    assert_all_end(world)


def meet_without_connecting(world: World, server: Server, reader: Process) -> None:
    world.connect(reader)
    world.pass_on(reader)
    assert phase_of(server) is Phase.WELCOMING, "with a connection that is gone"


def test_a_hello_that_is_said_twice_does_not_have_the_stream_made_twice() -> None:
    world, server, (first, second) = begin(Seen())
    state = state_at(Seen(), Position(2, 0))
    for reader in (first, second):
        world.load(reader, state)
        world.connect(reader)
        world.deliver_up(reader.connection)
    assert phase_of(server) is Phase.RESTORING
    attempt = server.session.attempt
    world.client_effects(second, second.session.connected())
    world.deliver_up(second.connection)
    assert server.session.attempt == attempt
    assert_all_end(world)


# What is made again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("until", [Position(0, 1), Position(1, 0), Position(2, 1)])
def test_rows_that_were_made_before_the_readers_came_are_compared_too(until: Position) -> None:
    """A new server warms up: its first steps may be those that the readers were in."""
    world, _, readers = begin(Seen())
    run(world, until)
    first = readers[0]
    if until.index:
        first.session.last_digest = bytes(16)
    world.kill_server(0)
    server = world.start_server(0)
    make(world, server)
    for reader in readers:
        reconnect(world, reader)
    for _ in range(3):
        for reader in readers:
            world.pass_on(reader)
        make(world, server)
    if until.index:
        for reader in readers:
            assert "REPLAY_DIVERGED" in error_of(reader)
    else:
        assert server.session.failure is None, "the last row is before what is made again"


def test_readers_without_a_snapshot_are_refused_and_the_server_serves_the_next() -> None:
    world, server, readers = begin(Seen())
    state = replace(state_at(Seen(), Position(2, 0)), snapshot=b"")
    for reader in readers:
        world.load(reader, state)
        world.connect(reader)
        world.deliver_up(reader.connection)
    for reader in readers:
        world.pass_on(reader)
        assert "no reader holds a snapshot at or below (2, 0)" in error_of(reader)
    assert server.session.failure is None
    for at in world.shape.readers:
        world.replace(at)
    assert_all_end(world)


def test_how_long_a_server_has_waited_is_counted_from_the_first_hello() -> None:
    world, _, (first, _) = begin(Seen())
    world.connect(first)
    world.pass_on(first)
    world.tick(3.0)
    world.pass_on(first)
    assert first.told is not None
    assert first.told.waited_s == 3.0


def test_looking_for_the_server_again_does_not_put_the_deadline_off() -> None:
    world, _, (first, _) = begin(Seen())
    for _ in range(int(PATIENCE_S / REJOIN_AFTER_S) + 1):
        world.connect(first)
        world.pass_on(first)
        world.tick(REJOIN_AFTER_S + 0.1)
        world.pass_on(first)
    assert "without rank 1 (dp1·cp0·tp0·pp0)" in error_of(first)
