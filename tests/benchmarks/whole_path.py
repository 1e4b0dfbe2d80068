"""From shard bytes to full micro-batches in the consumers: the product, the limit and what people write, in one run.

    python -m tests.benchmarks.whole_path [--quick] [--repeats N] [--only TEXT] [--data FOLDER]

Pre-tokenised WebDataset shards, packs of 8,192 slots, 16 packs' look-ahead, page cache warm. CPU is that of all
processes of a row and of their children, user and system, less what each had used when its imports were done; loader
processes of the server count from their birth. A token that several tensor-parallel ranks read counts once. Rows are
interleaved, figures are medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml
from rich.table import Table

from tests.benchmarks.children import Child, server_of
from tests.benchmarks.consuming import Tally
from tests.benchmarks.measuring import MemoryWatch, console
from tests.benchmarks.token_shards import PATTERN, VOCAB_SIZE, TokenShards

__all__ = ["tables"]

CAPACITY = 8192
LOOKAHEAD = 16  # packs
STEP_PACKS = 64


class Way(StrEnum):
    OURS = "packhorse serve"
    LIMIT = "limit: header walk + copy + ZeroMQ"
    FULL_LIMIT = "limit, with digests and full arrays"
    BASELINE = "webdataset + DataLoader + FFD"


FULL = "full"
FULL_IS = "full: int64 tokens, labels and positions, float32 mask, logical and physical offsets; every token is touched"
DELIVERS = {Way.LIMIT: "int32 tokens, offsets"}  # the other ways all of it


@dataclass(frozen=True, slots=True)
class Row:
    """One way to feed ``data`` x ``tensor`` ranks."""

    way: Way
    data: int = 1
    tensor: int = 1
    workers: int = 0  # loader processes: of the server, or of each rank
    transport: str = "tcp"
    arrays: str = "numpy"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    @property
    def shape(self) -> str:
        return f"{self.data} DP" if self.tensor == 1 else f"{self.tensor} TP"

    @property
    def name(self) -> str:
        details = {
            Way.OURS: f", {self.workers} loaders, {self.transport}, {self.arrays}",
            Way.LIMIT: f", {self.transport}",
            Way.FULL_LIMIT: f", {self.transport}",
            Way.BASELINE: f", w = {self.workers}",
        }
        return f"{self.way}{details[self.way]}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one run of one row. Seconds and bytes."""

    tokens: int
    cpu_s: float
    feeding_s: float  # of it, by what feeds the ranks
    wall_s: float  # from the end of imports to the last rank's last micro-batch
    first_s: float  # from the start of the server process, or the end of imports, to the first micro-batch of all ranks
    peak_bytes: int
    exact: bool

    @property
    def per_million(self) -> float:
        """CPU-seconds for a million tokens."""
        return self.cpu_s / self.tokens * 1e6

    @property
    def speed(self) -> float:
        """Million tokens a second."""
        return self.tokens / self.wall_s / 1e6


# Running one row -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """What feeds the ranks, and when."""

    feeding: list[Child]
    began: float  # the server process was started
    ready: float  # imports were done
    endpoint: str


