"""Whose turn it is to work the client's socket: the thread's or the loop's, never both; a table, without a lock.

A socket that an interrupted loop left in the middle of a message is dirty: whoever owns it next makes it anew.
Whoever calls holds the lock of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum, auto

__all__ = ["OWNERSHIP", "Owner", "OwnershipEvent", "SocketOwnership", "SocketState"]


class SocketState(StrEnum):
    """State of the socket: who works it, and whether it can go on."""

    FREE = auto()
    DIRTY = auto()  # nobody works it, and it cannot go on as it is
    LOOP = auto()
    LOOP_DIRTY = auto()
    THREAD = auto()  # which looks for requests before it polls
    THREAD_DIRTY = auto()
    POLLING = auto()  # the thread waits: a request has to wake it
    CLOSED = auto()


class OwnershipEvent(StrEnum):
    """Event that changes who works the socket, or whether it can go on."""

    LOOP_ACQUIRES = auto()
    THREAD_ACQUIRES = auto()
    POLL_BEGINS = auto()
    POLL_ENDS = auto()  # something happened, its time is over, or a request woke it
    INTERRUPTED = auto()  # the loop, while it worked the socket
    RENEWED = auto()
    RELEASED = auto()
    CLOSED = auto()


class Owner(StrEnum):
    """The two who may work the socket."""

    LOOP = auto()
    THREAD = auto()


S, E = SocketState, OwnershipEvent
OWNERSHIP: Mapping[tuple[SocketState, OwnershipEvent], SocketState] = {
    (S.FREE, E.LOOP_ACQUIRES): S.LOOP,
    (S.FREE, E.THREAD_ACQUIRES): S.THREAD,
    (S.FREE, E.CLOSED): S.CLOSED,
    (S.DIRTY, E.LOOP_ACQUIRES): S.LOOP_DIRTY,
    (S.DIRTY, E.THREAD_ACQUIRES): S.THREAD_DIRTY,
    (S.DIRTY, E.CLOSED): S.CLOSED,
    (S.LOOP, E.INTERRUPTED): S.LOOP_DIRTY,
    (S.LOOP, E.RELEASED): S.FREE,
    (S.LOOP_DIRTY, E.INTERRUPTED): S.LOOP_DIRTY,
    (S.LOOP_DIRTY, E.RENEWED): S.LOOP,
    (S.LOOP_DIRTY, E.RELEASED): S.DIRTY,
    (S.THREAD, E.POLL_BEGINS): S.POLLING,
    (S.THREAD, E.POLL_ENDS): S.THREAD,  # a request has ended it already
    (S.THREAD, E.RELEASED): S.FREE,
    (S.THREAD_DIRTY, E.RENEWED): S.THREAD,
    (S.THREAD_DIRTY, E.RELEASED): S.DIRTY,
    (S.POLLING, E.POLL_ENDS): S.THREAD,
    (S.POLLING, E.RELEASED): S.FREE,
}
ACQUIRES = {Owner.LOOP: E.LOOP_ACQUIRES, Owner.THREAD: E.THREAD_ACQUIRES}
OWNER_OF = {
    S.LOOP: Owner.LOOP,
    S.LOOP_DIRTY: Owner.LOOP,
    S.THREAD: Owner.THREAD,
    S.THREAD_DIRTY: Owner.THREAD,
    S.POLLING: Owner.THREAD,
}


@dataclass(slots=True)
class SocketOwnership:
    """State of the socket, and whether the loop has something to send (``flush_requested``)."""

    state: SocketState = SocketState.FREE
    flush_requested: bool = False
    worker: int = 0  # the thread that acquired it last

    @property
    def can_be_acquired(self) -> bool:
        """True where nobody works the socket, and it is not closed."""
        return (self.state, OwnershipEvent.LOOP_ACQUIRES) in OWNERSHIP

    def acquire(self, owner: Owner, worker: int = 0) -> bool:
        """Have ``owner`` work the socket in the thread ``worker``, unless somebody does; return whether it may."""
        if not self.can_be_acquired:
            return False
        self.worker = worker
        return self._follow(ACQUIRES[owner])

    def release(self, owner: Owner) -> None:
        """End the work of ``owner``, if it is at it."""
        if OWNER_OF.get(self.state) is owner:
            self._follow(OwnershipEvent.RELEASED)

    def abandon(self, worker: int) -> None:
        """End what this thread works still: it was interrupted behind its work, before it released the socket."""
        if self.worker == worker and OWNER_OF.get(self.state) is Owner.LOOP:
            self._follow(OwnershipEvent.INTERRUPTED)
            self._follow(OwnershipEvent.RELEASED)

    @property
    def dirty(self) -> bool:
        """True where the owner has to make the socket anew, and say ``renewed``, before it uses it."""
        return (self.state, OwnershipEvent.RENEWED) in OWNERSHIP

    def interrupted(self) -> None:
        """Note that the loop was interrupted while it worked the socket, maybe between two frames of a message."""
        self._follow(OwnershipEvent.INTERRUPTED)

    def renewed(self) -> None:
        """Note that the owner has made the socket anew."""
        self._follow(OwnershipEvent.RENEWED)

    def begin_poll(self) -> bool:
        """Let the thread wait for the socket, unless something is requested; return whether it may."""
        return not self.flush_requested and self._follow(OwnershipEvent.POLL_BEGINS)

    def end_poll(self) -> None:
        """Note that the thread waits no more."""
        self._follow(OwnershipEvent.POLL_ENDS)

    def request_flush(self) -> bool:
        """Note that there is something to send; return whether the thread waits, and has to be woken."""
        self.flush_requested = True
        return self.state is SocketState.POLLING and self._follow(OwnershipEvent.POLL_ENDS)

    def take_request(self) -> bool:
        """Return whether something was requested; the owner does it now."""
        requested, self.flush_requested = self.flush_requested, False
        return requested

    def close(self) -> bool:
        """Close the socket for good, unless somebody works it; return whether it is closed now."""
        return self._follow(OwnershipEvent.CLOSED)

    def _follow(self, event: OwnershipEvent) -> bool:
        """Go where the table leads; return whether it leads anywhere."""
        to = OWNERSHIP.get((self.state, event))
        if to is None:
            return False
        self.state = to
        return True
