"""1,024 ranks for a minute or more, a tenth of them slow and one that stops: nothing grows, nobody starves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = 1024
SCENARIO = f"""
ranks: {RANKS}
consume_ms: 3000          # what two cores can serve and simulate with room to spare
slow_ranks: 10%
slow_factor: 1.25
stopped_ranks: 1
start_timeout_s: 120
synthetic: {{seq_length: 2048, mean_length: 300, micro_batches: 2}}
"""


@pytest.mark.timeout(3600)
def test_a_thousand_ranks_are_served_evenly_in_memory_that_does_not_grow(soak_seconds: float, tmp_path: Path) -> None:
    scenario, result = tmp_path / "soak.yaml", tmp_path / "soak.json"
    scenario.write_text(SCENARIO)
    options = ["--scenario", str(scenario), "--seconds", str(soak_seconds), "--json", str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "packhorse_service", "loadtest", *options],
        capture_output=True,
        text=True,
        timeout=soak_seconds + 300,
        check=False,
    )
    print(done.stdout)  # noqa: T201  pytest shows it with a failure, or with -s
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    metrics = found["metrics"]
    assert found["ended_early"] is None
    assert metrics["errors"] == metrics["disconnects"] == 0
    assert metrics["handshakes_s"] < 10
    assert metrics["wait_p99_steps"] <= 1
    assert metrics["fairness"] >= 0.95
    assert metrics["server_open_files"] <= RANKS + 64
    assert metrics["server_memory_of_bound"] <= 1
    # What is held rises and falls by a step's rows; over a longer time the line through it is flat.
    grown_mib = metrics["server_memory_slope"] * soak_seconds / 60
    assert abs(grown_mib) < 0.05 * metrics["server_memory_mib"]
