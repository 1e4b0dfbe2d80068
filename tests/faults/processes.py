"""Real processes: servers by ``packhorse serve``, ranks by ``packhorse tap``. Whatever happens, none is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhorse import ParallelLayout, Position
from tests.harness import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
HOOKS = Path(__file__).with_name("hooks")


@dataclass
class Running:
    """A process and what it has written to its log."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def exit_code(self, within_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            text = f"{self.log.name}: no exit within {within_s:g} s; its last words: {self.last_words()}"
            raise AssertionError(text) from None

    def last_words(self) -> str:
        return " ".join(self.log.read_text()[-2000:].split())

    def children(self) -> list[int]:
        """Of every thread: each stream's loaders are started by the thread that makes its steps."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(word) for listed in threads for word in listed.read_text().split()]

    def loaders(self) -> list[int]:
        """Its loader processes; Python's own resource tracker is none."""
        return [pid for pid in self.children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@dataclass
class RunningServer(Running):
    endpoint_file: Path

    @property
    def endpoint(self) -> str:
        """Where it listens, once it does."""
        wait_until(lambda: self.endpoint_file.exists() or not self.alive, "the server's endpoint")
        assert self.alive, self.last_words()
        return self.endpoint_file.read_text().strip()


@dataclass
class RunningTap(Running):
    """One rank. ``rows`` are the lines that it has printed."""

    rank: int
    out: Path
    state: Path

    def rows(self) -> list[dict[str, Any]]:
        text = self.out.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def taken(self) -> int:
        return self.out.read_bytes().count(b"\n")

    def wait_taken(self, count: int) -> None:
        wait_until(lambda: self.taken() >= count or not self.alive, f"row {count} of rank {self.rank}")
        assert self.taken() >= count, self.last_words()

    def saved(self) -> Position | None:
        """The position of its saved state."""
        if not self.state.exists():
            return None
        step, index = json.loads(self.state.read_text())["position"]
        return Position(step, index)


@dataclass
class Launcher:
    """Starts processes of a source tree with files in ``folder``."""

    folder: Path
    tree: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)  # adds to this process's own
    started: list[Running] = field(default_factory=list)

    def _start(
        self, name: str, arguments: Sequence[str], out: Path | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f"{name}.log"
        roots = [self.tree / "client", self.tree / "service", *([HOOKS] if "FAULTS" in self.environment else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), **self.environment}
        command = [sys.executable, "-m", "packhorse_service", *arguments]
        with log.open("wb") as errors, (out or log).open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=errors, env=environment), log

    def serve(self, config: Path, *arguments: str) -> RunningServer:
        """Start a server; it may not listen yet."""
        name = f"server-{len(self.started)}"
        endpoint_file = self.folder / f"{name}.endpoint"
        told = ["--endpoint-file", str(endpoint_file), "--monitor-file", str(endpoint_file.with_suffix(".url"))]
        process, log = self._start(name, ["serve", str(config), *told, *arguments])
        server = RunningServer(process, log, endpoint_file)
        self.started.append(server)
        return server

    def tap(self, endpoint: str, rank: int, layout: ParallelLayout, *arguments: str, pairs: bool = True) -> RunningTap:
        """Start a rank that prints its rows and keeps its state."""
        name = f"rank-{rank}-{len(self.started)}"
        out, state = self.folder / f"{name}.jsonl", self.folder / f"{name}.state"
        out.touch()
        sizes = f"data={layout.data},context={layout.context},tensor={layout.tensor},pipeline={layout.pipeline}"
        options = ["--rank", str(rank), "--layout", sizes, "--timeout", "25", "--state-out", str(state)]
        options += ["--pairs"] if pairs else []
        process, log = self._start(name, ["tap", endpoint, *options, *arguments], out)
        running = RunningTap(process, log, rank, out, state)
        self.started.append(running)
        return running

    def close(self) -> None:
        for running in self.started:
            if running.alive:
                running.kill()


@contextlib.contextmanager
def launching(folder: Path, tree: Path = ROOT, **environment: str) -> Iterator[Launcher]:
    folder.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(folder, tree, environment)
    try:
        yield launcher
    finally:
        launcher.close()
