"""A server is there at once: nothing heavy that it does not need is imported."""

from __future__ import annotations

import subprocess
import sys

from tests.harness import DEADLINE_S

HEAVY = ("torch", "matplotlib", "webdataset", "pandas", "transformers")  # each takes longer than all the rest


def test_the_commands_load_nothing_heavy_that_serving_does_without() -> None:
    script = f"import sys, packhorse_service.commands; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == "[]"
