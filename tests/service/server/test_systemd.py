"""What systemd hears, over the socket that it gives."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from packhorse_service.server.systemd import SystemdNotifier
from tests.harness import DEADLINE_S


@pytest.mark.parametrize("abstract", [False, True], ids=["a file", "an abstract name"])
def test_it_hears_when_the_server_listens_turns_and_stops(tmp_path: Path, abstract: bool) -> None:
    name = f"@packhorse-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name[1:] if abstract else name)
        systemd.settimeout(DEADLINE_S)
        supervisor = SystemdNotifier({"NOTIFY_SOCKET": name})
        supervisor.ready("listening on tcp://127.0.0.1:5555")
        supervisor.watchdog("attempt 1, running, step 7")
        supervisor.stopping()
        heard = [systemd.recv(4096).decode() for _ in range(3)]
    assert heard == [
        "READY=1\nSTATUS=listening on tcp://127.0.0.1:5555",
        "WATCHDOG=1\nSTATUS=attempt 1, running, step 7",
        "STOPPING=1",
    ]


def test_nobody_is_told_where_there_is_no_supervisor(caplog: pytest.LogCaptureFixture) -> None:
    SystemdNotifier({}).watchdog("attempt 1")
    assert caplog.text == "", "it is no failure to tell"


def test_a_supervisor_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).watchdog("attempt 1")
    assert "systemd could not be told" in caplog.text
