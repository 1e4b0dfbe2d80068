"""What metrics, logs and the status page take of the whole path: with all of them, and with none, in turns.

    python -m tests.benchmarks.watching [--pairs N] [--data FOLDER]

Watched: the loop looks at itself once a second and logs as it does by default, in JSON; each second somebody scrapes
``/metrics`` and a page asks for ``/status.json``. Unwatched: the loop looks at nothing, nothing listens, nothing is
logged. Each pair runs the two one after the other, and changes their order; the figure is the median over pairs.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import yaml
from rich.table import Table

from tests.benchmarks.children import Child, server_of
from tests.benchmarks.measuring import console
from tests.benchmarks.token_shards import TokenShards
from tests.benchmarks.whole_path import CAPACITY, Row, Way, feed_config

__all__ = ["tables"]

ASKED_EVERY_S = 1.0
PATHS = ("/metrics", "/status.json")
AT_MOST = 0.02  # of the throughput


@dataclass(frozen=True, slots=True)
class Measured:
    tokens_per_s: float
    server_cpu_s: float  # for a million tokens
    asked: int  # answers that were read meanwhile

    @classmethod
    def of(cls, data: int, shards: TokenShards, epochs: int, *, watched: bool) -> Measured:
        """One run with ``data`` ranks."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
            row = Row(Way.OURS, data=data)
            ranks = [Child(("-m", "tests.benchmarks.feed_rank", "numpy")) for _ in range(data)]
            for rank in ranks:
                started.callback(rank.end)
                rank.await_ready()
            config = Path(folder) / "feed.yaml"
            described = feed_config(row, shards, "tcp://127.0.0.1:*")
            described["sources"]["shards"]["epochs"] = epochs
            config.write_text(yaml.safe_dump({**described, "monitor": "127.0.0.1:0" if watched else None}))
            url = config.with_name("url")
            server, endpoint = (
                server_of(config, started, "--monitor-file", str(url), "--log-format", "json")
                if watched
                else server_of(config, started, "--log-level", "error", module="tests.benchmarks.unwatched")
            )
            asking = started.enter_context(_Asking(url)) if watched else None
            began = time.monotonic()
            for number, rank in enumerate(ranks):
                rank.go({**asdict(row), "capacity": CAPACITY, "endpoint": endpoint, "rank": number})
            done = max(rank.result(needed=[server])["done"] for rank in ranks)
            tokens = epochs * shards.tally.tokens
            cpu_s = server.cpu_at_end()
            for rank in ranks:
                rank.cpu_at_end()
        return cls(tokens / (done - began), cpu_s / tokens * 1e6, 0 if asking is None else asking.answers)


class _Asking(threading.Thread):
    """A Prometheus and a browser, from the moment at which the monitor is there."""

    def __init__(self, url: Path) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._over = threading.Event()
        self.answers = 0

    def run(self) -> None:
        with suppress(OSError):  # the server has ended
            while not self._over.wait(ASKED_EVERY_S):
                for path in PATHS:
                    with urllib.request.urlopen(self._url.read_text().strip() + path, timeout=10) as answer:
                        self.answers += bool(answer.read())

    def __enter__(self) -> _Asking:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def tables(*, quick: bool = False) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as folder:
        yield from measured_tables(Path(folder), pairs=3 if quick else 9)


def measured_tables(folder: Path, pairs: int) -> Iterator[Table]:
    shards = TokenShards.written(folder, 16, 1024)
    columns = ("Mtok/s watched", "unwatched", "throughput lost", "server's CPU-s/Mtok", "unwatched", "must be", "")
    table = Table("", *columns, title=f"Watched and unwatched, medians of {pairs} pairs")
    for data, epochs in ((1, 12), (4, 12)):
        table.add_row(f"{data} DP", *_compared(data, shards, epochs, pairs))
    yield table


def _compared(data: int, shards: TokenShards, epochs: int, pairs: int) -> list[str]:
    runs: dict[bool, list[Measured]] = {True: [], False: []}
    for pair in range(pairs):
        for watched in (pair % 2 == 0, pair % 2 == 1):
            runs[watched].append(Measured.of(data, shards, epochs, watched=watched))
    assert all(run.asked for run in runs[True]), "nobody looked"
    lost = 1 - median(a.tokens_per_s / b.tokens_per_s for a, b in zip(runs[True], runs[False], strict=True))
    speeds = [f"{median(run.tokens_per_s for run in runs[watched]) / 1e6:.1f}" for watched in (True, False)]
    cpu = [f"{median(run.server_cpu_s for run in runs[watched]):.4f}" for watched in (True, False)]
    met = "met" if lost <= AT_MOST else "[bold red]missed[/]"
    return [*speeds, f"{lost:.1%}", *cpu, f"≤ {AT_MOST:.0%}", met]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9, metavar="N")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="write the shards here, or find them here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for table in measured_tables(asked.data or Path(folder), asked.pairs):
            console().print(table)


if __name__ == "__main__":
    main()
