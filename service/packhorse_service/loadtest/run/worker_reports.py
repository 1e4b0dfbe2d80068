"""What the worker processes of a load test have reported so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from packhorse_service.loadtest.ranks.wait_histogram import WaitHistogram
from packhorse_service.loadtest.ranks.worker_messages import Ready, Report, WorkerProgress, WorkerResult

__all__ = ["WorkerReports"]


@dataclass(slots=True)
class WorkerReports:
    """Newest report of each worker, by its number: whether it is ready, how far its ranks are, its result."""

    ready: set[int] = field(default_factory=set)
    progress: dict[int, WorkerProgress] = field(default_factory=dict)
    results: dict[int, WorkerResult] = field(default_factory=dict)
    _waits: WaitHistogram = field(default_factory=WaitHistogram)

    def receive(self, number: int, report: Report) -> None:
        """Keep a report of the worker ``number``."""
        match report:
            case Ready():
                self.ready.add(number)
            case WorkerProgress():
                self.progress[number] = report
                self._waits.bins.update(report.waits)
            case WorkerResult():
                self.results[number] = report

    @property
    def rank_failed(self) -> bool:
        """A rank of some worker has failed."""
        return any(each.failed for each in self.progress.values()) or any(each.errors for each in self.results.values())

    def total(self, name: str) -> int:
        """Return the sum of a count of ``WorkerProgress`` over the workers, each as it reported last."""
        return int(sum(getattr(each, name) for each in self.progress.values()))

    def waited_for(self) -> Counter[str]:
        """Return what or whom the server said it waited for -> milliseconds of waiting ranks, so far."""
        total: Counter[str] = Counter()
        for each in self.progress.values():
            total.update(each.waiting_for)
        return total

    def take_waits(self) -> WaitHistogram:
        """Return the waits that were reported since the last call."""
        taken, self._waits = self._waits, WaitHistogram()
        return taken
