"""The unit is one that systemd takes, it leaves the server little to do harm with, and the server runs in it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from packhorse_service.server.authentication import ALL
from packhorse_service.server.key_generation import make_client, make_server
from tests.deploy.corpus import write_corpus
from tests.deploy.systemd import Machine, running_machine
from tests.deploy.tools import DEPLOY, run
from tests.harness import wait_until

UNIT = DEPLOY / "systemd" / "packhorse.service"
EXPOSURE = 2.0  # of 10, by systemd's own count


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there: systemd looks for it."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/packhorse/bin/packhorse", sys.executable))
    return copy


def test_systemd_takes_it(unit: Path) -> None:
    assert run(["systemd-analyze", "verify", unit]) == ""


def test_it_is_exposed_little(unit: Path) -> None:
    report = run(["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE * 10:.0f}", unit])
    (exposure,) = re.findall(r"exposure level for \S+: ([\d.]+)", report)
    assert float(exposure) <= EXPOSURE


# The unit as it runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with the configuration that the unit's own words ask for."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "etc").mkdir()
    config = folder / "data" / "feed.yaml"
    config.parent.mkdir()
    config.write_text(yaml.safe_dump(FEED | {"sources": {"instructions": SOURCE | {"shards": "instructions-*.tar"}}}))
    write_corpus(config)
    config.write_text(yaml.safe_dump(FEED | {"curve": CURVE, "sources": {"instructions": SOURCE}}))
    config.rename(folder / "etc" / "feed.yaml")
    make_server(folder / "etc" / "keys")
    make_client(folder / "etc" / "keys", "trainers", ALL)
    (folder / "etc" / "keys").chmod(0o711)
    with running_machine(folder) as machine:
        machine.run("systemctl", "start", "packhorse")
        yield machine


FEED = {
    "listen": "tcp://0.0.0.0:5555",
    "contract": {"seq_length": 64, "global_batch_size": 4, "vocab_size": 256},
    "loading": {"workers": 1},
}
SOURCE = {"shards": "/srv/data/instructions-*.tar", "over_length": "split", "epochs": "endless"}
CURVE = {"key_file": "keys/server.key", "clients": "keys/clients.toml"}


def test_it_serves_within_its_confinement_and_says_so(machine: Machine) -> None:
    assert machine.show("ActiveState") == "active", machine.log
    wait_until(lambda: "waiting for readers" in machine.show("StatusText"), "what the server says to systemd")
    assert machine.run("/opt/packhorse/bin/packhorse", "status", "127.0.0.1:9555", "--json")
    mode, owner = machine.run("stat", "--dereference", "--format=%a %u", "/run/packhorse/server.key").split()
    assert mode == "400"
    assert owner != "0", "the copy of the key is of the server's own user"


def test_a_server_whose_loop_stands_is_started_again(machine: Machine) -> None:
    machine.run("kill", "-STOP", machine.show("MainPID"))
    machine.wait("NRestarts", "1")
    machine.wait("ActiveState", "active")


def test_it_ends_with_its_readers_and_stays_so(machine: Machine) -> None:
    read = ("tap", "tcp://127.0.0.1:5555", "--rank=0", "--layout=data=1", "--steps=2", "--timeout=30")
    printed = machine.run("/opt/packhorse/bin/packhorse", *read, "--key-file=/etc/packhorse/keys/trainers.key")
    assert printed.count('"step": 1') == 4, "a reader with its key is served"
    machine.wait("ActiveState", "inactive")
    assert (machine.show("Result"), machine.show("ExecMainStatus")) == ("success", "0")


def test_it_stops_at_once_when_it_is_told_to(machine: Machine) -> None:
    machine.run("systemctl", "restart", "packhorse")
    machine.run("systemctl", "stop", "packhorse")
    assert (machine.show("Result"), machine.show("ExecMainStatus")) == ("success", "0"), machine.log
    assert "stopped by SIGTERM" in machine.log
