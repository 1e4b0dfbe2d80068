"""The last warnings and errors of the log, for the status page."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from packhorse_service.monitoring.status import Event
from packhorse_service.server.logs import Repetitions

__all__ = ["RecentEvents"]

KEPT = 50


class RecentEvents(logging.Handler):
    """Handler that keeps the last warnings and errors. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._kept: deque[tuple[float, str, str]] = deque(maxlen=KEPT)
        self.addFilter(Repetitions())

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((self._clock(), record.levelname.lower(), record.getMessage()))

    def events(self, now: float) -> list[Event]:
        """Return what is kept, the last first, with ages at ``now``."""
        kept = reversed(tuple(self._kept))
        return [Event(age_s=round(now - at_s, 1), level=level, text=text) for at_s, level, text in kept]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Keep what ``packhorse`` loggers log while inside."""
        logger = logging.getLogger("packhorse")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