def measure(row: Row, shards: TokenShards) -> Measured:
    """Run a row once. Raises where a process fails."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        ranks = [_child(started, "-m", *CONSUMERS[row.way](row)) for _ in range(row.ranks)]
        for rank in ranks:
            rank.await_ready()
        feeding: list[Child] = []
        watch = started.enter_context(MemoryWatch(lambda: [child.pid for child in (*ranks, *feeding)]))
        at = FEEDERS[row.way](row, shards, Path(folder), started)
        feeding += at.feeding
        for number, rank in enumerate(ranks):
            rank.go({**_task(row, shards), "endpoint": at.endpoint, "rank": number})
        results = [rank.result(needed=feeding) for rank in ranks]
        reading_s, feeding_s = (sum(child.cpu_at_end() for child in children) for children in (ranks, feeding))
    return Measured(
        tokens=shards.tally.tokens,
        cpu_s=reading_s + feeding_s,
        feeding_s=feeding_s,
        wall_s=max(result["done"] for result in results) - at.ready,
        first_s=max(result["first"] for result in results) - at.began,
        peak_bytes=watch.peak,
        exact=_exact(row, results, shards.tally),
    )


def _child(started: ExitStack, *arguments: str, **options: Any) -> Child:
    child = Child(arguments, **options)
    started.callback(child.end)
    return child


def _task(row: Row, shards: TokenShards) -> dict[str, Any]:
    full = row.way is not Way.LIMIT
    return {**asdict(row), "paths": list(map(str, shards.paths)), "capacity": CAPACITY, "full": full}


def _exact(row: Row, results: Sequence[Mapping[str, Any]], whole: Tally) -> bool:
    """Whether the data-parallel ranks saw every sample once, and each tensor-parallel peer the same."""
    seen = [Tally(**result["seen"]) for result in results]
    return all(sum(seen[peer :: row.tensor], Tally()) == whole for peer in range(row.tensor))


def _serve(row: Row, shards: TokenShards, folder: Path, started: ExitStack) -> Started:
    """The real server as its own process; it is ready when it listens."""
    listen = "tcp://127.0.0.1:*" if row.transport == "tcp" else f"ipc://{folder}/feed"
    config = folder / "feed.yaml"
    config.write_text(yaml.safe_dump(feed_config(row, shards, listen)))
    began = time.monotonic()
    server, endpoint = server_of(config, started)
    return Started([server], began, time.monotonic(), endpoint)


def feed_config(row: Row, shards: TokenShards, listen: str) -> dict[str, Any]:
    return {
        "listen": listen,
        "layout": {"data": row.data, "tensor": row.tensor},
        "contract": {"seq_length": CAPACITY, "global_batch_size": STEP_PACKS, "vocab_size": VOCAB_SIZE},
        "sources": {"shards": {"shards": f"{shards.folder}/{PATTERN}"}},
        "packing": {"lookahead": LOOKAHEAD},
        "loading": {"workers": row.workers},
    }


def _send_bare(row: Row, shards: TokenShards, folder: Path, started: ExitStack) -> Started:
    sender = _child(started, "-m", "tests.benchmarks.bare_path", "send")
    sender.await_ready()
    endpoint = f"tcp://127.0.0.1:{_free_port()}" if row.transport == "tcp" else f"ipc://{folder}/bare"
    began = time.monotonic()
    sender.go({**_task(row, shards), "endpoint": endpoint})
    return Started([sender], began, began, endpoint)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _nobody(*_: object) -> Started:
    """Each rank reads for itself."""
    now = time.monotonic()
    return Started([], now, now, "")


CONSUMERS: dict[Way, Callable[[Row], tuple[str, ...]]] = {
    Way.OURS: lambda row: ("tests.benchmarks.feed_rank", row.arrays),
    Way.LIMIT: lambda row: ("tests.benchmarks.bare_path", "receive"),
    Way.FULL_LIMIT: lambda row: ("tests.benchmarks.bare_path", "receive"),
    Way.BASELINE: lambda row: ("tests.benchmarks.plain_loader",),
}
FEEDERS: dict[Way, Callable[[Row, TokenShards, Path, ExitStack], Started]] = {
    Way.OURS: _serve,
    Way.LIMIT: _send_bare,
    Way.FULL_LIMIT: _send_bare,
    Way.BASELINE: _nobody,
}


# All rows ------------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (4, 1), (1, 4))  # data- and tensor-parallel ranks


def rows(quick: bool) -> Iterator[Row]:
    """In the order in which they run."""
    for data, tensor in SHAPES:
        row = partial(Row, data=data, tensor=tensor)
        yield row(Way.LIMIT)
        yield row(Way.FULL_LIMIT)
        yield row(Way.OURS)
        if not quick:
            yield row(Way.LIMIT, transport="ipc")
            yield row(Way.OURS, transport="ipc")
            yield row(Way.OURS, arrays="torch")
            yield from (row(Way.OURS, workers=workers) for workers in (1, 2))
        yield from (row(Way.BASELINE, workers=workers) for workers in ((0,) if quick else (0, 1, 2)))


Runs = dict[Row, list[Measured]]


def run_all(shards: TokenShards, chosen: Sequence[Row], repeats: int) -> Runs:
    """Interleaved: each row once, then each once again."""
    runs: Runs = defaultdict(list)
    for number in range(repeats):
        for row in chosen:
            measured = measure(row, shards)
            runs[row].append(measured)
            told = f"{row.shape}, {row.name}: {measured.per_million:.4f} CPU-s/Mtok, {measured.speed:.1f} Mtok/s"
            sys.stderr.write(f"{number + 1}/{repeats} {told}\n")
    return runs


def whole_path_tables(runs: Runs, shards: TokenShards) -> Iterator[Table]:
    tally = shards.tally
    about = f"{shards.shards} shards, {tally.samples:,} samples, {tally.tokens / 1e6:.1f} M tokens, L = {CAPACITY:,}"
    for shape in dict.fromkeys(row.shape for row in runs):
        of_shape = {row: runs[row] for row in runs if row.shape == shape}
        title = f"Shards to micro-batches, {shape}: {about}"
        table = Table("", *COLUMNS, title=title, caption=FULL_IS)
        for row, found in sorted(of_shape.items(), key=lambda item: PER_MILLION.of(item[1])):
            table.add_row(
                row.name,
                f"{PER_MILLION.of(found):.4f}",
                f"{FEEDING.of(found):.4f}",
                f"{SPEED.of(found):.1f}",
                f"{FIRST.of(found):.2f}",
                f"{PEAK.of(found) / 1e6:.0f}",
                str(_processes(row)),
                "yes" if all(each.exact for each in found) else "NO",
                DELIVERS.get(row.way, FULL),
            )
        yield table
    yield targets_table(runs)


COLUMNS = ("CPU-s/Mtok", "of it feeding", "Mtok/s", "first s", "peak MB", "processes", "exactly once", "delivers")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a row: the median of its runs."""

    of_run: Callable[[Measured], float]

    def of(self, found: Iterable[Measured]) -> float:
        return median(map(self.of_run, found))


