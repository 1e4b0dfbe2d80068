"""What processes take, from outside: processor time, memory, open files, of a process and all its children.

From Linux's ``/proc``. Memory is the proportional set size: what several processes share counts once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "observe", "observe_all"]

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name: the parent, and processor time, own and of children that were waited for.
PARENT, TIMES = 1, slice(11, 15)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process and its children at one moment; ``open_files`` of the process alone."""

    cpu_s: float
    memory_bytes: int
    open_files: int


def observe(pid: int, proc: Path = PROC) -> Usage | None:
    """What the process and its descendants take; ``None`` where that cannot be seen, or it has ended."""
    parents = {int(entry.name): stat for entry in _processes(proc) if (stat := _stat(entry)) is not None}
    if pid not in parents:
        return None
    family = list(_family(pid, parents))
    cpu = sum(int(ticks) for member in family for ticks in parents[member][TIMES]) / TICKS
    try:
        open_files = len(os.listdir(proc / str(pid) / "fd"))
    except OSError:
        return None  # it ended meanwhile, or is somebody else's
    return Usage(cpu, sum(_memory(proc / str(member)) for member in family), open_files)


def observe_all(pids: Iterable[int], proc: Path = PROC) -> Usage | None:
    """The sum of several; ``None`` where nothing can be seen of any."""
    seen = [usage for pid in pids if (usage := observe(pid, proc)) is not None]
    if not seen:
        return None
    cpu, memory, files = (sum(figures) for figures in zip(*map(_figures, seen), strict=True))
    return Usage(cpu, int(memory), int(files))


def _figures(usage: Usage) -> tuple[float, int, int]:
    return usage.cpu_s, usage.memory_bytes, usage.open_files


def _processes(proc: Path) -> list[Path]:
    return [entry for entry in proc.iterdir() if entry.name.isdecimal()] if proc.is_dir() else []


def _stat(process: Path) -> list[str] | None:
    """Its fields behind the name, which may hold anything."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # it ended meanwhile


def _family(pid: int, stats: dict[int, list[str]]) -> Iterator[int]:
    children = defaultdict(list)
    for child, stat in stats.items():
        children[int(stat[PARENT])].append(child)
    pending = [pid]
    while pending:
        member = pending.pop()
        yield member
        pending += children[member]


def _memory(process: Path) -> int:
    try:
        rollup = (process / "smaps_rollup").read_text()
    except OSError:
        return 0  # it ended meanwhile, or is a zombie
    sizes = (line.split() for line in rollup.splitlines())
    return next((int(words[1]) << 10 for words in sizes if words[0] == "Pss:"), 0)
