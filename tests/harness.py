"""A real server process, and ranks that read from it, for tests from outside."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from packhorse import BatchContract, Feed, MicroBatch, ParallelLayout

DEADLINE_S = 300.0  # of what takes a few seconds: a machine may be ten times slower, and busy


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll a condition of the outside world until it holds."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen within {deadline_s:g} s")
        pause.wait(0.01)


def run_script(script: str) -> str:
    """Run Python code in an interpreter of its own and return what it printed."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout


@dataclass
class RunningServer:
    """``packhorse serve`` as its own process."""

    process: subprocess.Popen[str]
    endpoint: str

    def signal_and_wait(self, number: signal.Signals, within_s: float = DEADLINE_S) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=within_s)


def write_config(folder: Path, **settings: Any) -> Path:
    """A configuration file on a free loopback port."""
    path = folder / "feed.yaml"
    defaults: dict[str, Any] = {"listen": "tcp://127.0.0.1:*", "loading": {"workers": 1}}
    path.write_text(yaml.safe_dump({**defaults, **settings}, sort_keys=False))
    return path


def serve_command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "packhorse_service", "serve", str(config), *arguments]


@contextlib.contextmanager
def running_server(config: Path, *options: str) -> Iterator[RunningServer]:
    """Start a server, wait until it listens; it is gone afterwards, whatever happened."""
    endpoint_file = config.with_name("endpoint")
    endpoint_file.unlink(missing_ok=True)
    log = config.with_name("server.log")
    with log.open("w") as stream:
        process = subprocess.Popen(
            serve_command(config, "--endpoint-file", str(endpoint_file), *options), stderr=stream, text=True
        )
        try:
            wait_until(lambda: endpoint_file.exists() or process.poll() is not None, "the server's endpoint")
            if process.poll() is not None:
                raise AssertionError(f"the server ended with {process.returncode}: {log.read_text()}")
            yield RunningServer(process, endpoint_file.read_text().strip())
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def failing_server(config: Path, *options: str) -> str:
    """Run a server that must refuse to serve; what it printed, on one line."""
    done = subprocess.run(
        serve_command(config, "--failure-grace", "0", *options),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1, f"exit code {done.returncode}: {done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


def read_rank(
    endpoint: str, layout: ParallelLayout, rank: int, contract: BatchContract, **options: Any
) -> list[MicroBatch]:
    """Everything one rank is handed, as numpy arrays."""
    timeouts = {"start_timeout": DEADLINE_S, "stall_timeout": DEADLINE_S}
    with Feed(endpoint, layout=layout, rank=rank, contract=contract, arrays="numpy", **{**timeouts, **options}) as feed:
        return list(feed)


def read_all(
    endpoint: str, layout: ParallelLayout, contract: BatchContract | None = None, **options: Any
) -> Mapping[int, list[MicroBatch]]:
    """Everything every rank is handed; each rank reads in a thread of its own."""
    declared = contract or BatchContract()
    with ThreadPoolExecutor(layout.world_size) as pool:
        ranks = range(layout.world_size)
        futures = [pool.submit(read_rank, endpoint, layout, rank, declared, **options) for rank in ranks]
        return {rank: future.result() for rank, future in zip(ranks, futures, strict=True)}


@contextlib.contextmanager
def reading(endpoint: str, **options: Any) -> Iterator[Feed]:
    """A feed that leaves the server running: it crashes rather than says BYE."""
    feed = Feed(endpoint, arrays="numpy", start_timeout=DEADLINE_S, stall_timeout=DEADLINE_S, **options)
    try:
        yield feed
    finally:
        feed.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