PER_MILLION = Figure(lambda run: run.per_million)
FEEDING = Figure(lambda run: run.feeding_s / run.tokens * 1e6)
SPEED = Figure(lambda run: run.speed)
FIRST = Figure(lambda run: run.first_s)
PEAK = Figure(lambda run: run.peak_bytes)


def _processes(row: Row) -> int:
    """Of the row: ranks, what feeds them, loaders."""
    return {
        Way.OURS: row.ranks + 1 + row.workers,
        Way.LIMIT: row.ranks + 1,
        Way.FULL_LIMIT: row.ranks + 1,
        Way.BASELINE: row.ranks * (1 + row.workers),
    }[row.way]


class Target(NamedTuple):
    """A figure of one shape that must hold; where nothing is ``wanted``, one to judge the others by."""

    figure: str
    measured: float
    wanted: float | None = None
    at_most: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Of a table."""
        measured = f"{self.measured:.3g}"
        if self.wanted is None:
            return self.figure, measured, "", ""
        met = self.measured <= self.wanted if self.at_most else self.measured >= self.wanted
        sign = "≤" if self.at_most else "≥"
        return self.figure, measured, f"{sign} {self.wanted:g}", "met" if met else "[bold red]missed[/]"


def targets_table(runs: Runs) -> Table:
    """What must hold, by the best row of each way."""
    table = Table("shape", "figure", "measured", "must be", "", title="Shards to micro-batches: what must hold")
    for shape in dict.fromkeys(row.shape for row in runs):
        for target in targets({row: found for row, found in runs.items() if row.shape == shape}):
            table.add_row(shape, *target.cells)
    return table


def targets(runs: Runs) -> Iterator[Target]:
    """Of one shape; a ratio only where both of its sides were run."""
    best = {way: min(PER_MILLION.of(found) for row, found in runs.items() if row.way is way) for way in _ways(runs)}
    ours = [found for row, found in runs.items() if row.way is Way.OURS]
    if not ours:
        return
    tensor_parallel = all(row.tensor > 1 for row in runs)
    if Way.BASELINE in best:
        times = best[Way.BASELINE] / best[Way.OURS]
        yield Target("times less CPU than the baseline", times, 20 if tensor_parallel else 8)
        for limit, name in LIMITS.items():
            if limit in best:
                yield Target(f"{name} takes so many times less", best[Way.BASELINE] / best[limit])
    if Way.FULL_LIMIT in best:
        yield Target("times the CPU of the limit with full arrays", best[Way.OURS] / best[Way.FULL_LIMIT])
    if not tensor_parallel:
        if Way.LIMIT in best:
            yield Target("times the CPU of the limit", best[Way.OURS] / best[Way.LIMIT], 3, at_most=True)
        yield Target("CPU-s/Mtok", best[Way.OURS], 0.06, at_most=True)
        yield Target("Mtok/s on 2 cores", max(map(SPEED.of, ours)), 25)
    yield Target("first micro-batch, s", max(map(FIRST.of, ours)), 2, at_most=True)


LIMITS = {Way.LIMIT: "the limit", Way.FULL_LIMIT: "the limit with full arrays"}


def _ways(runs: Runs) -> list[Way]:
    return list(dict.fromkeys(row.way for row in runs))


# One command ---------------------------------------------------------------------------------------------


def tables(*, quick: bool = False) -> Iterator[Table]:
    """All tables, on data in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        yield from measured_tables(Path(folder), quick=quick, repeats=1 if quick else 3)


def measured_tables(folder: Path, *, quick: bool, repeats: int, only: str = "") -> Iterator[Table]:
    """Of the rows whose name, with its shape, holds ``only``."""
    shards = TokenShards.written(folder, *((16, 1024) if quick else (32, 2048)))
    chosen = [row for row in rows(quick) if only in f"{row.shape}, {row.name}"]
    yield from whole_path_tables(run_all(shards, chosen, repeats), shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the data, fewer rows")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name holds this: '4 DP, packhorse'")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="write the shards here, or find them here")
    asked = parser.parse_args()
    out = console()
    with tempfile.TemporaryDirectory() as folder:
        for table in measured_tables(
            asked.data or Path(folder), quick=asked.quick, repeats=asked.repeats, only=asked.only
        ):
            out.print(table)


if __name__ == "__main__":
    main()
