"""Tools of other makers that check what ``deploy/`` holds: found, run, and asked for where they are missing."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["DEPLOY", "ROOT", "free_port", "missing", "require", "run"]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PORTS = range(20_000, 30_000)  # below those of net.ipv4.ip_local_port_range
# Beside this Python, where pip puts them; daemons of Debian's packages are in sbin.
PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin"])


def missing(what: str) -> None:
    """Skip the test, for lack of ``what``; in CI, which installs everything, it fails instead."""
    text = f"{what} is missing; make deploy installs Python's tools, .ci/system-packages the others"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


def require(tool: str) -> str:
    """Path of a tool."""
    found = shutil.which(tool, path=PLACES)
    if found is None:
        missing(tool)
    return str(found)


def run(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    stdin: str | None = None,
) -> str:
    """What a tool prints, error output included. It must be content: exit code 0."""
    name, *arguments = map(str, command)
    done = subprocess.run(
        [require(name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
        input=stdin,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{name} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def free_port() -> int:
    """A port of loopback that nobody listens on, and that the system gives nobody who asks for just any."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port is free in {PORTS}")
