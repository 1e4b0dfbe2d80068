"""The client's socket has one owner at a time, no request is slept over, and closing always ends."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from packhorse.transport.socket_ownership import (
    OWNER_OF,
    OWNERSHIP,
    Owner,
    OwnershipEvent,
    SocketOwnership,
    SocketState,
)


class Users(RuleBasedStateMachine):
    """A thread and a loop that use one socket as ``Connection`` has them, interrupted at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.ownership = SocketOwnership()
        self.working: set[Owner] = set()
        self.waits = False  # the thread, in the poller
        self.woken = False  # a byte is in the waker's socket
        self.requested = False  # and nobody has sent it yet
        self.broken = False  # the socket, in the middle of a message

    # Both --------------------------------------------------------------------------------------------

    def _acquire(self, owner: Owner) -> None:
        could = self.ownership.can_be_acquired
        assert self.ownership.acquire(owner) is could
        if could:
            assert self.ownership.dirty is self.broken, "who owns a broken socket hears of it"
            if self.ownership.dirty:
                self.ownership.renewed()
                self.broken = False
            self.working.add(owner)

    def _release(self, owner: Owner) -> None:
        self.ownership.release(owner)
        self.working.discard(owner)

    def _send_what_is_requested(self) -> None:
        assert self.ownership.take_request() is self.requested
        self.requested = False

    # The loop ----------------------------------------------------------------------------------------

    @precondition(lambda self: Owner.LOOP not in self.working)
    @rule()
    def loop_acquires(self) -> None:
        self._acquire(Owner.LOOP)

    @precondition(lambda self: Owner.LOOP in self.working)
    @rule()
    def loop_works(self) -> None:
        self._send_what_is_requested()
        self._release(Owner.LOOP)

    @precondition(lambda self: Owner.LOOP in self.working)
    @rule()
    def loop_is_interrupted(self) -> None:
        self.broken = True
        self.ownership.interrupted()
        self._release(Owner.LOOP)

    @rule()
    def loop_requests(self) -> None:
        self.requested = True
        self.woken |= self.ownership.request_flush()

    @rule()
    def loop_releases_what_it_does_not_own(self) -> None:
        """An interrupt came between the lock and the acquisition."""
        if Owner.LOOP not in self.working:
            self.ownership.release(Owner.LOOP)

    # The thread --------------------------------------------------------------------------------------

    @precondition(lambda self: Owner.THREAD not in self.working)
    @rule()
    def thread_acquires(self) -> None:
        self._acquire(Owner.THREAD)

    @precondition(lambda self: Owner.THREAD in self.working and not self.waits)
    @rule()
    def thread_polls(self) -> None:
        self.waits = self.ownership.begin_poll()
        assert self.waits is not self.requested, "it waits only where nothing is requested"

    @precondition(lambda self: Owner.THREAD in self.working)
    @rule()
    def thread_works(self) -> None:
        self.waits = self.woken = False
        self.ownership.end_poll()
        self._send_what_is_requested()
        self._release(Owner.THREAD)

    @precondition(lambda self: Owner.THREAD in self.working)
    @rule()
    def thread_fails(self) -> None:
        self.waits = False
        self._release(Owner.THREAD)

    # What always holds -------------------------------------------------------------------------------

    @invariant()
    def one_owner_at_most(self) -> None:
        assert len(self.working) <= 1
        assert OWNER_OF.get(self.ownership.state) == next(iter(self.working), None)

    @invariant()
    def no_request_is_slept_over(self) -> None:
        assert not (self.waits and self.requested and not self.woken)

    def teardown(self) -> None:
        """Whoever works the socket is done at some time; then it can be closed, and nobody gets it again."""
        for owner in tuple(self.working):
            assert not self.ownership.close(), "not below somebody's hands"
            self._release(owner)
        assert self.ownership.close()
        assert not any(self.ownership.acquire(owner) for owner in Owner)
        assert not self.ownership.can_be_acquired


TestUsers = Users.TestCase
TestUsers.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.parametrize(("state", "event"), [*product(SocketState, OwnershipEvent)])
def test_an_event_without_a_row_changes_nothing(state: SocketState, event: OwnershipEvent) -> None:
    ownership = SocketOwnership(state)
    follows = ownership._follow(event)
    assert follows is ((state, event) in OWNERSHIP)
    assert ownership.state is OWNERSHIP.get((state, event), state)


def test_every_state_can_be_reached_and_left_but_for_the_closed_one() -> None:
    assert {SocketState.FREE, *OWNERSHIP.values()} == set(SocketState)
    assert {state for state, _ in OWNERSHIP} == set(SocketState) - {SocketState.CLOSED}


def test_who_acquires_is_the_owner_until_it_releases() -> None:
    for owner in Owner:
        for state in (SocketState.FREE, SocketState.DIRTY):
            ownership = SocketOwnership(state)
            assert ownership.acquire(owner)
            assert OWNER_OF[ownership.state] is owner
            assert not any(ownership.acquire(other) for other in Owner)
            ownership.release(owner)
            assert ownership.state is state, "dirty until it is made anew"
