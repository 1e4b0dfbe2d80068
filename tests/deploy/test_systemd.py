"""The unit is one that systemd takes, and it leaves the server little to do harm with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, run

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
