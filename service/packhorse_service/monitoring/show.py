"""``packhorse status``: ask once, or again and again, and show what is said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from packhorse.errors import ProtocolError, TransportError
from packhorse_service.monitoring.status import ServerStatus
from packhorse_service.monitoring.status_client import StatusAnswer, ask
from packhorse_service.monitoring.terminal import headlines, plain, render
from packhorse_service.text.formatting import duration

__all__ = ["StatusExit", "exit_code", "show", "show_json", "watch"]


class StatusExit(IntEnum):
    """Exit codes of ``packhorse status``."""

    WELL = 0
    UNREACHABLE = 1  # as every error that is raised
    STALLED = 4


def exit_code(status: ServerStatus) -> StatusExit:
    """Return the exit code for a status: whether every stream is served well now."""
    kept = any(stream.stall is not None or stream.failure is not None for stream in status.streams)
    return StatusExit.STALLED if kept else StatusExit.WELL


def show(endpoint: str, console: Console) -> StatusExit:
    """Show the status once. Raises as ``ask``."""
    status = ask(endpoint).status
    console.print(render(status))
    return exit_code(status)


def show_json(endpoint: str, write: Callable[[str], None]) -> StatusExit:
    """Write what the server says, as indented JSON. Raises as ``ask``."""
    answer = ask(endpoint)
    write(msgspec.json.format(answer.text, indent=2).decode())
    return exit_code(answer.status)


def watch(endpoint: str, console: Console, interval_s: float) -> StatusExit:
    """Show the status every ``interval_s`` seconds, until Ctrl-C; a server that is gone for a while may come back.

    Where there is no terminal, a line for each stream each time. Raises as ``ask`` where the first time fails.
    """
    live = LiveStatus(endpoint, ask(endpoint), time.monotonic())
    try:
        with _screen_of(console) as shown:
            while True:
                shown(live)
                live = live.refreshed(interval_s)
    except KeyboardInterrupt:
        return StatusExit.UNREACHABLE if live.error else exit_code(live.last.status)


@contextmanager
def _screen_of(console: Console) -> Iterator[Callable[[LiveStatus], None]]:
    if not console.is_terminal:
        yield lambda status: console.print(*status.lines(), sep="\n", soft_wrap=True)
        return
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        yield lambda status: screen.update(status.screen(), refresh=True)


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """Status that was said last and when, and why none has been since."""

    endpoint: str
    last: StatusAnswer
    said_s: float
    error: str = ""

    def refreshed(self, interval_s: float) -> LiveStatus:
        """Ask again after a pause; return what is known then."""
        time.sleep(interval_s)
        try:
            return LiveStatus(self.endpoint, ask(self.endpoint), time.monotonic())
        except (TransportError, ProtocolError) as error:  # it may be on its way up
            return LiveStatus(self.endpoint, self.last, self.said_s, str(error))

    def screen(self) -> RenderableType:
        shown = render(self.last.status)
        return Group(self._gone(), Text("what it said last:", "dim"), shown) if self.error else shown

    def lines(self) -> list[Text]:
        return [self._gone()] if self.error else list(headlines(self.last.status))

    def _gone(self) -> Text:
        silence = duration(time.monotonic() - self.said_s)
        return Text(f"the server has not answered for {silence}: {plain(self.error)}", "bold red")
