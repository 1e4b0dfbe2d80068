"""Processes that a benchmark starts and measures.

A child imports what it needs, says that it is ready, waits for one line (JSON) and ends with one line (JSON). Its CPU
time counts from ready to its end, with all of its children: what it closes, joins and frees counts. Loading libraries
does not, and neither does unloading them: torch takes 0.3 to 0.5 seconds for that, whatever was done with it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from tests.benchmarks.measuring import cpu_seconds

__all__ = ["Child", "be_child", "server_of"]

DEADLINE_S = 600.0
LISTEN_S = 30.0


class Child:
    """``python ARGUMENTS``; ``ready`` is the CPU time that it is not charged for."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        self.ready = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    def await_ready(self) -> None:
        self.ready = float(self._line()["ready"])

    def go(self, task: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def result(self, needed: Sequence[Child] = ()) -> dict[str, Any]:
        """What it ended with; it cannot end where one of ``needed`` has failed."""
        return self._line(needed)

    def _line(self, needed: Sequence[Child] = ()) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + DEADLINE_S
        while not select.select([self.process.stdout], [], [], 1.0)[0]:
            failed = [child.process.args for child in needed if child.failed]
            if failed or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.process.args!r} said nothing in {DEADLINE_S:.0f} s, or these failed: {failed}"
                )
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended and said nothing")
        said: dict[str, Any] = json.loads(line)
        return said

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well. It is left for ``cpu_at_end`` to wait for."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None and ended.si_status != 0

    def cpu_at_end(self) -> float:
        """Wait for its end; the CPU seconds since it was ready."""
        _, status, used = os.wait4(self.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.returncode}")
        return used.ru_utime + used.ru_stime - self.ready

    def end(self) -> None:
        """Kill it where it is still there."""
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def server_of(config: Path, started: ExitStack, *options: str, module: str = "packhorse_service") -> tuple[Child, str]:
    """``packhorse serve`` and its endpoint, once it listens: it is ready then. Its log lies beside ``config``."""
    endpoint_file, log = config.with_name("endpoint"), config.with_name("server.log")
    arguments = ("-m", module, "serve", str(config), "--endpoint-file", str(endpoint_file), *options)
    server = Child(arguments, stderr=started.enter_context(log.open("w")))
    started.callback(server.end)
    deadline = time.monotonic() + LISTEN_S
    while not endpoint_file.exists():
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server does not listen: {log.read_text()}")
        time.sleep(0.001)
    server.ready = cpu_seconds(server.pid)
    return server, endpoint_file.read_text().strip()


def be_child(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> NoReturn:
    """The child's side: everything is imported by now."""
    used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    _say({"ready": sum(u.ru_utime + u.ru_stime for u in used)})
    _say(work(json.loads(sys.stdin.readline())))
    os._exit(0)


def _say(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(dict(line)) + "\n")
    sys.stdout.flush()
