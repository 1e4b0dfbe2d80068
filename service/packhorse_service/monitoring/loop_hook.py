"""What the loop itself does for those who watch it: a status once a second, log lines of what changed, the watchdog.

``LoopMonitor`` is the ``server.LoopHook`` that ``packhorse serve`` hands to its server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from packhorse_service.monitoring.collect import INTERVAL_S, StatusCollector
from packhorse_service.monitoring.headline import headline, tokens_per_s
from packhorse_service.monitoring.log_events import log_events
from packhorse_service.monitoring.recent_events import RecentEvents
from packhorse_service.monitoring.status import ServerStatus, StreamStatus
from packhorse_service.server.logs import EVENTS
from packhorse_service.server.systemd import SystemdNotifier

__all__ = ["LoopMonitor"]

log = logging.getLogger("packhorse.server")
events = logging.getLogger(EVENTS)

REPORT_S = 10.0


class LoopMonitor:
    """Hook of a server's loop, whose thread calls all but ``latest``. ``clock`` is the server's, in seconds."""

    def __init__(
        self, collector: StatusCollector, recent: RecentEvents, notifier: SystemdNotifier, clock: Callable[[], float]
    ) -> None:
        self._collector = collector
        self._recent = recent
        self._notifier = notifier
        self._clock = clock
        self._turned_s = clock()
        self._status = collector.collect(self._turned_s, 0)
        self._next_look_s = 0.0
        self._next_report_s = 0.0

    def started(self) -> None:
        """Tell systemd that the server listens."""
        self._notifier.ready(f"listening on {self._status.endpoint}")

    def on_turn(self, now: float, connections: int) -> None:
        """Note that the loop has turned; once a second, describe the server, log changes and feed the watchdog."""
        self._turned_s = now
        if now < self._next_look_s:
            return
        self._next_look_s = now + INTERVAL_S
        before, self._status = self._status, self._collector.collect(now, connections)
        for event in log_events(before, self._status):
            events.log(event.level, "%s", event.text, extra=event.fields)
        self._notifier.watchdog("; ".join(map(in_a_line, self._status.streams)))
        if now >= self._next_report_s:
            self._next_report_s = now + REPORT_S
            self._report(self._status)

    def stopping(self) -> None:
        """Tell systemd that the server leaves."""
        self._notifier.stopping()

    def _report(self, status: ServerStatus) -> None:
        for stream in status.streams:
            log.info("%s", in_a_line(stream), extra={"stream": stream.name, **_rates(stream)})

    def latest(self) -> ServerStatus:
        """Return the last status, with how long ago the loop turned, and what was logged until now.

        Any thread may call it.
        """
        now = self._clock()
        return replace(self._status, age_s=round(now - self._turned_s, 1), events=tuple(self._recent.events(now)))


def in_a_line(stream: StreamStatus) -> str:
    """Return what a stream is doing, as one line."""
    said = headline(stream)
    return f"{said.word}: {said.sentence}"


def _rates(stream: StreamStatus) -> dict[str, float]:
    if not stream.history:
        return {}
    speed = round(tokens_per_s(stream.history))
    return {"tokens_per_s": speed, "useful_fill": stream.useful_fill, "waiting": stream.history[-1].waiting}
