"""``packhorse serve``: from the configuration file to a server that listens."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from packhorse.errors import ConfigError
from packhorse_service.check.memory_bound import MemoryBound, refuse_over_limit, server_memory, stream_memory
from packhorse_service.config.addresses import Address, address_of
from packhorse_service.config.serve_config import CurveConfig, ServeConfig, load_config
from packhorse_service.monitoring.collect import StatusCollector
from packhorse_service.monitoring.loop_hook import LoopMonitor
from packhorse_service.monitoring.recent_events import RecentEvents
from packhorse_service.monitoring.status_http import StatusServer
from packhorse_service.pipeline.all_streams import plan_streams
from packhorse_service.pipeline.plan import StreamPlan, make_engine
from packhorse_service.protocol.admission import ACCEPTED_AHEAD, Limits
from packhorse_service.protocol.derived import derived_values
from packhorse_service.protocol.stream_spec import readers_of
from packhorse_service.server.authentication import Curve, load_curve
from packhorse_service.server.bind_policy import is_private, require_private
from packhorse_service.server.lifetime import FAILURE_GRACE_S, Ending
from packhorse_service.server.logs import EVENTS, LogForm, log_to_stderr
from packhorse_service.server.rlimit import allow_open_files
from packhorse_service.server.server import Server
from packhorse_service.server.signals import ParentWatch, stopped_by_signals
from packhorse_service.server.systemd import SystemdNotifier

__all__ = ["serve_command"]

log = logging.getLogger("packhorse.server")
events = logging.getLogger(EVENTS)


class LogLevel(StrEnum):
    """Level from which on lines are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve_command(
    config: Annotated[Path, typer.Argument(help="The configuration file (YAML).", metavar="FEED.YAML")],
    listen: Annotated[str | None, typer.Option(help="Listen here instead of where the file says.")] = None,
    endpoint_file: Annotated[
        Path | None, typer.Option(help="Write the endpoint to this file once the server listens.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on a network without keys: whoever reaches it can read the data.")
    ] = False,
    monitor: Annotated[
        str | None,
        typer.Option(help="Serve status page, metrics and probes here instead; none: nowhere.", metavar="HOST:PORT"),
    ] = None,
    monitor_file: Annotated[Path | None, typer.Option(help="Write the URL of the status page to this file.")] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="The server's key instead of curve.key_file.", metavar="SERVER.KEY")
    ] = None,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Wait for the next job, from the beginning, once all have left.")
    ] = False,
    failure_grace: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds for which a server whose data has failed tells why to ranks that come later."
        ),
    ] = FAILURE_GRACE_S,
    parent: Annotated[
        int | None,
        typer.Option(help="Stop once this process, which has started the server, has ended.", metavar="PID"),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged.")] = LogLevel.INFO,
    log_format: Annotated[LogForm, typer.Option(help="One line an event, as text or as JSON.")] = LogForm.TEXT,
) -> int:
    """Launch the packing server beside the trainers.

    It reads and packs at once, waits for every reader of the layout, and ends when all have left. Elsewhere than
    on loopback or ipc it needs keys: curve: {key_file: keys/server.key, clients: keys/clients.toml} in the file, made
    by packhorse keygen.

    Exit code 0 where every reader has left or SIGTERM has stopped it, 1 where it failed or could not start, 3 where
    readers stayed silent behind the end of the data.
    """
    log_to_stderr(log_level, log_format)
    described = load_config(config)
    address = address_of(_or_none(monitor) if monitor else described.monitor, listen or described.listen)
    where = listen or described.listen
    require_private(where, curve=described.curve is not None, insecure=insecure)
    if insecure and described.curve is None and not is_private(where):
        log.warning("without keys on %s (--insecure): whoever reaches it can read the data and pose as a rank", where)
    curve = _curve(described.curve, key_file, config.parent)
    serving = Serving(
        described, config.parent, where, address, curve, insecure=insecure, parent=parent, failure_grace_s=failure_grace
    )
    with stopped_by_signals(serving.stop):
        ending = serving.serve_job(monitor_file, endpoint_file)
        while keep_running and serving.stopped_by is None:
            events.info("the job has ended; waiting for the next one, from the beginning or where its state says")
            ending = serving.serve_job(monitor_file, endpoint_file)
    return EXIT_CODES[ending]


