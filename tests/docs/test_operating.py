"""What operators are told of exit codes and of the monitor's paths is what the server has."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from packhorse_service.commands.serve_command import EXIT_CODES
from packhorse_service.config.addresses import Address
from packhorse_service.monitoring.status_http import StatusServer
from tests.docs.pages import rows, text_of
from tests.service.monitoring.statuses import a_status

PAGE = text_of("operating.md")
OF_EVERY_COMMAND = {1, 2}  # refused, and a command line that cannot be read


def test_the_exit_codes_are_those_of_serve() -> None:
    codes = {int(code) for code, _ in rows(PAGE, "## Stopping it")}
    assert codes == set(EXIT_CODES.values()) | OF_EVERY_COMMAND


def test_the_paths_are_those_of_the_monitor() -> None:
    with StatusServer(Address("127.0.0.1", 0), a_status) as monitor:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"{monitor.url}/nowhere")
        with refusal.value as said:
            there_are = said.read().decode().rpartition("there are ")[2].split()
    assert [path.strip("`") for path, _ in rows(PAGE, "## Watching it")] == there_are
