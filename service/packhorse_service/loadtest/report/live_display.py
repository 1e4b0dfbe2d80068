"""How a load test goes on: a live view on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from packhorse_service.loadtest.run.measurements import IntervalMetrics, Show
from packhorse_service.loadtest.run.setup import LoadTestPlan
from packhorse_service.text.formatting import mebibytes, si
from packhorse_service.text.sparkline import finite, sparkline

__all__ = ["ProgressDisplay"]

LINE_EVERY_S = 5.0
CURVE = 40  # columns of the throughput


@dataclass(slots=True)
class ProgressDisplay:
    """Display of one load test, on one console."""

    plan: LoadTestPlan
    console: Console

    @contextmanager
    def showing(self) -> Iterator[Show]:
        """Give what to call with each phase and moment while the test runs."""
        if self.console.is_terminal:
            view = LiveDisplay(self.plan)
            with Live(get_renderable=view.render, console=self.console, refresh_per_second=8, transient=True):
                yield view.show
        else:
            yield LineDisplay(self.plan, self.console).show


@dataclass(slots=True)
class LineDisplay:
    """Display of plain lines, for where there is no terminal."""

    plan: LoadTestPlan
    console: Console
    _phase: str = ""
    _next_s: float = 0.0

    def show(self, phase: str, moment: IntervalMetrics | None) -> None:
        if phase != self._phase:
            self.console.print(phase, highlight=False)
            self._phase, self._next_s = phase, 0.0
        if moment is not None and moment.at_s >= self._next_s:
            self._next_s = moment.at_s + LINE_EVERY_S
            self.console.print(
                f"  {moment.at_s:5.0f} s: {si(moment.tokens_per_s)} tokens/s, "
                f"wait p99 {moment.wait_p99_ms:.1f} ms, {moment.waiting} of {len(self.plan.ranks)} ranks waiting, "
                f"server {mebibytes(moment.server_memory_bytes)}",
                highlight=False,
                soft_wrap=True,
            )


class LiveDisplay:
    """A bar over the time that is measured, and the figures of the last second."""

    def __init__(self, plan: LoadTestPlan) -> None:
        self._plan = plan
        self._bar = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(bar_width=CURVE), TextColumn("{task.fields[left]}")
        )
        self._task = self._bar.add_task("preparing", total=plan.scenario.seconds, left="")
        self._rates: list[float] = []
        self._moment: IntervalMetrics | None = None

    def show(self, phase: str, moment: IntervalMetrics | None) -> None:
        self._bar.update(self._task, description=phase)
        if moment is None:
            return
        self._moment = moment
        if moment.at_s >= 0:
            seconds = self._plan.scenario.seconds
            left = max(seconds - moment.at_s, 0.0)
            self._bar.update(self._task, completed=min(moment.at_s, seconds), left=f"{left:.0f} s left")
            self._rates.append(moment.tokens_per_s)

    def render(self) -> Group:
        grid = Table.grid(padding=(0, 3))
        grid.add_column(style="dim")
        for name, value in self._rows() if self._moment is not None else ():
            grid.add_row(f"  {name}", value)
        return Group(self._bar, grid)

    def _rows(self) -> Iterator[tuple[str, str]]:
        moment, ranks = self._moment, len(self._plan.ranks)
        if moment is None:
            return
        yield "ranks connected", f"{moment.connected:,} of {ranks:,}"
        yield "tokens/s", f"{si(moment.tokens_per_s):>7}  [cyan]{self._curve()}[/]"
        yield "wait p99", f"{moment.wait_p99_ms:.1f} ms"
        yield "waiting now", f"{moment.waiting:,} ranks{self._whom(moment)}"
        if moment.server_memory_bytes is not None:
            cores = "" if moment.server_cores is None else f"{moment.server_cores:.0%} of a core, "
            yield "server", f"{cores}{mebibytes(moment.server_memory_bytes)}"

    def _whom(self, moment: IntervalMetrics) -> str:
        return f" for {moment.waited_for}" if moment.waiting and moment.waited_for else ""

    def _curve(self) -> str:
        shown = self._rates[-CURVE:]
        top = max(finite(shown), default=0.0)
        return sparkline(shown, 0.0, top) if top > 0 else ""
