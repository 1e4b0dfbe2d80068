"""A soak is asked for by its length: ``pytest tests/soak --soak-seconds 60``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=0.0, help="how long to soak; without it nothing is")


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    """Options of this folder are not known where pytest was not started on it."""
    seconds = float(request.config.getoption("--soak-seconds", default=0.0))
    if not seconds:
        pytest.skip("takes minutes: make soak")
    return seconds
