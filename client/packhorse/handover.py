"""What the Feed's thread and the loop share. Whoever calls holds the Feed's condition: no lock is here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from packhorse.errors import PackhorseError
from packhorse.microbatch import MicroBatch
from packhorse.session import ClientSession, Effect, State
from packhorse.state import FeedState

__all__ = ["Handover"]


@dataclass(slots=True)
class Handover:
    """The thread fills ``ready``, the loop takes from it; the session keeps count."""

    session: ClientSession
    ready: deque[MicroBatch | None] = field(default_factory=deque)  # None is END
    error: PackhorseError | None = None
    unsaid: list[Effect] = field(
        default_factory=list
    )  # of a loaded state: what is ready is of another start until then
    connected: bool = False
    last_failure: str = "nobody has answered there yet"

    def settled(self, ahead: int = 0) -> bool:
        """Whether ``take``, or ``peek`` so far ahead, has an answer."""
        if self.error is not None:
            return True
        return not self.unsaid and (len(self.ready) > ahead or self._end_within(ahead))

    def _end_within(self, ahead: int) -> bool:
        upcoming = islice(self.ready, ahead + 1)
        return self.session.state is State.ENDED or any(micro_batch is None for micro_batch in upcoming)

    def peek(self, ahead: int) -> MicroBatch | None:
        """A micro-batch behind the next one, which stays to be taken; ``None`` behind the end."""
        if self._end_within(ahead):
            return None
        if len(self.ready) > ahead:
            return self.ready[ahead]
        if self.error is not None:
            raise self.error
        return None

    def take(self) -> MicroBatch | None:
        """The next micro-batch, or ``None`` at an end. Raises what went wrong, behind what is ready."""
        if self.ready and not self.unsaid:
            micro_batch = self.ready.popleft()
            if micro_batch is None:
                self.session.end_handed_out()
            else:
                self.session.handed_out(micro_batch.position, micro_batch.row_digest)
            return micro_batch
        if self.error is not None:
            raise self.error
        return None

    def resume(self, saved: FeedState) -> None:
        """Begin at ``saved``; the thread still has to say so to the server."""
        self.unsaid = self.session.resume(saved)

    def said(self, effects: list[Effect]) -> None:
        """The thread has carried out ``effects``, unless another state was loaded meanwhile."""
        if self.unsaid is effects:
            self.unsaid = []

    def forget(self) -> None:
        """Drop what was not handed out."""
        self.ready.clear()

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
        whom = f": {', '.join(waiting.whom)}" if waiting.whom else ""
        return f"the server waits for {waiting.reason}{whom} (for {waiting.since_s:.0f} s)"
