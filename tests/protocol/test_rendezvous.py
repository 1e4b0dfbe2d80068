"""Readers that are hard to bring together: split over servers, ended, replaced, read in the wrong order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packhorse.contract.position import Position
from packhorse.errors import HandshakeRefused, ServerFailed
from packhorse.protocol.client_session import State
from packhorse.protocol.held_snapshots import HeldSnapshots
from packhorse.wire.messages import Ack, ErrorCode, ServerError, WaitReason, Welcome
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.effects import Restore
from packhorse_service.protocol.effects import Send as ServerSend
from tests.protocol.rare_schedules import ONE, PATIENCE_S, begin, make, meet, phase_of, run, state_at
from tests.protocol.simulated_cluster import REJOIN_AFTER_S, STEPS, Process, Seen, Server, SimulatedCluster


def rounds(cluster: SimulatedCluster, count: int = 30) -> None:
    for _ in range(count):
        cluster.round()


def assert_all_end(cluster: SimulatedCluster) -> None:
    rounds(cluster)
    for reader in cluster.processes.values():
        assert reader.error is None
        assert reader.session.state is State.ENDED, reader


def error_of(reader: Process) -> str:
    assert isinstance(reader.error, HandshakeRefused | ServerFailed), reader
    return str(reader.error)


def reconnect(cluster: SimulatedCluster, reader: Process, slot: int | None = None) -> None:
    cluster.disconnect(reader)
    cluster.connect(reader, slot)


# A server dies at the end ---------------------------------------------------------------------------


def test_who_has_ended_comes_back_so_that_the_others_can_end_at_a_new_server() -> None:
    cluster, server, (first, second) = begin(Seen())
    run(cluster, Position(STEPS, 0))
    make(cluster, server)
    cluster.pass_on(first, take=True)
    assert (first.session.state, second.session.state) == (State.ENDED, State.STREAMING)
    cluster.kill_server(0)
    cluster.start_server(0)
    assert_all_end(cluster)


def test_a_reader_that_left_behind_its_end_is_named_to_the_others() -> None:
    cluster, server, (first, second) = begin(Seen())
    run(cluster, Position(STEPS, 0))
    make(cluster, server)
    cluster.pass_on(first, take=True)
    cluster.say_bye(first)
    cluster.kill_server(0)
    cluster.start_server(0)
    rounds(cluster, 3)
    assert second.told is not None
    assert second.told.ranks == ("rank 0 (dp0·cp0·tp0·pp0)",)
    rounds(cluster, int(PATIENCE_S))
    assert "without rank 0 (dp0·cp0·tp0·pp0)" in error_of(second)


# Two servers ----------------------------------------------------------------------------------------


def test_readers_split_over_two_servers_meet_where_the_name_points() -> None:
    """Neither has ever had all of them: nobody is served, and each is told whom its server waits for."""
    cluster, _, (first, second) = begin(Seen())
    cluster.start_server(1)
    cluster.connect(first, 0)
    cluster.connect(second, 1)
    cluster.name = 1
    for _ in range(2):
        cluster.round()
    assert first.told is not None
    assert (first.told.reason, first.told.ranks) == (WaitReason.READERS, ("rank 1 (dp1·cp0·tp0·pp0)",))
    assert not first.ready
    assert_all_end(cluster)


def test_who_waits_at_a_server_that_serves_another_job_is_told_to_look_at_the_name_again() -> None:
    cluster, server, _ = begin(Seen())
    run(cluster, Position(1, 0))
    for number, at in enumerate(cluster.shape.readers):
        cluster.replace(at, zombie=number == 0)
    first, second = cluster.processes.values()
    cluster.start_server(1)
    cluster.connect(first, 0)
    cluster.connect(second, 1)
    cluster.name = 1
    cluster.zombies[0].stalled = False
    assert phase_of(server) is Phase.RUNNING
    assert_all_end(cluster)


def test_a_server_that_another_one_has_outrun_lets_all_meet_again() -> None:
    """The attempt ran here, went on elsewhere, and comes back to a server that never died."""
    cluster, old, readers = begin(Seen())
    run(cluster, Position(1, 0))
    cluster.start_server(1)
    cluster.name = 1
    for reader in readers:
        cluster.disconnect(reader)
    run(cluster, Position(3, 1))
    cluster.kill_server(1)
    cluster.name = 0
    assert phase_of(old) is Phase.RUNNING
    first, second = readers
    reconnect(cluster, second)
    cluster.pass_on(second)
    assert phase_of(old) is Phase.FORMING
    assert_all_end(cluster)
    assert old.session.attempt.number == 1, "the same attempt"
    assert first.session.attempt == old.session.attempt.name


def test_a_reader_that_answered_and_went_elsewhere_is_looked_for() -> None:
    """An attempt that has formed waits for an answer: those that gave theirs are told to look at the name again."""
    cluster, server, (first, second) = begin(Seen())
    cluster.start_server(1)
    for reader in (first, second):
        cluster.connect(reader, 0)
        cluster.deliver_up(reader.connection)
    assert phase_of(server) is Phase.WELCOMING
    reconnect(cluster, second, 1)
    cluster.name = 1
    assert_all_end(cluster)


# One rank, two processes ----------------------------------------------------------------------------


def test_who_claims_a_rank_later_ends_the_earlier_once_all_have_met() -> None:
    cluster, server, (first, _) = begin(Seen())
    cluster.connect(first)
    cluster.pass_on(first)
    cluster.replace(first.at, zombie=True)
    meet(cluster, server)
    cluster.pass_on(first)
    assert "another process has claimed rank 0" in error_of(first)
    assert_all_end(cluster)


def test_who_was_superseded_by_a_process_that_is_gone_takes_its_place_again() -> None:
    """A HELLO of a process that died is read behind that of the one that was started after it."""
    cluster, server, (dead, second) = begin(Seen())
    cluster.connect(dead)
    living = cluster.replace(dead.at)
    cluster.connect(living)
    cluster.deliver_up(living.connection)
    (late,) = cluster.abandoned
    assert cluster.deliver_up(late)
    assert [pending.peer for pending in server.session.rendezvous.replaced()]
    assert_all_end(cluster)
    assert second.session.attempt == living.session.attempt


def test_a_zombie_of_another_attempt_displaces_nobody() -> None:
    """It says HELLO last, to a server that has just started, and waits: it is told for whom, until it is refused."""
    cluster, _, (zombie, _) = begin(Seen())
    run(cluster, Position(1, 0))
    for number, at in enumerate(cluster.shape.readers):
        cluster.replace(at, zombie=number == 0)
    cluster.disconnect(zombie)
    run(cluster, Position(2, 0))
    cluster.kill_server(0)
    cluster.start_server(0)
    for reader in (*cluster.processes.values(), zombie):
        reconnect(cluster, reader)
        while cluster.deliver_up(reader.connection):
            pass
    assert_all_end(cluster)
    assert zombie.told is not None
    assert zombie.told.reason is WaitReason.READERS
    assert zombie.told.ranks
    rounds(cluster, int(PATIENCE_S))
    assert zombie.error is not None
    assert zombie.cursor == Position(1, 0)


def test_one_new_process_is_refused_with_the_reason_while_the_others_wait_for_it() -> None:
    cluster, _, (_, second) = begin(Seen())
    run(cluster, Position(1, 0))
    alone = cluster.replace(second.at)
    rounds(cluster, 5)
    told = cluster.processes[cluster.shape.readers[0]].told
    assert told is not None
    assert any("rank 1" in name and "a new process" in name for name in told.ranks)
    rounds(cluster, int(PATIENCE_S))
    assert "rank 1 (dp1·cp0·tp0·pp0)" in error_of(alone)
    assert "one rank cannot be replaced while the others train on" in error_of(alone)
    assert "resume all ranks from one checkpoint" in error_of(alone)


# Frames in the wrong order --------------------------------------------------------------------------


def test_an_older_hello_behind_the_newer_only_costs_a_few_seconds() -> None:
    """The server knows of a connection that is gone, and the reader greets on one that it does not know of."""
    cluster, server, (first, second) = begin(Seen())
    cluster.connect(first)
    reconnect(cluster, first)
    cluster.deliver_up(first.connection)
    (late,) = cluster.abandoned
    assert cluster.deliver_up(late)
    meet_without_connecting(cluster, server, second)
    assert first.session.state is State.HELLO_SENT
    assert_all_end(cluster)


def meet_without_connecting(cluster: SimulatedCluster, server: Server, reader: Process) -> None:
    cluster.connect(reader)
    cluster.pass_on(reader)
    assert phase_of(server) is Phase.WELCOMING, "with a connection that is gone"


def test_a_hello_that_is_said_twice_does_not_have_the_stream_made_twice() -> None:
    cluster, server, (first, second) = begin(Seen())
    state = state_at(Seen(), Position(2, 0))
    for reader in (first, second):
        cluster.load(reader, state)
        cluster.connect(reader)
        cluster.deliver_up(reader.connection)
    assert phase_of(server) is Phase.RESTORING
    attempt = server.session.attempt.name
    cluster.client_effects(second, second.session.connected())
    cluster.deliver_up(second.connection)
    assert server.session.attempt.name == attempt
    assert_all_end(cluster)


# What is made again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("until", [Position(0, 1), Position(1, 0), Position(2, 1)])
def test_rows_that_were_made_before_the_readers_came_are_compared_too(until: Position) -> None:
    """A new server warms up: its first steps may be those that the readers were in."""
    cluster, _, readers = begin(Seen())
    run(cluster, until)
    first = readers[0]
    if until.index:
        first.session.progress.last_digest = bytes(16)
    cluster.kill_server(0)
    server = cluster.start_server(0)
    make(cluster, server)
    for reader in readers:
        reconnect(cluster, reader)
    for _ in range(3):
        for reader in readers:
            cluster.pass_on(reader)
        make(cluster, server)
    if until.index:
        for reader in readers:
            assert "REPLAY_DIVERGED" in error_of(reader)
    else:
        assert server.session.failure is None, "the last row is before what is made again"


def test_readers_without_a_snapshot_are_refused_and_the_server_serves_the_next() -> None:
    cluster, server, readers = begin(Seen())
    state = replace(state_at(Seen(), Position(2, 0)), snapshot=b"")
    for reader in readers:
        cluster.load(reader, state)
        cluster.connect(reader)
        cluster.deliver_up(reader.connection)
    for reader in readers:
        cluster.pass_on(reader)
        assert "PLACE: snapshots of" in error_of(reader)
    assert server.session.failure is None
    for at in cluster.shape.readers:
        cluster.replace(at)
    assert_all_end(cluster)


def test_how_long_a_server_has_waited_is_counted_from_the_first_hello() -> None:
    cluster, _, (first, _) = begin(Seen())
    cluster.connect(first)
    cluster.pass_on(first)
    cluster.tick(3.0)
    cluster.pass_on(first)
    assert first.told is not None
    assert first.told.waited_s == 3.0


def test_looking_for_the_server_again_does_not_put_the_deadline_off() -> None:
    cluster, _, (first, _) = begin(Seen())
    for _ in range(int(PATIENCE_S / REJOIN_AFTER_S) + 1):
        cluster.connect(first)
        cluster.pass_on(first)
        cluster.tick(REJOIN_AFTER_S + 0.1)
        cluster.pass_on(first)
    assert "without rank 1 (dp1·cp0·tp0·pp0)" in error_of(first)


def test_who_meets_while_the_stream_is_on_its_way_to_their_start_is_welcomed_once() -> None:
    """The first job dies while the stream is restored to the beginning; the next begins there too."""
    cluster, server, _ = begin(Seen())
    run(cluster, Position(2, 1))
    for _ in range(2):
        for at in cluster.shape.readers:
            reader = cluster.replace(at)
            cluster.connect(reader)
            cluster.deliver_up(reader.connection)
        assert phase_of(server) is Phase.RESTORING
    assert [type(work) for work in server.work].count(Restore) == 1
    make(cluster, server)
    assert phase_of(server) is Phase.WELCOMING
    for reader in cluster.processes.values():
        assert reader.connection is not None
        assert [type(message) for message, _ in reader.connection.down].count(Welcome) == 1
    assert_all_end(cluster)


def test_what_is_restored_for_one_attempt_is_not_served_to_another_that_meets_meanwhile() -> None:
    """A process from a checkpoint is waited for; the one that went before comes back, at the same place."""
    cluster, server, (earlier,) = begin(Seen(), ONE)
    run(cluster, Position(3, 0))
    reader = cluster.replace(earlier.at, earlier.session.saved(), zombie=True)
    cluster.disconnect(earlier)
    cluster.connect(reader)
    cluster.pass_on(reader)
    cluster.tick(10)  # behind which the earlier one counts as gone
    cluster.pass_on(reader)
    assert [type(work) for work in server.work][-1] is Restore
    cluster.connect(earlier)
    cluster.deliver_up(earlier.connection)
    assert phase_of(server) is Phase.RESTORING
    assert server.session.attempt.snapshot_request is not None, "its own snapshot tells how it packs"


@pytest.mark.parametrize("answered", [0, 1], ids=["before any answer", "before the last answer"])
def test_a_left_over_that_comes_while_a_meeting_waits_for_its_answers_ends_nobody(answered: int) -> None:
    """It stands at the start and the job at a checkpoint: it can form nothing with the others, and waits."""
    cluster, server, readers = begin(Seen())
    state = state_at(Seen(), Position(2, 0))
    for reader in readers:
        cluster.load(reader, state)
        cluster.connect(reader)
        cluster.deliver_up(reader.connection)
    while phase_of(server) is Phase.RESTORING:
        for reader in readers:
            cluster.deliver_down(reader)
            cluster.deliver_up(reader.connection)
        make(cluster, server)
    for reader in readers[:answered]:
        cluster.pass_on(reader)
    left_over = cluster.new_process(readers[-1].at)
    cluster.connect(left_over)
    cluster.deliver_up(left_over.connection)
    assert phase_of(server) is Phase.WELCOMING
    for reader in readers:
        cluster.pass_on(reader)
    assert phase_of(server) is Phase.RUNNING
    cluster.pass_on(left_over)
    assert left_over.error is None
    assert_all_end(cluster)


@pytest.mark.parametrize("position", [(2, 2), (2, 99), (2, (1 << 62) - 1), ((1 << 62) - 1, 0), (3, 0)], ids=str)
def test_a_place_that_no_step_has_or_that_the_snapshot_is_not_of_is_refused_and_the_server_goes_on(
    position: tuple[int, int],
) -> None:
    """Of a state, as whoever resumes says it, and of a reader that runs, as its ACK says it."""
    cluster, server, readers = begin(Seen())
    state = replace(state_at(Seen(), Position(2, 0)), position=Position(*position))
    for reader in readers:
        cluster.load(reader, state)
        reader.session.progress.snapshots = HeldSnapshots({2: state.snapshot})
        cluster.connect(reader)
        cluster.deliver_up(reader.connection)
    for reader in readers:
        cluster.pass_on(reader)
        assert "PLACE: " in error_of(reader)
    for at in cluster.shape.readers:
        cluster.replace(at)
    meet(cluster, server)
    (reader, *_) = cluster.processes.values()
    assert reader.connection is not None
    ack = Ack(
        stream="train",
        attempt=reader.session.attempt,
        position=Position(0, position[1] or position[0]),
        loop_idle_s=0.0,
    )
    (effect,) = server.session.receive(reader.connection.peer, ack, (), cluster.now)
    assert isinstance(effect, ServerSend)
    assert isinstance(effect.message, ServerError)
    assert effect.message.code is ErrorCode.POSITION
    assert_all_end(cluster)
