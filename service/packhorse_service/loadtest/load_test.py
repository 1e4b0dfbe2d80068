"""A load test from its scenario to its outcome."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from packhorse_service.loadtest.report.live_display import ProgressDisplay
from packhorse_service.loadtest.report.outcome import LoadTestOutcome, outcome_of
from packhorse_service.loadtest.run.coordinator import Coordinator
from packhorse_service.loadtest.run.setup import prepare
from packhorse_service.loadtest.scenario.scenario import Scenario
from packhorse_service.processes import Children, stop_signals
from packhorse_service.server.rlimit import allow_open_files

__all__ = ["FILES_A_RANK", "run_load_test"]

# A connection, the wake-ups of a dealer and of both ends of its monitor, the two ends of its waker; and one to spare.
FILES_A_RANK = 7


def run_load_test(scenario: Scenario, command: str, console: Console) -> LoadTestOutcome:
    """Run it, showing how it goes on ``console``; ``command`` is what the report says was run.

    Raises ``ConfigError`` and ``StartTimeout``; a rank that failed is in the outcome. A signal ends it early.
    """
    with tempfile.TemporaryDirectory(prefix="packhorse-") as name, stop_signals() as asked:
        folder = Path(name)
        plan = prepare(scenario, folder)
        most = max(len(job.ranks) for job in plan.jobs(""))
        allow_open_files(most, each=FILES_A_RANK, otherwise=", or spread the ranks over more --processes")
        with Children(folder) as children, ProgressDisplay(plan, console).showing() as show:
            run = Coordinator(plan, command, children, asked, show).run(folder)
    return outcome_of(run, scenario.require, stopped=asked.is_set())
