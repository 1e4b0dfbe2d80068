"""The lines of the log that are worth a look later: warnings and errors, for the status page."""

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
    """Keeps the last of them. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._kept: deque[tuple[float, str, str]] = deque(maxlen=KEPT)
        self.addFilter(Repetitions())

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((self._clock(), record.levelname.lower(), record.getMessage()))

    def events(self, now: float) -> list[Event]:
        """The last first."""
        kept = reversed(tuple(self._kept))
        return [Event(age_s=round(now - at_s, 1), level=level, text=text) for at_s, level, text in kept]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """To all that is logged here, while inside."""
        logger = logging.getLogger("packhorse")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
