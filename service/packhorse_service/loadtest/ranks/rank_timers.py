"""When each rank has something to do by itself: ask for a micro-batch, or say that it lives."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from packhorse_service.loadtest.ranks.rank_connection import RankConnection

__all__ = ["RankTimers"]


@dataclass(slots=True)
class RankTimers:
    """Heap of due times, in seconds of the monotonic clock; entries that their rank outlived are skipped."""

    connections: Sequence[RankConnection]
    _heap: list[tuple[float, int]] = field(default_factory=list)  # (due, number of the connection)
    _newest: dict[int, float] = field(default_factory=dict)  # the due time of each that holds

    @property
    def next_due(self) -> float:
        """Time at which something may be due; infinite where nothing is scheduled."""
        return self._heap[0][0] if self._heap else inf

    def schedule(self, number: int) -> None:
        """Take the time at which the rank of connection ``number`` has something to do."""
        due = self.connections[number].rank.due
        if due < inf and due != self._newest.get(number, inf):
            heapq.heappush(self._heap, (due, number))
        self._newest[number] = due

    def due(self, now: float) -> Iterator[tuple[float, int]]:
        """Yield (when it was due, connection) of all that are due by ``now``, earliest first, and forget them."""
        while self._heap and self._heap[0][0] <= now:
            due, number = heapq.heappop(self._heap)
            if due == self._newest[number]:
                self._newest[number] = inf
                yield due, number
