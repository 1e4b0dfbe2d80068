"""Every exit happens within 5 seconds of a signal, and leaves no process and no socket file behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.test_serve import alive
from tests.faults.processes import Launcher, RunningServer, RunningTap, launching
from tests.faults.truth import Truth
from tests.harness import wait_until

EXIT_S = 30.0  # wide for a slow machine, and less than a feed that hangs takes to give up
POLITE = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    path = tmp_path / "faults"
    path.mkdir()
    return path


@pytest.fixture
def slow(tmp_path: Path, faults: Path) -> Iterator[Launcher]:
    """Processes whose file system stalls on command."""
    with launching(tmp_path / "run", FAULTS=str(faults)) as launcher:
        yield launcher


def serve(short: Truth, launcher: Launcher, socket: Path) -> RunningServer:
    """A server with two loaders that listens on a socket file."""
    server = launcher.serve(short.with_workers(2, "faulty"), "--listen", f"ipc://{socket}")
    assert server.endpoint
    wait_until(lambda: len(server.loaders()) == 2, "the loaders")
    return server


def leaves(server: RunningServer, number: signal.Signals, socket: Path) -> None:
    """It ends on the signal, and nothing is left of it."""
    children = server.children()
    assert socket.exists()
    server.signal(number)
    server.exit_code(EXIT_S)
    wait_until(lambda: not any(map(alive, children)), "the end of the loaders", EXIT_S)
    assert not socket.exists()


def test_a_server_that_waits_for_its_readers(short: Truth, slow: Launcher, tmp_path: Path) -> None:
    leaves(serve(short, slow, tmp_path / "s"), signal.SIGINT, tmp_path / "s")


@pytest.mark.parametrize("number", POLITE, ids=str)
def test_a_server_in_the_middle_of_a_run(short: Truth, slow: Launcher, tmp_path: Path, number: signal.Signals) -> None:
    """Its ranks, which go on waiting for another server, end on the same signal."""
    server = serve(short, slow, tmp_path / "s")
    taps = [slow.tap(server.endpoint, rank, short.layout, "--delay", "0.05") for rank in short.digests]
    for tap in taps:
        tap.wait_taken(3)
    leaves(server, number, tmp_path / "s")
    for tap in taps:
        assert tap.alive
        tap.signal(number)
        tap.exit_code(EXIT_S)


def test_a_server_whose_loaders_are_stuck_in_a_read(short: Truth, slow: Launcher, tmp_path: Path, faults: Path) -> None:
    """As on a file system that does not answer."""
    (faults / "hold").touch()
    server = serve(short, slow, tmp_path / "s")
    wait_until(lambda: any(faults.glob("held-*")), "a read that stalls")
    leaves(server, signal.SIGINT, tmp_path / "s")


def test_a_server_whose_loaders_stand_still(short: Truth, slow: Launcher, tmp_path: Path, faults: Path) -> None:
    (faults / "hold").touch()
    server = serve(short, slow, tmp_path / "s")
    wait_until(lambda: any(faults.glob("held-*")), "a read that stalls")
    for pid in server.loaders():
        os.kill(pid, signal.SIGSTOP)
    leaves(server, signal.SIGTERM, tmp_path / "s")


def test_a_server_that_is_killed_takes_its_loaders_with_it(short: Truth, slow: Launcher, tmp_path: Path) -> None:
    """Its socket file it cannot take: the next server on that name does."""
    first = serve(short, slow, tmp_path / "s")
    children = first.children()
    first.kill()
    wait_until(lambda: not any(map(alive, children)), "the end of the loaders", EXIT_S)
    leaves(serve(short, slow, tmp_path / "s"), signal.SIGTERM, tmp_path / "s")


def has_threads(tap: RunningTap) -> bool:
    """Its feed is at work."""
    return len(list(Path(f"/proc/{tap.process.pid}/task").iterdir())) > 3


@pytest.mark.parametrize("number", [*POLITE, signal.SIGKILL], ids=str)
def test_a_rank_that_waits_for_a_server_that_is_not_there(
    short: Truth, launcher: Launcher, number: signal.Signals
) -> None:
    taps = [launcher.tap("tcp://127.0.0.1:9", rank, short.layout) for rank in short.digests]
    for tap in taps:
        wait_until(partial(has_threads, tap), "its threads")
        tap.signal(number)
        tap.exit_code(EXIT_S)
