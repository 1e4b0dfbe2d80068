"""The worker processes of a load test, and what they tell, in the order of arrival."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from packhorse_service.loadtest.ranks.worker_messages import COMMANDS, REPORTS, Command, Job, Report
from packhorse_service.processes import Child, Children

__all__ = ["Workers"]

MODULE = "packhorse_service.loadtest.ranks.worker"


@dataclass(slots=True)
class Workers:
    """Each has a thread here that reads its lines."""

    children: Sequence[Child]
    _arrived: queue.SimpleQueue[tuple[int, Report]] = field(default_factory=queue.SimpleQueue)

    @staticmethod
    def start(children: Children, jobs: Sequence[Job]) -> Workers:
        """Start one process a job; each loads, and then waits for ``Connect``."""
        command = [sys.executable, "-m", MODULE]
        started = [children.start(f"worker-{number}", command, talks=True) for number in range(len(jobs))]
        workers = Workers(started)
        for number, (child, job) in enumerate(zip(started, jobs, strict=True)):
            _send(child, job)
            threading.Thread(target=workers._read, args=(number, child), daemon=True).start()
        return workers

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self.children]

    def send(self, command: Command) -> None:
        """Send a command to all of them; who has ended does not get it."""
        for child in self.children:
            _send(child, command)

    def reports(self, wait_s: float) -> Iterator[tuple[int, Report]]:
        """(worker, what it says) of all that has arrived, or arrives within ``wait_s`` seconds."""
        with suppress(queue.Empty):
            yield self._arrived.get(timeout=wait_s)
            while True:
                yield self._arrived.get_nowait()

    def _read(self, number: int, child: Child) -> None:
        if child.process.stdout is not None:
            for line in child.process.stdout:
                self._arrived.put((number, REPORTS.validate_json(line)))


def _send(child: Child, command: Command) -> None:
    if child.process.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended, as its exit code tells
            child.process.stdin.write(COMMANDS.dump_json(command) + b"\n")
            child.process.stdin.flush()
