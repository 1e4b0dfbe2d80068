"""A training loop that only takes its time: it asks for a micro-batch, thinks about it, and asks for the next."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from packhorse_service.loadtest.ranks.rank_counters import MeasureWindow

__all__ = ["SimulatedLoop", "ThinkTime"]


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """Distribution of the seconds that a rank takes over a micro-batch."""

    consume_s: float
    jitter: float  # at most so large a share of it shorter or longer, evenly distributed
    stops: bool = False  # takes nothing while the measure window has it stop

    def draw_s(self, rng: random.Random) -> float:
        return self.consume_s * (1 + self.jitter * rng.uniform(-1, 1))


@dataclass(slots=True)
class SimulatedLoop:
    """State of the loop: asking since a moment, thinking until one, or neither before the handshake and at the end."""

    think_time: ThinkTime
    rng: random.Random
    asking_since: float | None = None  # what it waits for is not there
    think_until: float = inf
    last_asked: float = 0.0

    def begin(self, now: float) -> None:
        """Ask for the first micro-batch."""
        self.last_asked = self.asking_since = now

    def ask(self, now: float, measured: MeasureWindow) -> None:
        """Ask for the next where thinking is over by ``now``: at the moment it ended, however late this is called.

        A loop that has to stop then does not ask until it resumes.
        """
        at = self.think_until
        if at > now:
            return
        if self.think_time.stops and measured.stopped(at):
            self.think_until = measured.resume_s
        else:
            self.asking_since, self.think_until = at, inf

    def take(self, at: float) -> None:
        """Have what was asked for, at ``at``, and begin to think about it."""
        self.asking_since, self.last_asked = None, at
        self.think_until = at + self.think_time.draw_s(self.rng)

    def stop(self) -> None:
        """Ask for nothing any more."""
        self.asking_since, self.think_until = None, inf

    def idle_s(self, now: float) -> float:
        """Return how long ago the loop last asked; 0 while it does."""
        return 0.0 if self.asking_since is not None else max(now - self.last_asked, 0.0)
