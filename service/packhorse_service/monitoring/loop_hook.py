"""The loop's own part in being watched: it looks once a second, logs what changed, and says that it turns."""

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
    """``turn`` is the loop's; ``latest`` may be called by any thread."""

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

    def on_turn(self, now: float, connections: int) -> None:
        """The loop has turned."""
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

    def _report(self, status: ServerStatus) -> None:
        for stream in status.streams:
            log.info("%s", in_a_line(stream), extra={"stream": stream.name, **_figures(stream)})

    def latest(self) -> ServerStatus:
        """The last look, with how long ago the loop turned, and what was logged until now."""
        now = self._clock()
        return replace(self._status, age_s=round(now - self._turned_s, 1), events=tuple(self._recent.events(now)))


def in_a_line(stream: StreamStatus) -> str:
    """What a stream is doing."""
    said = headline(stream)
    return f"{said.word}: {said.sentence}"


def _figures(stream: StreamStatus) -> dict[str, float]:
    if not stream.history:
        return {}
    speed = round(tokens_per_s(stream.history))
    return {"tokens_per_s": speed, "useful_fill": stream.useful_fill, "waiting": stream.history[-1].waiting}
