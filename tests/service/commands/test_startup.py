"""The command line: it is there at once, as nothing heavy is imported, and its options mean the same everywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import packhorse
from packhorse_service.commands import COMMANDS, app
from tests.harness import DEADLINE_S

HEAVY = ("torch", "matplotlib", "webdataset", "pandas", "transformers")  # each takes longer than all the rest


def test_the_commands_load_nothing_heavy_that_serving_does_without() -> None:
    script = f"import sys, packhorse_service.commands; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_short_option_for_help_is_the_long_one(command: str) -> None:
    of_command = [command] if command else []
    short, long = (CliRunner().invoke(app, [*of_command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.stdout == long.stdout


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "packhorse", "--version"]
    assert subprocess.check_output(command, text=True, timeout=DEADLINE_S).strip() == packhorse.__version__
