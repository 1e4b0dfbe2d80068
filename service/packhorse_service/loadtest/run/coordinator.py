"""Run a load test: start a server and the workers, wait until every rank has data, measure, and collect.

The clock of the test, and the only place that knows of all its processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from packhorse.errors import ConfigError, StartTimeout
from packhorse_service.loadtest.ranks.worker_messages import Connect, Leave, Measure
from packhorse_service.loadtest.run.interval_sampler import IntervalSampler
from packhorse_service.loadtest.run.measurements import Measurements, Show
from packhorse_service.loadtest.run.setup import LoadTestPlan
from packhorse_service.loadtest.run.usage import Usage, observe, observe_all
from packhorse_service.loadtest.run.worker_reports import WorkerReports
from packhorse_service.loadtest.run.workers import Workers
from packhorse_service.processes import Child, Children, start_server

__all__ = ["Coordinator"]

POLL_S = 0.1
BEGIN_S = 0.2  # between saying when it begins and its beginning
STOP_AT, STOP_FOR = 0.5, 0.25  # of the time that is measured
LOAD_S = 60.0  # until a worker is ready
COLLECT_S = 30.0  # until every worker has sent its result
END_S = 5.0  # until every process has ended


@dataclass(slots=True)
class Coordinator:
    """Phases of one run of a plan; ``show`` is called with the phase, and with the figures of each second of it."""

    plan: LoadTestPlan
    command: str
    children: Children
    asked: threading.Event  # to stop early
    show: Show
    server: Child | None = None
    workers: Workers = field(init=False)
    reports: WorkerReports = field(default_factory=WorkerReports)
    sampler: IntervalSampler = field(init=False)
    _asked_to_leave: bool = False

    def __post_init__(self) -> None:
        self.sampler = IntervalSampler(self.reports)

    def run(self, folder: Path) -> Measurements:
        """Run all phases and return what was measured. Raises what ended it before there was anything to measure."""
        endpoint, server_start_s = self._start_server(folder)
        jobs, seconds = self.plan.jobs(endpoint), self.plan.scenario.seconds
        self.show("starting the ranks", None)
        self.workers = Workers.start(self.children, jobs)
        self._wait_until(lambda: len(self.reports.ready) == len(jobs), LOAD_S, "the workers to load")
        connect_s = time.monotonic()
        self.workers.send(Connect())
        self.show("ranks are connecting", None)
        self._wait_until(self._all_started, self.plan.scenario.start_timeout_s, "every rank to take a micro-batch")
        self._require_something_left()
        begin_s, until_s = self._begin_to_measure()
        self._wait_until(lambda: time.monotonic() >= begin_s, LOAD_S, "the begin")
        before = self._usage()
        self._wait_until(self._all_results_in, until_s - begin_s + COLLECT_S, "every worker to send its result")
        ended_s, after = time.monotonic(), self._usage()
        self._leave()
        self._wait_for_the_end()
        return Measurements(
            setting=self.plan.setting(endpoint, len(jobs), self.command),
            results=list(self.reports.results.values()),
            moments=self.sampler.samples,
            connect_s=connect_s,
            begin_s=begin_s,
            until_s=min(until_s, ended_s),
            stop=(STOP_AT * seconds, (STOP_AT + STOP_FOR) * seconds),
            server_start_s=server_start_s,
            server=_both(before[0], after[0]),
            clients=_both(before[1], after[1]),
        )

    # Phases ------------------------------------------------------------------------------------------

    def _start_server(self, folder: Path) -> tuple[str, float | None]:
        """Return the endpoint, and the seconds until the server listened: ``None`` where it ran already."""
        if self.plan.feed is None:
            return str(self.plan.scenario.endpoint), None
        began = time.monotonic()
        self.show("starting the server", None)
        arguments = [str(self.plan.feed), "--listen", self.plan.listen(folder)]
        self.server, endpoint = start_server(self.children, arguments, folder, self.asked)
        return endpoint, time.monotonic() - began

    def _begin_to_measure(self) -> tuple[float, float]:
        """Send the workers from when until when to count, and return both."""
        seconds = self.plan.scenario.seconds
        begin_s = self.sampler.begin_s = time.monotonic() + BEGIN_S
        stop_s, until_s = begin_s + STOP_AT * seconds, begin_s + seconds
        self.workers.send(Measure(from_s=begin_s, until_s=until_s, stop_s=stop_s, resume_s=stop_s + STOP_FOR * seconds))
        self.show("measuring", None)
        return begin_s, until_s

    def _all_results_in(self) -> bool:
        """Return whether all workers have sent their results; they are asked for them where the test is to stop."""
        if self._to_stop() and not self._asked_to_leave:
            self._leave()
        return len(self.reports.results) == len(self.workers.children)

    def _leave(self) -> None:
        self._asked_to_leave = True
        self.workers.send(Leave())

    def _wait_for_the_end(self) -> None:
        """Wait for the processes: a server whose ranks have said BYE ends by itself, with its log complete."""
        deadline = time.monotonic() + END_S
        while not self.children.all_ended() and time.monotonic() < deadline:
            self._receive()

    def _all_started(self) -> bool:
        """Return true also where one has failed, or all have ended: there is nothing more to wait for."""
        started = self.reports.total("started") == len(self.plan.ranks)
        return self._to_stop() or bool(self.reports.results) or started

    def _require_something_left(self) -> None:
        if self.reports.results and not self._to_stop():
            raise ConfigError(
                f"{self.plan.data}: the stream ended before there was anything to measure; give it more data, or "
                "epochs: endless"
            )

    def _to_stop(self) -> bool:
        return self.reports.rank_failed or self.asked.is_set()

    # Waiting -----------------------------------------------------------------------------------------

    def _wait_until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Receive reports until it holds. Raises ``StartTimeout``, and ``ChildFailed`` where a process ends badly."""
        deadline = time.monotonic() + seconds
        while not holds():
            self._receive()
            self.children.all_ended()
            if time.monotonic() > deadline:
                raise StartTimeout(f"waited {seconds:.0f} s (start_timeout_s) for {what}; {self._rank_states()}")

    def _rank_states(self) -> str:
        """Return how far the ranks are, for an error."""
        connected, welcomed, started = map(self.reports.total, ("connected", "welcomed", "started"))
        ranks = len(self.plan.ranks)
        return (
            f"of {ranks} ranks {connected} are connected, {welcomed} have done their handshake and {started} have a "
            f"micro-batch: is a server running at the endpoint, with this layout ({self.plan.layout})?"
        )

    def _receive(self) -> None:
        for number, report in self.workers.reports(POLL_S):
            self.reports.receive(number, report)
        now = time.monotonic()
        if self.sampler.due(now):
            sampled = self.sampler.sample(now, *self._usage())
            self.show("measuring" if self.sampler.begin_s is not None else "ranks are connecting", sampled)

    def _usage(self) -> tuple[Usage | None, Usage | None]:
        """Return what the server and its loaders have taken, and what all workers have."""
        server = observe(self.server.process.pid) if self.server is not None else None
        return server, observe_all(self.workers.pids)


def _both(before: Usage | None, after: Usage | None) -> tuple[Usage, Usage] | None:
    return (before, after) if before is not None and after is not None else None
