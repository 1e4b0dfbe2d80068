"""When the training loop asked, and how long it stays away: by this the socket's two users know whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AWAY_S", "LoopActivity"]

AWAY_S = 0.002  # a loop that stays away so long has something to do meanwhile


@dataclass(slots=True)
class LoopActivity:
    """Times of the loop's last question, by a monotonic clock."""

    last_asked: float
    asking_since: float | None = None
    away_before_s: float = 0.0  # before it asked last

    def begin_wait(self, now: float) -> float:
        """Note that the loop asks from ``now`` on; return ``now``."""
        self.asking_since = now
        self.away_before_s = now - self.last_asked
        return now

    def end_wait(self, now: float) -> None:
        """Note that the loop has its answer."""
        self.last_asked = now
        self.asking_since = None

    def asks_soon(self, now: float) -> bool:
        """Return whether the loop asks, or did a moment ago: it works the socket itself then."""
        return self.asking_since is not None or now - self.last_asked < AWAY_S

    def is_away(self, now: float) -> bool:
        """Return whether the loop does something else, by how long it stays away now or did before it asked last."""
        return self.asking_since is None and max(self.away_before_s, now - self.last_asked) >= AWAY_S

    def idle_s(self, now: float) -> float:
        """Return how many seconds ago the loop last asked; 0 while it does."""
        return 0.0 if self.asking_since is not None else now - self.last_asked
