"""Random schedules of every fault, for one or two servers and up to four readers.

Whatever is cut, killed, stalled, restarted or moved: each process is handed consecutive micro-batches from its
start, each that of an undisturbed run (``SimulatedCluster`` compares them when they are taken); nobody holds more
than is allowed; and once the faults stop everybody reaches the end, or is told why not and begins again from a
checkpoint.

``PACKHORSE_SCHEDULES=20000`` runs that many other schedules, drawn anew each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

from packhorse.contract.layout import ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import Position
from packhorse.errors import HandshakeRefused, ServerFailed
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import TRANSITIONS as CLIENT_TRANSITIONS
from packhorse.protocol.client_session import State
from packhorse.wire.limits import NO_ATTEMPT
from packhorse.wire.messages import Message
from packhorse_service.protocol.attempt import Phase
from packhorse_service.protocol.stream_session import TRANSITIONS as SERVER_TRANSITIONS
from tests.protocol.rare_schedules import RARE
from tests.protocol.simulated_cluster import STEPS_AHEAD, WINDOW, Process, Seen, Shape, SimulatedCluster

SCHEDULES = 2000
STEPS_OF_A_SCHEDULE = 30
PATIENCE_S = 40.0
CALM_ROUNDS = 60  # seconds, more than anybody's patience

SHAPES = {
    "one": Shape(ParallelLayout()),
    "dp2": Shape(ParallelLayout(data=2)),
    "cp2": Shape(ParallelLayout(context=2), Partition.ZIGZAG),
    "dp2 tp2": Shape(ParallelLayout(data=2, tensor=2)),
    "dp2 cp2": Shape(ParallelLayout(data=2, context=2), Partition.ZIGZAG),
}
WHO = st.integers(0, 3)  # which reader, modulo how many there are
SLOT = st.integers(0, 1)  # which server
FEW = st.integers(1, 6)  # frames
TURNS = st.sampled_from([0, 0, 1, 2, 4, 8])
EVERYBODY = 15
TAKERS = st.integers(0, EVERYBODY)  # a bit for each reader


def fault(**draws: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A rule after which everybody else goes on for a while, or for no time at all."""

    def decorate(happens: Callable[..., None]) -> Callable[..., None]:
        @wraps(happens)
        def acted(self: Schedule, turns: int, reconnect: bool, **drawn: Any) -> None:
            happens(self, **drawn)
            self.go_on(turns, reconnect=reconnect)

        make: Callable[..., Callable[[Callable[..., None]], Callable[..., None]]] = rule
        return make(turns=TURNS, reconnect=st.booleans(), **draws)(acted)

    return decorate


