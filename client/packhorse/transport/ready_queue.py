"""What the Feed's thread and the loop share.

Whoever calls it holds the connection's lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from packhorse.codec.microbatch import MicroBatch
from packhorse.errors import PackhorseError
from packhorse.protocol.checkpoint_state import FeedState
from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Deliver, Effect

__all__ = ["QueueEntry", "ReadyQueue"]

# A micro-batch as it arrived, or rebuilt: by the thread, or by a loop that comes first; None is END.
QueueEntry = Deliver | MicroBatch | None


@dataclass(slots=True)
class ReadyQueue:
    """The thread fills ``entries``, the loop takes from it; the session keeps count."""

    session: ClientSession
    entries: deque[QueueEntry] = field(default_factory=deque)
    unacknowledged: int = 0  # what was taken since the last ACK
    error: PackhorseError | None = None
    pending_effects: list[Effect] = field(
        default_factory=list
    )  # of a loaded state: what is ready is of another start until then
    connected: bool = False
    last_failure: str = "nobody has answered there yet"

    def has_answer(self, ahead: int = 0) -> bool:
        """Whether ``peek`` so far ahead has an answer."""
        if self.error is not None:
            return True
        return not self.pending_effects and (len(self.entries) > ahead or self._end_within(ahead))

    def _end_within(self, ahead: int) -> bool:
        upcoming = islice(self.entries, ahead + 1)
        return self.session.state is State.ENDED or None in upcoming

    def peek(self, ahead: int) -> QueueEntry:
        """The next micro-batch or one behind it, which stays to be taken; ``None`` behind the end.

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

    def take(self, micro_batch: MicroBatch | None) -> None:
        """The next, rebuilt, is handed out; ``None``: the end is."""
        if self.pending_effects or not self.entries:
            return
        self.entries.popleft()
        self.unacknowledged += 1
        if micro_batch is None:
            self.session.end_handed_out()
        else:
            self.session.handed_out(micro_batch.position, micro_batch.row_digest)

    @property
    def ack_due(self) -> bool:
        """Whether the server should hear of what was taken.

        It waits for whole steps, and for room in the window: while half of that is left nothing waits.
        """
        return 2 * self.unacknowledged >= self.session.progress.identity.window or self.session.position.index == 0

    @property
    def first_unbuilt(self) -> tuple[int, Deliver] | None:
        """The first that nobody has rebuilt, and how far ahead it is."""
        found = ((ahead, entry) for ahead, entry in enumerate(self.entries) if isinstance(entry, Deliver))
        return next(found, None)

    def resume(self, saved: FeedState) -> None:
        """Begin at ``saved``; the thread still has to say so to the server."""
        self.pending_effects = self.session.resume(saved)

    def mark_sent(self, effects: list[Effect]) -> None:
        """The thread has carried out ``effects``, unless another state was loaded meanwhile."""
        if self.pending_effects is effects:
            self.pending_effects = []

    def forget(self) -> None:
        """Drop what was not handed out."""
        self.entries.clear()

    def fail(self, error: PackhorseError) -> None:
        """The first error is what the loop sees."""
        self.error = self.error or error

    def waiting_for(self) -> str:
        """What the loop waits for, as a key of ``FeedStats.waits``."""
        if not self.connected:
            return "the server"
        waiting = self.session.waiting
        return waiting.reason.value if waiting is not None else "the next micro-batch"

    def describe(self) -> str:
        """What this reader is waiting for, for a person."""
        waiting = self.session.waiting
        if not self.connected:
            return f"no connection ({self.last_failure}); is the server running, and is this its endpoint?"
        if waiting is None:
            return "connected, and the server has not said what it waits for"
        ranks = f": {', '.join(waiting.ranks)}" if waiting.ranks else ""
        return f"the server waits for {waiting.reason}{ranks} (for {waiting.waited_s:.0f} s)"
