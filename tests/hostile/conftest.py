"""A server under attack, with ranks that read from it all the while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import RunningServer, running_server, write_config
from tests.hostile.ranks import SteadyRanks, steady_ranks
from tests.service.corpus import random_lengths, write_source

log = logging.getLogger(__name__)

RANKS = 2
ATTACK_S = 2.0
MEMORY_MIB = 64
THROUGHPUT = 0.9  # of what it is without an attack
TRIES = 5  # another process of the machine may take the processor meanwhile

Attack = Callable[[str, float], None]


def memory_mib(pid: int) -> float:
    """What a process holds alone, and its share of what it holds with others."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Pss in smaps_rollup")


class PeakMemory:
    """Watches the memory of a process in a thread."""

    def __init__(self, pid: int) -> None:
        self.normal = self.peak = memory_mib(pid)
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.03):
            self.peak = max(self.peak, memory_mib(self._pid))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> float:
        return self.peak - self.normal


@dataclass
class Besieged:
    """A server and its ranks."""

    server: RunningServer
    ranks: SteadyRanks
    log: Path
    calm: float  # micro-batches a second of a rank, nobody else being there

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    def withstands(self, attack: Attack) -> None:
        """The server stays up and within its memory, and no rank notices."""
        kept = 0.0
        for _ in range(TRIES):
            kept = self._attacked(attack) / self.calm
            if kept >= THROUGHPUT:
                break
            self.calm = self.ranks.throughput(1.0)
        assert kept >= THROUGHPUT, f"ranks keep {kept:.0%} of their throughput"

    def _attacked(self, attack: Attack) -> float:
        with PeakMemory(self.server.process.pid) as memory, ThreadPoolExecutor(1) as pool:
            attacking = pool.submit(attack, self.endpoint, time.monotonic() + ATTACK_S)
            throughput = self.ranks.throughput(ATTACK_S)
            attacking.result()
        assert self.server.process.poll() is None, self.log.read_text()[-2000:]
        self.ranks.assert_untroubled()
        log.info("%.0f %% of %.1f/s, memory +%.1f MiB", 100 * throughput / self.calm, self.calm, memory.grown)
        assert memory.grown <= MEMORY_MIB, f"memory grew by {memory.grown:.0f} MiB"
        return throughput


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    folder = tmp_path_factory.mktemp("besieged")
    write_source(folder / "docs", random_lengths(1, 2, 400, longest=120))
    docs = {"shards": "docs/*.tar"}
    config = write_config(
        folder,
        layout={"data": RANKS},
        contract={"seq_length": 256, "global_batch_size": 2 * RANKS, "vocab_size": 100_000},
        sources={"docs": {**docs, "epochs": "endless"}},
        streams={"validation": {"sources": {"docs": docs}}},
    )
    with running_server(config) as server, steady_ranks(server.endpoint, RANKS, folder) as ranks:
        yield Besieged(server, ranks, folder / "server.log", ranks.throughput(1.5))
