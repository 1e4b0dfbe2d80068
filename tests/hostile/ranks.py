"""Well-behaved ranks in a process of their own: they read at a steady pace and count.

    python -m tests.hostile.ranks ENDPOINT RANKS COUNTS

``COUNTS`` is a file of int64 [RANKS]: micro-batches handed out so far. What a rank fails with is printed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from packhorse import BatchContract, Feed, ParallelLayout
from tests.harness import DEADLINE_S, wait_until

PAUSE_S = 0.02  # of a loop behind each micro-batch: far less than a server can serve


def read_steadily(endpoint: str, ranks: int, rank: int, counts: npt.NDArray[np.int64]) -> None:
    layout = ParallelLayout(data=ranks)
    try:
        feed = Feed(
            endpoint,
            layout=layout,
            rank=rank,
            contract=BatchContract(),
            arrays="numpy",
            start_timeout=DEADLINE_S,
            stall_timeout=DEADLINE_S,
        )
        for _ in feed:
            counts[rank] += 1
            time.sleep(PAUSE_S)
    except Exception as error:  # noqa: BLE001  whatever it is, the test must see it
        os.write(1, f"rank {rank}: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


@dataclass
class SteadyRanks:
    """Such a process, seen from the test."""

    process: subprocess.Popen[str]
    counts: npt.NDArray[np.int64]

    def throughput(self, during_s: float) -> float:
        """Micro-batches a second of the slowest rank."""
        pause, begun, before = threading.Event(), time.monotonic(), self.counts.copy()
        pause.wait(during_s)
        return float((self.counts - before).min() / (time.monotonic() - begun))

    def assert_untroubled(self) -> None:
        assert self.process.poll() is None, self.process.stdout.read() if self.process.stdout else ""


@contextlib.contextmanager
def steady_ranks(endpoint: str, ranks: int, folder: Path) -> Iterator[SteadyRanks]:
    """Ranks that read until the end; they have begun when the block is entered."""
    path = folder / "counts"
    counts = np.memmap(path, np.int64, "w+", shape=(ranks,))
    command = [sys.executable, "-m", "tests.hostile.ranks", endpoint, str(ranks), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reading = SteadyRanks(process, counts)
        try:
            wait_until(lambda: bool(counts.min() > 3) or process.poll() is not None, "ranks that read")
            reading.assert_untroubled()
            yield reading
        finally:
            process.kill()


def main(endpoint: str, ranks: int, path: Path) -> None:
    counts = np.memmap(path, np.int64, "r+", shape=(ranks,))
    threads = [threading.Thread(target=read_steadily, args=(endpoint, ranks, rank, counts)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