@dataclass(slots=True)
class Serving:
    """Settings of ``packhorse serve``, by which it serves one job after the other."""

    described: ServeConfig
    base: Path
    listen: str
    monitor: Address | None
    curve: Curve | None
    insecure: bool
    parent: int | None
    failure_grace_s: float
    stopped_by: str | None = None
    server: Server | None = None  # of this job

    def stop(self, why: str) -> None:
        """End this job and take no other; safe in a signal handler."""
        self.stopped_by = why
        if self.server is None:
            raise SystemExit(0)  # nothing is served yet: whatever is being read need not come to its end
        self.server.stop(why)

    def serve_job(self, monitor_file: Path | None, endpoint_file: Path | None) -> Ending:
        """Serve until all readers have left, or as ``Server.serve`` says; the next job finds the same addresses."""
        described, self.server = self.described, None
        plans = _planned(described, self.base)
        with ExitStack() as resources:
            streams = [(stream, make_engine(described, stream)) for stream in plans]
            for _, engine in streams:
                resources.callback(engine.close)
            self.server = server = Server(
                streams,
                self.listen,
                steps_ahead=described.steps_ahead,
                rejoin_after_s=described.rejoin_after_s,
                failure_grace_s=self.failure_grace_s,
                curve=self.curve,
                insecure=self.insecure,
            )
            resources.callback(server.close)
            self.listen = server.endpoint
            hook, monitor_url = _monitored(server, self.monitor, resources)
            _announce(server.endpoint, monitor_url, plans)
            if monitor_url is not None and self.monitor is not None:
                self.monitor = replace(self.monitor, port=urlsplit(monitor_url).port or self.monitor.port)
            # The endpoint comes last: whoever finds it finds the other too.
            publish(monitor_url, monitor_file)
            publish(server.endpoint, endpoint_file)
            _collect_less()
            return server.serve(hook if self.parent is None else ParentWatch(self.parent, self.stop, hook))


EXIT_CODES = {Ending.ALL_LEFT: 0, Ending.STOPPED: 0, Ending.SILENT: 3}
OBJECTS_A_COLLECTION = 50_000


def _collect_less() -> None:
    """Look for cyclic garbage where there may be some, and not so often.

    What start-up made stays. A step is thousands of small objects in no cycles, which live until it is delivered: to
    look through them as often as Python does by itself, at every 700, takes 4 % of the server's CPU.
    """
    gc.freeze()
    gc.set_threshold(OBJECTS_A_COLLECTION)


def _planned(described: ServeConfig, base: Path) -> list[StreamPlan]:
    """Return the plan of every stream, for whose memory and connections there is room."""
    plans = plan_streams(described, base)
    refuse_over_limit(described, server_memory(_memory_of(stream, described, base) for stream in plans))
    for warning in dict.fromkeys(warning for stream in plans for warning in stream.warnings):
        log.warning("%s", warning)
    readers = [len(readers_of(stream.layout, stream.contract.readers)) for stream in plans]
    allow_open_files(Limits.for_readers(sum(readers)).connections, ahead=ACCEPTED_AHEAD)
    return plans


def _or_none(monitor: str) -> str | None:
    return None if monitor == "none" else monitor


def _monitored(server: Server, address: Address | None, resources: ExitStack) -> tuple[LoopMonitor, str | None]:
    """Return what watches the server's loop, and the URL of the status page, which is served until ``resources`` end.

    Raises ``ConfigError`` where the page cannot be served at ``address``.
    """
    recent = RecentEvents(server.clock)
    watched = [(stream.session, stream.producer) for stream in server.streams]
    collector = StatusCollector(server.endpoint, watched, server.clock())
    hook = LoopMonitor(collector, recent, SystemdNotifier(), server.clock)
    resources.enter_context(recent.attached())
    if address is None:
        return hook, None
    return hook, resources.enter_context(StatusServer(address, hook.latest)).url


def _announce(endpoint: str, monitor_url: str | None, plans: Sequence[StreamPlan]) -> None:
    """Log what is served, and where."""
    for stream in plans:
        readers = len(readers_of(stream.layout, stream.contract.readers))
        log.info("listening on %s for %d readers of %s, %s", endpoint, readers, stream.name, stream.layout)
        log.info("contract", extra={"stream": stream.name, **asdict(stream.contract)})
        log.info("derived", extra={"stream": stream.name, **derived_values(stream.contract, stream.layout)})
    if monitor_url is not None:
        log.info("status page, metrics and probes at %s", monitor_url)


def publish(text: str | None, path: Path | None) -> None:
    """Write a line to a file in one step: whoever reads it finds nothing or all of it."""
    if text is None or path is None:
        return
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def _curve(described: CurveConfig | None, key_file: Path | None, base: Path) -> Curve | None:
    """Read the keys, with the one that the command line names; it is relative to the working directory."""
    if key_file is None:
        return None if described is None else load_curve(described, base)
    if described is None:
        raise ConfigError(
            f"--key-file {str(key_file)!r}: the configuration has no curve, which says who may connect; "
            "add curve: {key_file: …, clients: …}, or leave the option out"
        )
    return load_curve(described.model_copy(update={"key_file": str(key_file.resolve())}), base)


def _memory_of(stream: StreamPlan, described: ServeConfig, base: Path) -> MemoryBound:
    sizes = {source.order.name: [shard.size for shard in source.shards] for source in stream.sources}
    return stream_memory(described.of_stream(stream.name), base, stream.contract, stream.layout, sizes)
