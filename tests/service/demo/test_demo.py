"""``packhorse demo`` from end to end, small; and Ctrl-C in the middle of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packhorse_service.demo import INTERRUPTED, DemoSizes, run_demo
from packhorse_service.demo.corpus import CorpusSizes
from packhorse_service.processes import SERVE
from tests.harness import DEADLINE_S
from tests.service.demo.running import MARK, eventually, marked

SMALL = DemoSizes(
    seq_length=256,
    corpus=CorpusSizes(source=200_000, docs=20_000, chat=10_000, longest_chat=200, vocabulary=512),
)


@pytest.mark.parametrize("steps", [3, None], ids=["three steps", "to the end of the stream"])
def test_it_trains_draws_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int | None
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    assert run_demo(tmp_path, steps, SMALL) == 0
    assert (tmp_path / "packs.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "loss, first → last" in shown
    eventually(lambda: not marked(str(tmp_path)))
    if steps is not None:
        assert len((tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()) == steps


def test_a_failing_trainer_is_shown_and_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    too_small = DemoSizes(seq_length=SMALL.seq_length, global_batch_size=3, corpus=SMALL.corpus)  # not for two ranks
    assert run_demo(tmp_path, 1, too_small) == 1
    assert "server ended with exit code" in capsys.readouterr().out
    eventually(lambda: not marked(str(tmp_path)))


def test_ctrl_c_stops_everything_within_five_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", SERVE, "demo", "--out", str(tmp_path)]) as demo:
        lines = tmp_path / "run" / "rank-0.jsonl"
        eventually(lambda: demo.poll() is not None or (lines.exists() and bool(lines.read_text())))
        assert len(marked(str(tmp_path))) >= 6  # the demo, the server, four ranks
        demo.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert demo.wait(DEADLINE_S) == INTERRUPTED
        assert time.monotonic() - began < 5
    eventually(lambda: not marked(str(tmp_path)))
