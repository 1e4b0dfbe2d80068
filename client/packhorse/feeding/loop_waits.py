"""Waiting of the training loop for its next micro-batch: the deadlines, and what it waited for."""

from __future__ import annotations

import time
from collections import defaultdict

from packhorse.errors import StallTimeout, StartTimeout
from packhorse.feeding.stats import FeedStats
from packhorse.protocol.client_session import State
from packhorse.transport.connection import Connection

__all__ = ["LoopWaits"]

LOOK_S = 1.0  # how often a loop that waits looks at its deadline


class LoopWaits:
    """Waits of one rank's loop; both timeouts are in seconds and count only while the loop asks."""

    def __init__(self, connection: Connection, rank: int, start_timeout: float, stall_timeout: float) -> None:
        self._connection = connection
        self._rank = rank
        self._start_timeout, self._stall_timeout = start_timeout, stall_timeout
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by what was waited for

    def wait(self, began: float, ahead: int) -> None:
        """Wait for something that may answer what is ``ahead`` of the next; the loop asks since ``began``.

        Raises ``StartTimeout`` or ``StallTimeout`` where the deadline has passed.
        """
        connection, mark = self._connection, time.monotonic()
        if ahead and connection.queue.unacknowledged:
            with connection.lock:
                # To reach so far may need the whole window, and what was taken is part of it.
                connection.request_flush()
            connection.flush()
        connection.wait(ahead, min(LOOK_S, self._remaining(began)))
        self._seconds[connection.queue.waiting_for()] += time.monotonic() - mark

    def stats(self, micro_batches: int) -> FeedStats:
        """Return what a rank that has taken so many micro-batches has waited for."""
        waits = dict(self._seconds)
        return FeedStats(micro_batches=micro_batches, wait_seconds=sum(waits.values()), waits=waits)

    def _remaining(self, began: float) -> float:
        session = self._connection.session
        starting = session.state in (State.IDLE, State.HELLO_SENT) and not session.attempt
        limit, error = (self._start_timeout, StartTimeout) if starting else (self._stall_timeout, StallTimeout)
        remaining = began + limit - time.monotonic()
        if remaining <= 0:
            name = "start_timeout" if starting else "stall_timeout"
            raise error(
                f"rank {self._rank} ({session.progress.identity.reader}) waited {limit:g} s ({name}) at "
                f"{session.position} for {self._connection.endpoint}: {self._connection.queue.describe()}"
            )
        return remaining
