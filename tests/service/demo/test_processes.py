"""Whatever the children do, none is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from packhorse_service.processes import ChildFailed, Children, stop_signals
from tests.harness import DEADLINE_S
from tests.service.demo.running import MARK, eventually, marked

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""
LEAVES_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_that_fails_is_reported_with_what_it_logged_last(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("trainer", python("import sys; sys.exit('no such shard: docs-7.tar')"))
        with pytest.raises(ChildFailed, match=r"trainer ended with exit code 1; .*\n.*no such shard: docs-7\.tar"):
            eventually(children.all_ended)


def test_a_child_that_was_killed_is_reported_by_its_signal(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("trainer", python("import time; time.sleep(600)"))
        child.signal(signal.SIGKILL)
        with pytest.raises(ChildFailed, match="trainer ended with signal SIGKILL"):
            eventually(children.all_ended)


def test_children_that_ignore_sigterm_and_their_own_children_end_within_the_grace(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("stubborn", python(STUBBORN), {MARK: str(tmp_path)})
        eventually(lambda: child.log.read_text() == "ready\n")
        assert len(marked(str(tmp_path))) == 2
        began = time.monotonic()
        children.stop(grace_s=0.2)
        assert time.monotonic() - began < 2
    eventually(lambda: not marked(str(tmp_path)))


def test_what_a_child_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("server", python(LEAVES_A_CHILD), {MARK: str(tmp_path)})
        eventually(children.all_ended)
    eventually(lambda: not marked(str(tmp_path)))


def test_an_exception_in_the_block_stops_the_children(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Children(tmp_path) as children:
            children.start("trainer", python("import time; time.sleep(600)"), {MARK: str(tmp_path)})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    eventually(lambda: not marked(str(tmp_path)))


def test_ranks_get_the_variables_of_torchrun(tmp_path: Path) -> None:
    tell = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
    with Children(tmp_path) as children:
        ranks = children.start_ranks(python(tell), 2)
        eventually(children.all_ended)
        told = [rank.log.read_text().split() for rank in ranks]
    port = told[0][3]
    assert told == [["0", "2", "127.0.0.1", port], ["1", "2", "127.0.0.1", port]]


def test_signals_set_an_event_and_the_former_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.wait(DEADLINE_S)
    assert signal.getsignal(signal.SIGINT) is before
