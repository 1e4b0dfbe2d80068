"""What the demo says about a training, from what its ranks report."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packhorse_service.demo.demo_progress import Training, TrainingProgress
from packhorse_service.demo.step_lines import RankStepReport, Tail

REPORT = RankStepReport(
    rank=0, step=0, loss=7.5, step_tokens=3900, row_tokens=980, row_slots=1000, waits={"readers": 1.0, "loading": 0.5}
)


def test_rates_and_means_over_ranks_and_steps() -> None:
    training = Training()
    for step, loss, now in ((0, 7.5, 10.0), (1, 7.0, 12.0), (2, 6.5, 14.0)):
        for rank in (1, 0):
            waits = {"readers": 1.0, "loading": 0.5 * step} if rank else {"loading": 1.5 * step}
            training.add(replace(REPORT, rank=rank, step=step, loss=loss, waits=waits), now + rank)
    assert training.losses == [7.5, 7.0, 6.5]
    assert training.fill == pytest.approx(0.98)
    assert training.tokens_per_second == pytest.approx(2 * 3900 / 4)
    assert training.waits == {"loading": 2.0, "readers": 0.5}
    assert list(training.waits) == ["loading", "readers"]


def test_without_a_terminal_there_are_lines_and_a_table() -> None:
    console = Console(file=io.StringIO(), width=100)
    progress = TrainingProgress(console)
    progress.line()
    progress.add(REPORT)
    with progress.showing():
        progress.line()
    console.print(progress.table())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.startswith("step 0: loss 7.500, fill 98.0%")
    assert "7.500 → 7.500" in shown
    assert "readers 1.0 s, loading 0.5 s" in shown


@given(st.lists(st.floats()))
def test_any_loss_can_be_shown(losses: list[float]) -> None:
    """A training that diverges has losses that are infinite, and then no numbers."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = TrainingProgress(console)
    with progress.showing():
        for step, loss in enumerate(losses):
            progress.add(replace(REPORT, step=step, loss=loss))
    assert isinstance(console.file, io.StringIO)
    assert "four ranks" in console.file.getvalue() or losses


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    line = json.dumps(asdict(REPORT)) + "\n"
    with path.open("w", buffering=1) as file:
        file.write(line + line[:10])
        file.flush()
        assert [RankStepReport.parse(text) for text in tail.lines()] == [REPORT]
        assert tail.lines() == []
        file.write(line[10:])
        assert [RankStepReport.parse(text) for text in tail.lines()] == [REPORT]
