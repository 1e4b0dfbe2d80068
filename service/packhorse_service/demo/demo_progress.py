"""What the demo shows: a live view while the ranks train (plain lines where there is no terminal), then a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packhorse_service.demo.step_lines import RankStepReport
from packhorse_service.text.sparkline import finite, sparkline

__all__ = ["Training", "TrainingProgress"]

CURVE = 60  # columns of the loss curve
LINE_EVERY_S = 5.0


class Training:
    """Reports of the ranks so far, step by step."""

    def __init__(self) -> None:
        self.latest: dict[int, RankStepReport] = {}  # by rank
        self.losses: list[float] = []
        self._tokens: list[int] = []  # of each step
        self._times: list[float] = []  # when each step was first reported
        self._row_tokens = self._row_slots = 0

    def add(self, report: RankStepReport, now: float) -> None:
        """Take one rank's report of one step, at ``now`` seconds; the first rank to report a step speaks for it."""
        self.latest[report.rank] = report
        self._row_tokens += report.row_tokens
        self._row_slots += report.row_slots
        if report.step == len(self.losses):
            self.losses.append(report.loss)
            self._tokens.append(report.step_tokens)
            self._times.append(now)

    @property
    def fill(self) -> float:
        """Share of the slots of all rows that hold a token."""
        return self._row_tokens / self._row_slots if self._row_slots else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks, after the first step: that one includes the start."""
        seconds = self._times[-1] - self._times[0] if self._times else 0.0
        return sum(self._tokens[1:]) / seconds if seconds else 0.0

    @property
    def waits(self) -> dict[str, float]:
        """Seconds waited by reason, the mean of the ranks, longest first."""
        total: Counter[str] = Counter()
        for report in self.latest.values():
            total.update(report.waits)
        return {reason: seconds / len(self.latest) for reason, seconds in total.most_common()}


class TrainingProgress:
    """Shows a training on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._training = Training()
        self._next_line = 0.0

    def add(self, report: RankStepReport) -> None:
        """Take one rank's report of one step."""
        self._training.add(report, time.monotonic())

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Keep a live view while the block runs, if there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._view, console=self._console, refresh_per_second=5, transient=True):
            yield

    def line(self) -> None:
        """Without a terminal: print where things stand, now and then."""
        now = time.monotonic()
        if self._training.losses and not self._console.is_terminal and now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._console.print(self._headline())

    def table(self) -> Table:
        """Return the table that the demo ends with."""
        training = self._training
        table = Table(title="packhorse demo", show_header=False, title_style="bold", min_width=60)
        table.add_row("steps", str(len(training.losses)))
        table.add_row("loss, first → last", f"{training.losses[0]:.3f} → {training.losses[-1]:.3f}")
        table.add_row("fill", f"{training.fill:.1%} of the slots of all packs hold a token")
        table.add_row("tokens per second", f"{training.tokens_per_second:,.0f}")
        table.add_row("a rank waited for", _listed(training.waits))
        return table

    def _view(self) -> Group:
        ranks = Table.grid(padding=(0, 3))
        for rank, report in sorted(self._training.latest.items()):
            waited = f"waited for {_listed(report.waits)}"
            ranks.add_row(f"  rank {rank}", f"step {report.step}", Text(waited, style="dim"))
        return Group(self._headline(), Text(f"  {_curve(self._training.losses)}", style="cyan"), ranks)

    def _headline(self) -> str:
        training = self._training
        if not training.losses:
            return "starting four ranks …"
        return (
            f"step {len(training.losses) - 1}: loss {training.losses[-1]:.3f}, fill {training.fill:.1%}, "
            f"{training.tokens_per_second:,.0f} tokens per second"
        )


def _listed(waits: dict[str, float]) -> str:
    return ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in waits.items()) or "nothing"


def _curve(losses: list[float]) -> str:
    """Return the loss so far as bars, at most ``CURVE`` of them, the latest last."""
    known = finite(losses)
    return sparkline(losses[-CURVE:], min(known, default=0.0), max(known, default=0.0))
