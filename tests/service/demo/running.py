"""Run processes as the demo does, wait with a deadline, and look whether any is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from packhorse_service.processes import Children
from tests.harness import wait_until

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0
MARK = "PACKHORSE_TEST_MARK"  # an environment variable that all descendants of a test inherit


def run_ranks(children: Children, module: str, arguments: list[str], ranks: int) -> None:
    """Run ``module`` once a rank; return when all children have ended well. Raises ``ChildFailed``."""
    command = [sys.executable, "-m", module, *arguments]
    for rank in children.start_ranks(command, ranks, {"PYTHONPATH": str(ROOT)}):
        rank.process.wait(DEADLINE_S)
    eventually(children.all_ended)


def eventually(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Look at ``condition`` again and again until it holds; fail when it does not in time."""
    wait_until(condition, "what was waited for", deadline_s)


def marked(mark: str) -> list[int]:
    """Ids of the other running processes whose environment has ``mark``; from /proc, so on Linux only."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            has_mark = f"{MARK}={mark}\0".encode() in (process / "environ").read_bytes()
            is_zombie = "State:\tZ" in (process / "status").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or somebody else's
        if has_mark and not is_zombie and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found
