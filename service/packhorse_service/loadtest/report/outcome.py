"""What a load test came to: the results of its workers, and what was seen of the processes, as one record.

Everything here is computed once, from what was measured; tables, JSON and the page only show it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from packhorse_service.loadtest.ranks.wait_histogram import WaitHistogram, upper_edge
from packhorse_service.loadtest.ranks.worker_messages import RankResult, WorkerResult
from packhorse_service.loadtest.run.measurements import IntervalMetrics, LoadTestSetting, Measurements
from packhorse_service.loadtest.run.usage import Usage
from packhorse_service.loadtest.scenario.measured import METRICS
from packhorse_service.loadtest.scenario.thresholds import Threshold, ThresholdResult, judge

__all__ = ["LoadTestOutcome", "RankOutcome", "Waited", "as_json", "outcome_of"]

MIB = 1 << 20
SETTLED = 1 / 3  # of the time; the slope of memory is that of the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """Outcome of one rank; waits in milliseconds."""

    rank: int
    slow: bool
    stopped: bool
    micro_batches: int
    wait_p50_ms: float
    wait_p99_ms: float
    wait_max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """Time that the server said it waited, for what and for whom; ``whom`` is empty for all of them together."""

    reason: str
    whom: str
    seconds: float  # of all ranks that waited, added up


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestOutcome:
    """The result of a load test."""

    setting: LoadTestSetting
    seconds: float
    ended_early: str | None  # why it was not measured as long as asked
    metrics: Mapping[str, float | None]
    verdicts: tuple[ThresholdResult, ...]
    totals: Mapping[str, int]
    waited_for: tuple[Waited, ...]  # as the server said; most first
    errors: Mapping[str, int]
    examples: Mapping[str, str]
    ranks: tuple[RankOutcome, ...]
    waits: tuple[tuple[float, float], ...]  # (milliseconds, share of the waits that are not longer)
    stop: tuple[tuple[float, float], ...]  # from when until when ranks were stopped, in seconds as of ``moments``
    moments: tuple[IntervalMetrics, ...]

    @property
    def ok(self) -> bool:
        """No rank failed, and everything required was met."""
        return not self.errors and all(verdict.met for verdict in self.verdicts)


def outcome_of(run: Measurements, required: tuple[Threshold, ...], *, stopped: bool) -> LoadTestOutcome:
    """Compute it; ``stopped``: by a signal."""
    metrics, waits, errors = _measured(run), run.waits, _errors(run.results)
    reasons = {"a rank failed": bool(errors), "stopped by a signal": stopped, "the stream ended": run.finished_early}
    counts = ("micro_batches", "fillers", "tokens", "delivered_tokens", "wire_bytes", "verified")
    return LoadTestOutcome(
        setting=run.setting,
        seconds=run.seconds,
        ended_early=next((why for why, holds in reasons.items() if holds), None),
        metrics=metrics,
        verdicts=judge(required, metrics),
        totals={name: run.total(name) for name in counts},
        waited_for=_waited_for(run.results),
        errors=errors,
        examples={kind: text for result in run.results for kind, text in result.examples.items()},
        ranks=tuple(_rank(rank, run.setting) for rank in run.ranks),
        waits=tuple((1000 * upper_edge(number), below / waits.count) for number, below in waits.cumulative()),
        stop=(run.stop,) if run.setting.stopped_ranks else (),
        moments=tuple(run.moments),
    )


def _measured(run: Measurements) -> dict[str, float | None]:
    """Every metric of ``METRICS``, by name."""
    values: dict[str, float | None] = {**_rates(run), **_waits(run), **_starts(run), **_processes(run)}
    values["errors"] = sum(sum(result.errors.values()) for result in run.results)
    values["disconnects"] = run.total("disconnects")
    return {name: values[name] for name in METRICS}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rates(run: Measurements) -> dict[str, float | None]:
    taken, seconds = run.total("micro_batches"), run.seconds
    apart = {*run.setting.slow_ranks, *run.setting.stopped_ranks}
    equals = [rank.micro_batches for rank in run.ranks if rank.rank not in apart]
    num_microbatches = max((result.num_microbatches for result in run.results), default=0)
    return {
        "tokens_per_s": _ratio(run.total("tokens"), seconds),
        "micro_batches_per_s": _ratio(taken, seconds),
        "gigabytes_per_s": _ratio(run.total("wire_bytes") / 1e9, seconds),
        "wire_bytes_per_token": _ratio(run.total("wire_bytes"), run.total("delivered_tokens")),
        "step_ms": _ratio(1000 * seconds * len(run.ranks) * num_microbatches, taken),
        "fairness": _ratio(min(equals, default=0) * len(equals), sum(equals)),
    }


def _waits(run: Measurements) -> dict[str, float | None]:
    waits, step_ms = run.waits, _rates(run)["step_ms"]
    p50, p95, p99 = (1000 * waits.quantile(share) for share in (0.5, 0.95, 0.99))
    late = WaitHistogram.merged(result.late for result in run.results)
    stopped = max((result.max_stopped_wait_s for result in run.results), default=0.0)
    return {
        "wait_p50_ms": p50,
        "wait_p95_ms": p95,
        "wait_p99_ms": p99,
        "wait_max_ms": 1000 * waits.max_s,
        "wait_share": _ratio(waits.total_s, run.seconds * len(run.ranks)),
        "wait_p99_steps": _ratio(p99, step_ms) if step_ms else None,
        "stopped_wait_max_ms": 1000 * stopped if run.setting.stopped_ranks else None,
        "late_p99_ms": 1000 * late.quantile(0.99),
    }


def _starts(run: Measurements) -> dict[str, float | None]:
    welcomed = [result.welcomed_s for result in run.results]
    firsts = [result.first_taken_s for result in run.results if result.first_taken_s is not None]
    known = [at for at in welcomed if at is not None]
    return {
        "handshakes_s": max(known) - run.connect_s if known and len(known) == len(welcomed) else None,
        "first_micro_batch_s": min(firsts) - run.connect_s if firsts else None,
        "server_start_s": run.server_start_s,
    }


def _processes(run: Measurements) -> dict[str, float | None]:
    million = run.total("tokens") / 1e6
    memory = [moment.server_memory_bytes for moment in run.moments if moment.server_memory_bytes is not None]
    clients = [moment.client_memory_bytes for moment in run.moments if moment.client_memory_bytes is not None]
    files = [moment.server_open_files for moment in run.moments if moment.server_open_files is not None]
    bound = run.setting.bound_bytes
    return {
        "server_cpu_s_per_mtok": _cpu(run.server, million),
        "client_cpu_s_per_mtok": _cpu(run.clients, million),
        "server_memory_mib": max(memory) / MIB if memory else None,
        "server_memory_slope": _slope(run.moments),
        "server_memory_of_bound": max(memory) / bound if memory and bound else None,
        "client_memory_mib": max(clients) / MIB if clients else None,
        "server_open_files": max(files, default=None),
    }


def _cpu(usage: tuple[Usage, Usage] | None, million_tokens: float) -> float | None:
    return _ratio(usage[1].cpu_s - usage[0].cpu_s, million_tokens) if usage else None


def _slope(moments: Sequence[IntervalMetrics]) -> float | None:
    """MiB a minute, of the straight line nearest to what was seen once the server had settled."""
    seen = [(m.at_s, m.server_memory_bytes) for m in moments if m.at_s >= 0 and m.server_memory_bytes is not None]
    later = [(at, memory / MIB) for at, memory in seen if at >= seen[-1][0] * SETTLED]
    if len(later) < 3 or later[0][0] == later[-1][0]:
        return None
    at, memory = np.array(later).T
    return float(np.polynomial.Polynomial.fit(at / 60, memory, 1).convert().coef[1])


def _rank(rank: RankResult, setting: LoadTestSetting) -> RankOutcome:
    waits = WaitHistogram.merged([rank.waits], rank.wait_s, rank.max_wait_s)
    return RankOutcome(
        rank=rank.rank,
        slow=rank.rank in setting.slow_ranks,
        stopped=rank.rank in setting.stopped_ranks,
        micro_batches=rank.micro_batches,
        wait_p50_ms=1000 * waits.quantile(0.5),
        wait_p99_ms=1000 * waits.quantile(0.99),
        wait_max_ms=1000 * waits.max_s,
    )


def _waited_for(results: Sequence[WorkerResult]) -> tuple[Waited, ...]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.waiting_for)
    split = [(*what.partition(": ")[::2], ms / 1000) for what, ms in total.most_common()]
    reasons = {reason: seconds for reason, whom, seconds in split if not whom}
    ordered = sorted(split, key=lambda each: (-reasons.get(each[0], 0), bool(each[1])))
    return tuple(Waited(reason=reason, whom=whom, seconds=seconds) for reason, whom, seconds in ordered)


def _errors(results: Sequence[WorkerResult]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.errors)
    return dict(total)


def as_json(outcome: LoadTestOutcome) -> str:
    """Return the outcome as one JSON object; ``docs/loadtest.md`` has its keys."""
    plain = asdict(outcome)
    plain["verdicts"] = [
        {"require": str(verdict.threshold), "measured": verdict.measured, "met": verdict.met}
        for verdict in outcome.verdicts
    ]
    plain["waits"] = [{"ms": ms, "share": share} for ms, share in outcome.waits]
    return json.dumps({"ok": outcome.ok, **plain}, indent=2, ensure_ascii=False)
