"""One simulated rank: session and queue of a real client, and a training loop that only takes its time.

No socket, clock or thread is here: ``rank_connection`` has them and calls in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from packhorse.protocol.client_session import ClientSession, State
from packhorse.protocol.effects import Effect, Forget, Send
from packhorse.transport.ready_queue import ReadyQueue
from packhorse.wire.messages import Frames, Message, Wait
from packhorse_service.loadtest.ranks.rank_counters import RankCounters, RebuiltMicroBatch
from packhorse_service.loadtest.ranks.simulated_loop import SimulatedLoop

__all__ = ["SimulatedRank"]


@dataclass(slots=True)
class SimulatedRank:
    """Rank whose methods take the time as ``now``, and return the effects to carry out, in order."""

    queue: ReadyQueue[RebuiltMicroBatch]  # says when to acknowledge, as in a real client
    loop: SimulatedLoop
    counters: RankCounters = field(default_factory=RankCounters)
    keep_alive_at: float = inf
    welcomed_s: float | None = None
    first_taken_s: float | None = None
    error: Exception | None = None
    taken: int = 0  # since the start, measured or not

    @property
    def session(self) -> ClientSession:
        """Session of this rank's client."""
        return self.queue.session

    @property
    def due(self) -> float:
        """Time at which ``tick`` has something to do."""
        return min(self.loop.think_until, self.keep_alive_at)

    @property
    def ended(self) -> bool:
        return self.session.state is State.ENDED

    def fail(self, error: Exception) -> None:
        """End the rank; the first error is what counts."""
        self.error = self.error or error
        self.loop.stop()
        self.keep_alive_at = inf

    # The connection ----------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Note that the connection is being made."""
        self.keep_alive_at = now + self.session.progress.keep_alive_s

    def came_up(self, now: float) -> list[Effect]:
        self.queue.connected = True
        self.begin(now)
        return self._follow(self.session.connected())

    def went_down(self) -> None:
        self.queue.connected = False

    def receive(self, message: Message, extra: Frames, now: float) -> list[Effect]:
        """Take one message of the server. Raises ``ProtocolError`` where it has no place."""
        effects = self._follow(self.session.receive(message, extra))
        if isinstance(message, Wait) and self.loop.asking_since is not None:
            self.counters.count_wait(message, now, self.session.progress.keep_alive_s)
        if self.session.state is State.STREAMING and self.welcomed_s is None:
            self.welcomed_s = now
            self.loop.begin(now)
        return effects

    def _follow(self, effects: list[Effect]) -> list[Effect]:
        """Drop what the session forgets, which the loop must not take, and return ``effects``."""
        # What is delivered comes by ``delivered``, once it is rebuilt.
        self.queue.apply(effect for effect in effects if isinstance(effect, Forget))
        return effects

    def delivered(self, rebuilt: RebuiltMicroBatch | None, now: float) -> list[Effect]:
        """Take a micro-batch that is there, rebuilt, or the end (``None``)."""
        self.queue.entries.append(rebuilt)
        return self._take(now)

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: ask for the next micro-batch, tell the server that this rank lives."""
        effects: list[Effect] = []
        if now >= self.loop.think_until:
            self.loop.ask(now, self.counters.measured)
            effects += self._take(now)
        if now >= self.keep_alive_at:
            self.begin(now)
            if self.queue.connected:
                effects += [*self._follow(self.session.interval_passed()), *self._acknowledge(now)]
        return effects

    # The loop ----------------------------------------------------------------------------------------

    def _take(self, now: float) -> list[Effect]:
        """Take what is ready, as long as the loop asks for it by ``now``, and acknowledge it where that is due."""
        effects: list[Effect] = []
        while self.queue.entries and self.loop.asking_since is not None:
            upcoming = self.queue.peek(0)
            if isinstance(upcoming, RebuiltMicroBatch):
                self._take_one(upcoming, self.loop.asking_since)
                self.loop.ask(now, self.counters.measured)
            else:
                self.queue.take(None)  # END
                self.taken += not self.ended
            if self.queue.ack_due:
                effects += self._acknowledge(now)
        if self.ended:
            self.loop.asking_since = None
        return effects

    def _take_one(self, upcoming: RebuiltMicroBatch, asked_s: float) -> None:
        at = max(asked_s, upcoming.ready_s)
        self.queue.take(upcoming)
        if self.first_taken_s is None:
            self.first_taken_s = at
        else:
            self.counters.count(upcoming, asked_s, at)
        self.taken += 1
        self.loop.take(at)

    def _acknowledge(self, now: float) -> list[Effect]:
        ack = self.queue.ack(self.loop.idle_s(now))
        return [Send(ack)] if ack is not None else []

    def leave(self, now: float) -> list[Effect]:
        """Return the last messages of a rank that leaves in order."""
        self.loop.think_until = self.keep_alive_at = inf
        return [*self._acknowledge(now), Send(self.session.bye())] if self.queue.connected else []
