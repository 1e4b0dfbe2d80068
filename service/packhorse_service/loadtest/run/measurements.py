"""What one run of a load test measured: its setting, each interval of it, and the results of its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packhorse_service.loadtest.ranks.wait_histogram import WaitHistogram
from packhorse_service.loadtest.ranks.worker_messages import (
    RankResult,
    WorkerResult,
)
from packhorse_service.loadtest.run.usage import Usage

__all__ = ["IntervalMetrics", "LoadTestSetting", "Measurements", "Show"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestSetting:
    """Setting of a load test: what was tested, and where."""

    command: str
    data: str  # the user's feed, or what is synthetic
    endpoint: str
    layout: str
    readers: int  # ranks that connect
    processes: int
    consume_ms: float
    jitter: float
    slow_ranks: tuple[int, ...]
    slow_factor: float
    stopped_ranks: tuple[int, ...]
    seconds: float
    verify: bool
    machine: str
    bound_bytes: int | None  # of the server's memory, as check has it


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalMetrics:
    """The time since the last one; ``at_s`` counts from the begin of what is measured, and is below 0 before it."""

    at_s: float
    tokens_per_s: float
    micro_batches_per_s: float
    gigabytes_per_s: float
    wait_p99_ms: float
    waiting: int
    waited_for: str  # what or whom the server named most in this time
    connected: int
    server_cores: float | None  # processors it kept busy
    server_memory_bytes: int | None
    client_memory_bytes: int | None
    server_open_files: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of a load test; times are of the machine's monotonic clock."""

    setting: LoadTestSetting
    results: Sequence[WorkerResult]
    moments: Sequence[IntervalMetrics]
    connect_s: float  # when the ranks were told to connect
    begin_s: float
    until_s: float
    stop: tuple[float, float]  # from when until when ranks that shall stop do, from ``begin_s``
    server_start_s: float | None
    server: tuple[Usage, Usage] | None  # when it began and when it ended
    clients: tuple[Usage, Usage] | None

    @property
    def ranks(self) -> list[RankResult]:
        return sorted((rank for result in self.results for rank in result.ranks), key=lambda rank: rank.rank)

    @property
    def seconds(self) -> float:
        """Seconds that were measured: to the last micro-batch, where the stream ended before its time."""
        last = max((result.last_taken_s for result in self.results), default=0.0)
        return max((last if self.finished_early else self.until_s) - self.begin_s, 0.0)

    @property
    def finished_early(self) -> bool:
        """True where every rank has come to the end of the stream."""
        return self.total("ended") == len(self.ranks) > 0

    @property
    def waits(self) -> WaitHistogram:
        ranks = self.ranks
        total, longest = sum(rank.wait_s for rank in ranks), max((rank.max_wait_s for rank in ranks), default=0.0)
        return WaitHistogram.merged((rank.waits for rank in ranks), total, longest)

    def total(self, name: str) -> int:
        """Return the sum of a count over the workers."""
        return int(sum(getattr(result, name) for result in self.results))


Show = Callable[[str, IntervalMetrics | None], None]
