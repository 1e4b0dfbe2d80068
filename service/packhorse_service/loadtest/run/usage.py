"""What processes take, from outside: processor time, memory, open files, of a process and all its children.

From Linux's ``/proc``. Memory is the proportional set size: what several processes share counts once.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "family", "observe", "observe_all", "processor"]

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name: the parent, and processor time, own and of children that were waited for.
PARENT, TIMES = 1, slice(11, 15)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources taken by a process and its children at one moment; ``open_files`` of the process alone."""

    cpu_s: float
    memory_bytes: int
    open_files: int


def processor() -> str:
    """Return the model of the processor, as far as it tells."""
    try:
        lines = (PROC / "cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []  # not Linux
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def family(pid: int, proc: Path = PROC) -> list[int]:
    """Find a process and all its living descendants; nothing where it has ended, or cannot be seen."""
    stats = _stats(proc)
    return list(_family(pid, stats)) if pid in stats else []


def observe(pid: int, proc: Path = PROC) -> Usage | None:
    """Return what the process and its descendants take; ``None`` where that cannot be seen, or it has ended."""
    stats = _stats(proc)
    if pid not in stats:
        return None
    members = list(_family(pid, stats))
    cpu = sum(int(ticks) for member in members for ticks in stats[member][TIMES]) / TICKS
    try:
        open_files = len(os.listdir(proc / str(pid) / "fd"))
    except OSError:
        return None  # it ended meanwhile, or is somebody else's
    return Usage(cpu, sum(_memory(proc / str(member)) for member in members), open_files)


def observe_all(pids: Iterable[int], proc: Path = PROC) -> Usage | None:
    """Return the sum of several; ``None`` where nothing can be seen of any."""
    seen = [usage for pid in pids if (usage := observe(pid, proc)) is not None]
    if not seen:
        return None
    cpu, memory, files = (sum(figures) for figures in zip(*map(_figures, seen), strict=True))
    return Usage(cpu, int(memory), int(files))


def _figures(usage: Usage) -> tuple[float, int, int]:
    return usage.cpu_s, usage.memory_bytes, usage.open_files


def _processes(proc: Path) -> list[Path]:
    return [entry for entry in proc.iterdir() if entry.name.isdecimal()] if proc.is_dir() else []


def _stats(proc: Path) -> dict[int, list[str]]:
    return {int(entry.name): stat for entry in _processes(proc) if (stat := _stat(entry)) is not None}


def _stat(process: Path) -> list[str] | None:
    """Return the fields of a process behind its name, which may hold anything."""
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
