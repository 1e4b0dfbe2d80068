"""Every figure that a load test measures, by name: what thresholds, JSON, tables and the documentation say.

Rates and waits are of the time that is measured: it begins when every rank has taken a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["METRICS", "Metric"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure; ``None`` stands for its value where that cannot be known."""

    name: str
    meaning: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "tokens_per_s", "distinct tokens a second: what 4 tensor-parallel ranks read counts once, fillers do not"
        ),
        Metric("micro_batches_per_s", "micro-batches a second, of all ranks"),
        Metric("gigabytes_per_s", "10⁹ bytes a second on the wire, headers included, to all ranks"),
        Metric("wire_bytes_per_token", "bytes on the wire per token that a rank gets"),
        Metric("wait_p50_ms", "from asking for a micro-batch to having it rebuilt: the median of all ranks' waits"),
        Metric("wait_p95_ms", "95 % of the waits are not longer"),
        Metric("wait_p99_ms", "99 % are not"),
        Metric("wait_max_ms", "the longest"),
        Metric("wait_share", "share of the time of all ranks that they waited"),
        Metric("wait_p99_steps", "wait_p99_ms ÷ step_ms"),
        Metric("stopped_wait_max_ms", "the longest wait of those that overlap --stopped-ranks, which no other counts"),
        Metric("step_ms", "time a step took"),
        Metric("fairness", "fewest micro-batches of a rank ÷ their mean, over those that are neither slow nor stopped"),
        Metric("handshakes_s", "from connecting to the last rank's WELCOME"),
        Metric("first_micro_batch_s", "from connecting to the first micro-batch of all"),
        Metric("server_start_s", "from launching the server to its listening"),
        Metric("server_cpu_s_per_mtok", "processor time of the server and its loaders per million distinct tokens"),
        Metric("client_cpu_s_per_mtok", "the same of the simulated ranks"),
        Metric("server_memory_mib", "most memory of the server and its loaders"),
        Metric("server_memory_slope", "MiB a minute that it grew, over the later two thirds of the time"),
        Metric("server_memory_of_bound", "server_memory_mib ÷ what `packhorse check` bounds it by"),
        Metric("client_memory_mib", "most memory of all processes that simulate ranks"),
        Metric("server_open_files", "most open files of the server"),
        Metric("late_p99_ms", "how late the load test itself was: 99 % of what its ranks did was not later"),
        Metric("disconnects", "connections that broke"),
        Metric("errors", "ranks that failed"),
    )
}
