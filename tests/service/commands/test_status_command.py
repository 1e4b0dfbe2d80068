"""``packhorse status``, as a person or a script calls it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from packhorse_service.commands import app
from packhorse_service.monitoring.status import StreamPhase
from packhorse_service.protocol.diagnosis import Cause
from tests.service.monitoring.scripted_site import Site, serving
from tests.service.monitoring.statuses import a_stall, a_status, with_stream

DEADLINE_S = 300.0


def status(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["status", *arguments])


@pytest.fixture
def site() -> Iterator[Site]:
    with serving(Site()) as site:
        site.say(a_status())
        yield site


def test_a_server_that_does_well_is_shown_without_colour_codes_and_the_exit_code_is_0(site: Site) -> None:
    done = status(site.url)
    assert done.exit_code == 0
    assert "training: step 1,204" in done.output
    assert "\x1b" not in done.output
    assert site.asked == ["/status.json"]


def test_a_stall_and_a_failure_have_an_exit_code_of_their_own(site: Site) -> None:
    site.say(with_stream(a_status(), **a_stall(Cause.LOADING)))
    assert status(site.url).exit_code == 4
    site.say(with_stream(a_status(), failure="shard 'a.tar' is gone", phase=StreamPhase.FAILED))
    assert status(site.url, "--json").exit_code == 4


def test_a_server_that_is_gone_is_one_line_and_exit_code_1() -> None:
    with serving(Site()) as site:
        pass
    done = status(site.url)
    assert done.exit_code == 1
    assert "nothing listens at" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_json_is_what_the_server_says(site: Site) -> None:
    done = status(site.url, "--json")
    assert json.loads(done.output) == json.loads(site.pages["/status.json"].body)
    assert len(done.output.splitlines()) > 100


def test_watching_and_json_exclude_each_other(site: Site) -> None:
    done = status(site.url, "--json", "--watch")
    assert done.exit_code == 1
    assert "choose one" in done.stderr


@contextmanager
def watched(site: Site, stdout: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "packhorse_service", "status", site.url, "--watch", "--interval", "0.1"]
    roots = [str(Path(__file__).parents[3] / root) for root in ("client", "service")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots), "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=stdout, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(part: str, descriptor: int) -> str:
    """All that is written until ``part`` is; the test's own timeout is the deadline."""
    said = ""
    while part not in said:
        said += os.read(descriptor, 1 << 16).decode()
    return said


def test_watching_without_a_terminal_writes_a_line_each_time_and_ends_with_ctrl_c(site: Site) -> None:
    read, write = os.pipe()
    with watched(site, write) as process:
        read_until("training: step 1,204", read)
        site.say(with_stream(a_status(), **a_stall()))
        read_until("stalled by a slow peer", read)
        del site.pages["/status.json"]
        read_until("the server has not answered for", read)
        site.say(with_stream(a_status(), step=1300))
        assert "\x1b" not in read_until("training: step 1,300", read)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    os.close(read)
    os.close(write)


def test_watching_in_a_terminal_redraws_the_screen_and_gives_it_back(site: Site) -> None:
    ours, theirs = pty.openpty()
    with watched(site, theirs) as process:
        read_until("1,204", ours)
        site.say(with_stream(a_status(), step=1300))
        read_until("1,300", ours)
        process.send_signal(signal.SIGINT)
        said = read_until("\x1b[?1049l", ours)  # back to what was there before
        assert process.wait(DEADLINE_S) == 0
        assert "Traceback" not in said
    os.close(ours)
    os.close(theirs)
