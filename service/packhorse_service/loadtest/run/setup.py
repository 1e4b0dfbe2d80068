"""From a scenario to what runs: the data, the layout, which ranks connect, and which of them are slow or stop."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packhorse.contract.batch_contract import BatchContract, ReaderPolicy
from packhorse.contract.layout import ParallelLayout
from packhorse.errors import ConfigError
from packhorse.transport.key_files import KEY_FILE, find_client_key
from packhorse_service.check.checks import check_streams
from packhorse_service.config.serve_config import ServeConfig, load_config
from packhorse_service.loadtest.ranks.worker_messages import Job
from packhorse_service.loadtest.run.measurements import LoadTestSetting
from packhorse_service.loadtest.run.usage import processor
from packhorse_service.loadtest.scenario.scenario import Scenario, SyntheticConfig, Transport
from packhorse_service.loadtest.scenario.synthetic import write_synthetic_feed
from packhorse_service.protocol.stream_spec import readers_of
from packhorse_service.server.authentication import ALL
from packhorse_service.server.key_generation import make_client, make_server

__all__ = ["LoadTestPlan", "prepare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestPlan:
    """Everything that is decided before a process starts."""

    scenario: Scenario
    feed: Path | None  # what the server serves; ``None`` where it runs already
    data: str
    key_file: Path | None
    layout: ParallelLayout
    contract: BatchContract
    ranks: tuple[int, ...]  # those that connect
    slow: tuple[int, ...]
    stopped: tuple[int, ...]
    bound_bytes: int | None

    def listen(self, folder: Path) -> str:
        """Endpoint at which a server of our own listens."""
        return f"ipc://{folder}/server" if self.scenario.transport is Transport.IPC else "tcp://127.0.0.1:*"

    def jobs(self, endpoint: str) -> tuple[Job, ...]:
        """Jobs, one a worker process, the ranks dealt in turn, so that each has its part of every kind."""
        processes = min(self.scenario.processes or os.cpu_count() or 1, len(self.ranks))
        counted = _counted(self.ranks, self.layout)
        return tuple(self._job(endpoint, self.ranks[number::processes], counted) for number in range(processes))

    def _job(self, endpoint: str, ranks: Sequence[int], counted: frozenset[int]) -> Job:
        scenario = self.scenario
        return Job(
            endpoint=endpoint,
            key_file=None if self.key_file is None else str(self.key_file.absolute()),
            layout=self.layout,
            contract=self.contract,
            ranks=tuple(ranks),
            counted=tuple(rank for rank in ranks if rank in counted),
            consume_s=scenario.consume_ms / 1000,
            jitter=scenario.jitter,
            slow=tuple(rank for rank in ranks if rank in self.slow),
            slow_factor=scenario.slow_factor,
            stopped=tuple(rank for rank in ranks if rank in self.stopped),
            seed=scenario.seed,
            window=scenario.window,
            verify=scenario.verify,
            orderly=self.feed is not None,  # a server that is not ours goes on when its ranks have gone
        )

    def setting(self, endpoint: str, processes: int, command: str) -> LoadTestSetting:
        """Return the setting that the report tells of."""
        scenario = self.scenario
        return LoadTestSetting(
            command=command,
            data=self.data,
            endpoint=endpoint,
            layout=str(self.layout),
            readers=len(self.ranks),
            processes=processes,
            consume_ms=scenario.consume_ms,
            jitter=scenario.jitter,
            slow_ranks=self.slow,
            slow_factor=scenario.slow_factor,
            stopped_ranks=self.stopped,
            seconds=scenario.seconds,
            verify=scenario.verify,
            machine=_machine(),
            bound_bytes=self.bound_bytes,
        )


def prepare(scenario: Scenario, folder: Path) -> LoadTestPlan:
    """Decide everything; synthetic shards are written to ``folder``. Raises ``ConfigError``."""
    feed, data, key_file = scenario.feed, f"{scenario.feed}", scenario.key_file
    if feed is None and scenario.endpoint is None:
        synthetic = scenario.synthetic or SyntheticConfig()
        curve, key_file = _make_keys(folder / "keys") if scenario.curve else (None, None)
        layout = scenario.layout or ParallelLayout()
        feed = write_synthetic_feed(folder, synthetic, layout, scenario.seed, curve=curve)
        data = (
            f"synthetic: seq_length {synthetic.seq_length:,}, samples of {synthetic.mean_length:,} slots in the mean, "
            f"vocabulary {synthetic.vocab_size:,}, {synthetic.micro_batches} micro-batches a step"
        )
    config = None if feed is None else load_config(feed)
    if config is not None and config.curve is not None:
        _require_key(feed, key_file)
    layout = scenario.layout or (config.layout if config is not None else ParallelLayout())
    contract = config.contract if config is not None else BatchContract()
    ranks = tuple(sorted(layout.rank(at) for at in readers_of(layout, contract.readers or ReaderPolicy.ALL)))
    slow = _spread(ranks, scenario.slow_ranks.of(len(ranks)))
    others = tuple(rank for rank in ranks if rank not in slow)
    _require_enough(scenario, ranks, slow)
    return LoadTestPlan(
        scenario=scenario,
        feed=None if scenario.endpoint is not None else feed,
        data=data if config is not None else "what the server serves",
        key_file=key_file,
        layout=layout,
        contract=contract,
        ranks=ranks,
        slow=slow,
        stopped=_spread(others, scenario.stopped_ranks),
        bound_bytes=_bound(config, feed.parent) if config and feed else None,
    )


def _make_keys(folder: Path) -> tuple[dict[str, str], Path]:
    """Keys for this test alone: the section of the configuration, and the file for all ranks."""
    server, (ranks, clients) = make_server(folder), make_client(folder, "ranks", ALL)
    return {"key_file": str(server.path), "clients": str(clients.path)}, ranks.path


def _require_key(feed: Path | None, key_file: Path | None) -> None:
    """Raise ``ConfigError`` where a feed has keys and the ranks have none, before anything is started."""
    if find_client_key(key_file) is None:
        raise ConfigError(f"feed={str(feed)!r} has curve: give the ranks a key (key_file, or {KEY_FILE})")


def _bound(config: ServeConfig, base: Path) -> int | None:
    """Return what ``packhorse check`` bounds the server's memory by, where it does."""
    return check_streams(config, base).derived.get("memory_bound_bytes")


def _require_enough(scenario: Scenario, ranks: Sequence[int], slow: Sequence[int]) -> None:
    if scenario.slow_ranks.count > len(ranks):
        raise ConfigError(f"slow_ranks={scenario.slow_ranks.count}: only {len(ranks)} ranks connect; ask for fewer")
    if scenario.stopped_ranks > len(ranks) - len(slow):
        raise ConfigError(
            f"stopped_ranks={scenario.stopped_ranks}: {len(ranks)} ranks connect and {len(slow)} of them are slow; "
            f"must be at most {len(ranks) - len(slow)}"
        )


def _spread(ranks: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of them, evenly apart."""
    return tuple(ranks[(2 * number + 1) * len(ranks) // (2 * count)] for number in range(count))


def _counted(ranks: Sequence[int], layout: ParallelLayout) -> frozenset[int]:
    """Return the first rank of each data-parallel coordinate: its peers get the same tokens, or slices of them."""
    first: dict[int, int] = {}
    for rank in sorted(ranks, key=lambda rank: layout.coordinates(rank)[::-1]):
        first.setdefault(layout.coordinates(rank).data, rank)
    return frozenset(first.values())


def _machine() -> str:
    return f"{processor()}, {os.cpu_count() or 1} cores, {platform.system()}, Python {platform.python_version()}"
