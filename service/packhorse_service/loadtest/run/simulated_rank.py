"""One simulated rank: the session and handover of a real client, and a training loop that only takes its time.

No socket, clock or thread is here: ``swarm`` owns them for many ranks and calls in. The loop asks for a
micro-batch, has it at once or waits, and thinks about it until it asks for the next.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from packhorse.contract.position import Position
from packhorse.protocol.client_session import ClientSession, Effect, Forget, Send, State
from packhorse.wire.messages import Frames, Message, Wait
from packhorse_service.loadtest.run.wait_histogram import WaitHistogram

__all__ = ["MeasureWindow", "RebuiltMicroBatch", "SimulatedRank", "ThinkTime"]


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """How long a rank thinks about a micro-batch."""

    consume_s: float
    jitter: float  # at most so large a share of it shorter or longer, evenly distributed
    stops: bool = False  # takes nothing while the period has it stop

    def draw_s(self, rng: random.Random) -> float:
        return self.consume_s * (1 + self.jitter * rng.uniform(-1, 1))


@dataclass(frozen=True, slots=True)
class MeasureWindow:
    """What is taken from ``begin_s`` until ``end_s`` counts; who stops, does from ``stop_s`` until ``resume_s``."""

    begin_s: float = inf
    end_s: float = inf
    stop_s: float = inf
    resume_s: float = inf

    def counts(self, at_s: float) -> bool:
        return self.begin_s <= at_s < self.end_s

    def stopped(self, at_s: float) -> bool:
        return self.stop_s <= at_s < self.resume_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuiltMicroBatch:
    """What is kept of a micro-batch once it was rebuilt: a rank that trains holds its tensors, this one need not."""

    position: Position
    digest: bytes
    tokens: int  # real ones of the whole row
    delivered: float  # of this rank's slice
    filler: bool
    wire_bytes: int
    ready_s: float  # when it was there, rebuilt
    verified: bool


@dataclass(slots=True)
class RankCounters:
    """What one rank took while it was measured."""

    micro_batches: int = 0
    fillers: int = 0
    tokens: int = 0
    delivered: float = 0.0
    wire_bytes: int = 0
    verified: int = 0
    waits: WaitHistogram = field(default_factory=WaitHistogram)
    stopped_waits: WaitHistogram = field(default_factory=WaitHistogram)
    waiting_for: Counter[str] = field(default_factory=Counter)
    last_taken_s: float = 0.0


@dataclass(slots=True)
class SimulatedRank:
    """Methods take the time as ``now``, and return the effects to carry out, in order."""

    session: ClientSession
    think_time: ThinkTime
    rng: random.Random
    measured: MeasureWindow = field(default_factory=MeasureWindow)
    counters: RankCounters = field(default_factory=RankCounters)
    ready: deque[RebuiltMicroBatch | None] = field(default_factory=deque)  # None is END
    connected: bool = False
    asking_since: float | None = None  # what it waits for is not there
    think_until: float = inf
    keep_alive_at: float = inf
    last_asked: float = 0.0
    welcomed_s: float | None = None
    first_taken_s: float | None = None
    error: Exception | None = None
    taken: int = 0  # since the start, measured or not
    on_wait: Callable[[float], None] = field(default=lambda _seconds: None)

    @property
    def due(self) -> float:
        """When ``tick`` has something to do."""
        return min(self.think_until, self.keep_alive_at)

    @property
    def ended(self) -> bool:
        return self.session.state is State.ENDED

    @property
    def num_microbatches(self) -> int:
        """Of a step, as the server's contract has it; 0 before the handshake."""
        contract = self.session.contract
        return contract.num_microbatches(self.session.identity.layout) if contract else 0

    def fail(self, error: Exception) -> None:
        """The rank is over; the first error is what counts."""
        self.error = self.error or error
        self.asking_since, self.think_until, self.keep_alive_at = None, inf, inf

    # The connection ----------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Its connection is being made."""
        self.keep_alive_at = now + self.session.keep_alive_s

    def came_up(self, now: float) -> list[Effect]:
        self.connected = True
        self.begin(now)
        return self._changed(self.session.connected())

    def went_down(self) -> None:
        self.connected = False

    def receive(self, message: Message, extra: Frames, now: float) -> list[Effect]:
        """One message of the server. Raises ``ProtocolError`` where it has no place."""
        effects = self._changed(self.session.receive(message, extra))
        if isinstance(message, Wait) and self.asking_since is not None:
            self._count_wait(message, now)
        if self.session.state is State.STREAMING and self.welcomed_s is None:
            self.welcomed_s = self.last_asked = self.asking_since = now
        return effects

    def _changed(self, effects: list[Effect]) -> list[Effect]:
        """What the session forgets, the loop must not take."""
        if any(isinstance(effect, Forget) for effect in effects):
            self.ready.clear()
        return effects

    def _count_wait(self, wait: Wait, now: float) -> None:
        """The server says it every keep-alive interval: each time stands for a second of one waiting rank."""
        if self.measured.counts(now):
            self.counters.waiting_for[f"{wait.reason}"] += 1
            for name in wait.ranks:
                # "rank 3 (dp3·cp0·tp0·pp0): its loop last asked 9 s ago", or "and 12 more"
                whom = "others" if name.startswith("and ") else name.partition(": ")[0]
                self.counters.waiting_for[f"{wait.reason}: {whom}"] += 1

    # The loop ----------------------------------------------------------------------------------------

    def delivered(self, taken: RebuiltMicroBatch | None, now: float) -> list[Effect]:
        """A micro-batch is there, rebuilt, or the end is (``None``)."""
        self.ready.append(taken)
        return self._take(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has come to ``due``: ask for the next micro-batch, say that this rank lives."""
        effects: list[Effect] = []
        if now >= self.think_until:
            effects += self._ask(now)
        if now >= self.keep_alive_at:
            self.keep_alive_at = now + self.session.keep_alive_s
            effects += self._live(now) if self.connected else []
        return effects

    def _live(self, now: float) -> list[Effect]:
        return [*self._changed(self.session.interval_passed()), *self._acknowledge(now)]

    def _ask(self, now: float) -> list[Effect]:
        """The loop asks at the moment its thinking ended, however late this is called."""
        at = self.think_until
        if self.think_time.stops and self.measured.stopped(at):
            self.think_until = self.measured.resume_s
            return []
        self.asking_since, self.think_until = at, inf
        return self._take(now)

    def _take(self, now: float) -> list[Effect]:
        """Take what is ready, as long as the loop asks for it by ``now``; acknowledge the last only."""
        before = self.taken
        while self.ready and self.asking_since is not None:
            upcoming = self.ready.popleft()
            if upcoming is None:
                self._take_end()
                break
            self._take_one(upcoming, self.asking_since)
            if self.think_until <= now and not (self.think_time.stops and self.measured.stopped(self.think_until)):
                self.asking_since, self.think_until = self.think_until, inf
        return self._acknowledge(now) if self.taken != before or self.ended else []

    def _take_one(self, upcoming: RebuiltMicroBatch, asked_s: float) -> None:
        at = max(asked_s, upcoming.ready_s)
        self.session.handed_out(upcoming.position, upcoming.digest)
        if self.first_taken_s is None:
            self.first_taken_s = at
        else:
            self._count(upcoming, asked_s, at)
        self.taken += 1
        self.asking_since, self.last_asked = None, at
        self.think_until = at + self.think_time.draw_s(self.rng)

    def _take_end(self) -> None:
        self.session.end_handed_out()
        self.asking_since = None if self.ended else self.asking_since
        self.taken += not self.ended  # the end of a pass is acknowledged too

    def _count(self, upcoming: RebuiltMicroBatch, asked_s: float, at: float) -> None:
        if not self.measured.counts(at):
            return
        counters, wait = self.counters, at - asked_s
        counters.micro_batches += 1
        counters.fillers += upcoming.filler
        counters.tokens += 0 if upcoming.filler else upcoming.tokens
        counters.delivered += upcoming.delivered
        counters.wire_bytes += upcoming.wire_bytes
        counters.verified += upcoming.verified
        counters.last_taken_s = at
        overlaps_stop = asked_s < self.measured.resume_s and at >= self.measured.stop_s
        (counters.stopped_waits if overlaps_stop else counters.waits).add(wait)
        self.on_wait(wait)

    def _acknowledge(self, now: float) -> list[Effect]:
        if not self.connected or self.session.state not in (State.STREAMING, State.ENDED):
            return []
        idle = 0.0 if self.asking_since is not None else max(now - self.last_asked, 0.0)
        return [Send(self.session.ack(idle))]

    def leave(self, now: float) -> list[Effect]:
        """The last words of a rank that leaves in order."""
        self.think_until = self.keep_alive_at = inf
        return [*self._acknowledge(now), Send(self.session.bye())] if self.connected else []
