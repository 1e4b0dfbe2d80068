"""Run a load test: start a server and the workers, have all ranks meet, measure, and collect.

The clock of the test, and the only place that knows of all its processes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packhorse.errors import ConfigError, StartTimeout
from packhorse_service.loadtest.report.outcome import IntervalMetrics, Measurements
from packhorse_service.loadtest.run.setup import Plan
from packhorse_service.loadtest.run.usage import Usage, observe, observe_all
from packhorse_service.loadtest.run.wait_histogram import WaitHistogram
from packhorse_service.loadtest.run.worker_messages import Go, Leave, Measure, Ready, WorkerProgress, WorkerResult
from packhorse_service.loadtest.run.workers import Workers
from packhorse_service.processes import Child, Children, start_server

__all__ = ["Coordinator", "Show"]

POLL_S = 0.1
SAMPLE_S = 1.0
BEGIN_S = 0.2  # between saying when it begins and its beginning
STOP_AT, STOP_FOR = 0.5, 0.25  # of the time that is measured
LOAD_S = 60.0  # until a worker is ready
COLLECT_S = 30.0  # until every worker has told its result
END_S = 5.0  # until every process has ended

Show = Callable[[str, IntervalMetrics | None], None]


@dataclass(slots=True)
class Coordinator:
    """One run of a plan; ``show`` is given the phase, and each moment of it as it passes."""

    plan: Plan
    command: str
    children: Children
    asked: threading.Event  # to stop early
    show: Show
    server: Child | None = None
    workers: Workers = field(init=False)
    latest: dict[int, WorkerProgress] = field(default_factory=dict)
    results: dict[int, WorkerResult] = field(default_factory=dict)
    moments: list[IntervalMetrics] = field(default_factory=list)
    _ready: set[int] = field(default_factory=set)
    _waits: WaitHistogram = field(default_factory=WaitHistogram)  # since the last moment
    _before: dict[int, WorkerProgress] = field(default_factory=dict)  # at the last moment
    _usage: tuple[float, Usage | None] = (0.0, None)  # of the server, then
    _next_sample: float = 0.0
    _begin_s: float = 0.0
    _asked_to_leave: bool = False

    def run(self, folder: Path) -> Measurements:
        """All of it. Raises what ended it before there was anything to measure."""
        endpoint, server_start_s = self._serve(folder)
        jobs, seconds = self.plan.jobs(endpoint), self.plan.scenario.seconds
        self.show("starting the ranks", None)
        self.workers = Workers.start(self.children, jobs)
        self._until(lambda: len(self._ready) == len(jobs), LOAD_S, "the workers to load")
        connect_s = time.monotonic()
        self.workers.tell(Go())
        self.show("ranks are connecting", None)
        self._until(self._all_started, self.plan.scenario.start_timeout_s, "every rank to take a micro-batch")
        self._require_something_left()
        begin_s, until_s = self._measure()
        self._until(lambda: time.monotonic() >= begin_s, LOAD_S, "the begin")
        before = self._observed()
        self._until(self._told, until_s - begin_s + COLLECT_S, "every worker to tell its result")
        ended_s, after = time.monotonic(), self._observed()
        self._leave()
        self._wait_for_the_end()
        return Measurements(
            setting=self.plan.setting(endpoint, len(jobs), self.command),
            results=list(self.results.values()),
            moments=self.moments,
            connect_s=connect_s,
            begin_s=begin_s,
            until_s=min(until_s, ended_s),
            stop=(STOP_AT * seconds, (STOP_AT + STOP_FOR) * seconds),
            server_start_s=server_start_s,
            server=_both(before[0], after[0]),
            clients=_both(before[1], after[1]),
        )

    # Phases ------------------------------------------------------------------------------------------

    def _serve(self, folder: Path) -> tuple[str, float | None]:
        if self.plan.feed is None:
            return str(self.plan.scenario.endpoint), None
        began = time.monotonic()
        self.show("starting the server", None)
        arguments = [str(self.plan.feed), "--listen", self.plan.listen(folder)]
        self.server, endpoint = start_server(self.children, arguments, folder, self.asked)
        return endpoint, time.monotonic() - began

    def _measure(self) -> tuple[float, float]:
        """Tell the workers what counts; from when until when."""
        seconds = self.plan.scenario.seconds
        begin_s = self._begin_s = time.monotonic() + BEGIN_S
        stop_s, until_s = begin_s + STOP_AT * seconds, begin_s + seconds
        self.workers.tell(Measure(from_s=begin_s, until_s=until_s, stop_s=stop_s, resume_s=stop_s + STOP_FOR * seconds))
        self.show("measuring", None)
        return begin_s, until_s

    def _told(self) -> bool:
        """Whether all have told their results; where it is to stop, they are asked for them."""
        if self._stopped() and not self._asked_to_leave:
            self._leave()
        return len(self.results) == len(self.workers.children)

    def _leave(self) -> None:
        self._asked_to_leave = True
        self.workers.tell(Leave())

    def _wait_for_the_end(self) -> None:
        """A server whose ranks have said BYE ends by itself, with its log complete."""
        deadline = time.monotonic() + END_S
        while not self.children.all_ended() and time.monotonic() < deadline:
            self._hear()

    def _all_started(self) -> bool:
        """Also where one has failed, or all have ended: there is nothing more to wait for."""
        started = sum(each.started for each in self.latest.values())
        return self._stopped() or bool(self.results) or started == len(self.plan.ranks)

    def _require_something_left(self) -> None:
        if self.results and not self._stopped():
            raise ConfigError(
                f"{self.plan.data}: the stream ended before there was anything to measure; give it more data, or "
                "epochs: endless"
            )

    def _stopped(self) -> bool:
        failed = any(each.failed for each in self.latest.values()) or any(each.errors for each in self.results.values())
        return failed or self.asked.is_set()

    def _until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        """Hear the workers until it holds. Raises ``StartTimeout``, and ``ChildFailed`` where a process ends badly."""
        deadline = time.monotonic() + seconds
        while not holds():
            self._hear()
            self.children.all_ended()
            if time.monotonic() > deadline:
                raise StartTimeout(f"waited {seconds:.0f} s (start_timeout_s) for {what}; {self._standing()}")

    def _standing(self) -> str:
        """Where the ranks are, for an error."""
        progress = self.latest.values()
        connected, welcomed, started = (
            sum(getattr(each, name) for each in progress) for name in ("connected", "welcomed", "started")
        )
        ranks = len(self.plan.ranks)
        return (
            f"of {ranks} ranks {connected} are connected, {welcomed} have done their handshake and {started} have a "
            f"micro-batch: is a server running at the endpoint, with this layout ({self.plan.layout})?"
        )

    # Hearing and seeing ------------------------------------------------------------------------------

    def _hear(self) -> None:
        for number, report in self.workers.reports(POLL_S):
            match report:
                case Ready():
                    self._ready.add(number)
                case WorkerProgress():
                    self.latest[number] = report
                    self._waits.bins.update(report.waits)
                case WorkerResult():
                    self.results[number] = report
        now = time.monotonic()
        if self.latest and not self.results and now >= self._next_sample:
            self._sample(now)
            self._next_sample = now + SAMPLE_S

    def _observed(self) -> tuple[Usage | None, Usage | None]:
        """The server and its loaders, and all workers."""
        server = observe(self.server.process.pid) if self.server is not None else None
        return server, observe_all(self.workers.pids)

    def _sample(self, now: float) -> None:
        server, clients = self._observed()
        seen_s, before = self._usage
        cores = (server.cpu_s - before.cpu_s) / (now - seen_s) if server and before else None
        moment = IntervalMetrics(
            at_s=now - self._begin_s if self._begin_s else -1.0,
            tokens_per_s=self._rate("tokens"),
            micro_batches_per_s=self._rate("micro_batches"),
            gigabytes_per_s=self._rate("wire_bytes") / 1e9,
            wait_p99_ms=1000 * self._waits.quantile(0.99),
            waiting=sum(each.waiting for each in self.latest.values()),
            waited_for=self._waited_for(),
            connected=sum(each.connected for each in self.latest.values()),
            server_cores=cores,
            server_memory_bytes=server.memory_bytes if server else None,
            client_memory_bytes=clients.memory_bytes if clients else None,
            server_open_files=server.open_files if server else None,
        )
        self._usage, self._waits, self._before = (now, server), WaitHistogram(), dict(self.latest)
        self.moments.append(moment)
        self.show("measuring" if self._begin_s else "ranks are connecting", moment)

    def _waited_for(self) -> str:
        since = _named(self.latest.values())
        since.subtract(_named(self._before.values()))
        return next((name for name, seconds in since.most_common(1) if seconds > 0), "")

    def _rate(self, name: str) -> float:
        """What all workers counted a second, each by its own moments."""
        pairs = [(self._before[number], now) for number, now in self.latest.items() if number in self._before]
        rates = [
            (getattr(now, name) - getattr(before, name)) / (now.at_s - before.at_s)
            for before, now in pairs
            if now.at_s > before.at_s
        ]
        return float(sum(rates))


def _named(progress: Iterable[WorkerProgress]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in progress:
        total.update(each.waiting_for)
    return total


def _both(before: Usage | None, after: Usage | None) -> tuple[Usage, Usage] | None:
    return (before, after) if before is not None and after is not None else None
