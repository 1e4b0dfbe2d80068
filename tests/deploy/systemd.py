"""A real systemd, PID 1 of namespaces of its own on this machine, that runs the unit of ``deploy/systemd``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.tools import DEPLOY, ROOT, missing, require, run
from tests.harness import DEADLINE_S, wait_until

__all__ = ["Machine", "running_machine"]

SCRIPT = Path(__file__).with_name("systemd_namespace.sh")
# Of the targets that units name, all are there and none does anything.
TARGETS = ("test", "sysinit", "basic", "shutdown", "network-online", "multi-user", "umount", "final", "exit")
TARGET = "[Unit]\nDefaultDependencies=no\n"
UNIT = "packhorse.service"


@dataclass(frozen=True)
class Machine:
    folder: Path
    pid: int  # of systemd, as this side counts

    def run(self, *command: str) -> str:
        """What a command prints there."""
        return run(["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", *command])

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.run("systemctl", "show", "--property", name, "--value", UNIT).strip()

    def wait(self, name: str, value: str) -> None:
        wait_until(lambda: self.show(name) == value, f"{name}={value} of the unit; its log:\n{self.log}")

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def running_machine(folder: Path) -> Iterator[Machine]:
    """A machine whose ``folder`` holds ``etc`` (for /etc/packhorse) and ``data`` (for /srv/data); gone afterwards."""
    if os.geteuid() != 0:
        missing("root, who alone can be a systemd of a whole machine,")
    _write_units(folder)
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # systemd's users have to find what is bound into their places
    site = next(path for path in reversed(sys.path) if path.endswith("site-packages"))
    places = [folder, sys.base_prefix, site, ROOT / "client", ROOT / "service"]
    with (folder / "start.log").open("wb") as log:
        command = [require("unshare"), "--mount", "bash", str(SCRIPT), *map(str, places)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        started = folder / "pid"
        wait_until(lambda: started.exists() or process.poll() is not None, "a systemd")
        assert started.exists(), (folder / "start.log").read_text()
        machine = Machine(folder, int(started.read_text()))
        # Where systemctl talks to it, seen from here.
        socket = Path(f"/proc/{machine.pid}/root/run/systemd/private")
        wait_until(lambda: socket.exists() or process.poll() is not None, "systemd's socket")
        yield machine
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        process.wait(DEADLINE_S)


def _write_units(folder: Path) -> None:
    units = folder / "units"
    (units / f"{UNIT}.d").mkdir(parents=True)
    for name in TARGETS:
        (units / f"{name}.target").write_text(TARGET)
    (units / UNIT).write_bytes((DEPLOY / "systemd" / UNIT).read_bytes())
    log = folder / "log"
    quick = f"[Service]\nWatchdogSec=4\nRestartSec=1\nStandardOutput=append:{log}\nStandardError=append:{log}\n"
    (units / f"{UNIT}.d" / "test.conf").write_text(quick)
