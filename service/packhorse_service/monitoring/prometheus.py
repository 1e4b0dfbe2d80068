"""Metrics for Prometheus, made from a ``ServerStatus`` whenever somebody scrapes.

Their number is bounded: by streams, sources, rules and causes, and by readers where a stream has few of those
(``READERS_SHOWN``). Of more readers the worst is shown alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from packhorse_service.monitoring.status import ReaderStatus, ServerStatus, SourceStatus, StreamStatus
from packhorse_service.protocol.diagnosis import Cause

__all__ = ["READERS_SHOWN", "registry_of"]

READERS_SHOWN = 256  # of one stream, each with series of its own
PREFIX = "packhorse_"

Sample = tuple[tuple[str, ...], float]  # label values, value


@dataclass(frozen=True, slots=True)
class StreamMetric:
    """Metric with the samples that a stream gives it; the first label is the stream's."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    samples: Callable[[StreamStatus], Iterable[Sample]]
    kind: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily


def registry_of(latest: Callable[[], ServerStatus]) -> CollectorRegistry:
    """Return the registry that a scrape shows: the latest status, and what the process takes."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(latest))
    ProcessCollector(registry=registry)
    return registry


class _StatusCollector(Collector):
    def __init__(self, latest: Callable[[], ServerStatus]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        status = self._latest()
        yield from _of_server(status)
        for metric in STREAM_METRICS:
            yield _of_streams(metric, status)


def _of_server(status: ServerStatus) -> Iterator[Metric]:
    build = GaugeMetricFamily(PREFIX + "build_info", "The version of the server; always 1.", labels=["version"])
    build.add_metric([status.version], 1)
    yield build
    yield GaugeMetricFamily(
        PREFIX + "data_loop_age_seconds", "Since the data loop last turned; it turns every second.", status.age_s
    )
    yield GaugeMetricFamily(PREFIX + "connections", "Open connections, of readers and of others.", status.connections)
    yield GaugeMetricFamily(PREFIX + "uptime_seconds", "Since the server started.", status.uptime_s)


def _of_streams(metric: StreamMetric, status: ServerStatus) -> Metric:
    family = metric.kind(PREFIX + metric.name, metric.meaning, labels=["stream", *metric.labels])
    for stream in status.streams:
        for labels, value in metric.samples(stream):
            family.add_metric([stream.name, *labels], value)
    return family


# Of one stream --------------------------------------------------------------------------------------------


def _value(of: Callable[[StreamStatus], float]) -> Callable[[StreamStatus], Iterable[Sample]]:
    return lambda stream: [((), of(stream))]


def _of_sources(of: Callable[[SourceStatus], float]) -> Callable[[StreamStatus], Iterable[Sample]]:
    return lambda stream: [((source.name,), of(source)) for source in stream.sources]


def _of_readers(of: Callable[[ReaderStatus], float]) -> Callable[[StreamStatus], Iterable[Sample]]:
    def samples(stream: StreamStatus) -> Iterable[Sample]:
        few = stream.readers if len(stream.readers) <= READERS_SHOWN else ()
        return [((str(reader.rank),), of(reader)) for reader in few]

    return samples


def _worst(of: Callable[[ReaderStatus], float]) -> Callable[[StreamStatus], Iterable[Sample]]:
    return lambda stream: [((), max(map(of, stream.readers), default=0))]


def _connected(reader: ReaderStatus) -> bool:
    return not reader.state.away


def _waiting(stream: StreamStatus) -> Iterable[Sample]:
    """Count by every cause, the absent ones too: a series that is missing cannot be told from one that is 0."""
    causes = Counter(reader.cause for reader in stream.readers if reader.state.waits)
    return [((cause,), causes[cause]) for cause in Cause]


def _stalled(stream: StreamStatus) -> Iterable[Sample]:
    return [((cause,), float(stream.stall is not None and stream.stall.cause is cause)) for cause in Cause]


def _information(stream: StreamStatus) -> Iterable[Sample]:
    derived = stream.derived
    return [((str(derived["fingerprint"]), str(derived["packing"]), str(derived["layout"])), 1)]


def counter(
    name: str, meaning: str, samples: Callable[[StreamStatus], Iterable[Sample]], labels: tuple[str, ...] = ()
) -> StreamMetric:
    """Return a metric that only ever grows."""
    return StreamMetric(name, meaning, labels, samples, CounterMetricFamily)


def gauge(
    name: str, meaning: str, samples: Callable[[StreamStatus], Iterable[Sample]], labels: tuple[str, ...] = ()
) -> StreamMetric:
    """Return a metric that goes up and down."""
    return StreamMetric(name, meaning, labels, samples)


STREAM_METRICS = (
    counter("steps", "Steps made.", _value(lambda s: s.steps)),
    counter("delivered_steps", "Steps taken by every reader.", _value(lambda s: s.delivered_steps)),
    counter("microbatches", "Micro-batches made, of all data-parallel ranks.", _value(lambda s: s.microbatches)),
    counter("tokens", "Tokens in the steps made.", _value(lambda s: s.tokens)),
    counter("loss_tokens", "Supervised tokens in the steps made.", _value(lambda s: s.loss_tokens)),
    counter("slots", "Slots of the rows made, padding included.", _value(lambda s: s.slots)),
    counter(
        "replayed_microbatches", "Micro-batches sent again to readers that came back.", _value(lambda s: s.replayed)
    ),
    counter("reconnects", "Readers that came back to a running attempt.", _value(lambda s: s.reconnects)),
    counter(
        "rejects",
        "Refused readers, by each rule that they broke.",
        lambda s: [((rule,), count) for rule, count in s.rejects.items()],
        ("rule",),
    ),
    counter(
        "stall_seconds",
        "Time in which somebody waited for over 2 s, by its first cause, to the second.",
        lambda s: [((cause,), s.stalled_s.get(cause, 0.0)) for cause in Cause],
        ("cause",),
    ),
    counter("source_samples", "Samples drawn.", _of_sources(lambda s: s.samples), ("source",)),
    counter("source_tokens", "Ids of the samples drawn.", _of_sources(lambda s: s.tokens), ("source",)),
    counter(
        "source_skipped_samples", "Samples whose content is unusable.", _of_sources(lambda s: s.skipped), ("source",)
    ),
    counter(
        "source_lost_tokens",
        "Targets lost to the over-length policy.",
        _of_sources(lambda s: s.lost_tokens),
        ("source",),
    ),
    counter(
        "source_unsupervised_tokens",
        "Targets left out by the policy `unsupervised`: nothing of their sample or piece is trained on.",
        _of_sources(lambda s: s.unsupervised_tokens),
        ("source",),
    ),
    gauge("source_epoch", "The epoch that a source is in, from 0.", _of_sources(lambda s: s.epoch), ("source",)),
    gauge(
        "source_epoch_progress_ratio",
        "Shards of this epoch that were opened.",
        _of_sources(lambda s: s.progress),
        ("source",),
    ),
    counter(
        "reader_wait_seconds",
        "Time in which its loop asked and had nothing, to the second.",
        _of_readers(lambda r: r.waited_s),
        ("rank",),
    ),
    gauge("reader_lag_microbatches", "Behind the furthest reader.", _of_readers(lambda r: r.lag), ("rank",)),
    gauge("reader_ready_microbatches", "Sent, and not yet taken.", _of_readers(lambda r: r.ready), ("rank",)),
    gauge(
        "reader_loop_age_seconds", "Since its training loop last asked.", _of_readers(lambda r: r.loop_age_s), ("rank",)
    ),
    gauge("reader_silence_seconds", "Since it was last heard.", _of_readers(lambda r: r.silence_s), ("rank",)),
    gauge("reader_connected", "1 while it is connected and heard.", _of_readers(_connected), ("rank",)),
    gauge("reader_lag_microbatches_max", "Of the reader furthest behind.", _worst(lambda r: r.lag)),
    gauge("reader_loop_age_seconds_max", "Of the loop that has not asked for longest.", _worst(lambda r: r.loop_age_s)),
    gauge("reader_silence_seconds_max", "Of the reader that is silent for longest.", _worst(lambda r: r.silence_s)),
    gauge("readers", "That the layout has.", _value(lambda s: len(s.readers))),
    gauge("readers_connected", "Connected and heard.", _value(lambda s: sum(map(_connected, s.readers)))),
    gauge("stalled", "1 while somebody has waited for over 2 s, by its first cause.", _stalled, ("cause",)),
    gauge("waiting_readers", "Whose loop asks and has nothing, by cause.", _waiting, ("cause",)),
    gauge(
        "fill_ratio", "Slots of segments with their alignment padding, of the last step's.", _value(lambda s: s.fill)
    ),
    gauge("useful_fill_ratio", "Tokens, of the last step's slots.", _value(lambda s: s.useful_fill)),
    gauge("steps_held", "Steps made, and not yet taken by every reader.", _value(lambda s: s.held)),
    gauge("step", "Where the slowest reader stands.", _value(lambda s: s.step)),
    gauge("attempt", "The number of the attempt that runs.", _value(lambda s: s.attempt)),
    gauge("snapshot_bytes", "Of the last step's snapshot; at most 65,536.", _value(lambda s: s.snapshot_bytes)),
    gauge("loader_workers", "Loader processes; 0 where the server loads itself.", _value(lambda s: s.loaders.workers)),
    gauge("loader_busy_ratio", "Loaders at work, over half a minute.", _value(lambda s: s.loaders.busy)),
    counter("loader_restarts", "Loader processes that died and were replaced.", _value(lambda s: s.loaders.restarts)),
    gauge("failed", "1 once the stream cannot go on.", _value(lambda s: float(s.failure is not None))),
    gauge("stream_info", "What is served; always 1.", _information, ("fingerprint", "packing", "layout")),
)
