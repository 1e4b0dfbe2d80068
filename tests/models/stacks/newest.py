"""Say which pinned stacks the registry has newer releases of: ``python -m tests.models.stacks.newest``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PYTHON = "3.12"  # what the stacks declare


def pinned() -> dict[str, str]:
    """Return the pinned version of each stack."""
    lines = (Path(__file__).parent / "wheels.txt").read_text().splitlines()
    return dict(line.split("==", 1) for line in lines if not line.startswith("#"))


def newest(name: str) -> str | None:
    """Return the newest release that the registry has, ``None`` where it does not answer."""
    command = ["index", "versions", name, "--python-version", PYTHON, "--only-binary=:all:"]
    answer = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    return answer.stdout.split("(")[1].split(")")[0] if "(" in answer.stdout else None


def main() -> None:
    """Print one line for each stack."""
    for name, version in pinned().items():
        found = newest(name)
        known = {version: "the newest", None: "the registry did not answer"}
        sys.stdout.write(f"{name} {version}: {known.get(found, f'{found} is out; raise the pin in wheels.txt')}\n")


if __name__ == "__main__":
    main()
