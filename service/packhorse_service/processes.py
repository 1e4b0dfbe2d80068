"""Start, watch and stop child processes, so that none is left whatever happens: of the demo, of a load test.

Each child leads a process group of its own: a Ctrl-C reaches only the parent, which then ends its children
in order, and a child's own children are found by the group. Everything goes by process id.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from packhorse.errors import PackhorseError, StartTimeout

__all__ = ["Child", "ChildFailed", "Children", "pause", "start_server", "stop_signals"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.05
START_POLL_S = 0.02
GRACE_S = 3.0  # between asking a child to end and killing it
LOG_TAIL = 12  # lines shown of a child that failed
START_S = 60.0  # a server listens within this, or something is wrong
SERVE = "from packhorse_service.cli import main; main()"  # what the script `packhorse` does, wherever it is installed


class ChildFailed(PackhorseError):
    """A child ended with an error; the message ends with what it logged last."""


@dataclass(slots=True)
class Child:
    """A running process. All it writes goes to ``log``; its standard output to us instead, where it ``talks``."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    _ended: bool = field(default=False, init=False)

    def ended(self) -> bool:
        """Return whether the child has ended, and kill at that moment what is left of its group.

        Later, the group's number may belong to somebody else.
        """
        if not self._ended and self.process.poll() is not None:
            self._ended = True
            self.signal(signal.SIGKILL)
        return self._ended

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        with suppress(ProcessLookupError):  # nobody is left in it
            os.killpg(self.process.pid, number)

    def failure(self) -> str:
        """Return what to say of a child that failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL:]
        return f"{self.name} ended with {_status(self.process.returncode)}; {self.log} ends:\n" + "\n".join(lines)


class Children:
    """The children of one ``with`` block; at its end they are stopped."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, *, talks: bool = False
    ) -> Child:
        """Start ``command`` with ``environment`` added to this process's own; ``talks``: over pipes, with us."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else file,
                stderr=file,
                start_new_session=True,
            )
        self._children.append(Child(name, log, process))
        return self._children[-1]

    def start_ranks(
        self, command: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None
    ) -> list[Child]:
        """Start ``command`` once for each rank, with the variables that torchrun sets."""
        job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}  # nothing leaves the machine
        shared = {**(environment or {}), **job, **loopback}
        return [self.start(f"rank-{rank}", command, {**shared, "RANK": str(rank)}) for rank in range(ranks)]

    def all_ended(self) -> bool:
        """Return whether every child has ended well. Raises ``ChildFailed`` as soon as one has not."""
        ended = [child for child in self._children if child.ended()]
        failed = [child.failure() for child in ended if child.process.returncode != 0]
        if failed:
            raise ChildFailed("\n\n".join(failed))
        return len(ended) == len(self._children)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ask every child to end, wait, then kill."""
        deadline = time.monotonic() + grace_s
        for child in self._children:
            if not child.ended():
                child.signal(signal.SIGTERM)
        while time.monotonic() < deadline and not all(child.ended() for child in self._children):
            time.sleep(POLL_S)
        for child in self._children:
            if not child.ended():
                child.signal(signal.SIGKILL)
                child.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def start_server(
    children: Children, arguments: Sequence[str], folder: Path, asked: threading.Event
) -> tuple[Child, str]:
    """Start ``packhorse serve`` with these arguments, its log and endpoint file in ``folder``; it, and its endpoint.

    Raises ``ChildFailed`` where it ends, ``StartTimeout`` where it does not listen, ``KeyboardInterrupt`` where asked.
    """
    endpoint = folder / "endpoint"
    server = children.start(
        "server", [sys.executable, "-c", SERVE, "serve", *arguments, "--endpoint-file", str(endpoint)]
    )
    deadline = time.monotonic() + START_S
    while not endpoint.exists():
        children.all_ended()
        if time.monotonic() > deadline:
            raise StartTimeout(f"the server did not listen within {START_S:g} s; see {server.log}")
        pause(asked, START_POLL_S)
    return server, endpoint.read_text(encoding="utf-8").strip()


def pause(asked: threading.Event, seconds: float) -> None:
    """Let time pass. Raises ``KeyboardInterrupt`` as soon as a signal has asked to stop."""
    if asked.wait(seconds):
        raise KeyboardInterrupt


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C, SIGTERM and a closed terminal set.

    An exception out of a signal handler could strike between a child's start and its entry in the list.
    """
    asked = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    previous = {number: signal.signal(number, ask) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _status(returncode: int) -> str:
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
