"""The process of a server that this process has started; what it logs is logged here."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from packhorse.errors import ConfigError, StartTimeout

__all__ = ["LocalServer"]

log = logging.getLogger("packhorse.launch")

POLL_S = 0.02
STOP_S = 10.0  # between asking the server to stop and killing it
LAST_LINES = 12
OF_EVERY_LINE = {"time", "level", "logger", "event"}


class LocalServer:
    """``packhorse serve`` as a child process, which stops when this process has ended, whatever ended it."""

    def __init__(self, config: Path, socket: Path, *, monitor: str | None) -> None:
        self.endpoint = f"ipc://{socket}"
        self._socket = socket
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._closing = False
        command = [sys.executable, "-m", "packhorse_service", "serve", str(config), "--listen", self.endpoint]
        options = ["--monitor", monitor or "none", "--log-format", "json", "--parent", str(os.getpid())]
        # A session of its own: Ctrl-C reaches the trainer alone, which ends the server in order.
        self._process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read_log, name="packhorse-server-log", daemon=True)
        self._on_failure: Callable[[str], None] | None = None
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the server, whose loaders are children of it."""
        return self._process.pid

    def await_listening(self, timeout_s: float) -> None:
        """Wait until the server listens. Raises ``ConfigError`` with its own words where it cannot start."""
        deadline = time.monotonic() + timeout_s
        while not self._socket.is_socket():
            if self._process.poll() is not None:
                self._reader.join()
                raise ConfigError(f"the server could not start, {self.describe_end()}")
            if time.monotonic() > deadline:
                self.end(wait_s=0)
                raise StartTimeout(f"the server did not listen within {timeout_s:g} s at {self.endpoint}")
            time.sleep(POLL_S)

    def end(self, wait_s: float) -> None:
        """Wait so long for the server to end by itself, as it does once all readers have left; then stop it."""
        self._closing = True
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("the server of %s did not stop within %.0f s; it is killed", self.endpoint, STOP_S)
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._socket.unlink(missing_ok=True)  # one that was killed has left it

    def tell_failure(self, to: Callable[[str], None]) -> None:
        """Have ``to`` told how the server has ended, once it has without being asked: by another thread, or at once."""
        self._on_failure = to
        if not self._reader.is_alive():
            self._tell_failure()

    def describe_end(self) -> str:
        """Return how the process has ended, and the last that it said."""
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "\n".join([f"{how}:" if self._last_lines else how, *self._last_lines])

    def _read_log(self) -> None:
        """Log what the server logs, in a thread; the end of it is the end of the server."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._log_again(line.decode("utf-8", "replace").rstrip())
        self._tell_failure()

    def _tell_failure(self) -> None:
        if self._process.wait() != 0 and not self._closing and self._on_failure is not None:
            self._on_failure(self.describe_end())

    def _log_again(self, line: str) -> None:
        try:
            said = json.loads(line)
            level = logging.getLevelNamesMapping()[said["level"]]
            logger, event = logging.getLogger(str(said["logger"])), str(said["event"])
        except (ValueError, LookupError, TypeError):  # no event: what Python or a library has written
            self._last_lines.append(line)
            log.log(logging.ERROR if line.startswith("error:") else logging.INFO, "%s", line)
            return
        if level >= logging.ERROR:
            self._last_lines.append(event)
        given = "".join(f"  {name}={value}" for name, value in said.items() if name not in OF_EVERY_LINE)
        logger.log(level, "%s%s", event, given)
