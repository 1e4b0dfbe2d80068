"""Memory of the server and of its clients over time, beside the bound that ``packhorse check`` prints.

    python -m tests.benchmarks.memory [--quick] [--seconds N]

Memory is PSS of each process tree, sampled ten times a second. Slopes are least squares over the second half.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.table import Table

from packhorse_service.text.sparkline import sparkline
from tests.benchmarks.children import Child, server_of
from tests.benchmarks.measuring import MemoryWatch, console
from tests.benchmarks.token_shards import PATTERN, VOCAB_SIZE, TokenShards

__all__ = ["tables"]

MIB = 1 << 20
WIDTH = 24  # of a sparkline
SHARDS, SAMPLES = 16, 1024


@dataclass(frozen=True, slots=True)
class Case:
    """Ranks, and the settings that differ from the defaults."""

    name: str
    ranks: int
    seq_length: int = 8192
    packs: int = 4  # of each rank in a step
    settings: dict[str, Any] = field(default_factory=dict)
    pause_s: float = 0.0
    sources: int = 1
    sample_ids: int = 500  # in the mean

    def config(self, shards: TokenShards) -> dict[str, Any]:
        source = {"shards": f"{shards.folder}/{PATTERN}", "epochs": "endless"}
        contract = {"seq_length": self.seq_length, "global_batch_size": self.packs * self.ranks}
        return {
            "listen": "tcp://127.0.0.1:*",
            "layout": {"data": self.ranks},
            "contract": {**contract, "vocab_size": VOCAB_SIZE},
            "sources": {f"source{number}": source for number in range(self.sources)},
            "loading": {"workers": 0},
            **self.settings,
        }


CASES = (
    Case("1 rank", 1, packs=64),
    Case("4 ranks", 4, packs=16),
    Case("4 ranks, slow", 4, packs=16, pause_s=0.2),
    Case("4 ranks, 2 loaders", 4, packs=16, settings={"loading": {"workers": 2}}),
    Case("4 ranks, window of 4 steps", 4, packs=16, settings={"packing": {"window": 4}}),
    Case("4 ranks, L = 65,536", 4, seq_length=65_536),
    Case("4 ranks, 16 sources", 4, packs=16, sources=16),
    Case("4 ranks, samples of 100 ids", 4, packs=16, sample_ids=100),
    Case("64 ranks", 64),
    Case("64 ranks, steps of 1,024 packs", 64, packs=16),
)


QUICK = tuple(case for case in CASES if case.name in ("1 rank", "4 ranks", "64 ranks"))


@dataclass(frozen=True, slots=True)
class Watched:
    server: list[tuple[float, int]]
    ranks: list[tuple[float, int]]
    bound: int
    tokens: int


def watch(case: Case, shards: TokenShards, seconds: float) -> Watched:
    """Run a case; raises where a process fails."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        config = Path(folder) / "feed.yaml"
        config.write_text(yaml.safe_dump(case.config(shards)))
        ranks = Child(["-m", "tests.benchmarks.memory_ranks"])
        started.callback(ranks.end)
        ranks.await_ready()
        server, endpoint = server_of(config, started)
        with MemoryWatch(lambda: [server.pid]) as of_server, MemoryWatch(lambda: [ranks.pid]) as of_ranks:
            task = {"endpoint": endpoint, "capacity": case.seq_length, "ranks": case.ranks}
            ranks.go({**task, "seconds": seconds, "pause_s": case.pause_s})
            tokens = int(ranks.result(needed=[server])["tokens"])
        return Watched(of_server.seen, of_ranks.seen, bound_of(config), tokens)


def bound_of(config: Path) -> int:
    """What ``packhorse check`` prints."""
    command = [sys.executable, "-m", "packhorse_service", "check", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(json.loads(done.stdout)["derived"]["memory_bound_bytes"])


def memory_line(seen: Sequence[tuple[float, int]], top: int) -> str:
    """Memory over time, from nothing to ``top``."""
    chunks = np.array_split(np.array([size for _, size in seen]), WIDTH)
    return sparkline([float(chunk.max()) for chunk in chunks if len(chunk)], 0.0, top)


def slope(seen: Sequence[tuple[float, int]]) -> float:
    """Bytes a second, over the second half."""
    half = np.array(seen[len(seen) // 2 :], float)
    return float(np.polyfit(half[:, 0], half[:, 1], 1)[0])


def memory_table(folder: Path, cases: Sequence[Case], seconds: float) -> Table:
    columns = ("server peak MiB", "bound MiB", "of it", "slope MiB/min", "server over time", "ranks peak MiB", "Mtok")
    table = Table("", *columns, title=f"Memory over {seconds:.0f} s")
    table.caption = (
        "log-normal samples of 500 ids in the mean; bound: what check prints; over time: from 0 to the highest of the "
        "case; ranks: all in one process"
    )
    for case in cases:
        shards = TokenShards.written(folder / str(case.sample_ids), SHARDS, SAMPLES, case.sample_ids)
        seen = watch(case, shards, seconds)
        peak = max(size for _, size in seen.server)
        table.add_row(
            case.name,
            f"{peak / MIB:.0f}",
            f"{seen.bound / MIB:.0f}",
            f"{peak / seen.bound:.0%}",
            f"{60 * slope(seen.server) / MIB:+.1f}",
            memory_line(seen.server, peak),
            f"{max(size for _, size in seen.ranks) / MIB:.0f}",
            f"{seen.tokens / 1e6:.0f}",
        )
    return table


def tables(*, quick: bool = False, seconds: float | None = None) -> Iterator[Table]:
    """On data in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield memory_table(Path(folder), QUICK if quick else CASES, seconds or (5.0 if quick else 30.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three rows, 5 seconds for each, not 30")
    parser.add_argument("--seconds", type=float, metavar="N", help="for each row")
    asked = parser.parse_args()
    out = console()
    for table in tables(quick=asked.quick, seconds=asked.seconds):
        out.print(table)


if __name__ == "__main__":
    main()
