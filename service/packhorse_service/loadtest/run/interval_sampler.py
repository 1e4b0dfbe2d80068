"""Figures of each second of a load test, from what workers report and what their processes take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from packhorse_service.loadtest.ranks.worker_messages import WorkerProgress
from packhorse_service.loadtest.run.measurements import IntervalMetrics
from packhorse_service.loadtest.run.usage import Usage
from packhorse_service.loadtest.run.worker_reports import WorkerReports

__all__ = ["IntervalSampler"]

INTERVAL_S = 1.0


@dataclass(slots=True)
class IntervalSampler:
    """Takes the time as ``now``, in seconds of the monotonic clock; keeps what the next difference is taken from."""

    reports: WorkerReports
    begin_s: float | None = None  # of what is measured; ``None`` before that is known
    samples: list[IntervalMetrics] = field(default_factory=list)
    _next_s: float = 0.0
    _before: dict[int, WorkerProgress] = field(default_factory=dict)
    _waited_for: Counter[str] = field(default_factory=Counter)
    _server: tuple[float, Usage] | None = None  # when it was seen, and what it had taken

    def due(self, now: float) -> bool:
        """Return whether a second has passed; there is none before the first report, nor once results arrive."""
        return bool(self.reports.progress) and not self.reports.results and now >= self._next_s

    def sample(self, now: float, server: Usage | None, clients: Usage | None) -> IntervalMetrics:
        """Return the figures of the time since the last sample, and keep them; usage is ``None`` where unknown."""
        reports = self.reports
        sampled = IntervalMetrics(
            at_s=now - self.begin_s if self.begin_s is not None else -1.0,
            tokens_per_s=self._rate("tokens"),
            micro_batches_per_s=self._rate("micro_batches"),
            gigabytes_per_s=self._rate("wire_bytes") / 1e9,
            wait_p99_ms=1000 * reports.take_waits().quantile(0.99),
            waiting=reports.total("waiting"),
            waited_for=self._waited_for_most(),
            connected=reports.total("connected"),
            server_cores=self._cores(now, server),
            server_memory_bytes=server.memory_bytes if server else None,
            client_memory_bytes=clients.memory_bytes if clients else None,
            server_open_files=server.open_files if server else None,
        )
        self._next_s = now + INTERVAL_S
        self._server = None if server is None else (now, server)
        self._before, self._waited_for = dict(reports.progress), reports.waited_for()
        self.samples.append(sampled)
        return sampled

    def _rate(self, name: str) -> float:
        """Return what all workers counted a second, each by its own clock."""
        pairs = [(self._before[number], now) for number, now in self.reports.progress.items() if number in self._before]
        rates = [
            (getattr(now, name) - getattr(before, name)) / (now.at_s - before.at_s)
            for before, now in pairs
            if now.at_s > before.at_s
        ]
        return float(sum(rates))

    def _waited_for_most(self) -> str:
        since = self.reports.waited_for()
        since.subtract(self._waited_for)
        return next((name for name, seconds in since.most_common(1) if seconds > 0), "")

    def _cores(self, now: float, server: Usage | None) -> float | None:
        """Return how many processors the server kept busy since it was last seen."""
        if server is None or self._server is None:
            return None
        seen_s, before = self._server
        return (server.cpu_s - before.cpu_s) / (now - seen_s) if now > seen_s else None