class Schedule(RuleBasedStateMachine):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.saved: FeedState | None = None  # the last checkpoint

    @initialize(
        shape=st.sampled_from(list(SHAPES)),
        kind=st.tuples(st.booleans(), st.booleans(), st.integers(0, 7)),
        turns=st.sampled_from([0, 4, 8, 12, 16]),
        takers=TAKERS,
    )
    def begin(self, shape: str, kind: tuple[bool, bool, int], turns: int, takers: int) -> None:
        """Most schedules begin with an attempt that runs, some readers ahead of others."""
        two, patient, wire = kind
        self.cluster = SimulatedCluster(
            SHAPES[shape], self.seen, wire=wire == 0, start_timeout_s=1e6 if patient else PATIENCE_S
        )
        if two:
            self.cluster.start_server(1)
        self.go_on(turns, takers, reconnect=True)

    def go_on(self, turns: int, takers: int = EVERYBODY, *, reconnect: bool = False) -> None:
        """Frames are read and steps are made in turn, and the loops of some readers take what is there."""
        cluster = self.cluster
        for _ in range(turns):
            for server in cluster.alive:
                cluster.produce(server)
            for number, process in enumerate(cluster.everybody):
                if reconnect:
                    cluster.connect(process)
                cluster.deliver_up(process.connection)
                cluster.deliver_down(process)
                if takers >> number & 1:
                    cluster.take(process)

    def who(self, number: int) -> Process:
        readers = self.cluster.shape.readers
        return self.cluster.processes[readers[number % len(readers)]]

    # What happens anyway -----------------------------------------------------------------------------

    @rule(turns=st.integers(1, 8), takers=TAKERS)
    def some_loops_go_on(self, turns: int, takers: int) -> None:
        self.go_on(turns, takers, reconnect=True)

    @rule(who=WHO, slot=SLOT)
    def connect(self, who: int, slot: int) -> None:
        self.cluster.connect(self.who(who), slot)

    @rule(who=WHO, up=FEW, down=FEW)
    def messages_arrive(self, who: int, up: int, down: int) -> None:
        process = self.who(who)
        for _ in range(up):
            self.cluster.deliver_up(process.connection)
        for _ in range(down):
            self.cluster.deliver_down(process)

    @rule(slot=SLOT, count=st.integers(1, 3))
    def steps_are_made(self, slot: int, count: int) -> None:
        for _ in range(count):
            self.cluster.produce(self.cluster.servers[slot])

    @rule(who=WHO, count=st.integers(1, 3))
    def a_loop_takes(self, who: int, count: int) -> None:
        for _ in range(count):
            self.cluster.take(self.who(who))

    @fault(seconds=st.sampled_from([1.0, 1.0, 7.0, 45.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.tick(seconds)

    @rule(who=WHO, back=st.integers(0, 2))
    def a_checkpoint_is_saved(self, who: int, back: int) -> None:
        """At any micro-batch, or at an earlier boundary that is still held."""
        session = self.who(who).session
        step = session.position.step - back
        boundary = back > 0 and step in session.progress.snapshots and session.state is not State.ENDED
        self.saved = session.saved(step if boundary else None)

    # Faults ------------------------------------------------------------------------------------------

    @fault(who=WHO, up=st.integers(0, 4), down=st.integers(0, 4), noticed=st.booleans())
    def a_connection_breaks(self, who: int, up: int, down: int, noticed: bool) -> None:
        connection = self.who(who).connection
        if connection is not None:
            connection.cut(up, down, noticed=noticed)

    @fault(who=WHO, up=st.integers(0, 4), slot=SLOT)
    def a_connection_is_replaced(self, who: int, up: int, slot: int) -> None:
        """What was received of the old one may be read behind the HELLO on the new one."""
        process = self.who(who)
        if process.connection is not None:
            process.connection.cut(up)
        self.cluster.connect(process, slot)

    @rule(count=FEW)
    def late_frames_are_read(self, count: int) -> None:
        for connection in self.cluster.abandoned:
            for _ in range(count):
                self.cluster.deliver_up(connection)

    @fault(slot=SLOT, again=st.booleans())
    def a_server_dies(self, slot: int, again: bool) -> None:
        self.cluster.kill_server(slot)
        if again:
            self.cluster.start_server(slot)

    @rule(slot=SLOT)
    def a_server_starts(self, slot: int) -> None:
        if self.cluster.servers[slot] is None:
            self.cluster.start_server(slot)

    @rule()
    def the_name_moves(self) -> None:
        self.cluster.name = 1 - self.cluster.name

    @fault(slot=SLOT)
    def a_server_stalls_or_goes_on(self, slot: int) -> None:
        server = self.cluster.servers[slot]
        if server is not None:
            server.stalled = not server.stalled

    @fault(who=WHO)
    def a_reader_stalls_or_goes_on(self, who: int) -> None:
        self.who(who).stalled = not self.who(who).stalled

    @fault(who=WHO, resumes=st.booleans(), zombie=st.booleans())
    def a_reader_is_replaced(self, who: int, resumes: bool, zombie: bool) -> None:
        self.cluster.replace(self.who(who).at, self.saved if resumes else None, zombie=zombie and self._room())

    def _room(self) -> bool:
        """Zombies enough for a whole job would meet, and take the server from the job that came after them."""
        return len(self.cluster.zombies) < min(2, len(self.cluster.shape.readers) - 1)

    @fault(resumes=st.booleans(), zombie=st.booleans())
    def the_job_is_restarted(self, resumes: bool, zombie: bool) -> None:
        state = self.saved if resumes else None
        for number, at in enumerate(self.cluster.shape.readers):
            self.cluster.replace(at, state, zombie=zombie and number == 0 and self._room())

    @rule(who=WHO)
    def a_state_is_loaded(self, who: int) -> None:
        """By a loop that has taken nothing, at whatever the thread has said meanwhile."""
        process = self.who(who)
        if self.saved is not None and process.session.progress.start == Position(0, 0):
            self.cluster.load(process, self.saved)

    @fault(who=WHO, finished=st.booleans())
    def a_reader_says_bye(self, who: int, finished: bool) -> None:
        process = self.who(who)
        if not process.absent and finished == (process.session.state is State.ENDED):
            self.cluster.say_bye(process)

    # What holds --------------------------------------------------------------------------------------

    @invariant()
    def nobody_holds_more_than_is_allowed(self) -> None:
        for process in self.cluster.everybody:
            assert len(process.ready) <= WINDOW
            assert len(process.session.progress.snapshots) <= STEPS_AHEAD + 2
        for server in self.cluster.alive:
            assert len(server.session.buffer.steps) <= STEPS_AHEAD + 1
            assert server.session.failure is None

    @invariant()
    def every_loop_can_save_its_state(self) -> None:
        for process in self.cluster.everybody:
            assert process.session.saved().position <= process.session.position

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self.seen.schedules += 1
            come_to_an_end(self.cluster, self.saved)


def come_to_an_end(cluster: SimulatedCluster, saved: FeedState | None) -> None:
    """The faults stop: everybody who can meet reaches the end; the others are told why not, and the job restarts."""
    stop_the_faults(cluster, zombies=not cluster.rivals)
    meets = not cluster.rivals and can_meet(cluster)
    run_undisturbed(cluster)
    if meets and cluster.start_timeout_s > CALM_ROUNDS:
        assert_all_ended(cluster)
    elif any(process.session.state is not State.ENDED for process in cluster.processes.values()):
        assert_told_why(cluster)
        for at in cluster.shape.readers:
            cluster.replace(at, saved)
        stop_the_faults(cluster, zombies=False)
        run_undisturbed(cluster)
        assert_all_ended(cluster)


def stop_the_faults(cluster: SimulatedCluster, *, zombies: bool) -> None:
    if cluster.servers[cluster.name] is None:
        cluster.start_server(cluster.name)
    for server in cluster.alive:
        server.stalled = False
        for connection in list(server.connections.values()):
            connection.noticed = True
    for process in cluster.everybody:
        process.stalled = False
    for zombie in cluster.zombies[int(zombies) :]:  # one goes on
        cluster.disconnect(zombie)
    del cluster.zombies[int(zombies) :]


def can_meet(cluster: SimulatedCluster) -> bool:
    """Whether one of the two rules holds for all processes, by what each knows itself."""
    processes = list(cluster.processes.values())
    sessions = [process.session for process in processes]
    if any(process.error or process.said_bye for process in processes):
        return False
    attempts = {session.attempt for session in sessions}
    if len(attempts) == 1 and sessions[0].attempt:
        return True
    progresses = [session.progress for session in sessions]
    begins = all(at.position == at.start for at in progresses) and not attempts & set(runs(cluster)) - {NO_ATTEMPT}
    return begins and len({(at.start, at.snapshots.get(at.start.step)) for at in progresses}) == 1


def runs(cluster: SimulatedCluster) -> Iterator[bytes]:
    """Attempts that run, or may with a zombie or the answers of the dead: whoever is in one takes something soon."""
    yield from (zombie.session.attempt for zombie in cluster.zombies)
    current = {process.session.progress.identity.client for process in cluster.processes.values()}
    for server in cluster.alive:
        died = {reader.client for reader in server.session.attempt.readers} - current
        if server.session.phase is Phase.RUNNING or (server.session.phase is Phase.WELCOMING and died):
            yield server.session.attempt.name


def run_undisturbed(cluster: SimulatedCluster) -> None:
    for _ in range(CALM_ROUNDS):
        if all(process.over for process in cluster.processes.values()):
            return
        cluster.round()


def assert_all_ended(cluster: SimulatedCluster) -> None:
    for process in cluster.processes.values():
        assert process.error is None
        assert process.session.state is State.ENDED, process


def assert_told_why(cluster: SimulatedCluster) -> None:
    """Who is not at the end was refused with a reason, or knows what it waits for and for whom."""
    for process in cluster.processes.values():
        if process.error is not None:
            assert isinstance(process.error, HandshakeRefused | ServerFailed), process.error
        elif not process.said_bye and process.session.state is not State.ENDED:
            assert process.told is not None, process
            assert process.told.ranks, process


@pytest.mark.timeout(600)
def test_no_schedule_makes_a_gap_a_duplicate_a_disagreement_or_a_deadlock_and_every_pair_is_reached() -> None:
    asked = os.environ.get("PACKHORSE_SCHEDULES")
    seen = Seen()

    class Seeing(Schedule):
        def __init__(self) -> None:
            super().__init__(seen)

    run_state_machine_as_test(
        Seeing,
        settings=settings(
            max_examples=int(asked or SCHEDULES),
            stateful_step_count=STEPS_OF_A_SCHEDULE,
            derandomize=asked is None,
            database=None,
            report_multiple_bugs=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen.schedules >= int(asked or SCHEDULES)
    for schedule in RARE:
        schedule(seen)
    assert seen.client == {(state, event) for state, event in CLIENT_TRANSITIONS if event in get_args(Message)}
    # A SNAPSHOT may be read behind what ended the wait for it; it has no row then, and asks for HELLO.
    assert seen.server >= {(phase, event) for phase, event in SERVER_TRANSITIONS if event in get_args(Message)}
