"""SIGINT and SIGTERM, which stop a server in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["stopped_by_signals"]


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
