"""Whatever stands still is named by the right word, and who or what it is: in the status, which the page shows, in the
metrics, in a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from packhorse_service.monitoring.headline import STALLED_BY
from packhorse_service.monitoring.status import ServerStatus, Stall, StreamStatus
from packhorse_service.protocol.diagnosis import Cause, ReaderState
from tests.faults.job import Job
from tests.faults.test_processes_killed import held_loader
from tests.harness import DEADLINE_S, wait_until


class Seen:
    """What the monitor of a job's server says."""

    def __init__(self, job: Job) -> None:
        self._file = job.server.endpoint_file.with_suffix(".url")
        wait_until(self._file.exists, "the URL of the monitor")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._file.read_text().strip() + path, timeout=10) as answer:
            body: bytes = answer.read()
            return body

    @property
    def status(self) -> ServerStatus:
        return msgspec.json.decode(self._get("/status.json"), type=ServerStatus)

    @property
    def stream(self) -> StreamStatus:
        return self.status.streams[0]

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self._get("/metrics").decode())
        samples = (sample for family in families for sample in family.samples)
        return next(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def stalls_for(self, cause: Cause) -> Stall:
        """Wait for a stall of this cause, which the metrics show too."""
        found: list[Stall] = []

        def stalled() -> bool:
            stall = self.stream.stall
            found.extend([stall] if stall is not None and stall.cause is cause else [])
            return bool(found)

        wait_until(stalled, f"a stall by {cause}", 30)
        wait_until(lambda: self.metric("packhorse_stalled", cause=cause) == 1, "the same in the metrics", 10)
        assert sum(self.metric("packhorse_stalled", cause=other) for other in Cause) == 1
        self._told_in_a_terminal(cause, found[0].why)
        return found[0]

    def _told_in_a_terminal(self, cause: Cause, why: str) -> None:
        command = [sys.executable, "-m", "packhorse_service", "status", self._file.read_text().strip()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 4, done.stderr
        shown = " ".join(done.stdout.split())
        assert STALLED_BY[cause] in shown or cause is Cause.STARTUP
        assert undated(why) in undated(shown)


def undated(text: str) -> str:
    """Without how long something has lasted, which has changed meanwhile."""
    return re.sub(r"\d+ s\b", "N s", text)


@pytest.fixture
def seen(job: Job) -> Seen:
    return Seen(job)


def test_a_rank_that_has_not_come(job: Job, seen: Seen) -> None:
    job.start(of_rank={1: ["--delay", "0"]})
    job.taps[1].kill()
    stall = seen.stalls_for(Cause.STARTUP)
    assert "rank 1" in stall.why
    assert [reader.state for reader in seen.stream.readers] == [ReaderState.FORMING, ReaderState.ABSENT]


def test_a_rank_that_is_stopped(job: Job, seen: Seen) -> None:
    job.start("--delay", "0.01")
    job.wait_taken(9)
    job.taps[1].signal(signal.SIGSTOP)
    stall = seen.stalls_for(Cause.NETWORK)
    assert "rank 1" in stall.why
    assert "nothing was heard" in stall.why
    assert seen.metric("packhorse_reader_silence_seconds", rank="1") > 2
    assert seen.metric("packhorse_reader_connected", rank="1") == 0
    job.taps[1].signal(signal.SIGCONT)
    job.finish()


def test_a_rank_that_is_taken_away(job: Job, seen: Seen) -> None:
    job.start("--delay", "0.01")
    job.wait_taken(9)
    job.taps[1].kill()
    stall = seen.stalls_for(Cause.NETWORK)
    assert "rank 1" in stall.why
    assert "its connection is gone" in stall.why
    assert [reader.state for reader in seen.stream.readers] == [ReaderState.WAITING, ReaderState.LOST]
    assert any("lost rank 1" in event.text for event in seen.status.events)


def test_a_training_loop_that_does_not_ask(job: Job, seen: Seen) -> None:
    job.start(of_rank={1: ["--delay", "60"]})
    stall = seen.stalls_for(Cause.TRAINER)
    assert "rank 1" in stall.why
    assert "its training loop last asked" in stall.why
    assert seen.metric("packhorse_reader_loop_age_seconds", rank="1") > 2
    assert seen.metric("packhorse_waiting_readers", cause=Cause.SLOW_PEER) == 1


def test_a_source_that_gives_nothing(slow_disk: Job, faults: Path) -> None:
    seen = Seen(slow_disk)
    slow_disk.start("--delay", "0.01")
    slow_disk.wait_taken(3)
    (faults / "hold").touch()
    stall = seen.stalls_for(Cause.LOADING)
    assert "shard '" in stall.why
    assert "of source '" in stall.why
    assert seen.stream.loaders.waits_for in stall.why
    (faults / "hold").unlink()
    slow_disk.finish()


def test_a_loader_that_is_killed(slow_disk: Job, faults: Path) -> None:
    seen = Seen(slow_disk)
    slow_disk.start("--delay", "0.01")
    slow_disk.wait_taken(3)
    os.kill(held_loader(slow_disk, faults), signal.SIGKILL)
    wait_until(lambda: seen.stream.loaders.restarts == 1, "another loader")
    assert seen.metric("packhorse_loader_restarts_total") == 1
    assert any("a loader process died" in event.text for event in seen.status.events)
    seen.stalls_for(Cause.LOADING)  # what is held is still held
    (faults / "hold").unlink()
    slow_disk.finish()
