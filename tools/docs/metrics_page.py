"""The reference of the metrics, from what a scrape shows."""

from __future__ import annotations

from collections.abc import Iterator

from packhorse import __version__
from packhorse_service.monitoring.prometheus import PREFIX, STREAM_METRICS, registry_of
from packhorse_service.monitoring.status import ServerStatus
from tools.docs.markdown import code, table

__all__ = ["metrics"]

WITHOUT_STREAMS = ServerStatus(
    version=__version__, endpoint="", uptime_s=0, age_s=0, connections=0, ready=False, streams=()
)
PROCESS = "process_"


def metrics() -> str:
    """Every metric, those of the server first; ``process_*`` aside."""
    return table(("metric", "type", "labels", "meaning"), [*_of_server(), *_of_streams()])


def _of_server() -> Iterator[list[str]]:
    of_streams = {PREFIX + metric.name for metric in STREAM_METRICS}
    for family in registry_of(lambda: WITHOUT_STREAMS).collect():
        if family.name not in of_streams and not family.name.startswith(PROCESS):
            labels = sorted(family.samples[0].labels)
            yield [code(family.name), family.type, ", ".join(map(code, labels)), family.documentation]


def _of_streams() -> Iterator[list[str]]:
    for metric in STREAM_METRICS:
        kind = metric.kind(metric.name, metric.meaning).type
        name = PREFIX + metric.name + ("_total" if kind == "counter" else "")
        yield [code(name), kind, ", ".join(map(code, ("stream", *metric.labels))), metric.meaning]
