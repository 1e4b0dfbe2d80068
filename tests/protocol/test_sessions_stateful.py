"""Random schedules of faults, driven by Hypothesis through the real session code.

Whatever is cut, killed or delayed, each process is handed consecutive positions from its start, every
micro-batch is that of an undisturbed run, and once the faults stop everybody reaches the end.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from packhorse.layout import Coordinates
from packhorse.session import State
from tests.protocol.network import LAYOUT, Network, undisturbed

READERS = st.sampled_from([Coordinates(rank, 0, 0, 0) for rank in range(LAYOUT.data)])


class Faults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    @rule(at=READERS)
    def connect(self, at: Coordinates) -> None:
        self.network.connect(at)

    @rule(at=READERS, count=st.integers(1, 6))
    def deliver(self, at: Coordinates, count: int) -> None:
        for _ in range(count):
            self.network.deliver_to_server(at)
            self.network.deliver_to_client(at)

    @rule(at=READERS)
    def deliver_to_server(self, at: Coordinates) -> None:
        self.network.deliver_to_server(at)

    @rule(at=READERS)
    def deliver_to_client(self, at: Coordinates) -> None:
        self.network.deliver_to_client(at)

    @rule()
    def produce(self) -> None:
        self.network.server.produce(self.network)

    @rule(at=READERS)
    def take(self, at: Coordinates) -> None:
        self.network.clients[at].take()

    @rule(at=READERS, noticed=st.booleans())
    def cut(self, at: Coordinates, noticed: bool) -> None:
        self.network.cut(at, noticed=noticed)

    @rule(seconds=st.sampled_from([1.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.network.tick(seconds)

    @rule()
    def everybody_progresses(self) -> None:
        for at in self.network.clients:
            self.network.connect(at)
        for _ in range(4):
            self.network.server.produce(self.network)
            for at, client in self.network.clients.items():
                self.network.deliver_to_server(at)
                self.network.deliver_to_client(at)
                client.take()

    @rule()
    def server_dies(self) -> None:
        self.network.restart_server()

    @rule(at=READERS)
    def one_process_dies(self, at: Coordinates) -> None:
        self.network.restart_client(at)

    @rule()
    def all_processes_die(self) -> None:
        for at in list(self.network.clients):
            self.network.restart_client(at)

    @invariant()
    def what_was_taken_is_a_prefix_of_the_undisturbed_run(self) -> None:
        for at, client in self.network.clients.items():
            assert client.error is None
            got = [(mb.position, mb.row_digest) for mb in client.taken]
            assert got == undisturbed(at)[: len(got)]

    @invariant()
    def the_server_holds_a_bounded_number_of_steps(self) -> None:
        session = self.network.server.session
        assert len(session.supply.steps) <= session.offer.steps_ahead + 1

    def teardown(self) -> None:
        """The faults stop. If processes of different attempts are left, all restart, as a job would."""
        self.network.settle()
        if any(client.session.state is not State.ENDED for client in self.network.clients.values()):
            for at in list(self.network.clients):
                self.network.restart_client(at)
            self.network.settle()
        for at, client in self.network.clients.items():
            assert client.session.state is State.ENDED, client.session
            assert [(mb.position, mb.row_digest) for mb in client.taken] == undisturbed(at)


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
