"""The hook of a server's loop: what systemd and the log are told, and how old a status says it is."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from packhorse_service.monitoring.loop_hook import REPORT_S, LoopMonitor
from packhorse_service.monitoring.recent_events import RecentEvents
from packhorse_service.server.server import LoopHook
from packhorse_service.server.systemd import SystemdNotifier
from tests.harness import DEADLINE_S
from tests.service.monitoring.collected_stream import CollectedStream


@pytest.fixture
def collected(tmp_path: Path) -> Iterator[CollectedStream]:
    collected = CollectedStream(tmp_path)
    yield collected
    collected.close()


def hook_of(collected: CollectedStream, seconds: list[float], notify_socket: str = "") -> LoopMonitor:
    """The hook of that stream's server; its clock gives the last of ``seconds``."""

    def clock() -> float:
        return seconds[-1]

    notifier = SystemdNotifier({"NOTIFY_SOCKET": notify_socket})
    return LoopMonitor(collected.collector, RecentEvents(clock), notifier, clock)


def test_systemd_hears_that_the_server_listens_turns_once_a_second_and_leaves(
    collected: CollectedStream, tmp_path: Path
) -> None:
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name)
        systemd.settimeout(DEADLINE_S)
        hook: LoopHook = hook_of(collected, [1.0], name)
        hook.started()
        for now in (1.0, 1.1, 1.9, 2.0):
            hook.on_turn(now, 0)
        hook.stopping()
        heard = [systemd.recv(4096).decode().partition("\n")[0] for _ in range(4)]
    assert heard == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


def test_a_status_is_as_old_as_the_last_turn_of_the_loop(collected: CollectedStream) -> None:
    seconds = [1.0]
    hook = hook_of(collected, seconds)
    hook.on_turn(1.0, 5)
    hook.on_turn(1.5, 7)
    seconds.append(11.5)
    assert (hook.latest().age_s, hook.latest().connections) == (10.0, 5)


def test_what_every_stream_does_is_logged_now_and_then(
    collected: CollectedStream, caplog: pytest.LogCaptureFixture
) -> None:
    hook = hook_of(collected, [0.0])
    with caplog.at_level(logging.INFO, "packhorse.server"):
        for second in range(int(2 * REPORT_S)):
            hook.on_turn(float(second), 0)
    assert caplog.text.count("waiting for readers: 0 of 2 readers have come") == 2
