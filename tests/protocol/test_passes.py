"""A stream that is read in passes: END ends a pass, has a position, and is replayed like any micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.protocol.client_session import State
from packhorse.wire.digest import digest_of
from packhorse.wire.messages import End, Hello, SnapshotRef, Wait, WaitReason, decode
from packhorse_service.protocol.attempt import Phase
from tests.protocol.passes import PASS_STEPS, PassNetwork, undisturbed_pass

FIRST, SECOND = Coordinates(0, 0, 0, 0), Coordinates(1, 0, 0, 0)
READERS = st.sampled_from([FIRST, SECOND])
PASS_TAKES = 2 * PASS_STEPS + 1  # micro-batches of a pass and its END


def taking(network: PassNetwork, at: Coordinates, count: int) -> None:
    """This loop asks, and the other does not, until it has got so much."""
    client = network.clients[at]
    for _ in range(200):
        if not count:
            return
        network.turn()
        count -= client.take()
    raise AssertionError(f"{at} waits for {count} more")


def meet(network: PassNetwork) -> None:
    for at in network.clients:
        network.connect(at)
    for _ in range(20):
        network.turn()
    assert network.server.session.phase is Phase.RUNNING


def assert_all_got(network: PassNetwork, passes: int) -> None:
    for at, client in network.clients.items():
        assert client.error is None
        assert client.got == [*(undisturbed_pass(at, number) for number in range(passes)), []]
        assert client.session.state is State.STREAMING


def more_passes(network: PassNetwork, passes: int) -> None:
    for client in network.clients.values():
        client.passes = passes
    network.settle()


def test_each_pass_holds_the_same_and_positions_only_grow() -> None:
    network = PassNetwork()
    more_passes(network, 4)
    assert_all_got(network, 4)
    for client in network.clients.values():
        positions = [position for one in client.got for position, _ in one]
        assert positions == sorted(set(positions))
        assert client.session.position == Position(4 * (PASS_STEPS + 1), 0)


def test_the_next_pass_is_ready_before_it_is_asked_for_and_no_more_than_the_window_of_it() -> None:
    network = PassNetwork()
    more_passes(network, 1)
    for client in network.clients.values():
        assert [mb.position for mb in client.waiting if mb is not None] == [(4, 0), (4, 1)]
    assert len(network.server.session.buffer.steps) <= network.server.session.spec.steps_ahead + 1
    network.tick()
    assert not network.clients[FIRST].to_client, "nothing is owed to a loop that has not asked"


def both_taking(network: PassNetwork, count: int) -> None:
    """Every loop, one after the other, as often as this."""
    for _ in range(count):
        for at in network.clients:
            taking(network, at, 1)


def test_the_end_counts_as_one_in_the_window() -> None:
    """A window of two behind the last micro-batch of a pass: END, and the first of the next."""
    network = PassNetwork()
    meet(network)
    both_taking(network, PASS_TAKES - 1)
    for _ in range(20):
        network.turn()
    waiting = network.clients[FIRST].waiting
    assert [None if mb is None else mb.position for mb in waiting] == [None, (4, 0)]


def test_the_end_brings_the_snapshot_behind_it() -> None:
    network = PassNetwork()
    more_passes(network, 1)
    session = network.clients[FIRST].session
    behind = (PASS_STEPS + 1).to_bytes(8, "little")
    assert session.progress.snapshots[PASS_STEPS + 1] == behind
    assert session.saved().snapshot == behind
    assert session.saved().position == (PASS_STEPS + 1, 0)


# Lost and replayed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", range(PASS_TAKES + 3))
@pytest.mark.parametrize("noticed", [False, True])
def test_an_end_that_was_lost_with_its_connection_is_sent_again(before: int, noticed: bool) -> None:
    """The connection is cut with everything on it, at each place around the end."""
    network = PassNetwork()
    meet(network)
    both_taking(network, before)
    network.turn()
    network.cut(FIRST, noticed=noticed)
    network.settle()
    assert_all_got(network, 2)
    assert network.server.session.attempt.number == 1


@pytest.mark.parametrize("ahead", range(3))
@pytest.mark.parametrize("both", range(PASS_TAKES + 1))
def test_a_restarted_server_replays_from_where_the_slowest_reader_stands(both: int, ahead: int) -> None:
    network = PassNetwork()
    meet(network)
    both_taking(network, both)
    taking(network, FIRST, ahead)
    network.restart_server()
    network.settle()
    assert_all_got(network, 2)


def test_a_restarted_server_that_makes_other_rows_inside_a_pass_is_found_out() -> None:
    network = PassNetwork()
    meet(network)
    both_taking(network, 3)
    network.clients[FIRST].session.progress.last_digest = bytes(16)
    network.restart_server()
    network.settle()
    assert all("REPLAY_DIVERGED" in str(client.error) for client in network.clients.values())


def test_behind_the_end_of_a_pass_no_row_is_compared() -> None:
    network = PassNetwork()
    more_passes(network, 1)
    (hello,) = [e.message for e in network.clients[FIRST].session.connected() if hasattr(e, "message")]
    assert isinstance(hello, Hello)
    assert hello.last_digest == b""
    assert SnapshotRef(PASS_STEPS + 1, digest_of((PASS_STEPS + 1).to_bytes(8, "little"))) in hello.snapshots


def test_new_processes_resume_in_the_middle_of_a_pass_and_behind_its_end() -> None:
    for before in range(1, PASS_TAKES + 2):
        network = PassNetwork()
        meet(network)
        states = []
        both_taking(network, before)
        for at in list(network.clients):
            states.append(network.clients[at].session.saved())
            network.restart_client(at)
        network.restart_server()
        assert states[0] == states[1]
        for client in network.clients.values():
            client.session.resume(states[0])
            client.passes = 1
        network.settle()
        begun, inside = divmod(before, PASS_TAKES)
        for at, client in network.clients.items():
            assert client.got == [undisturbed_pass(at, begun)[inside:], []]


def test_one_new_process_in_an_evaluation_waits_and_is_named() -> None:
    network = PassNetwork()
    meet(network)
    both_taking(network, 3)
    attempt = network.server.session.attempt.name
    network.restart_client(SECOND)
    network.settle()
    assert network.server.session.attempt.name == attempt
    assert not network.clients[SECOND].waiting
    network.tick()
    frames = network.clients[SECOND].to_client[-1]
    wait, _ = decode(frames)
    assert isinstance(wait, Wait)
    assert wait.reason is WaitReason.READERS


def test_every_end_is_acknowledged_before_the_server_forgets_it() -> None:
    network = PassNetwork()
    meet(network)
    both_taking(network, PASS_TAKES - 3)
    taking(network, SECOND, 2)
    taking(network, FIRST, 3)
    network.turn()
    network.turn()
    buffer = network.server.session.buffer
    assert PASS_STEPS in buffer.ends
    network.cut(SECOND, noticed=True)
    network.connect(SECOND)
    sent: list[Position] = []
    for _ in range(10):
        network.server.produce(network)
        network.deliver_to_server(SECOND)
        sent += [m.position for m, _ in map(decode, network.clients[SECOND].to_client) if isinstance(m, End)]
        network.deliver_to_client(SECOND)
    assert Position(PASS_STEPS, 0) in sent
    network.settle()
    assert PASS_STEPS not in buffer.ends
    assert_all_got(network, 2)


# Any schedule ----------------------------------------------------------------------------------------


class Faults(RuleBasedStateMachine):
    """Whatever is cut, killed or delayed, every pass of every process is that of an undisturbed run."""

    PASSES = 3

    def __init__(self) -> None:
        super().__init__()
        self.network = PassNetwork()
        self._want()

    def _want(self) -> None:
        for client in self.network.clients.values():
            client.passes = self.PASSES

    @rule(at=READERS, count=st.integers(1, 6))
    def deliver(self, at: Coordinates, count: int) -> None:
        for _ in range(count):
            self.network.deliver_to_server(at)
            self.network.deliver_to_client(at)

    @rule(at=READERS)
    def deliver_one_way(self, at: Coordinates) -> None:
        self.network.deliver_to_server(at)

    @rule()
    def produce(self) -> None:
        self.network.server.produce(self.network)

    @rule(at=READERS)
    def take(self, at: Coordinates) -> None:
        self.network.clients[at].take()

    @rule(at=READERS, noticed=st.booleans())
    def cut(self, at: Coordinates, noticed: bool) -> None:
        self.network.cut(at, noticed=noticed)

    @rule(turns=st.integers(1, 8))
    def everybody_progresses(self, turns: int) -> None:
        for at in self.network.clients:
            self.network.connect(at)
        for _ in range(turns):
            self.network.turn(*self.network.clients)

    @rule()
    def server_dies(self) -> None:
        self.network.restart_server()

    @rule()
    def all_processes_die(self) -> None:
        for at in list(self.network.clients):
            self.network.restart_client(at)
        self._want()

    @invariant()
    def what_was_taken_is_a_beginning_of_the_undisturbed_passes(self) -> None:
        for at, client in self.network.clients.items():
            assert client.error is None
            *whole, begun = client.got
            assert whole == [undisturbed_pass(at, number) for number in range(len(whole))]
            assert begun == undisturbed_pass(at, len(whole))[: len(begun)]

    @invariant()
    def the_server_holds_a_bounded_number_of_steps(self) -> None:
        session = self.network.server.session
        held = len(session.buffer.steps) + len(session.buffer.ends)
        assert held <= session.spec.steps_ahead + 1

    def teardown(self) -> None:
        """The faults stop: everybody gets all passes. A reader whose HELLO went astray connects again."""
        self.network.settle()
        for at, client in self.network.clients.items():
            if client.session.state is State.HELLO_SENT:
                self.network.cut(at, noticed=True)
        self.network.settle()
        assert_all_got(self.network, self.PASSES)


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=150, stateful_step_count=40)
