"""What the benchmarks have in common: CPU and memory of a process and its children, facts of the machine, tables.

Needs Linux: processes are read from ``/proc``.
"""

from __future__ import annotations

import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zmq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from packhorse_service.loadtest.run.usage import observe, observe_all, processor

__all__ = [
    "MemoryWatch",
    "best_cpu_seconds",
    "console",
    "cpu_seconds",
    "machine_table",
    "markdown",
    "pss_bytes",
]

NO_TERMINAL = 180  # columns


# Processes ----------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """User and system seconds that a process and its children, living or waited for, have used."""
    usage = observe(pid)
    return usage.cpu_s if usage else 0.0


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes and their children, what they share counted once."""
    usage = observe_all(pids)
    return usage.memory_bytes if usage else 0


class MemoryWatch:
    """Samples the memory of processes from a thread of its own while inside; ``seen`` is (seconds, bytes)."""

    def __init__(self, pids: Callable[[], Iterable[int]], every_s: float = 0.1) -> None:
        self._pids, self._every_s = pids, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: list[tuple[float, int]] = []

    @property
    def peak(self) -> int:
        return max((size for _, size in self.seen), default=0)

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._over.wait(self._every_s):
            self.seen.append((time.monotonic() - began, pss_bytes(self._pids())))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


def best_cpu_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of this process for the best of several runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


# The machine, and tables ----------------------------------------------------------------------------------


def console() -> Console:
    """For tables: as wide as they need where it is no terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=NO_TERMINAL)


def machine_table() -> Table:
    """What a reader must know to compare figures."""
    table = Table("machine", "")
    for name, value in {
        "processor": processor(),
        "cores": f"{os.cpu_count()}, of which {len(os.sched_getaffinity(0))} usable",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "pyzmq, libzmq": f"{zmq.__version__}, {zmq.zmq_version()}",
        "revision": _revision(),
        "date": time.strftime("%Y-%m-%d"),
    }.items():
        table.add_row(name, value)
    return table


def _revision() -> str:
    """Commit of the code that is measured, by which a reader knows how old the figures are."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return described.stdout.strip() or "not in a git checkout"


def markdown(table: Table) -> str:
    """A table for the documentation, its title and caption above and below."""
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
    header, *rows = zip(*columns, strict=True)
    lines = [_row(header), _row(["---"] * len(header)), *map(_row, rows)]
    title = [f"### {_plain(table.title)}", ""] if table.title else []
    caption = ["", _plain(table.caption)] if table.caption else []
    return "\n".join([*title, *lines, *caption, ""])


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
