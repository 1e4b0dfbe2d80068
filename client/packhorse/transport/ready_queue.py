"""Micro-batches between their arrival and the loop, and when what the loop took is acknowledged.

No socket, clock, lock or thread is here: whoever shares a queue between threads holds a lock around each call. The
load test's simulated ranks use it as ``Feed`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from packhorse.contract.position import Position
from packhorse.errors import PackhorseError
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver, Effect, Fail, Finish, Forget
from packhorse.wire.messages import Ack

__all__ = ["ReadyQueue"]


class Rebuilt(Protocol):
    """A micro-batch, or what stands for one."""

    @property
    def position(self) -> Position:
        """Position (step, index) in the stream."""

    @property
    def row_digest(self) -> bytes:
        """Digest of the row that it is."""


RebuiltT = TypeVar("RebuiltT", bound=Rebuilt)


@dataclass(slots=True)
class ReadyQueue(Generic[RebuiltT]):
    """Queue that what arrives is put into, and that the loop takes from; the session keeps count.

    An entry is a micro-batch as it arrived (``Deliver``), one that is rebuilt, or END (``None``).
    """

    session: ClientSession
    entries: deque[Deliver | RebuiltT | None] = field(default_factory=deque)
    unacknowledged: int = 0  # entries that were taken since the last ACK
    error: PackhorseError | None = None
    pending_effects: list[Effect] = field(default_factory=list)  # of a loaded state: entries are of another start
    connected: bool = False
    last_failure: str = "nobody has answered there yet"

    # What arrives ------------------------------------------------------------------------------------

    def apply(self, effects: Iterable[Effect]) -> None:
        """Put into the queue, or drop, what the effects of a transition say; the socket's are left to others."""
        for effect in effects:
            match effect:
                case Deliver():
                    self.entries.append(effect)
                case Finish():
                    self.entries.append(None)
                case Forget():
                    self.entries.clear()
                case Fail(error):
                    self.fail(error)

    def fail(self, error: PackhorseError) -> None:
        """Raise ``error`` in the loop, behind what is ready; the first error counts."""
        self.error = self.error or error

    @property
    def first_unbuilt(self) -> tuple[int, Deliver] | None:
        """The first entry that nobody has rebuilt, behind how far ahead it is."""
        found = ((ahead, entry) for ahead, entry in enumerate(self.entries) if isinstance(entry, Deliver))
        return next(found, None)

    # The loop ----------------------------------------------------------------------------------------

    def has_answer(self, ahead: int = 0) -> bool:
        """Return whether ``peek`` so far ahead has an answer."""
        if self.error is not None:
            return True
        return not self.pending_effects and (len(self.entries) > ahead or self._end_within(ahead))

    def _end_within(self, ahead: int) -> bool:
        upcoming = islice(self.entries, ahead + 1)
        return self.session.state is State.ENDED or None in upcoming

    def peek(self, ahead: int) -> Deliver | RebuiltT | None:
        """Return the next entry or one behind it, which stays to be taken; ``None`` behind the end.

        Raises what went wrong, behind what is ready.
        """
        if not self.pending_effects:
            if ahead and self._end_within(ahead):
                return None
            if len(self.entries) > ahead:
                return self.entries[ahead]
        if self.error is not None:
            raise self.error
        return None

    def take(self, rebuilt: RebuiltT | None) -> None:
        """Hand out the next entry, rebuilt; ``None`` hands out the end."""
        if self.pending_effects or not self.entries:
            return
        if rebuilt is None:
            self.session.end_handed_out()
        else:
            self.session.handed_out(rebuilt.position, rebuilt.row_digest)
        self.entries.popleft()
        self.unacknowledged += 1

    # Acknowledgement ---------------------------------------------------------------------------------

    @property
    def ack_due(self) -> bool:
        """True where the server should hear of what was taken.

        It waits for whole steps, and for room in the window: while half of that is left nothing waits.
        """
        progress = self.session.progress
        return 2 * self.unacknowledged >= progress.identity.window or progress.position.index == 0

    def ack(self, loop_idle_s: float) -> Ack | None:
        """Return the ACK of all that was taken; ``None`` where no server would know what to do with it."""
        if not self.connected or self.session.state not in (State.STREAMING, State.ENDED):
            return None
        self.unacknowledged = 0
        return self.session.ack(loop_idle_s)

    # A checkpoint ------------------------------------------------------------------------------------

    def resume(self, saved: FeedState) -> None:
        """Begin at ``saved``; whoever owns the socket still has to tell the server (``pending_effects``)."""
        self.pending_effects = self.session.resume(saved)

    def mark_sent(self, effects: list[Effect]) -> None:
        """Note that ``effects`` are carried out, unless another state was loaded meanwhile."""
        if self.pending_effects is effects:
            self.pending_effects = []

    # For people --------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """Return what the loop waits for, as a key of ``FeedStats.waits``."""
        if not self.connected:
            return "the server"
        waiting = self.session.waiting
        return waiting.reason.value if waiting is not None else "the next micro-batch"

    def describe(self) -> str:
        """Return what this reader is waiting for, in a sentence for a person."""
        waiting = self.session.waiting
        if not self.connected:
            return f"no connection ({self.last_failure}); is the server running, and is this its endpoint?"
        if waiting is None:
            return "connected, and the server has not said what it waits for"
        ranks = f": {', '.join(waiting.ranks)}" if waiting.ranks else ""
        return f"the server waits for {waiting.reason}{ranks} (for {waiting.waited_s:.0f} s)"
