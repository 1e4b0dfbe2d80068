"""What stops a server in order: SIGINT, SIGTERM, and the end of the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from packhorse_service.server.server import LoopHook

__all__ = ["ParentWatch", "stopped_by_signals"]


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call ``stop`` with their name while inside; it must be safe in a signal handler."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class ParentWatch:
    """Hook of a server's loop that stops the server once the process that started it has ended.

    All turns go on to ``hook``. The kernel gives an orphan another parent, which is what is looked at: a process id
    alone may be another process by now.
    """

    def __init__(self, parent: int, stop: Callable[[str], None], hook: LoopHook) -> None:
        self._parent = parent
        self._stop = stop
        self._hook = hook

    def started(self) -> None:
        """Pass on that the server listens."""
        self._hook.started()

    def on_turn(self, now: float, connections: int) -> None:
        """Look whether the parent is still there; pass the turn on."""
        if os.getppid() != self._parent:
            self._stop(f"the end of process {self._parent}, which started it")
        self._hook.on_turn(now, connections)

    def stopping(self) -> None:
        """Pass on that the loop has ended."""
        self._hook.stopping()
